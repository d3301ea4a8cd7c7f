"""Who owns what: the ranks, their slots, and the flats cut along them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from lanewise.engine.transport.protocol import Transport
from lanewise.engine.unit import Flat
from lanewise.lanes.hosting import Span, even, spans
from lanewise.lanes.layout import pieces


@dataclass(frozen=True)
class World:
    """The ranks of a run and the slots each of them owns."""

    transport: Transport
    lanes: int
    device: torch.device
    _spans: dict[int, tuple[Span, ...]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def rank(self) -> int:
        """This process."""
        return self.transport.rank

    @property
    def size(self) -> int:
        """How many processes there are."""
        return self.transport.size

    @cached_property
    def others(self) -> tuple[int, ...]:
        """All ranks but this one."""
        return tuple(rank for rank in range(self.size) if rank != self.rank)

    @property
    def overlaps(self) -> bool:
        """Whether an exchange can go on beside a computation. On a CPU, a message needs a core that computes."""
        return self.transport.is_shared or self.device.type == "cuda"

    @property
    def runs_ahead(self) -> bool:
        """Whether the device computes while the host goes on, so that the host should not wait for what it finds."""
        return self.device.type == "cuda"

    @property
    def piece_limit(self) -> int:
        """Elements to exchange at once: enough to be worth a message, few enough to be added in a cache."""
        if self.device.type == "cuda":
            return 1 << 26
        return 1 << 21 if self.transport.is_shared else 1 << 23

    @cached_property
    def slots(self) -> tuple[Span, ...]:
        """The slots of every rank."""
        return spans(even(self.lanes, self.size))

    def spans(self, flat: Flat) -> tuple[Span, ...]:
        """The elements of a flat that each rank owns."""
        if flat.number not in self._spans:
            self._spans[flat.number] = tuple(flat.layout.span(slots) for slots in self.slots)
        return self._spans[flat.number]

    def my_span(self, flat: Flat) -> Span:
        """The elements of a flat that this rank owns."""
        return self.spans(flat)[self.rank]

    def pieces(self, flat: Flat) -> tuple[tuple[Span, ...], ...]:
        """What is exchanged at once: a stretch of every owner's span."""
        return pieces(self.spans(flat), self.piece_limit)


def offsets(flats: Sequence[Flat]) -> tuple[dict[int, int], int]:
    """Where each flat begins in a row that holds them all, and the length of the row."""
    starts = {}
    position = 0
    for flat in flats:
        starts[flat.number] = position
        position += flat.layout.length
    return starts, position
