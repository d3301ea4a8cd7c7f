"""Schedules: the table (round, rank) -> lane of one step, and the sums that follow from it.

A rank with no lane in a round still takes part in that round's gathers and exchanges. In a *late*
schedule a rank hosts neighbouring lanes, adds them itself and sends whole subtrees once. In an *eager*
schedule the lanes of one round are neighbours, and the owner of a slot merges what arrives each round.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lanewise.lanes.hosting import spans
from lanewise.lanes.program import Action, Program, plan
from lanewise.lanes.tree import Node, aligned, leaf


@dataclass(frozen=True)
class Schedule:
    """Who computes which lane when. `table[round][rank]` is a lane or None."""

    lanes: int
    table: tuple[tuple[int | None, ...], ...]

    @property
    def num_ranks(self) -> int:
        """How many ranks take part, with or without a lane."""
        return len(self.table[0])

    def lanes_of(self, rank: int) -> tuple[int, ...]:
        """The lanes a rank hosts, in the order in which it computes them."""
        return tuple(row[rank] for row in self.table if row[rank] is not None)  # type: ignore[misc]

    @cached_property
    def host(self) -> tuple[int, ...]:
        """The rank that hosts each lane."""
        hosts = {lane: rank for row in self.table for rank, lane in enumerate(row) if lane is not None}
        return tuple(hosts[lane] for lane in range(self.lanes))


def late(shares: Sequence[int]) -> Schedule:
    """Each rank hosts a contiguous range of lanes."""
    ranges = spans(shares)
    return Schedule(
        sum(shares),
        tuple(
            tuple(start + number if start + number < stop else None for start, stop in ranges)
            for number in range(max(shares))
        ),
    )


def eager(shares: Sequence[int]) -> Schedule:
    """Each round computes neighbouring lanes, one on every rank that still has a share left."""
    table = []
    next_lane = 0
    for number in range(max(shares)):
        row: list[int | None] = []
        for share in shares:
            row.append(next_lane if number < share else None)
            next_lane += number < share
        table.append(tuple(row))
    return Schedule(sum(shares), tuple(table))


def local_program(schedule: Schedule, rank: int) -> Program:
    """Late: the sums of a rank over its own lanes, one lane a round."""
    return plan(schedule.lanes, [[leaf(lane)] for lane in schedule.lanes_of(rank)])


def sent_nodes(schedule: Schedule, rank: int) -> tuple[Node, ...]:
    """Late: the subtrees a rank is left with, and sends to every owner."""
    lanes = schedule.lanes_of(rank)
    return aligned(lanes[0], lanes[-1] + 1, schedule.lanes) if lanes else ()


def unmerged_lane(schedule: Schedule, rank: int) -> int | None:
    """Late: the last lane of a rank, if nothing on that rank is added to it.

    The owner can then add it straight from where it was made.
    """
    lanes = schedule.lanes_of(rank)
    last = local_program(schedule, rank).rounds[-1]
    return lanes[-1] if lanes and [step.action for step in last] == [Action.LOAD] else None


def owner_program_late(schedule: Schedule, rank: int) -> Program:
    """Late: the sum of an owner over the subtrees of all ranks.

    Its own lie in registers already, but for its `unmerged_lane`, which arrives like those of the others.
    """
    resident = dict(local_program(schedule, rank).outputs)
    arrivals = [n for r in range(schedule.num_ranks) if r != rank for n in sent_nodes(schedule, r)]
    lane = unmerged_lane(schedule, rank)
    if lane is not None:
        del resident[leaf(lane)]
        arrivals.append(leaf(lane))
    return plan(schedule.lanes, [arrivals], resident)


def owner_program_eager(schedule: Schedule) -> Program:
    """Eager: the sum of every owner, whose registers last through the rounds of a step."""
    return plan(schedule.lanes, [[leaf(lane) for lane in row if lane is not None] for row in schedule.table])
