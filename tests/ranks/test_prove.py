"""`lanewise prove` on real ranks: scripts with equal bits, with a fault, and such that cannot be proven."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from lanewise.errors import ProofError
from lanewise.run.cells import Cells
from lanewise.run.launch import Job
from lanewise.run.prove import plan, prove

SCRIPT = """
import os, sys, time
mode, *rest = sys.argv[1:] or [""]
if mode == "stranger":
    print("this script knows nothing of lanewise")
    raise SystemExit
import torch
import lanewise as lw
run = lw.start(lanes=8)
if mode == "idle":
    raise SystemExit
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
data = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
total = 2 if mode == "short" else 50
for step in run.steps(run.loader(data, batch_size=16, shuffle=True), total=total):
    if mode == "wait":
        open(f"{rest[0]}/{os.getpid()}", "w").close()
        time.sleep(60)
    for x, y in step:
        y_hat = model(x)
        if mode == "rank" and step.index == 1:
            y_hat = y_hat * (1 + 1e-3 * run.rank)
        if mode == "hash" and step.index == 1:
            y_hat = y_hat * (1 + 1e-6 * (hash("a") % 10000))
        step.backward(torch.nn.functional.cross_entropy(y_hat, y))
    if mode == "crash" and step.index == 1 and run.rank == 1:
        raise ValueError("the script's own mistake")
    if mode == "kill" and step.index == 1 and run.rank == 1:
        os.kill(os.getpid(), 9)
    step.update(clip=1.0)
assert mode == "short", "a proof ends a script after its last step"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("prove") / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def running():
    with Cells(lambda cell, steps: None) as cells:
        yield cells


@pytest.fixture
def proven(script, running):
    def prove_mode(mode, worlds="1,3", strategies="ddp,zero3"):
        run = partial(running.run, Job(str(script), (mode,)))
        return prove(plan(worlds, strategies, 3), 3, run, lambda result: None)

    return prove_mode


def command(script, *arguments):
    return [sys.executable, "-m", "lanewise", "prove", str(script), *arguments]


def lanewise_prove(script, *arguments):
    done = subprocess.run(command(script, *arguments), capture_output=True, text=True, timeout=200)
    return done.returncode, done.stdout, done.stderr


def test_a_good_script_gives_the_same_bits_in_every_cell(script):
    code, out, err = lanewise_prove(script, "--steps", "3", "--worlds", "1,3,5", "--exchange", "gloo")
    assert code == 0, err
    assert out.rstrip().endswith("same bits: 12 cells, 3 steps, one digest after each step.")
    rows = [line.split("│")[1:-1] for line in out.splitlines() if line.startswith("│")]
    assert [int(row[0]) for row in rows] == [1, 3, 5]
    assert len({cell.strip() for row in rows for cell in row[1:]}) == 1
    assert err == ""


def test_a_script_that_depends_on_the_rank_is_told_where(script):
    code, out, err = lanewise_prove(
        script, "--json", "--steps", "3", "--worlds", "1,3", "--strategies", "ddp,zero3", "rank"
    )
    assert code == 1, err
    report = json.loads(out)
    assert report["verdict"] == "different"
    differs = {(r["cell"]["world"], r["cell"]["strategy"]): r["differs_at"] for r in report["results"]}
    assert differs == {(1, "ddp"): None, (1, "zero3"): None, (3, "ddp"): 2, (3, "zero3"): 2}
    found = report["difference"]
    assert (found["step"], found["lane"], found["parameter"]) == (1, 3, "0.weight")
    assert found["cause"] == "loss"
    left, right = (side["values"] for side in found["sides"])
    assert (left["computed by"], right["computed by"]) == ("rank 0", "rank 1")
    assert left["batch"] == right["batch"]
    assert left["loss"] != right["loss"]
    assert left["gradient"] != right["gradient"]


def test_what_depends_on_the_hash_seed_is_not_hidden(proven):
    """Ranks are forked from warm processes; were these all forks of one, the order of a set would not differ."""
    report = proven("hash", worlds="1")
    assert "PYTHONHASHSEED" in os.environ or not report.is_same


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("stranger", "ddp on 1 rank: the script came to its end without calling lw.start"),
        ("idle", "ddp on 1 rank: the script called lw.start and came to its end without a step"),
        ("short", "ddp on 1 rank: the script ended after 2 of 3 steps. Let it train longer, or prove fewer"),
        ("kill", "ddp on 3 ranks: rank 1 of 3 was ended by SIGKILL"),
    ],
)
def test_a_script_that_cannot_be_proven_is_told_with_its_output(proven, mode, message):
    with pytest.raises(ProofError) as caught:
        proven(mode)
    text = str(caught.value)
    assert text.startswith(message)
    if mode == "stranger":
        assert text.endswith("The end of what rank 0 wrote:\n  | this script knows nothing of lanewise")


def test_a_failure_is_one_object_of_json(script):
    code, out, _ = lanewise_prove(script, "--json", "--worlds", "1,3", "--steps", "3", "crash")
    assert code == 1
    report = json.loads(out)
    assert report["verdict"] == "failed"
    assert report["error"].startswith("ddp on 3 ranks: rank 1 of 3 failed with ValueError.")
    assert "ValueError: the script's own mistake" in report["error"]


@pytest.mark.parametrize(("sign", "exit_code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_nothing_runs_on_when_a_proof_is_stopped(script, tmp_path, tmp_path_factory, sign, exit_code):
    process = subprocess.Popen(
        command(script, "--worlds", "3,1", "--steps", "3", "wait", str(tmp_path)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(tmp_path_factory.mktemp("left"))},
    )
    try:
        deadline = time.monotonic() + 100
        while len(ranks := [int(path.name) for path in tmp_path.iterdir()]) < 3:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(sign)
        assert process.wait(30) == exit_code
    finally:
        process.kill()
    while any(Path(f"/proc/{rank}").exists() for rank in ranks):
        assert time.monotonic() < deadline, "ranks are left behind"
        time.sleep(0.1)
