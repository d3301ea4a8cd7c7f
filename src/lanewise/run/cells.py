"""Runs a script in one cell after another, as `lanewise run` would, on processes that stay warm."""

import json
import os
import select
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Self

from lanewise import env
from lanewise.engine import exchange
from lanewise.errors import ProofError
from lanewise.run import failure, trace
from lanewise.run.failure import Outcome
from lanewise.run.launch import Job
from lanewise.run.prove import Cell
from lanewise.run.record import Order
from lanewise.run.trace import Trace
from lanewise.run.warm import Start, WarmProcess

_GRACE_S = 2.0
"""How long the others may take to say what they noticed, after a rank has failed."""
_POLL_S = 0.1
_TAIL_LINES = 15
_NUM_WARM = 2
"""Enough for neighbouring ranks, and one rank in neighbouring cells, to have different hash seeds."""


class Cells:
    """Ranks for one cell at a time. Use it in a `with`, which ends them."""

    def __init__(self, progress: Callable[[Cell, int], None], threads: int = 1) -> None:
        """`progress` is told how many steps a cell has made."""
        self._progress = progress
        env.set_all(env.threads_for_ranks(threads))
        self._warm = [WarmProcess() for _ in range(_NUM_WARM)]
        self._store, self._port = exchange.serve_store(None)
        self._number = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._warm:
            process.close()

    def run(self, job: Job, cell: Cell, steps: int, details: bool) -> Trace:
        """Run a job's script in a cell for so many steps."""
        with tempfile.TemporaryDirectory(prefix="lanewise-") as name:
            folder = Path(name)
            self._progress(cell, 0)
            outcome = self._wait(cell, folder, self._start(job, cell, folder, Order(name, steps, details)))
            _check(cell, folder, outcome, steps)
            return trace.read(folder)

    def _start(self, job: Job, cell: Cell, folder: Path, order: Order) -> dict[int, int]:
        """Start the ranks of a cell; returns the rank of each process."""
        self._number += 1
        (folder / "failures").mkdir()
        told = env.for_ranks({**job.overrides, "strategy": cell.strategy}, folder / "failures", os.getpid())
        running = {}
        for rank in range(cell.world):
            place = env.place(rank, cell.world, self._port, self._number)
            told_rank = {**told, **place, env.RECORD: json.dumps(asdict(order))}
            process = self._warm[(rank + self._number) % _NUM_WARM]
            output = str(_output(folder, rank))
            running[process.start(Start(job.script, job.arguments, told_rank, output))] = rank
        return running

    def _wait(self, cell: Cell, folder: Path, running: dict[int, int]) -> Outcome:
        """Wait for all ranks; when one has failed, end those that do not follow soon."""
        codes: dict[int, int] = {}
        deadline = float("inf")
        while running:
            ready, _, _ = select.select(self._warm, [], [], _POLL_S)
            for process in ready:
                process.receive()
            for process in self._warm:
                for number, code in process.ended().items():
                    rank = running.pop(number)
                    if code and time.monotonic() < deadline:
                        codes[rank] = code
                        deadline = min(deadline, time.monotonic() + _GRACE_S)
            self._progress(cell, max(trace.num_steps(folder), 0))
            if time.monotonic() > deadline:
                for process in self._warm:
                    process.kill()
        return Outcome(cell.world, codes, failure.read(folder / "failures"))


def _output(folder: Path, rank: int) -> Path:
    return folder / f"output-{rank}.txt"


def _check(cell: Cell, folder: Path, outcome: Outcome, steps: int) -> None:
    """Refuse a run that cannot be compared."""
    made = trace.num_steps(folder)
    if not outcome.is_good:
        problem = outcome.describe()
    elif not trace.has_started(folder):
        problem = "the script came to its end without calling lw.start, so there is nothing to compare."
    elif made < 0:
        problem = "the script called lw.start and came to its end without a step of run.steps or run.fit."
    elif made < steps:
        problem = (
            f"the script ended after {made} of {steps} steps. Let it train longer, or prove fewer --steps."
        )
    else:
        return
    text = _output(folder, outcome.culprit).read_text(encoding="utf-8", errors="replace")
    if outcome.first is not None:
        text += outcome.first.traceback
    lines = text.splitlines()[-_TAIL_LINES:] or ["nothing"]
    tail = "\n".join(f"  | {line}" for line in lines)
    raise ProofError(f"{cell}: {problem}\nThe end of what rank {outcome.culprit} wrote:\n{tail}")
