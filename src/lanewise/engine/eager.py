"""The eager sum: every unit's gradient goes to its owners as soon as it is there, in every round.

Used where a rank keeps only its slots' gradients (zero2, zero3). The owner keeps the pending subtrees and
merges siblings as they arrive. A unit is exchanged in pieces through a small ring of buffers, so that no
rank holds a second copy of a large unit.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lanewise.engine.sum import Addend, Leaf, carry_out
from lanewise.engine.transport.protocol import Board, Stretch, Transfer
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
    flat: Flat
    piece: tuple[Span, ...]
    transfer: Transfer
    leaf: Leaf | None
    number: int


class EagerSum:
    """Gradients of the owned slots of all flats, summed over the lanes."""

    def __init__(self, world: World, flats: Sequence[Flat]) -> None:
        """`flats` come in the order in which they are exchanged."""
        self._world = world
        self._flats = tuple(flats)
        self._pieces = {flat.number: world.pieces(flat) for flat in flats}
        self._schedule: Schedule | None = None
        self._rings: dict[torch.dtype, _Ring] = {}
        for dtype in dict.fromkeys(flat.dtype for flat in self._flats):
            self._rings[dtype] = _Ring(world, [f for f in self._flats if f.dtype == dtype], dtype)
        self._registers: dict[int, list[torch.Tensor]] = {flat.number: [] for flat in self._flats}

    def schedule(self, shares: Sequence[int]) -> Schedule:
        """The table of a step in which each rank hosts so many lanes."""
        return eager(shares)

    def begin_step(self, schedule: Schedule) -> None:
        """Plan the step; find room for the subtrees that will be pending at a time."""
        self._number = 0
        self._opened: deque[_Open] = deque()
        if schedule == self._schedule:
            return
        self._schedule = schedule
        self._program = owner_program_eager(schedule)
        for flat in self._flats:
            low, high = self._world.my_span(flat)
            registers = self._registers[flat.number]
            while len(registers) < self._program.num_registers:
                registers.append(torch.zeros(high - low, dtype=flat.sum_dtype, device=self._world.device))
            del registers[self._program.num_registers :]

    def deposit(self, unit: Unit, leaves: Sequence[Leaf] | None) -> None:
        """Send one lane's gradients of a unit to their owners. None: this rank only receives this round."""
        for number, flat in enumerate(unit.trainable):
            ring = self._rings[flat.dtype]
            for piece in self._pieces[flat.number]:
                leaf = leaves[number] if leaves is not None else None
                where = f"the exchange of gradients of unit {flat.unit_name}"
                transfer = ring.offer(flat, piece, leaf, self._hosts(), where)
                self._opened.append(_Open(flat, piece, transfer, leaf, self._number))
                while len(self._opened) > _LAG:
                    self._collect()

    def end_round(self) -> None:
        """The lane of this round has left every unit."""
        self._number += 1

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
        for ring in self._rings.values():
            ring.drain()

    @property
    def num_bytes(self) -> dict[str, int]:
        """Memory by what it is for."""
        pending = sum(t.nbytes for registers in self._registers.values() for t in registers)
        return {"gradients": pending, "exchange": sum(ring.num_bytes for ring in self._rings.values())}

    def _hosts(self) -> dict[int, int]:
        """The lane that each rank computes in this round, where it computes one."""
        assert self._schedule is not None
        row = self._schedule.table[self._number]
        return {rank: lane for rank, lane in enumerate(row) if lane is not None}

    def _collect(self) -> None:
        item = self._opened.popleft()
        assert self._schedule is not None
        row = self._schedule.table[item.number]
        senders = [rank for rank in self._world.others if row[rank] is not None]
        addends: dict[tuple[int, int], Addend] = {}
        for rank, tensor in zip(senders, item.transfer.take(), strict=True):
            addends[leaf_node(row[rank] or 0)] = tensor
        me = self._world.rank
        low, high = item.piece[me]
        if item.leaf is not None:
            addends[leaf_node(row[me] or 0)] = item.leaf.parts((low, high))
        start = self._world.my_span(item.flat)[0]
        registers = [r[low - start : high - start] for r in self._registers[item.flat.number]]
        carry_out(self._program.rounds[item.number], registers, addends)
        item.transfer.close()


class _Ring:
    """A few buffers to lay out the pieces that other ranks own, used one after the other."""

    def __init__(self, world: World, flats: Sequence[Flat], dtype: torch.dtype) -> None:
        self._world = world
        largest = max(
            sum(high - low for low, high in piece) for flat in flats for piece in world.pieces(flat)
        )
        self._length = largest if world.size > 1 else 0
        self._board: Board = world.transport.board(_RING * self._length, dtype)
        self._in_use: list[Transfer | None] = [None] * _RING
        self._next = 0

    @property
    def num_bytes(self) -> int:
        return self._board.mine.nbytes

    def offer(
        self, flat: Flat, piece: tuple[Span, ...], leaf: Leaf | None, hosts: dict[int, int], where: str
    ) -> Transfer:
        """Lay out what others own of a piece, and open its exchange."""
        number, self._next = self._next, (self._next + 1) % _RING
        start = number * self._length
        used = self._in_use[number]
        if used is not None:
            used.drain()
        outgoing = []
        if leaf is not None:
            for peer in self._world.others:
                low, high = self._section(start, piece, self._world.rank, peer)
                target = self._board.mine[low:high]
                leaf.parts(piece[peer]).copy_to(target)
                outgoing.append(Stretch(peer, (low, high)))
        me = self._world.rank
        incoming = [
            Stretch(peer, self._section(start, piece, peer, me))
            for peer in self._world.others
            if peer in hosts
        ]
        transfer = self._world.transport.open(self._board, outgoing, incoming, where)
        self._in_use[number] = transfer
        return transfer

    def drain(self) -> None:
        """Wait until what was sent has left."""
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
