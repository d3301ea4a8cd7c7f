"""The eager sum on a GPU: each unit's gradients are packed, swapped and added in a few calls, beside the backward.

The main queue packs a unit's gradients, in one call, into memory that is laid out as its owners want it. The
transport swaps it for what this rank owns of every lane of the round, and a side queue adds that to the registers,
in one kernel, while backward goes on. Memory is found and freed in the order of the main queue, which waits for an
exchange only when the next one but one begins.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from lanewise.engine import device
from lanewise.engine.eager import EagerSum
from lanewise.engine.finite import DeviceCheck, FiniteCheck, note
from lanewise.engine.sum import Leaf, carry_out
from lanewise.engine.transport.messages import MessageTransport
from lanewise.engine.unit import Flat
from lanewise.engine.world import World
from lanewise.lanes.hosting import Span
from lanewise.lanes.layout import FlatLayout, between
from lanewise.lanes.program import Instruction, Program
from lanewise.lanes.schedule import Schedule, owner_program_eager
from lanewise.lanes.tree import leaf as leaf_node

_LAG = 1
"""Exchanges that may be open while the next one is prepared."""


@dataclass(frozen=True)
class _Packing:
    """How a piece of a flat is packed: the stretches of all owners, one after the other."""

    sizes: tuple[int, ...]
    """The lengths of all parts, of padding too, in order."""
    fields: tuple[tuple[int, int, int], ...]
    """The field and its elements that each part holds; -1 for padding."""
    to_each: list[int]
    mine: Span
    """The part of this rank's registers that the piece adds to."""
    first: int
    """The element of the flat that it begins with."""

    length: int


@dataclass
class _Underway:
    """An exchange that the main queue has not waited for yet, with the memory it uses."""

    done: device.Mark
    memory: tuple[torch.Tensor, ...]


class StreamedSum(EagerSum):
    """See the file, and `EagerSum`."""

    def __init__(
        self, world: World, flats: Sequence[Flat], check: FiniteCheck, is_followed: bool, keeps_all: bool
    ) -> None:
        """`keeps_all` says that every rank wants every sum, by `gather`."""
        super().__init__(world, flats, check, is_followed)
        self._keeps_all = keeps_all
        assert isinstance(world.transport, MessageTransport)
        assert isinstance(check, DeviceCheck)
        self._transport = world.transport
        self._device_check = check
        self._main = device.Queue.present(world.device)
        self._side = device.Queue.another(world.device)
        self._rounds: dict[tuple[int, torch.dtype], Adding] = {}
        self._where = {flat.number: f"the exchange of gradients of {flat.unit_name}" for flat in flats}
        self._underway: deque[_Underway] = deque()
        self._packings = {
            flat.number: tuple(
                _packing(flat.layout, piece, world.rank, world.my_span(flat)[0])
                for piece in self._pieces[flat.number]
            )
            for flat in flats
        }
        self._wholes: dict[int, torch.Tensor] = {}
        self._used_bytes = self._most_bytes = self._gradient_bytes = self._most_gradients = 0

    def begin_step(self, schedule: Schedule) -> None:
        """Plan the step. One that was abandoned leaves nothing behind."""
        self._main = device.Queue.present(self._world.device)
        self._wait(0)
        self._free()
        super().begin_step(schedule)

    def _plan(self, schedule: Schedule) -> None:
        """Find the program. Room is found when a flat's first gradient comes: a forward needs it for itself."""
        self._program = owner_program_eager(schedule)
        self._rounds = {}
        self._from_each: dict[tuple[int, int], list[int]] = {}
        self._senders = [
            [rank for rank, lane in enumerate(row) if lane is not None] for row in schedule.table
        ]
        self._first_lane = [min(lane for lane in row if lane is not None) for row in schedule.table]
        self._num_kept = 1 + max(max(pending, default=0) for pending in _pending(self._program))

    def finish(self) -> None:
        """Have the main queue wait for every sum that this rank owns."""
        super().finish()
        self._wait(0)

    def gather(self) -> None:
        """Give all sums to all ranks."""
        assert self._keeps_all
        number = self._transport.announce("the gather of gradients")
        under_way = []
        for flat in self._flats:
            spans = self._world.spans(flat)
            whole = self._empty(flat.layout.length, flat.sum_dtype)
            low, high = spans[self._world.rank]
            whole[low:high].copy_(self._registers[flat.number][0])
            self._count_gradients(whole.nbytes)
            self._wholes[flat.number] = whole
            where = f"the gather of gradients of unit {flat.unit_name}"
            under_way.append(self._transport.gather(whole, spans, where, number))
        for arrival in under_way:
            arrival.wait()

    def total(self, flat: Flat, owner: int) -> torch.Tensor:
        """This rank's own sum, or another's that has been gathered."""
        if flat.number in self._wholes:
            low, high = self._world.spans(flat)[owner]
            return self._wholes[flat.number][low:high]
        return super().total(flat, owner)

    def end_step(self) -> None:
        """Free all sums."""
        super().end_step()
        self._free()

    def _free(self) -> None:
        self._wholes.clear()
        self._gradient_bytes = 0
        for registers in self._registers.values():
            registers.clear()

    @property
    def num_bytes(self) -> dict[str, int]:
        """The most that was in use at a time."""
        return {"gradients": self._most_gradients, "exchange": self._most_bytes}

    @property
    def present_bytes(self) -> dict[str, int]:
        """What is in use now."""
        return {"gradients": self._gradient_bytes, "exchange": self._used_bytes}

    def _send(self, flat: Flat, leaf: Leaf | None) -> None:
        registers = self._registers[flat.number]
        if not registers:
            low, high = self._world.my_span(flat)
            for _ in range(self._program.num_registers if flat.sparse_columns else self._num_kept):
                registers.append(self._empty(high - low, flat.sum_dtype))
            self._count_gradients(sum(register.nbytes for register in registers))
        if flat.sparse_columns:
            super()._send(flat, leaf)
            return
        for packing in self._packings[flat.number]:
            self._swap(flat, packing, leaf)

    def _swap(self, flat: Flat, packing: _Packing, leaf: Leaf | None) -> None:
        me, senders = self._world.rank, self._senders[self._number]
        own = packing.to_each[me]
        packed = self._new(packing.length if leaf is not None else 0, flat.dtype)
        if leaf is not None:
            _pack(packing, leaf, packed)
        if self._world.size == 1:
            rows, arrival = packed, None
        else:
            rows = self._new(own * len(senders), flat.dtype)
            from_each = self._lengths(own)
            to_each = packing.to_each if leaf is not None else [0] * self._world.size
            where = self._where[flat.number]
            arrival = self._transport.swap(rows, packed, from_each, to_each, where, self._announced)
        arrived = device.Mark(self._main)
        low, high = packing.mine
        with self._side.in_place_of(self._main):
            arrived.hold_back(self._side)
            if arrival is not None:
                arrival.wait()
            registers = [register[low:high] for register in self._registers[flat.number]]
            position = self._device_check.places.start(flat) + packing.first
            self._adding(flat)(registers, rows, self._device_check.wanted_flags, position)
            done = device.Mark(self._side)
        self._underway.append(_Underway(done, (packed, rows)))
        self._wait(_LAG)

    def _lengths(self, own: int) -> list[int]:
        """How much comes from each rank, where a lane sends so many elements."""
        key = (self._number, own)
        if key not in self._from_each:
            lengths = [0] * self._world.size
            for rank in self._senders[self._number]:
                lengths[rank] = own
            self._from_each[key] = lengths
        return self._from_each[key]

    def _adding(self, flat: Flat) -> "Adding":
        """How this round's rows are added."""
        key = (self._number, flat.dtype)
        if key not in self._rounds:
            instructions = self._program.rounds[self._number]
            self._rounds[key] = adding(instructions, self._first_lane[self._number], flat, self._world.device)
        return self._rounds[key]

    def _count_gradients(self, more: int) -> None:
        self._gradient_bytes += more
        self._most_gradients = max(self._most_gradients, self._gradient_bytes)

    def _wait(self, left: int) -> None:
        while len(self._underway) > left:
            item = self._underway.popleft()
            item.done.hold_back(self._main)
            self._used_bytes -= sum(tensor.nbytes for tensor in item.memory)

    def _new(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        tensor = self._empty(numel, dtype)
        self._used_bytes += tensor.nbytes
        self._most_bytes = max(self._most_bytes, self._used_bytes)
        return tensor

    def _empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=self._world.device)


def _pending(program: Program) -> list[set[int]]:
    """The registers that hold a subtree after each round. All others are used within a round only."""
    pending: set[int] = set()
    found = []
    for instructions in program.rounds:
        for step in instructions:
            pending.add(step.register)
            if step.source is not None:
                pending.discard(step.source)
        found.append(set(pending))
    return found


Adding = Callable[[Sequence[torch.Tensor], torch.Tensor, torch.Tensor | None, int], None]
"""Carries out a round on registers and the rows of one tensor, which are the arrivals of neighbouring lanes.

Flags take note of what is not finite, as in `DeviceCheck`; last comes the position of the first element.
"""


def adding(instructions: Sequence[Instruction], first_lane: int, flat: Flat, where: torch.device) -> Adding:
    """The best way to carry out a round on a device."""
    if device.has_kernels(where):
        from lanewise.engine.kernels import adding as kernels

        return kernels.Round(instructions, first_lane, flat.dtype, flat.sum_dtype)
    return partial(_add_plainly, instructions, first_lane)


def _add_plainly(
    instructions: Sequence[Instruction],
    first_lane: int,
    registers: Sequence[torch.Tensor],
    rows: torch.Tensor,
    flags: torch.Tensor | None,
    position: int,
) -> None:
    length = registers[0].numel()
    if not length:
        return
    num_used = 1 + max((step.register for step in instructions), default=-1)
    registers = [*registers, *(torch.empty_like(registers[0]) for _ in range(num_used - len(registers)))]
    split = rows.split(length)
    arrivals = {leaf_node(first_lane + number): row for number, row in enumerate(split)}
    carry_out(instructions, registers, arrivals)
    if flags is not None and instructions:
        for register in {step.register for step in instructions}:
            note(registers[register], flags[:1], position)
        for number, row in enumerate(split):
            note(row, flags[1 + first_lane + number :][:1], position)


def _pack(packing: _Packing, leaf: Leaf, packed: torch.Tensor) -> None:
    """Copy a leaf into place, in one call; zeros stand for padding and for absent gradients."""
    places, values = [], []
    for place, (field, start, stop) in zip(
        packed.split_with_sizes(packing.sizes), packing.fields, strict=True
    ):
        gradient = leaf.gradients[field] if field >= 0 else None
        if gradient is None:
            place.zero_()
            continue
        flat = gradient.reshape(-1)
        values.append(flat if stop - start == flat.numel() else flat[start:stop])
        places.append(place)
    if places:
        torch._foreach_copy_(places, values)


def _packing(layout: FlatLayout, piece: Sequence[Span], rank: int, base: int) -> _Packing:
    """`base` is the first element that this rank owns."""
    sizes: list[int] = []
    fields: list[tuple[int, int, int]] = []
    for low, high in piece:
        parts = layout.parts((low, high))
        places = [(part.offset, part.offset + part.stop - part.start) for part in parts]
        found = [(place, (p.field, p.start, p.stop)) for place, p in zip(places, parts, strict=True)]
        found += [(gap, (-1, 0, 0)) for gap in between(places, high - low)]
        for (start, stop), what in sorted(found):
            if sizes and fields[-1][0] == what[0] and fields[-1][2] == what[1]:
                sizes[-1] += stop - start
                fields[-1] = (what[0], fields[-1][1], what[2])
            else:
                sizes.append(stop - start)
                fields.append(what)
    low, high = piece[rank]
    lengths = [stop - start for start, stop in piece]
    return _Packing(tuple(sizes), tuple(fields), lengths, (low - base, high - base), low, sum(lengths))
