"""What every rank must know of every lane before a step is decided: one small exchange.

Each rank fills in what it hosts and owns; the exchange gives every rank the whole, so that all of them
come to the same decision from the same numbers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch

from lanewise.engine.sum import tree_sum
from lanewise.lanes.hosting import Span
from lanewise.lanes.schedule import Schedule

NOTHING = 1 << 62
"""In the place of a parameter or a position where nothing is bad; fp64 holds it exactly."""
PLAIN, WEIGHTED = 1, 2
"""A loss that is a mean, and one that is a sum with its weight."""


@dataclass
class LaneReport:
    """One lane: the sum of its losses, their weight, and whether it had samples of its own."""

    loss: float = 0.0
    weight: float = 0.0
    is_padding: bool = False
    ways: int = 0
    """How its losses were given: `PLAIN`, `WEIGHTED`, or both."""


@dataclass
class RankReport:
    """What one rank knows."""

    lanes: dict[int, LaneReport] = field(default_factory=dict)
    present: set[int] = field(default_factory=set)
    """The trainable parameters that got a gradient in some lane."""
    slot_squares: Sequence[float] = ()
    """The sum of squares of each slot it owns, where the norm is wanted."""
    bad_total: int = NOTHING
    """The first parameter whose summed gradient is not finite."""
    bad_leaves: Mapping[int, int] = field(default_factory=dict)
    """The lanes that have a gradient which is not finite, with the first such parameter."""
    changed_buffers: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    options: Mapping[str, int] = field(default_factory=dict)
    """What the user chose for this step, by what it is called: hashes of up to 52 bits."""


@dataclass(frozen=True)
class StepReport:
    """What all ranks know together."""

    lanes: tuple[LaneReport, ...]
    present: tuple[bool, ...]
    slot_squares: tuple[float, ...]
    bad_total: int | None
    bad_leaf: tuple[int, int] | None
    """The first lane with a gradient that is not finite, and in it the first such parameter."""
    changed_buffers: tuple[bool, ...]
    other_options: Mapping[str, tuple[int, ...]]
    """What ranks chose otherwise than rank 0, and which ranks."""

    def given(self, way: int) -> list[int]:
        """The lanes in which a loss was given in this way."""
        return [lane for lane, report in enumerate(self.lanes) if report.ways & way]

    @property
    def total_weight(self) -> float:
        """The weight of the whole batch, in the canonical order."""
        return tree_sum([lane.weight for lane in self.lanes])

    @property
    def mean_loss(self) -> float:
        """The weighted mean of the losses, in the canonical order."""
        return tree_sum([lane.loss for lane in self.lanes]) / self.total_weight

    @property
    def norm_of_sum(self) -> float:
        """The norm of the summed gradient, before any division."""
        return math.sqrt(tree_sum(self.slot_squares))


@dataclass(frozen=True)
class Form:
    """Where everything stands in the row of fp64 numbers that a rank's report is sent as."""

    lanes: int
    slots: tuple[Span, ...]
    """The slots of every rank."""
    num_parameters: int
    num_buffers: int
    options: tuple[str, ...]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The lengths of the parts: lanes, squares, what is bad, presence, buffers, options."""
        return (
            4 * self.lanes, self.lanes, 1 + self.lanes, self.num_parameters, self.num_buffers, len(self.options),
        )  # fmt: skip

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each part begins, and the length of the row."""
        return tuple(accumulate(self.sizes, initial=0))

    def fill(self, mine: RankReport, rank: int) -> torch.Tensor:
        """A rank's row."""
        lanes, squares, bad, present, _, _ = self.starts[:-1]
        row = [0.0] * self.starts[-1]
        for lane, report in mine.lanes.items():
            row[lanes + 4 * lane : lanes + 4 * lane + 4] = [
                report.loss, report.weight, report.is_padding, report.ways,
            ]  # fmt: skip
        low = squares + self.slots[rank][0]
        row[low : low + len(mine.slot_squares)] = mine.slot_squares
        row[bad:present] = [float(NOTHING)] * (1 + self.lanes)
        row[bad] = float(mine.bad_total)
        for lane, index in mine.bad_leaves.items():
            row[bad + 1 + lane] = float(index)
        if len(mine.present) == self.num_parameters:
            row[present : present + self.num_parameters] = [1.0] * self.num_parameters
        for index in mine.present if len(mine.present) < self.num_parameters else ():
            row[present + index] = 1.0
        row[self.starts[4] :] = [*mine.changed_buffers.tolist(), *mine.options.values()]
        return torch.tensor(row, dtype=torch.float64)

    def read(
        self, rows: torch.Tensor, schedule: Schedule, index_of: Callable[[int], int] = lambda index: index
    ) -> StepReport:
        """Everybody's rows together. `index_of` turns what a row calls bad into the number of a parameter."""
        tables, squares, bad, present, buffers, options = rows.split(self.sizes, dim=1)
        lane_rows = [
            tables[rank, 4 * lane : 4 * lane + 4].tolist() for lane, rank in enumerate(schedule.host)
        ]
        owner = {slot: rank for rank, span in enumerate(self.slots) for slot in range(*span)}
        worst = [int(number) for number in bad.amin(dim=0).tolist()]
        found = [None if number >= NOTHING else index_of(number) for number in worst]
        return StepReport(
            lanes=tuple(
                LaneReport(loss, weight, bool(pad), int(ways)) for loss, weight, pad, ways in lane_rows
            ),
            present=tuple((present.amax(dim=0) > 0).tolist()) if self.num_parameters else (),
            slot_squares=tuple(float(squares[owner[slot], slot]) for slot in range(self.lanes)),
            bad_total=found[0],
            bad_leaf=next(((lane, index) for lane, index in enumerate(found[1:]) if index is not None), None),
            changed_buffers=tuple((buffers.amax(dim=0) > 0).tolist()) if self.num_buffers else (),
            other_options=_differences(self.options, options.tolist()),
        )


def _differences(names: Sequence[str], rows: Sequence[Sequence[float]]) -> dict[str, tuple[int, ...]]:
    found = {}
    for number, name in enumerate(names):
        ranks = tuple(rank for rank, row in enumerate(rows) if row[number] != rows[0][number])
        if ranks:
            found[name] = ranks
    return found
