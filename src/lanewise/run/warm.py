"""Processes that have torch loaded and fork a rank when told to, so that a rank starts in milliseconds.

Use more than one, and turn by turn: forks of one process share Python's hash seed, and with it the order of
every set, which a proof must not hide. Orders and answers are lines of JSON on pipes.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lanewise import env
from lanewise.errors import ProofError
from lanewise.run import worker

_PRELOAD = ("torch", "numpy", "torch._dynamo", "lanewise.run.start")
"""What takes seconds to import. An optimizer's first step imports dynamo."""
_POLL_S = 0.02


@dataclass(frozen=True)
class Start:
    """A rank to be started."""

    script: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    output: str
    """Where its stdout and stderr go."""


class WarmProcess:
    """Forks ranks. It and its ranks end with the process that made it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._unread = b""
        self._ranks: set[int] = set()
        self._ended: dict[int, int] = {}
        self._started: list[int] = []

    def fileno(self) -> int:
        """Readable when a rank has ended, or the process itself."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def start(self, order: Start) -> int:
        """Fork a rank; returns its process."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(asdict(order)).encode() + b"\n")
            self._process.stdin.flush()
        while not self._started:
            self.receive()
        rank = self._started.pop()
        self._ranks.add(rank)
        return rank

    def receive(self) -> None:
        """Wait for an answer."""
        received = os.read(self.fileno(), 1 << 16)
        if not received:
            raise ProofError(
                f"a process that starts ranks has ended ({self._process.wait()}). Memory may have run out; prove "
                "smaller --worlds."
            )
        *lines, self._unread = (self._unread + received).split(b"\n")
        for rank, exit_code in map(json.loads, lines):
            if exit_code is None:
                self._started.append(rank)
            else:
                self._ended[rank] = exit_code

    def ended(self) -> dict[int, int]:
        """The exit codes of ranks that have ended since this was asked, negative for a signal."""
        ended, self._ended = self._ended, {}
        self._ranks.difference_update(ended)
        return ended

    def kill(self) -> None:
        """End the ranks that run, and all that they started."""
        for rank in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank, signal.SIGKILL)

    def close(self) -> None:
        """End the process, and its ranks."""
        self.kill()
        self._process.kill()
        self._process.communicate()


def _serve() -> Any:
    """Fork a rank for every order.

    Returns the order in the fork, and nothing when there are no more orders.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for name in _PRELOAD:
        importlib.import_module(name)
    gc.freeze()
    me = os.getpid()
    ranks: set[int] = set()
    while True:
        ready, _, _ = select.select([0], [], [], _POLL_S if ranks else None)
        if ready:
            line = sys.stdin.buffer.readline()
            if not line:
                return None
            rank = os.fork()
            if not rank:
                answers.close()
                order = json.loads(line)
                _become(order, me)
                return order
            with contextlib.suppress(OSError):
                os.setpgid(rank, rank)
            ranks.add(rank)
            print(json.dumps([rank, None]), file=answers)
        for rank in tuple(ranks):
            ended, status = os.waitpid(rank, os.WNOHANG)
            if ended:
                ranks.remove(rank)
                print(json.dumps([rank, os.waitstatus_to_exitcode(status)]), file=answers)


def _become(order: Any, parent: int) -> None:
    """Leave behind what a process that was started afresh would not have."""
    import numpy

    os.setpgid(0, 0)
    worker.end_with(parent)
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    env.set_all(order["environment"])
    numpy.random.seed()  # the module `random` does this by itself in a fork


def _run(script: str, arguments: list[str]) -> None:
    """Run the script, and leave without taking down what the fork has inherited, which takes seconds.

    Everything registered with atexit, and by the script's threads, is done before.
    """
    exit_code = 1

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)

    atexit.register(leave)  # called last, since it was registered first
    try:
        worker.run_script(script, arguments)
        exit_code = 0
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            exit_code = (end.code or 0) & 0xFF
        raise


if __name__ == "__main__":
    worker.end_with(int(sys.argv[1]))
    if received := _serve():
        _run(received["script"], received["arguments"])
