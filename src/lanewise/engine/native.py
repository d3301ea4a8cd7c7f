"""The native sum: lanes added as they come and ranks added by the backend, without a promise of bits.

It exists so that the price of the exact sum can be measured, and for those who do not want to pay it.
"""

from collections import deque
from collections.abc import Callable, Sequence

import torch

from lanewise.engine.finite import FiniteCheck
from lanewise.engine.sum import Leaf
from lanewise.engine.transport.messages import MessageTransport
from lanewise.engine.transport.protocol import Arrival
from lanewise.engine.unit import Flat, Unit
from lanewise.engine.world import World
from lanewise.lanes.schedule import Schedule, eager, late

_LAG = 2


class NativeSum:
    """Gradients of all flats, summed by the backend's all-reduce or reduce-scatter."""

    def __init__(
        self, world: World, flats: Sequence[Flat], check: FiniteCheck, keeps_all: bool, every_round: bool
    ) -> None:
        assert isinstance(world.transport, MessageTransport), "the native sum needs a backend"
        self._transport = world.transport
        self._world = world
        self._flats = tuple(flats)
        self._check = check
        self._keeps_all = keeps_all
        self._every_round = every_round
        self._sums: dict[int, torch.Tensor] = {}
        for flat in flats:
            low, high = (0, flat.layout.length) if not every_round else world.my_span(flat)
            self._sums[flat.number] = torch.zeros(high - low, dtype=flat.sum_dtype, device=world.device)
        self._waiting: deque[tuple[Arrival, Callable[[], None]]] = deque()

    def schedule(self, shares: Sequence[int]) -> Schedule:
        """The table of a step in which each rank hosts so many lanes."""
        return eager(shares) if self._every_round else late(shares)

    def begin_step(self, schedule: Schedule) -> None:
        """Begin to sum."""
        self._number = 0
        self._lanes = schedule.lanes_of(self._world.rank)
        self._to_send = deque(self._flats)

    def deposit(self, unit: Unit, leaves: Sequence[Leaf] | None) -> None:
        """Add one lane's gradients of a unit."""
        for number, flat in enumerate(unit.trainable):
            leaf = leaves[number] if leaves is not None else None
            if leaf is not None:
                self._check.look_at_whole_leaf(self._lanes[self._number], flat, leaf)
            if self._every_round:
                self._send_round(flat, leaf)
            elif leaf is not None:
                parts = leaf.parts((0, flat.layout.length))
                (parts.copy_to if self._number == 0 else parts.add_to)(self._sums[flat.number])
                if self._number == len(self._lanes) - 1:
                    assert self._to_send.popleft() is flat
                    self._send_once(flat)

    def end_round(self) -> None:
        """The lane of this round has left every unit."""
        self._number += 1

    def finish(self) -> None:
        """Return when every sum is complete."""
        if not self._every_round:
            while self._to_send:
                flat = self._to_send.popleft()
                self._sums[flat.number].zero_()
                self._send_once(flat)
        self._settle(0)
        for flat in self._flats:
            self._check.look_at_total(flat, self.total(flat, self._world.rank))

    def gather(self) -> None:
        """The backend's all-reduce has given every sum to every rank already."""

    def total(self, flat: Flat, owner: int) -> torch.Tensor:
        """The sum over all lanes of what `owner` owns."""
        low, high = self._world.spans(flat)[owner]
        return self._sums[flat.number] if self._every_round else self._sums[flat.number][low:high]

    def end_step(self) -> None:
        """The sums have been used."""

    @property
    def num_bytes(self) -> dict[str, int]:
        """Memory by what it is for."""
        return {"gradients": sum(t.nbytes for t in self._sums.values()), "exchange": 0}

    @property
    def present_bytes(self) -> dict[str, int]:
        """As much as at any time."""
        return self.num_bytes

    def _send_once(self, flat: Flat) -> None:
        where = f"the backend's sum of gradients of unit {flat.unit_name}"
        whole = self._sums[flat.number]
        spans = self._world.spans(flat)
        self._waiting.append((self._transport.add_up(whole, spans, self._keeps_all, where), lambda: None))

    def _send_round(self, flat: Flat, leaf: Leaf | None) -> None:
        where = f"the backend's sum of gradients of unit {flat.unit_name}"
        whole = torch.zeros(flat.layout.length, dtype=flat.sum_dtype, device=self._world.device)
        if leaf is not None:
            leaf.parts((0, flat.layout.length)).copy_to(whole)
        arrival = self._transport.add_up(whole, self._world.spans(flat), False, where)
        low, high = self._world.my_span(flat)
        target = self._sums[flat.number]
        is_first = self._number == 0

        def keep() -> None:
            (target.copy_ if is_first else target.add_)(whole[low:high])

        self._waiting.append((arrival, keep))
        self._settle(_LAG)

    def _settle(self, left: int) -> None:
        while len(self._waiting) > left:
            arrival, then = self._waiting.popleft()
            arrival.wait()
            then()
