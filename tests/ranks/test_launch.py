"""`lanewise run` on real ranks: what a script is told, how failures and signals end, and that nothing is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lanewise.run.elastic import OneHost

TRAIN = """
import sys
import torch
import lanewise as lw
run = lw.start(lanes=6, strategy="ddp")
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
data = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
for step in run.steps(run.loader(data, batch_size=12, shuffle=True), total=2):
    for x, y in step:
        step.backward(torch.nn.functional.cross_entropy(model(x), y))
    step.update()
digest = run.digest()
if run.rank == 0:
    print(run.world_size, run.settings.strategy, run.settings.lanes, run.shares, sys.argv[1:], digest)
"""

PLAIN = """
import os, signal, sys, time
from lanewise.errors import PeerLostError
what, folder = sys.argv[1:]
rank = int(os.environ["RANK"])
open(f"{folder}/{os.getpid()}", "w").close()
def fail():
    raise ValueError("the script's own mistake")
if rank == 1:
    while what != "wait" and len(os.listdir(folder)) < 3:
        time.sleep(0.01)
    if what == "raise":
        fail()
    if what == "exit":
        sys.exit(7)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
if what == "raise":
    while not os.path.exists(os.environ["LANEWISE_FAILURES"] + "/1.json"):
        time.sleep(0.001)
    raise PeerLostError((1,), "rank 1 has ended")
time.sleep(60)
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("launch")
    (folder / "train.py").write_text(TRAIN)
    (folder / "plain.py").write_text(PLAIN)
    return folder


def run(*command, timeout=100):
    """Exit code, stdout and stderr of a command, away from the folder that tests are run in."""
    path = os.pathsep.join(str(Path(entry).resolve()) for entry in sys.path if entry)
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**environment, "PYTHONPATH": path},
    )
    return done.returncode, done.stdout, done.stderr


def test_one_script_runs_alone_under_torchrun_and_with_other_settings(scripts):
    script = str(scripts / "train.py")
    code, alone, err = run(script)
    assert code == 0, err
    code, launched, err = run(
        "-m", "lanewise", "run", "--ranks", "3", "--strategy", "zero3", "--hosting", "3,1,2", script, "--a", "$$b"
    )  # fmt: skip
    assert code == 0, err
    notices = [line for line in err.splitlines() if "from the launcher" in line]
    assert notices == [
        "lanewise: strategy='zero3' from the launcher replaces the script's 'ddp'",
        "lanewise: hosting=(3.0, 1.0, 2.0) from the launcher replaces the script's 'even'",
    ]
    assert "Warning" not in err
    assert "OMP_NUM_THREADS" not in err
    code, torchrun, err = run("-m", "torch.distributed.run", "--nproc-per-node", "3", script)
    assert code == 0, err
    *told, digest = alone.split()
    assert " ".join(told) == "1 ddp 6 (6,) []"
    assert launched == f"3 zero3 6 (3, 1, 2) ['--a', '$$b'] {digest}\n"
    assert torchrun == f"3 ddp 6 (2, 2, 2) [] {digest}\n"


@pytest.mark.parametrize(
    ("what", "exit_code", "last"),
    [
        ("raise", 1, "error: rank 1 of 3 failed with ValueError."),
        ("exit", 7, "error: rank 1 of 3 ended with exit code 7 and no exception; its own output says why."),
        ("kill", 137, "error: rank 1 of 3 was ended by SIGKILL. The kernel does that when memory runs out."),
    ],
)
def test_the_rank_that_failed_first_is_the_one_that_is_heard(scripts, tmp_path, what, exit_code, last):
    script = str(scripts / "plain.py")
    code, out, err = run("-m", "lanewise", "run", "--ranks", "3", script, what, str(tmp_path))
    assert (code, out) == (exit_code, "")
    *before, told = err.splitlines()
    assert told == last
    assert not running(tmp_path)
    if what != "raise":
        assert before == []
        return
    assert before[0] == "Traceback (most recent call last):"
    assert before[1].startswith(f'  File "{script}", line ')
    assert before[-1] == "ValueError: the script's own mistake"
    assert "PeerLostError" not in err


@pytest.mark.parametrize(
    ("sign", "exit_code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_ranks_end_with_their_launcher(scripts, tmp_path, tmp_path_factory, sign, exit_code):
    left = tmp_path_factory.mktemp("left")
    command = ["run", "--ranks", "3", str(scripts / "plain.py"), "wait", str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-m", "lanewise", *command],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(left)},
    )
    try:
        deadline = time.monotonic() + 100
        while len(running(tmp_path)) < 3:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(sign)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == exit_code
    if sign != signal.SIGKILL:
        assert err == f"error: stopped by {sign.name}; all ranks have ended.\n"
        assert not running(tmp_path)
        assert not list(left.iterdir())
    while running(tmp_path):
        assert time.monotonic() < deadline, "ranks are left behind"
        time.sleep(0.05)


def running(folder):
    """Those of the processes that left their number in a folder that still run."""
    return [path.name for path in folder.iterdir() if Path(f"/proc/{path.name}").exists()]


def test_a_port_in_use_is_said_before_ranks_start(scripts, tmp_path):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, _, err = run(
            "-m", "lanewise", "run", "--ranks", "3", "--port", port, str(scripts / "plain.py"), "x", str(tmp_path)
        )  # fmt: skip
    assert code == 1
    assert err.startswith(f"error: port {port} is in use by another process.")
    assert not list(tmp_path.iterdir())


def test_a_restarted_rank_cannot_read_what_the_last_attempt_left():
    meeting = OneHost(None)
    first = meeting.next_rendezvous()
    first.store.set("address", "old")
    second = meeting.next_rendezvous()
    assert second.bootstrap_store_info.master_addr == "127.0.0.1"
    assert not second.store.check(["address"])
    meeting.shutdown()
