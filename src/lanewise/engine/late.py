"""The late sum: a rank adds its own lanes, and sends each owner its subtrees once.

Used where a rank keeps whole gradients anyway (ddp, zero1). Where an exchange can overlap a computation,
that of a unit starts when the last lane of this rank has left it; else all start when backward is over.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lanewise.engine import row_exchange, sparse
from lanewise.engine.finite import FiniteCheck
from lanewise.engine.rows import BoardRows, PrivateRows, Rows
from lanewise.engine.sum import Addend, Leaf, carry_out
from lanewise.engine.transport.protocol import Arrival, Outgoing, Transfer
from lanewise.engine.unit import Flat, Unit
from lanewise.engine.world import World
from lanewise.lanes.hosting import Span
from lanewise.lanes.schedule import Schedule, late, local_program, owner_program_late, unmerged_lane
from lanewise.lanes.tree import Node
from lanewise.lanes.tree import leaf as leaf_node

_LAG = 1
"""Exchanges that may be open while the next one is prepared."""


@dataclass
class _Open:
    """A piece of a flat that is being exchanged, with this rank's leaf where that was not added to anything."""

    flat: Flat
    span: Span
    transfer: Transfer
    leaf: Leaf | None


class LateSum:
    """Gradients of all flats, summed over the lanes."""

    def __init__(self, world: World, flats: Sequence[Flat], check: FiniteCheck, keeps_all: bool) -> None:
        """`flats` come in the order in which they are exchanged. `keeps_all` says that `gather` will be used."""
        self._world = world
        self._flats = tuple(flats)
        self._check = check
        self._keeps_all = keeps_all
        self._pieces = {flat.number: world.pieces(flat) for flat in flats}
        self._rows: dict[torch.dtype, Rows] = {}
        self._schedule: Schedule | None = None
        self._counts: list[int] = []
        self._scratch: dict[torch.dtype, list[torch.Tensor]] = {}

    def schedule(self, shares: Sequence[int]) -> Schedule:
        """The table of a step in which each rank hosts so many lanes."""
        return late(shares)

    def begin_step(self, schedule: Schedule) -> None:
        """Plan the step; find room for as many whole gradients as its sums need."""
        self._number = 0
        self._announced: int | None = None
        self._opened: deque[_Open] = deque()
        self._sending: list[Transfer] = []
        self._waiting: deque[tuple[Flat, Leaf | None]] = deque()
        self._to_come = deque(self._flats)
        if schedule is not self._schedule:
            self._schedule = schedule
            self._plan(schedule)

    def _plan(self, schedule: Schedule) -> None:
        ranks = range(self._world.size)
        programs = [local_program(schedule, rank) for rank in ranks]
        self._local = programs[self._world.rank]
        self._owner = owner_program_late(schedule, self._world.rank)
        self._sent = [program.outputs for program in programs]
        self._lanes = schedule.lanes_of(self._world.rank)
        unmerged = [unmerged_lane(schedule, rank) for rank in ranks]
        self._unmerged = unmerged[self._world.rank]
        self._leaf_of: list[Node | None] = [None if lane is None else leaf_node(lane) for lane in unmerged]
        counts = [max(program.num_registers, 1) for program in programs]
        if counts == self._counts:
            return
        self._counts = counts
        self._rows.clear()
        for dtype in dict.fromkeys(flat.sum_dtype for flat in self._flats):
            members = [flat for flat in self._flats if flat.sum_dtype == dtype]
            if self._world.transport.is_shared:
                self._rows[dtype] = BoardRows(self._world, members, dtype, counts)
            else:
                self._rows[dtype] = PrivateRows(self._world, dtype, self._keeps_all)

    def deposit(self, unit: Unit, leaves: Sequence[Leaf] | None) -> None:
        """Add one lane's gradients of a unit. None says that this rank has no lane in this round."""
        if leaves is None:
            return
        lane = self._lanes[self._number]
        is_last = lane == self._lanes[-1]
        for flat, leaf in zip(unit.trainable, leaves, strict=True):
            if lane != self._unmerged:
                rows = self._rows[flat.sum_dtype]
                wholes = [rows.whole(flat, r) for r in range(self._local.num_registers)]
                instructions = self._local.rounds[self._number]
                for low, high in sparse.blocks(flat):
                    registers = [whole[low:high] for whole in wholes]
                    arrivals = {leaf_node(lane): leaf.parts((low, high))}
                    carry_out(instructions, registers, arrivals)
                    self._check.look(flat, (low, high), instructions, registers, arrivals, is_last=False)
            if is_last:
                assert self._to_come.popleft() is flat
                self._waiting.append((flat, leaf if lane == self._unmerged else None))
        if self._world.overlaps:
            self._open_waiting()

    def end_round(self) -> None:
        """The lane of this round has left every unit."""
        self._number += 1

    def finish(self) -> None:
        """Return when every sum that this rank owns is complete."""
        self._waiting.extend((flat, None) for flat in self._to_come)
        self._open_waiting()
        while self._opened:
            self._collect()

    def gather(self) -> None:
        """Give all sums to all ranks. Where memory is shared they are there already."""
        if self._world.transport.is_shared:
            return
        under_way: list[Arrival] = []
        number = self._world.transport.announce("the gather of gradients")
        for flat in self._flats:
            whole = self._rows[flat.sum_dtype].whole(flat, 0)
            if flat.sparse_columns:
                row_exchange.gather(self._world, flat, self._pieces[flat.number], whole)
                continue
            where = f"the gather of gradients of unit {flat.unit_name}"
            under_way.append(self._world.transport.gather(whole, self._world.spans(flat), where, number))
        for arrival in under_way:
            arrival.wait()

    def total(self, flat: Flat, owner: int) -> torch.Tensor:
        """The sum over all lanes of the elements that `owner` owns."""
        return self._rows[flat.sum_dtype].total(flat, owner)

    def end_step(self) -> None:
        """All ranks are done with each other's gradients."""
        for rows in self._rows.values():
            rows.end_step()

    @property
    def num_bytes(self) -> dict[str, int]:
        """Memory by what it is for."""
        scratch = sum(t.nbytes for tensors in self._scratch.values() for t in tensors)
        received = self._world.transport.received_bytes
        return {
            "gradients": sum(rows.num_bytes for rows in self._rows.values()),
            "exchange": scratch + received,
        }

    @property
    def present_bytes(self) -> dict[str, int]:
        """As much as at any time."""
        return self.num_bytes

    def _open_waiting(self) -> None:
        while self._waiting:
            flat, leaf = self._waiting.popleft()
            for piece in self._pieces[flat.number]:
                transfer = self._open(flat, piece, leaf)
                self._sending.append(transfer)
                self._opened.append(_Open(flat, piece[self._world.rank], transfer, leaf))
                while len(self._opened) > _LAG:
                    self._collect()

    def _open(self, flat: Flat, piece: tuple[Span, ...], leaf: Leaf | None) -> Transfer:
        """Offer this rank's subtrees of a piece, and ask for the others'."""
        transport, me = self._world.transport, self._world.rank
        rows = self._rows[flat.sum_dtype]
        if self._announced is None:
            self._announced = transport.announce("the exchange of gradients")
        if flat.sparse_columns and not transport.is_shared:
            return self._open_rows(flat, piece, leaf)
        outgoing = []
        for peer in self._world.others:
            low, high = piece[peer]
            for node, register in self._sent[me]:
                if node != self._leaf_of[me]:
                    outgoing.append(Outgoing(peer, [rows.whole(flat, register)[low:high]]))
                elif leaf is None:
                    raise AssertionError("a rank's unmerged lane is still where it was made")
                elif transport.is_shared:
                    leaf.parts(piece[peer]).copy_to(rows.whole(flat, register)[low:high])
                else:
                    parcels = leaf.parcels(piece[peer], transport.sends_alone, flat.sum_dtype)
                    outgoing.append(Outgoing(peer, parcels))
        incoming = []
        low, high = piece[me]
        for peer in self._world.others:
            for node, register in self._sent[peer]:
                is_leaf = node == self._leaf_of[peer]
                segments = (
                    flat.layout.segments(piece[me], transport.sends_alone) if is_leaf else ((0, high - low),)
                )
                incoming.append(rows.incoming(peer, register, flat, piece[me], segments))
        where = f"the exchange of gradients of {flat.unit_name}"
        return transport.open(rows.board, outgoing, incoming, where, self._announced)

    def _open_rows(self, flat: Flat, piece: tuple[Span, ...], leaf: Leaf | None) -> Transfer:
        me = self._world.rank
        rows = self._rows[flat.sum_dtype]
        sources = [
            leaf if leaf is not None and node == self._leaf_of[me] else rows.whole(flat, register)
            for node, register in self._sent[me]
        ]
        expected = [len(sent) for sent in self._sent]
        return row_exchange.scatter(self._world, flat, piece, sources, expected, rows.board, self._announced)

    def _collect(self) -> None:
        item = self._opened.popleft()
        nodes = [node for peer in self._world.others for node, _ in self._sent[peer]]
        addends: dict[Node, Addend] = dict(zip(nodes, item.transfer.take(), strict=True))
        if item.leaf is not None:
            assert self._unmerged is not None
            addends[leaf_node(self._unmerged)] = item.leaf.parts(item.span)
        rows = self._rows[item.flat.sum_dtype]
        num_rows = self._counts[self._world.rank]
        registers = [rows.mine(item.flat, r, item.span) for r in range(num_rows)]
        num_spare = self._owner.num_registers - num_rows
        length = item.span[1] - item.span[0]
        registers += [tensor[:length] for tensor in self._spare(item.flat.sum_dtype, num_spare)]
        carry_out(self._owner.rounds[0], registers, addends)
        self._check.look(item.flat, item.span, self._owner.rounds[0], registers, addends, is_last=True)
        if not self._world.transport.is_shared:
            item.transfer.drain()
        item.transfer.close()

    def _spare(self, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
        """Registers of the owner's program beyond the rows: as long as a piece."""
        tensors = self._scratch.setdefault(dtype, [])
        while len(tensors) < count:
            longest = max(high - low for cut in self._pieces.values() for piece in cut for low, high in piece)
            tensors.append(torch.empty(longest, dtype=dtype, device=self._world.device))
        return tensors[: max(count, 0)]
