"""What every rank must know of every lane before a step is decided: one small exchange.

Each rank fills in what it hosts and owns; the exchange gives every rank the whole, so that all of them
come to the same decision from the same numbers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from lanewise.engine.sum import tree_sum
from lanewise.engine.transport.protocol import Transport
from lanewise.lanes.hosting import Span
from lanewise.lanes.schedule import Schedule

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
    bad_total: int = -1
    """The first parameter whose summed gradient is not finite, or -1."""
    bad_leaf: tuple[int, int] | None = None
    """The first lane, and in it the first parameter, whose gradient is not finite."""
    changed_buffers: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    options: Mapping[str, int] = field(default_factory=dict)
    """What the user chose for this step, by what it is called: hashes of up to 52 bits."""


@dataclass(frozen=True)
class StepReport:
    """What all ranks know together."""

    lanes: tuple[LaneReport, ...]
    present: tuple[bool, ...]
    slot_squares: tuple[float, ...]
    bad_totals: tuple[int, ...]
    bad_leaf: tuple[int, int] | None
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


def exchange_reports(
    mine: RankReport,
    transport: Transport,
    schedule: Schedule,
    slots: Sequence[Span],
    num_parameters: int,
    where: str,
) -> StepReport:
    """Put the reports of all ranks together."""
    lanes = schedule.lanes
    table = torch.zeros(lanes, 4, dtype=torch.float64)
    for lane, report in mine.lanes.items():
        row = [report.loss, report.weight, report.is_padding, report.ways]
        table[lane] = torch.tensor(row, dtype=torch.float64)
    squares = torch.zeros(lanes, dtype=torch.float64)
    low, high = slots[transport.rank]
    if mine.slot_squares:
        squares[low:high] = torch.tensor(mine.slot_squares, dtype=torch.float64)
    present = torch.zeros(num_parameters, dtype=torch.float64)
    if mine.present:
        present[sorted(mine.present)] = 1.0
    parts = [
        table.view(-1),
        squares,
        torch.tensor([mine.bad_total, *(mine.bad_leaf or (-1, -1))], dtype=torch.float64),
        present,
        mine.changed_buffers.double(),
        torch.tensor([*mine.options.values()], dtype=torch.float64),
    ]
    rows = transport.share(torch.cat(parts), where)
    tables, all_squares, bad, presents, buffers, options = rows.split([part.numel() for part in parts], dim=1)
    lane_rows = [tables[rank].view(lanes, 4)[lane].tolist() for lane, rank in enumerate(schedule.host)]
    owner = {slot: rank for rank, (start, stop) in enumerate(slots) for slot in range(start, stop)}
    return StepReport(
        lanes=tuple(LaneReport(loss, weight, bool(pad), int(ways)) for loss, weight, pad, ways in lane_rows),
        present=tuple((presents.amax(dim=0) > 0).tolist()) if num_parameters else (),
        slot_squares=tuple(float(all_squares[owner[slot], slot]) for slot in range(lanes)),
        bad_totals=tuple(int(value) for value in bad[:, 0].tolist()),
        bad_leaf=min(((int(lane), int(index)) for _, lane, index in bad.tolist() if lane >= 0), default=None),
        changed_buffers=tuple((buffers.amax(dim=0) > 0).tolist()) if mine.changed_buffers.numel() else (),
        other_options=_differences(tuple(mine.options), options.tolist()),
    )


def _differences(names: Sequence[str], rows: Sequence[Sequence[float]]) -> dict[str, tuple[int, ...]]:
    found = {}
    for number, name in enumerate(names):
        ranks = tuple(rank for rank, row in enumerate(rows) if row[number] != rows[0][number])
        if ranks:
            found[name] = ranks
    return found
