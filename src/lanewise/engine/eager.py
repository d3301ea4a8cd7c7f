"""The eager sum: every unit's gradient goes to its owners as soon as it is there, in every round.

Used where a rank keeps only its slots' gradients (zero2, zero3). The owner keeps the pending subtrees and
merges siblings as they arrive. A unit is exchanged in pieces, so that no rank holds a second copy of a
large one.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lanewise.engine import row_exchange
from lanewise.engine.finite import FiniteCheck
from lanewise.engine.sum import Addend, Leaf, carry_out
from lanewise.engine.transport.protocol import Board, Incoming, Outgoing, Transfer
from lanewise.engine.unit import Flat, Unit
from lanewise.engine.world import World
from lanewise.lanes.hosting import Span
from lanewise.lanes.schedule import Schedule, eager, owner_program_eager
from lanewise.lanes.tree import leaf as leaf_node

_LAG = 1
"""Exchanges that may be open while the next one is prepared."""
_RING = 3
"""Buffers to prepare exchanges in; more than are open at a time."""


@dataclass
class _Open:
    """A piece of a flat that is being exchanged in a round, with this rank's own leaf."""

    flat: Flat
    piece: tuple[Span, ...]
    transfer: Transfer
    leaf: Leaf | None
    number: int


class EagerSum:
    """Gradients of the owned slots of all flats, summed over the lanes."""

    def __init__(self, world: World, flats: Sequence[Flat], check: FiniteCheck, is_followed: bool) -> None:
        """`flats` come in the order in which they are exchanged. `is_followed` says that a rank without a lane
        learns from the others' words what they gather, so that every exchange has to be announced.
        """
        self._world = world
        self._flats = tuple(flats)
        self._check = check
        self._is_followed = is_followed
        self._pieces = {flat.number: world.pieces(flat) for flat in flats}
        self._schedule: Schedule | None = None
        self._offers: dict[torch.dtype, _Ring | _Parcels] = {}
        for dtype in dict.fromkeys(flat.dtype for flat in self._flats):
            pieces = [piece for f in self._flats if f.dtype == dtype for piece in self._pieces[f.number]]
            is_shared = world.transport.is_shared
            self._offers[dtype] = _Ring(world, pieces, dtype) if is_shared else _Parcels(world, dtype)
        self._registers: dict[int, list[torch.Tensor]] = {flat.number: [] for flat in self._flats}

    def schedule(self, shares: Sequence[int]) -> Schedule:
        """The table of a step in which each rank hosts so many lanes."""
        return eager(shares)

    def begin_step(self, schedule: Schedule) -> None:
        """Plan the step; find room for the subtrees that will be pending at a time."""
        self._number = 0
        self._announced: int | None = None
        self._opened: deque[_Open] = deque()
        if schedule is not self._schedule:
            self._schedule = schedule
            self._plan(schedule)

    def deposit(self, unit: Unit, leaves: Sequence[Leaf] | None) -> None:
        """Send one lane's gradients of a unit to their owners. None: this rank only receives this round."""
        assert self._schedule is not None
        if self._announced is None and not self._is_followed:
            self._announced = self._world.transport.announce("the exchange of gradients")
        for number, flat in enumerate(unit.trainable):
            self._send(flat, leaves[number] if leaves is not None else None)

    def end_round(self) -> None:
        """The lane of this round has left every unit."""
        self._number += 1
        self._announced = None

    def finish(self) -> None:
        """Return when every sum that this rank owns is complete."""
        while self._opened:
            self._collect()

    def gather(self) -> None:
        """Never called: who sums eagerly keeps only what it owns."""
        raise AssertionError("an eager sum stands at its owner only")

    def total(self, flat: Flat, owner: int) -> torch.Tensor:
        """The sum over all lanes of the elements that this rank owns."""
        assert owner == self._world.rank, "an eager sum stands at its owner only"
        return self._registers[flat.number][0]

    def end_step(self) -> None:
        """All ranks are done with each other's gradients."""
        for offers in self._offers.values():
            offers.drain()

    @property
    def num_bytes(self) -> dict[str, int]:
        """Memory by what it is for."""
        pending = sum(t.nbytes for registers in self._registers.values() for t in registers)
        offered = sum(offers.num_bytes for offers in self._offers.values())
        return {"gradients": pending, "exchange": offered + self._world.transport.received_bytes}

    @property
    def present_bytes(self) -> dict[str, int]:
        """As much as at any time."""
        return self.num_bytes

    def _plan(self, schedule: Schedule) -> None:
        """Find the program, and room for as many pending subtrees as it needs."""
        self._program = owner_program_eager(schedule)
        for flat in self._flats:
            low, high = self._world.my_span(flat)
            registers = self._registers[flat.number]
            while len(registers) < self._program.num_registers:
                registers.append(torch.zeros(high - low, dtype=flat.sum_dtype, device=self._world.device))
            del registers[self._program.num_registers :]

    def _send(self, flat: Flat, leaf: Leaf | None) -> None:
        """Start the exchange of a flat, piece by piece."""
        assert self._schedule is not None
        row = self._schedule.table[self._number]
        senders = [rank for rank in self._world.others if row[rank] is not None]
        for piece in self._pieces[flat.number]:
            transfer = self._offers[flat.dtype].open(flat, piece, leaf, senders, self._announced)
            self._opened.append(_Open(flat, piece, transfer, leaf, self._number))
            while len(self._opened) > _LAG:
                self._collect()

    def _collect(self) -> None:
        item = self._opened.popleft()
        assert self._schedule is not None
        lanes = self._schedule.table[item.number]
        me = self._world.rank
        sent = [lanes[rank] for rank in self._world.others if lanes[rank] is not None]
        addends: dict[tuple[int, int], Addend] = {}
        for lane, tensor in zip(sent, item.transfer.take(), strict=True):
            addends[leaf_node(lane or 0)] = tensor
        low, high = item.piece[me]
        if item.leaf is not None:
            addends[leaf_node(lanes[me] or 0)] = item.leaf.parts((low, high))
        start = self._world.my_span(item.flat)[0]
        registers = [r[low - start : high - start] for r in self._registers[item.flat.number]]
        instructions = self._program.rounds[item.number]
        carry_out(instructions, registers, addends)
        is_last = item.number == len(self._program.rounds) - 1
        self._check.look(item.flat, (low, high), instructions, registers, addends, is_last)
        item.transfer.close()


class _Ring:
    """Offers where memory is shared: a few buffers on a board, used one after the other."""

    def __init__(self, world: World, pieces: Sequence[tuple[Span, ...]], dtype: torch.dtype) -> None:
        self._world = world
        self._length = max((_offered(piece) for piece in pieces), default=0)
        self._board: Board = world.transport.board(_RING * self._length, dtype)
        self._in_use: list[Transfer | None] = [None] * _RING
        self._next = 0

    @property
    def num_bytes(self) -> int:
        return self._board.mine.nbytes

    def open(
        self,
        flat: Flat,
        piece: tuple[Span, ...],
        leaf: Leaf | None,
        senders: Sequence[int],
        under: int | None,
    ) -> Transfer:
        """Lay out what others own of a piece, and open its exchange."""
        number, self._next = self._next, (self._next + 1) % _RING
        start = number * self._length
        used = self._in_use[number]
        if used is not None:
            used.drain()
        if leaf is not None:
            for peer in self._world.others:
                low, high = self._section(start, piece, self._world.rank, peer)
                leaf.parts(piece[peer]).copy_to(self._board.mine[low:high])
        me = self._world.rank
        incoming = [Incoming(peer, self._section(start, piece, peer, me), ()) for peer in senders]
        where = f"the exchange of gradients of {flat.unit_name}"
        transfer = self._world.transport.open(self._board, [], incoming, where, under)
        self._in_use[number] = transfer
        return transfer

    def drain(self) -> None:
        """Wait until nobody reads any more."""
        for transfer in self._in_use:
            if transfer is not None:
                transfer.drain()
        self._in_use = [None] * _RING

    def _section(self, start: int, piece: tuple[Span, ...], sender: int, owner: int) -> Span:
        """Where the sender lays out what the owner owns: one owner after the other, itself left out."""
        for peer, (low, high) in enumerate(piece):
            if peer == owner:
                return (start, start + high - low)
            if peer != sender:
                start += high - low
        raise AssertionError("an owner is one of the ranks")


def _offered(piece: tuple[Span, ...]) -> int:
    """The most that any rank offers of a piece: all but what it owns."""
    lengths = [high - low for low, high in piece]
    return sum(lengths) - min(lengths)


class _Parcels:
    """Offers as messages: gradients are sent from where they lie."""

    def __init__(self, world: World, dtype: torch.dtype) -> None:
        self._world = world
        self._dtype = dtype
        self._board = Board(torch.empty(0, dtype=dtype, device=world.device))
        self._on_their_way: deque[Transfer] = deque()

    @property
    def num_bytes(self) -> int:
        """Nothing: gradients are sent from where they lie, and received by the transport."""
        return 0

    def open(
        self,
        flat: Flat,
        piece: tuple[Span, ...],
        leaf: Leaf | None,
        senders: Sequence[int],
        under: int | None,
    ) -> Transfer:
        """Send what others own of a piece, and receive what this rank owns."""
        me, alone = self._world.rank, self._world.transport.sends_alone
        mine = piece[me]
        leaves = [] if leaf is None else [leaf]
        transfer: Transfer
        if flat.sparse_columns:
            expected = [len(leaves) if rank == me else rank in senders for rank in range(self._world.size)]
            transfer = row_exchange.scatter(self._world, flat, piece, leaves, expected, self._board, under)
        else:
            outgoing = [
                Outgoing(p, leaf.parcels(piece[p], alone, self._dtype))
                for p in self._world.others
                for leaf in leaves
            ]
            segments = flat.layout.segments(mine, alone)
            incoming = [Incoming(peer, mine, segments) for peer in senders]
            where = f"the exchange of gradients of {flat.unit_name}"
            transfer = self._world.transport.open(self._board, outgoing, incoming, where, under)
        self._on_their_way.append(transfer)
        while len(self._on_their_way) > _RING:
            self._on_their_way.popleft().drain()
        return transfer

    def drain(self) -> None:
        """Wait until everything has left."""
        while self._on_their_way:
            self._on_their_way.popleft().drain()
