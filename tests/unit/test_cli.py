"""The command line without ranks: what it imports, what it refuses, what it says."""

import subprocess
import sys

import pytest

from lanewise import config


def lanewise(*arguments, cwd=None):
    """Run the command as a user does; its exit code, stdout and stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "lanewise", *arguments], capture_output=True, text=True, timeout=60, cwd=cwd
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("print('a rank was started')")
    return str(path)


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["prove", "--help"], []])
def test_help_does_not_import_torch(arguments):
    code = (
        "import sys; from lanewise.cli.main import main\n"
        f"sys.argv = ['lanewise', *{arguments!r}]\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "lanewise" in done.stdout


def test_importing_lanewise_does_not_import_torch():
    code = "import sys, lanewise; assert not {'torch', 'numpy', 'pydantic'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "0"], "--ranks must be at least 1, found 0."),
        (["--port", "70000"], "--port must be between 1 and 65535, found 70000."),
        (
            ["--strategy", "zero9"],
            "strategy: must be 'ddp', 'zero1', 'zero2' or 'zero3', found 'zero9'",
        ),
        (["--hosting", "2;1"], "--hosting must be 'even' or one weight a rank, such as 2,1,1; found '2;1'."),
        (
            ["--ranks", "3", "--hosting", "2,1"],
            "--hosting names 2 weights for 3 ranks; give one for each rank.",
        ),
        (["--reduction", "native", "--exchange", "shared"], "needs a backend: use exchange='gloo' or 'nccl'"),
        (["--ranks", "many"], "Invalid value for '--ranks'"),
        (["--rank", "3"], "No such option: --rank"),
    ],
)
def test_a_wrong_setting_is_refused_before_any_rank_starts(script, options, message):
    code, out, err = lanewise("run", *options, script)
    assert code == 2
    assert message in " ".join(err.split()), err
    assert out == ""
    assert "Traceback" not in err


def test_all_wrong_settings_are_told_at_once(script):
    code, _, err = lanewise("run", "--lanes", "0", "--precision", "int8", script)
    assert code == 2
    assert "2 problem(s)" in err
    assert "lanes: " in err
    assert "precision: " in err


@pytest.mark.parametrize(("name", "found"), [("absent.py", "does not exist"), (".", "is a folder")])
def test_a_script_must_be_there(tmp_path, name, found):
    code, _, err = lanewise("run", "--ranks", "2", name, cwd=tmp_path)
    assert code == 2
    assert f"the script '{name}' {found}; give the path of a Python file." in err


def test_a_wrong_proof_is_refused_before_any_rank_starts(script):
    for options, message in [
        (["--worlds", "0"], "--worlds must be numbers of ranks such as 1,2,3,5; found '0'."),
        (["--worlds", "3", "--strategies", "ddp"], "is one cell, and there is nothing to compare it with"),
        (["--lanes", "0"], "lanes: must be greater than or equal to 1, found 0"),
        (["--strategy", "ddp"], "No such option: --strategy"),
    ]:
        code, out, err = lanewise("prove", script, *options)
        assert (code, out) == (2, ""), err
        assert message in " ".join(err.split()), err


def test_help_names_every_choice():
    _, out, _ = lanewise("run", "--help")
    for strategy in config.STRATEGIES:
        assert strategy in out
