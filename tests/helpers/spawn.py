"""Real ranks for tests: processes forked from one that has imported torch, on a free loopback port."""

import atexit
import multiprocessing as mp
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

os.environ.setdefault("RES_OPTIONS", "timeout:1")
"""torch asks a resolver for the name of every peer: one that does not answer costs a second, and not five."""

_context: mp.context.ForkServerContext | None = None


def context() -> mp.context.ForkServerContext:
    global _context
    if _context is None:
        _context = mp.get_context("forkserver")
        _context.set_forkserver_preload(["torch._dynamo", "lanewise.run.start", "tests.helpers.models"])
    return _context


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def meet(folder: Path, name: str, count: int) -> None:
    """In a rank: leave this process's number in a folder, and wait for so many others to do the same."""
    (folder / f"{name} {os.environ['RANK']}").write_text(str(os.getpid()))
    while len(list(folder.glob(f"{name} *"))) < count:
        time.sleep(0.002)


class RankError(AssertionError):
    """A rank raised; its traceback is the message."""

    def __init__(self, rank: int, kind: str, message: str, text: str) -> None:
        super().__init__(f"rank {rank} raised {kind}: {message}\n{text}")
        self.rank, self.kind, self.message = rank, kind, message


def _enter(rank: int, world: int, port: int, environment: dict[str, str], job: Any, out: Connection) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    os.environ.update(environment)
    import warnings

    warnings.simplefilter("error")
    function, arguments, keywords = job
    try:
        out.send(("ok", function(*arguments, **keywords)))
    except BaseException as error:
        sys.last_value = error
        out.send(("error", type(error).__name__, str(error), traceback.format_exc()))
    finally:
        out.close()
        atexit._run_exitfuncs()


class Ranks:
    """Running ranks, for tests that act on them from outside."""

    def __init__(
        self, world: int, function: Callable[..., Any], *arguments: Any, environment=None, **keywords: Any
    ):
        port = free_port()
        self.processes, self.pipes = [], []
        self.results: dict[int, tuple] = {}
        for rank in range(world):
            ours, theirs = context().Pipe(duplex=False)
            process = context().Process(
                target=_enter,
                args=(rank, world, port, environment or {}, (function, arguments, keywords), theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def join(self, timeout: float = 120) -> dict[int, tuple]:
        """What each rank came to: ("ok", value), ("error", kind, message, traceback) or ("gone", exit code)."""
        deadline = time.monotonic() + timeout
        open_pipes = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in self.results}
        while open_pipes and time.monotonic() < deadline:
            for pipe in wait(list(open_pipes), timeout=0.5):
                rank = open_pipes.pop(pipe)
                try:
                    self.results[rank] = pipe.recv()
                except EOFError:
                    self.processes[rank].join(5)
                    self.results[rank] = ("gone", self.processes[rank].exitcode)
        for rank in open_pipes.values():
            self.results[rank] = ("late", None)
        for process in self.processes:
            process.join(0.1 if open_pipes else 10)
            if process.is_alive():
                process.kill()
                process.join()
        return self.results


def run_ranks(
    world: int, function: Callable[..., Any], *arguments: Any, timeout: float = 120, **keywords: Any
) -> list:
    """Run a function on every rank; the values by rank. Raises the first error of any rank."""
    environment = keywords.pop("environment", None)
    results = Ranks(world, function, *arguments, environment=environment, **keywords).join(timeout)
    errors = [(rank, r) for rank, r in sorted(results.items()) if r[0] != "ok"]
    if errors:
        errors.sort(key=lambda e: (e[1][0] != "error", e[1][1] in ("PeerLostError",), e[0]))
        rank, result = errors[0]
        if result[0] == "error":
            raise RankError(rank, *result[1:])
        raise RankError(rank, result[0], str(result[1]), "")
    return [results[rank][1] for rank in range(world)]
