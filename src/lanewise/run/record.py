"""What a run writes down for a proof, and where it ends for it. The script knows nothing of this.

Rank 0 writes the digest of every parameter before the first step and after each one. If details are
wanted, every rank also writes, for each lane it computes, hashes of the batch and of each gradient as
autograd made it, before it is added to anything.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lanewise import config
from lanewise.engine import hashing
from lanewise.engine.report import LaneReport
from lanewise.engine.sum import sum_of_squares
from lanewise.engine.unit import Flat
from lanewise.run import digest as digests
from lanewise.run.trace import LANES, STEPS

if TYPE_CHECKING:
    from lanewise.run.session import Run


@dataclass(frozen=True)
class Order:
    """What is to be recorded."""

    folder: str
    steps: int
    """The run ends after so many steps, whatever the script says."""
    details: bool = False


def make(values: Mapping[str, object]) -> "Recorder | None":
    """The recorder that the launcher asks for, if it does."""
    return Recorder(config.parse(Order, values, "what is to be recorded")) if values else None


class Recorder:
    """Records one run."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._folder = Path(order.folder)
        self._has_begun = False
        self._lanes: dict[int, dict[str, Any]] = {}
        self._batch: list[str] = []
        self._lane = 0

    def started(self, run: "Run") -> None:
        """The script has called lw.start."""
        if run.rank == 0:
            (self._folder / STEPS).touch()

    def before_steps(self, run: "Run") -> None:
        """Write down the first values. Collective."""
        if not self._has_begun:
            self._has_begun = True
            units = {name: flat.unit_name for flat in run.engine.flats for name in flat.names}
            self._write_step(run, {"units": units})
            if self._order.details:
                run.engine.collector.observer = self._see

    def limit(self, total: int) -> int:
        """The number of steps that the run may make."""
        return min(total, self._order.steps)

    def batch(self, lane: int, micro: int, batch: Any) -> None:
        """A batch is handed to the script."""
        if self._order.details:
            self._lane = lane
            self._batch = [*(self._batch if micro else []), *_words(batch)]

    def after_step(self, run: "Run", step: int, loss: float) -> None:
        """Write down what a step has come to. Collective."""
        self._write_step(run, {"loss": repr(loss)})
        if self._order.details:
            lines = [
                {"step": step, "rank": run.rank, "lane": lane, **seen} for lane, seen in self._lanes.items()
            ]
            self._append(f"{LANES}{run.rank}", lines)
            self._lanes.clear()

    def end_if_done(self, run: "Run") -> None:
        """End the script when the last step that the proof wants has been made."""
        if run.position >= self._order.steps:
            raise SystemExit(0)

    def _write_step(self, run: "Run", more: Mapping[str, Any]) -> None:
        parameters = digests.parameter_digests(run.engine)
        line = {"step": run.position, "digest": digests.combine(parameters), "parameters": parameters, **more}
        if run.rank == 0:
            self._append(STEPS, [line])

    def _see(self, report: LaneReport, flat: Flat, gradients: Sequence[torch.Tensor | None]) -> None:
        entry = self._lanes.setdefault(
            self._lane, {"batch": hashing.of_words(self._batch), "loss": repr(report.loss), "gradients": {}}
        )
        for name, gradient in zip(flat.names, gradients, strict=True):
            entry["gradients"][name] = "none" if gradient is None else _describe(gradient)

    def _append(self, name: str, lines: Sequence[Mapping[str, Any]]) -> None:
        with (self._folder / name).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


def _describe(gradient: torch.Tensor) -> str:
    values = gradient.detach().to_dense()
    norm = math.sqrt(float(sum_of_squares(values.reshape(-1))))
    return f"{hashing.of([values]).hex()} norm {norm:.12g}"


def _words(value: Any) -> Iterator[str]:
    """What a batch holds, as words; of things we do not know, their type."""
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype} {tuple(value.shape)} {hashing.of([value]).hex()}"
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield repr(key)
            yield from _words(item)
    elif isinstance(value, list | tuple):
        yield str(len(value))
        for item in value:
            yield from _words(item)
    elif isinstance(value, str | bytes | int | float | None):
        yield repr(value)
    else:
        yield type(value).__name__
