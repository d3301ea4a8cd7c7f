"""Ranks that die, stop, fail or never come: the others name the one that is to blame, in time, and nothing is left."""

import contextlib
import gc
import multiprocessing
import os
import re
import resource
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import lanewise as lw
from lanewise.errors import ExchangeError, LanewiseError
from tests.helpers.cases import Cell, grid, on_ranks
from tests.helpers.models import Gpt, token_data, token_loss
from tests.helpers.spawn import Ranks, free_port, meet

WORLD = 3
SOON = 6.0
"""Seconds within which a loss is noticed that needs no timeout; far more than it takes, for a busy machine."""
SLACK = 10.0


@dataclass(frozen=True)
class Case:
    """Something that happens to one rank of a run."""

    how: str
    victim: int
    exchange: str
    strategy: str
    timeout: float = 60.0


def train(case, run, folder):
    """Train, and have it happen to the victim."""
    is_victim = run.rank == case.victim

    def happen(how):
        if is_victim and case.how == how:
            (folder / "when").write_text(str(time.monotonic()))
            if how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif how == "raise between steps":
                raise ValueError("the script's own mistake")
            else:
                os.kill(os.getpid(), signal.SIGKILL)

    meet(folder, "started", WORLD)
    happen("die before prepare")
    torch.manual_seed(0)
    model = Gpt()
    run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    loader = run.loader(token_data(), batch_size=12)
    for step in run.steps(loader, total=4):
        for tokens, targets in step:
            is_second = (step.index, step.lane) == (1, step.lanes[1])
            if is_second:
                happen("die in a lane")
                happen("stop")
            logits = model(tokens)
            if is_second:
                logits.register_hook(lambda gradient: happen("die in backward"))
                model.blocks[1].down.weight.register_hook(lambda gradient: happen("die in an exchange"))
            step.backward(token_loss(logits, targets))
        if is_victim and case.how == "be slow" and step.index < 2:
            time.sleep(0.6 * case.timeout)
        step.update()
        if step.index == 1:
            happen("raise between steps")
    return run.digest()


def go_through(cases, ports, folder):
    """What each case came to on this rank: a digest, or the error with when it came and whom it blames."""
    rank = int(os.environ["RANK"])
    found = []
    for number, (case, port) in enumerate(zip(cases, ports, strict=True)):
        here = folder / str(number)
        meet(here, "pid", WORLD)
        os.environ["MASTER_PORT"] = str(port)
        if case.how == "never come" and rank == case.victim:
            found.append(("absent",))
            continue
        found.append(one(case, here))
        if case.how == "stop" and rank != case.victim:
            meet(here, "over", WORLD - 1)
            os.kill(int((here / f"pid {case.victim}").read_text()), signal.SIGCONT)
    return found


def one(case, folder):
    run = None
    began = time.monotonic()
    try:
        run = lw.start(
            lanes=6, strategy=case.strategy, exchange=case.exchange, timeout=case.timeout, sinks=[]
        )
        digest = train(case, run, folder)
        run.close()
        return ("digest", digest)
    except (LanewiseError, ValueError) as error:
        now = time.monotonic()
        if run is not None:
            run.close()
        when = folder / "when"
        happened = float(when.read_text()) if when.exists() else began
        return (type(error).__name__, str(error), getattr(error, "ranks", None), now - happened)


SPAWNS = {
    "shared, rank 1": [
        Case("be slow", 1, "shared", "zero3", 4.0),
        Case("die in a lane", 1, "shared", "ddp"),
    ],
    "shared, rank 0": [
        Case("never come", 0, "shared", "ddp", 1.5),
        Case("stop", 0, "shared", "zero3", 2.0),
        Case("die before prepare", 0, "shared", "zero2"),
    ],
    "shared, an exception": [
        Case("stop", 1, "shared", "zero1", 2.0),
        Case("never come", 1, "shared", "ddp", 1.5),
        Case("raise between steps", 2, "shared", "zero2"),
    ],
    "shared, in backward": [Case("die in backward", 0, "shared", "zero2")],
    "gloo, rank 1": [
        Case("raise between steps", 1, "gloo", "zero1"),
        Case("never come", 1, "gloo", "ddp", 1.5),
        Case("be slow", 1, "gloo", "zero1", 4.0),
        Case("die in an exchange", 1, "gloo", "zero3"),
    ],
    "gloo, rank 0": [
        Case("raise between steps", 0, "gloo", "zero3"),
        Case("stop", 0, "gloo", "zero2", 2.0),
        Case("die in a lane", 0, "gloo", "ddp"),
    ],
    "gloo, an exception": [
        Case("stop", 1, "gloo", "zero3", 2.0),
        Case("raise between steps", 2, "gloo", "ddp"),
    ],
    "gloo, in backward": [Case("die in backward", 1, "gloo", "zero2")],
    "gloo, before prepare": [Case("die before prepare", 2, "gloo", "zero1")],
}
"""Where memory is shared, an exception is noticed when its process ends: it is the last case of a spawn."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What every case came to, by spawn and rank. Most of the time is spent waiting, so all go on side by side."""
    spawned = {}
    for name, cases in SPAWNS.items():
        folder = tmp_path_factory.mktemp("case")
        for number in range(len(cases)):
            (folder / str(number)).mkdir()
        spawned[name] = Ranks(WORLD, go_through, cases, [free_port() for _ in cases], folder)
    return {name: ranks.join() for name, ranks in spawned.items()}


CASES = [
    pytest.param(name, number, id=f"{case.how}: {case.exchange} {case.strategy} rank {case.victim}")
    for name, cases in SPAWNS.items()
    for number, case in enumerate(cases)
]


@pytest.mark.parametrize(("name", "number"), CASES)
def test_the_others_name_the_rank_that_is_lost(outcomes, name, number):
    case, by_rank = SPAWNS[name][number], outcomes[name]
    others = [rank for rank in range(WORLD) if rank != case.victim]
    for rank in others:
        assert by_rank[rank][0] == "ok", by_rank[rank]
    for rank in others:
        end = by_rank[rank][1][number]
        if case.how == "be slow":
            assert end == by_rank[others[0]][1][number]
            assert end[0] == "digest"
            continue
        assert end[0] == "PeerLostError", end
        _, message, blamed, seconds = end
        assert blamed == (case.victim,), end
        assert message.startswith(f"rank {rank} "), end
        assert f"rank {case.victim}" in message, end
        assert WORDS[case.how, case.exchange] in message, end
        assert "GLHF" not in message, end
        if case.how in ("stop", "never come"):
            assert 0.6 * case.timeout < seconds < case.timeout + SLACK, end
        else:
            assert seconds < SOON, end
    how, value = by_rank[case.victim][:2]
    if case.how.startswith("die"):
        assert (how, value) == ("gone", -signal.SIGKILL)
    elif how == "ok" and case.how == "stop":
        assert value[number][0] == "PeerLostError", "it goes on when all others have given up"
    elif how == "ok" and case.how == "raise between steps":
        assert value[number][:2] == ("ValueError", "the script's own mistake")


WORDS = {
    ("die in a lane", "shared"): "has ended; it is gone; its last word: step 1, lane",
    ("die in a lane", "gloo"): "has ended or hung up",
    ("die before prepare", "shared"): "waited in the comparison of layouts",
    ("die before prepare", "gloo"): "waited in the comparison of layouts",
    ("die in backward", "shared"): "has ended; it is gone; its last word: step 1, lane",
    ("die in backward", "gloo"): "has ended or hung up",
    ("die in an exchange", "gloo"): "has ended or hung up",
    ("stop", "shared"): "did not come within 2 s; it is stopped; its last word: step 1, lane",
    ("stop", "gloo"): "did not come within 2 s. Look",
    ("raise between steps", "shared"): "step 1, update; it failed with ValueError: the script's own mistake",
    ("raise between steps", "gloo"): "(step 1, update; it failed with ValueError: the script's own mistake)",
    ("never come", "shared"): "within 1.5 s",
    ("never come", "gloo"): "within 1.5 s",
}


def leave_things_behind(exchange, folder):
    """Train until killed, with a worker that loads."""
    multiprocessing.current_process()._config["daemon"] = False  # as a launched rank is: it has workers
    multiprocessing.set_start_method("fork", force=True)
    run = lw.start(lanes=6, strategy="zero3", exchange=exchange, sinks=[])
    model = Gpt()
    run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    loader = run.loader(token_data(), batch_size=12, num_workers=1)
    for step in run.steps(loader, epochs=10**6):
        for tokens, targets in step:
            step.backward(token_loss(model(tokens), targets))
        step.update()
        if step.index == 2:
            (folder / f"up {run.rank}").touch()


def lines(path):
    """The lines of a file of the kernel, none where its process has ended."""
    try:
        return Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return []


def shared_memory(pid):
    """The inodes of memory that a process maps under a name of ours."""
    return {line.split()[4] for line in lines(f"/proc/{pid}/maps") if "memfd:lanewise" in line}


def named_memory(pid):
    """What a process maps of /dev/shm that has a name there."""
    return [line for line in lines(f"/proc/{pid}/maps") if "/dev/shm" in line and "(deleted)" not in line]


def listening(pid=None):
    """The inodes of the sockets that listen, in all or of one process."""
    entries = [line.split() for kind in ("tcp", "tcp6") for line in lines(f"/proc/net/{kind}")[1:]]
    found = {entry[9] for entry in entries if entry[3] == "0A"}
    if pid is None:
        return found
    return {inode for inode in found if f"socket:[{inode}]" in open_files(pid)}


def open_files(pid):
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(str(path.readlink()))
    return found


def processes():
    """The parent of every process that runs."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        for line in lines(path):
            state, parent = line.rpartition(")")[2].split()[:2]
            if state != "Z":
                found[int(path.parent.name)] = int(parent)
    return found


def with_children(pids):
    """The processes and whatever they have started."""
    parents = processes()
    family = set(pids)
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return family


def wait_for(condition, what, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_ranks_that_are_killed_leave_no_memory_no_process_and_no_port(tmp_path):
    folders = {exchange: tmp_path / exchange for exchange in ("shared", "gloo")}
    for folder in folders.values():
        folder.mkdir()
    spawned = [Ranks(WORLD, leave_things_behind, exchange, folder) for exchange, folder in folders.items()]
    for folder in folders.values():
        wait_for(lambda: len(list(folder.iterdir())) == WORLD, "ranks do not train")  # noqa: B023
    by_exchange = [[process.pid for process in ranks.processes] for ranks in spawned]
    pids = [pid for group in by_exchange for pid in group]
    family = with_children(pids)
    assert len(family) >= 2 * len(pids), "each rank has a worker"
    memory = [set().union(*map(shared_memory, group)) for group in by_exchange]
    assert memory[0]
    assert not memory[1]
    ports = set().union(*map(listening, pids))
    assert len(ports) > 2
    assert not [line for pid in family for line in named_memory(pid)]
    for sign in (signal.SIGSTOP, signal.SIGKILL):  # none is to notice the end of another
        for pid in pids:
            os.kill(pid, sign)
    for ranks in spawned:
        assert set(ranks.join().values()) == {("gone", -signal.SIGKILL)}
    wait_for(lambda: not family & set(processes()), "a process is left")
    assert not ports & listening()
    assert not [pid for pid in processes() if memory[0] & shared_memory(pid)]


def possessions():
    """The files, shared memory and threads that this process has. Rank 0 serves the sockets of the others too."""
    gc.collect()
    is_server = os.environ["RANK"] == "0"
    files = sorted(name for name in open_files("self") if not (is_server and name.startswith("socket")))
    return files, shared_memory("self"), [thread.name for thread in threading.enumerate()]


def train_once(exchange):
    run = lw.start(lanes=6, strategy="zero3", exchange=exchange, sinks=[])
    model = Gpt()
    run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for step in run.steps(run.loader(token_data(), batch_size=12), total=2):
        for tokens, targets in step:
            step.backward(token_loss(model(tokens), targets))
        step.update()
    during = possessions()
    run.close()
    return during


def what_is_left(cell):
    train_once(cell.exchange)  # torch opens files of its own when they are first needed
    before = possessions()
    during = train_once(cell.exchange)
    assert during != before
    return before, possessions()


def test_a_closed_run_leaves_no_file_no_memory_and_no_thread():
    for by_rank in on_ranks(grid([3], ["zero3"]), what_is_left):
        for before, after in by_rank:
            assert after == before


def prepare_without_memory(cell):
    """Rank 1 may make no file that is larger than a megabyte, and neither memory that it shares."""
    run = cell.start(lanes=3)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    model = torch.nn.Linear(1000, 1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if run.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(ExchangeError) as caught:
            run.prepare(model, optimizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    run.close()
    return str(caught.value)


def test_a_host_without_memory_to_share():
    (by_rank,) = on_ranks([Cell(3, "zero2", "shared")], prepare_without_memory)
    for message in by_rank:
        assert re.fullmatch(
            r"rank 1 could not allocate \d+ bytes of shared memory: \[Errno 27\] File too large\. Use fewer ranks on "
            r"this host, or exchange='gloo'\.",
            message,
        ), message
