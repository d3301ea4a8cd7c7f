"""The examples, run as a reader would run them, with small settings: they work, and their loss falls."""

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from lanewise.recipes import recipe as recipes
from lanewise.recipes.train import train
from tests.helpers.cases import Cell, on_ranks
from tests.helpers.spawn import free_port

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["--width", "32", "--layers", "2", "--length", "32", "--batch", "8"]


def script(*command, **options):
    return subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, timeout=240, **options
    )


def losses(output):
    return [float(loss) for loss in re.findall(r"step +\d+ +loss (\S+)", output)]


def test_the_demo_comes_to_one_digest_which_torchrun_finds_too():
    done = script(EXAMPLES / "demo.py", "--steps", "20", "--size", *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The same bits." in done.stdout
    digests = re.findall(r"\b[0-9a-f]{32}\b", done.stdout)
    assert len(digests) == 2
    first, second = losses(done.stdout)[:3], losses(done.stdout)[3:]
    assert first == second
    assert first[-1] < first[0] - 0.3
    memory = re.search(r"counted by Lanewise.* ([\d.]+) +([\d.]+)\n", done.stdout)
    assert float(memory[1]) < float(memory[2])

    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "3", "--master-port", free_port()]
    again = script(*torchrun, EXAMPLES / "gpt.py", *SMALL, "--steps", "20", "--strategy", "zero2")
    assert again.returncode == 0, again.stderr
    assert f"digest {digests[0]}" in again.stdout


def test_the_demo_leaves_no_process_when_it_is_interrupted(tmp_path):
    (tmp_path / "some.txt").write_bytes(b"to be or not to be " * 500)
    command = [EXAMPLES / "demo.py", "--steps", "100000", "--size", *SMALL, "--text", tmp_path / "some.txt"]
    demo = subprocess.Popen(
        [sys.executable, *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        while "loss" not in (line := demo.stdout.readline()):
            assert line, demo.stderr.read()
        assert processes_of(tmp_path)
        os.killpg(demo.pid, signal.SIGINT)
        _, said = demo.communicate(timeout=30)
    finally:
        demo.kill()
        demo.communicate()
    assert demo.returncode == 1
    assert "stopped" in said
    assert "Traceback" not in said
    assert not processes_of(tmp_path)


def processes_of(path):
    """Running processes that were given a path."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes()
        except OSError:
            continue
        if str(path).encode() in words:
            found.append(words.replace(b"\0", b" ").decode())
    return found


def train_shortly(cell: Cell, file: Path, **changes):
    recipe = recipes.read(file)
    recipe = replace(recipe, output=recipes.Output(), **changes)
    short = replace(recipe.train, steps=30, epochs=None, patience=None, evaluate_every=30)
    recipe = replace(recipe, train=short)
    return train(recipe, file.parent, str, sinks=[], timeout=60.0).fit.losses


def train_all(cell: Cell, images: Path):
    changes = {
        "gpt-bytes": {"model": recipes.Gpt(width=32, layers=2, heads=2, length=32)},
        "csv-classifier": {},
        "image-classifier": {"data": recipes.ImageFolder(str(images), size=16)},
    }
    found = {}
    for number, (name, changed) in enumerate(changes.items()):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = f"examples.{number}"
        found[name] = train_shortly(cell, EXAMPLES / "recipes" / f"{name}.toml", **changed)
    return found


def test_the_recipes_learn(tmp_path):
    drawn = script(EXAMPLES / "make_shapes.py", tmp_path, "20")
    assert drawn.returncode == 0, drawn.stderr
    ((found,),) = on_ranks([Cell(1, "ddp")], train_all, tmp_path)
    assert set(found) == {file.stem for file in (EXAMPLES / "recipes").glob("*.toml")}
    for name, values in found.items():
        assert sum(values[-5:]) < 0.9 * sum(values[:5]), (name, values)
