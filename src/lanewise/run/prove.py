"""The proof that a script gives the same bits in every cell of a grid: compares, and explains what differs.

Runs nothing itself: it is given a function that runs the script in a cell and returns what was recorded.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from lanewise.config import Strategy
from lanewise.errors import SettingsError
from lanewise.run.trace import Lane, Trace


@dataclass(frozen=True)
class Cell:
    """One way to run the script. None of this may change a bit."""

    world: int
    strategy: str

    def __str__(self) -> str:
        return f"{self.strategy} on {self.world} rank{'s' if self.world > 1 else ''}"


RunCell = Callable[[Cell, int, bool], Trace]
"""Runs the script in a cell for so many steps, with details of every lane or without."""

Cause = Literal["first values", "batch", "loss", "gradient", "update", "unsteady"]

EXPLANATIONS: Mapping[Cause, str] = {
    "first values": (
        "The first values differ before any step is made. Build the model after lw.start, which seeds torch, numpy "
        "and random, and change it in the same way on every rank."
    ),
    "batch": (
        "The lane got another batch. A sample must depend on its index only: not on the rank, the number of ranks, "
        "the time, or how often it was read."
    ),
    "loss": (
        "The lane had the same batch on both sides and came to another loss. The model or the loss depends on the "
        "rank, on the number of ranks, on what was computed before, or on randomness that lw.start does not seed."
    ),
    "gradient": (
        "The lane had the same batch and the same loss on both sides, and another gradient. A hook or a backward of "
        "the script's own depends on the rank, or a kernel does not repeat its bits."
    ),
    "update": (
        "Every lane had the same gradients on both sides, so the difference arose in their sum or in the update: "
        "reduction='native', an optimizer, clipping or schedule that depends on the rank, a value changed between "
        "steps, or a fault in Lanewise."
    ),
    "unsteady": (
        "The difference did not come back when both cells were run again. Something in the script or in the machine "
        "does not repeat its bits."
    ),
}


@dataclass(frozen=True)
class Side:
    """What one of two runs that differ had at the place of the difference."""

    name: str
    values: Mapping[str, str]


@dataclass(frozen=True)
class Difference:
    """The first place where two runs differ."""

    step: int | None
    """The step that led to other values; None if they differed before the first."""
    lane: int | None
    """The lane whose batch, loss or gradient differs; None if no lane's does."""
    unit: str
    parameter: str
    num_parameters: int
    """How many parameters and buffers differ after that step."""
    cause: Cause
    explanation: str
    sides: tuple[Side, Side]
    is_repeatable: bool
    """Whether each of the two cells gave the same bits when it was run again. If not, both sides are one cell."""


@dataclass(frozen=True)
class Result:
    """What a cell came to."""

    cell: Cell
    digest: str
    differs_at: int | None
    """How many steps it had made when it first differed from the first cell."""


@dataclass(frozen=True)
class Report:
    """What came of a proof."""

    steps: int
    results: tuple[Result, ...]
    difference: Difference | None

    @property
    def is_same(self) -> bool:
        """Whether all cells had the same bits after every step."""
        return self.difference is None


def plan(worlds: str, strategies: str, steps: int) -> tuple[Cell, ...]:
    """The cells that a command line names, worlds outermost."""
    if steps < 1:
        raise SettingsError(f"--steps must be at least 1, found {steps}.")
    numbers = [_world(word.strip()) for word in worlds.split(",")]
    names = [_strategy(word.strip()) for word in strategies.split(",")]
    for option, values in (("--worlds", numbers), ("--strategies", names)):
        twice = [value for n, value in enumerate(values) if value in values[:n]]
        if twice:
            raise SettingsError(f"{option} names {twice[0]} twice.")
    cells = tuple(Cell(world, strategy) for world in numbers for strategy in names)
    if len(cells) == 1:
        raise SettingsError(
            f"--worlds {worlds} --strategies {strategies} is one cell, and there is nothing to compare it with. Name "
            "at least two worlds or two strategies."
        )
    return cells


def _world(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise SettingsError(f"--worlds must be numbers of ranks such as 1,2,3,5; found {word!r}.")
    return int(word)


def _strategy(word: str) -> str:
    known = get_args(Strategy)
    if word not in known:
        raise SettingsError(f"--strategies must be some of {','.join(known)}; found {word!r}.")
    return word


def prove(cells: Sequence[Cell], steps: int, run: RunCell, tell: Callable[[Result], None]) -> Report:
    """Run every cell and compare it with the first after every step; say what differs first, if anything does."""
    traces: list[Trace] = []
    results = []
    for cell in cells:
        traces.append(run(cell, steps, False))
        results.append(Result(cell, traces[-1].points[-1].digest, first_difference(traces[0], traces[-1])))
        tell(results[-1])
    differing = [result for result in results if result.differs_at is not None]
    if not differing:
        return Report(steps, tuple(results), None)
    worst = min(differing, key=lambda result: result.differs_at or 0)
    other = results.index(worst)
    difference = _diagnose(run, (cells[0], cells[other]), (traces[0], traces[other]), worst.differs_at or 0)
    return Report(steps, tuple(results), difference)


def first_difference(left: Trace, right: Trace) -> int | None:
    """After how many steps two runs first had other values; None if they never had."""
    for number, (a, b) in enumerate(zip(left.points, right.points, strict=False)):
        if a.digest != b.digest:
            return number
    return None


def _diagnose(run: RunCell, cells: tuple[Cell, Cell], before: tuple[Trace, Trace], point: int) -> Difference:
    """Run the two cells again, with details, and find the first thing that differs.

    A cell that then differs from itself is run a third time, and explains more than the other one can.
    """
    steps = max(point, 1)
    left, right = (run(cell, steps, True) for cell in cells)
    pair = _Pair((left, right), (str(cells[0]), str(cells[1])), True)
    for cell, first, second in ((cells[0], before[0], left), (cells[1], before[1], right)):
        if first_difference(first, second) is not None:
            pair = _Pair((second, run(cell, steps, True)), (f"{cell}, once", f"{cell}, again"), False)
            break
    found = first_difference(*pair.traces)
    if found is None:
        return _Pair(before, (str(cells[0]), str(cells[1])), False).by_value(point, "unsteady")
    if found == 0:
        return pair.by_value(0, "first values")
    return pair.by_lane(found) or pair.by_value(found, "update")


@dataclass(frozen=True)
class _Pair:
    """Two runs that differ."""

    traces: tuple[Trace, Trace]
    names: tuple[str, str]
    is_repeatable: bool

    def by_value(self, point: int, cause: Cause) -> Difference:
        """The first parameter or buffer that differs at a point."""
        name = self._changed(point)[0]
        left, right = (
            Side(who, {"hash": trace.points[point].parameters.get(name, "none")})
            for who, trace in zip(self.names, self.traces, strict=True)
        )
        return self._difference(point, None, name, cause, (left, right))

    def by_lane(self, point: int) -> Difference | None:
        """The first lane of the step before a point whose gradients differ."""
        step = point - 1
        first = self.traces[0]
        for number in sorted(lane for at, lane in first.lanes if at == step):
            left, right = (trace.lanes.get((step, number)) for trace in self.traces)
            if left is None or right is None or left.gradients == right.gradients:
                continue
            name = next(n for n in first.units if left.gradients.get(n) != right.gradients.get(n))
            cause: Cause = (
                "batch" if left.batch != right.batch else "loss" if left.loss != right.loss else "gradient"
            )
            sides = (_side(self.names[0], left, name), _side(self.names[1], right, name))
            return self._difference(point, number, name, cause, sides)
        return None

    def _difference(
        self, point: int, lane: int | None, name: str, cause: Cause, sides: tuple[Side, Side]
    ) -> Difference:
        return Difference(
            step=point - 1 if point else None,
            lane=lane,
            unit=self.traces[0].units.get(name, ""),
            parameter=name,
            num_parameters=len(self._changed(point)),
            cause=cause,
            explanation=EXPLANATIONS[cause],
            sides=sides,
            is_repeatable=self.is_repeatable,
        )

    def _changed(self, point: int) -> list[str]:
        """The parameters and buffers that differ at a point, in the order of the model."""
        left, right = (trace.points[point].parameters for trace in self.traces)
        units = self.traces[0].units
        known = [*units, *sorted({*left, *right} - set(units))]
        return [name for name in known if left.get(name) != right.get(name)]


def _side(who: str, lane: Lane, parameter: str) -> Side:
    values = {
        "computed by": f"rank {lane.rank}",
        "batch": lane.batch,
        "loss": lane.loss,
        "gradient": lane.gradients.get(parameter, "none"),
    }
    return Side(who, values)
