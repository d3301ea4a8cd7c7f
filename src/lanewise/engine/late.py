"""The late sum: a rank adds its own lanes, and sends each owner its subtrees once, at the end.

Used where a rank keeps whole gradients anyway (ddp, zero1). The exchange of a unit starts when the last
lane of this rank has left it, so it overlaps with the rest of that backward pass.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lanewise.engine.sum import Addend, Leaf, carry_out
from lanewise.engine.transport.protocol import Arrival, Board, Stretch, Transfer
from lanewise.engine.unit import Flat, Unit
from lanewise.engine.world import World, offsets
from lanewise.lanes.hosting import Span
from lanewise.lanes.program import Program
from lanewise.lanes.schedule import Schedule, late, local_program, owner_program_late, unmerged_lane
from lanewise.lanes.tree import Node
from lanewise.lanes.tree import leaf as leaf_node

_LAG = 1
"""Exchanges that may be open while the next one is prepared."""


@dataclass
class _Open:
    flat: Flat
    span: Span
    transfer: Transfer
    leaf: Leaf | None


class LateSum:
    """Gradients of all flats, summed over the lanes; the owner's part in place."""

    def __init__(self, world: World, flats: Sequence[Flat]) -> None:
        """`flats` come in the order in which they are exchanged."""
        self._world = world
        self._flats = tuple(flats)
        self._pieces = {flat.number: world.pieces(flat) for flat in flats}
        self._rows: dict[torch.dtype, _Rows] = {}
        self._schedule: Schedule | None = None
        self._scratch: dict[torch.dtype, list[torch.Tensor]] = {}

    def schedule(self, shares: Sequence[int]) -> Schedule:
        """The table of a step in which each rank hosts so many lanes."""
        return late(shares)

    def begin_step(self, schedule: Schedule) -> None:
        """Plan the step; find room for as many whole gradients as its sums need."""
        self._number = 0
        self._opened: deque[_Open] = deque()
        self._to_open = deque(self._flats)
        if schedule == self._schedule:
            return
        self._schedule = schedule
        rank = self._world.rank
        programs = [local_program(schedule, r) for r in range(self._world.size)]
        self._local = programs[rank]
        self._owner: Program = owner_program_late(schedule, rank)
        self._sent: list[tuple[tuple[Node, int], ...]] = [p.outputs for p in programs]
        self._lanes = schedule.lanes_of(rank)
        self._unmerged = unmerged_lane(schedule, rank)
        needed = [max(program.num_registers, 1) for program in programs]
        for dtype in dict.fromkeys(flat.sum_dtype for flat in self._flats):
            if dtype not in self._rows or self._rows[dtype].counts != needed:
                self._rows.pop(dtype, None)
                members = [flat for flat in self._flats if flat.sum_dtype == dtype]
                self._rows[dtype] = _Rows(self._world, members, dtype, needed)

    def deposit(self, unit: Unit, leaves: Sequence[Leaf] | None) -> None:
        """Add one lane's gradients of a unit. None says that this rank has no lane in this round."""
        if leaves is None:
            return
        lane = self._lanes[self._number]
        is_last = lane == self._lanes[-1]
        for flat, leaf in zip(unit.trainable, leaves, strict=True):
            if is_last:
                assert self._to_open.popleft() is flat
            if lane == self._unmerged:
                self._open(flat, leaf)
                continue
            rows = self._rows[flat.sum_dtype].mine(flat)
            arrivals = {leaf_node(lane): leaf.parts((0, flat.layout.length))}
            carry_out(self._local.rounds[self._number], rows, arrivals)
            if is_last:
                self._open(flat, None)

    def end_round(self) -> None:
        """The lane of this round has left every unit."""
        self._number += 1

    def finish(self) -> None:
        """Return when every sum that this rank owns is complete."""
        while self._to_open:
            self._open(self._to_open.popleft(), None)
        while self._opened:
            self._collect()

    def gather(self) -> None:
        """Give all sums to all ranks. Shared memory needs only a meeting, which the update has anyway."""
        if self._world.transport.is_shared:
            return
        under_way: list[Arrival] = []
        for flat in self._flats:
            row = self._rows[flat.sum_dtype].mine(flat)[0]
            where = f"the gather of gradients of unit {flat.unit_name}"
            under_way.append(self._world.transport.gather(row, self._world.spans(flat), where))
        for arrival in under_way:
            arrival.wait()

    def total(self, flat: Flat, owner: int) -> torch.Tensor:
        """The sum over all lanes of the elements that `owner` owns."""
        return self._rows[flat.sum_dtype].total(flat, owner)

    def end_step(self) -> None:
        """All ranks are done with each other's gradients."""
        for rows in self._rows.values():
            rows.drain()

    @property
    def num_bytes(self) -> dict[str, int]:
        """Memory by what it is for."""
        scratch = sum(t.nbytes for tensors in self._scratch.values() for t in tensors)
        return {"gradients": sum(r.num_bytes for r in self._rows.values()), "exchange": scratch}

    def _open(self, flat: Flat, leaf: Leaf | None) -> None:
        """Offer this rank's subtrees of a flat. `leaf` is the one that lies where it was made."""
        rows = self._rows[flat.sum_dtype]
        mine = rows.mine(flat)
        me = self._world.rank
        where = f"the exchange of gradients of unit {flat.unit_name}"
        for piece in self._pieces[flat.number]:
            if leaf is not None:
                for peer in self._world.others:
                    low, high = piece[peer]
                    leaf.parts(piece[peer]).copy_to(mine[self._sent[me][-1][1]][low:high])
            outgoing = [
                Stretch(peer, rows.place(me, register, flat, piece[peer]))
                for peer in self._world.others
                for _, register in self._sent[me]
            ]
            incoming = [
                Stretch(peer, rows.place(peer, register, flat, piece[me]))
                for peer in self._world.others
                for _, register in self._sent[peer]
            ]
            transfer = self._world.transport.open(rows.board, outgoing, incoming, where)
            rows.open.append(transfer)
            self._opened.append(_Open(flat, piece[me], transfer, leaf))
            while len(self._opened) > _LAG:
                self._collect()

    def _collect(self) -> None:
        item = self._opened.popleft()
        nodes = [node for peer in self._world.others for node, _ in self._sent[peer]]
        addends: dict[Node, Addend] = dict(zip(nodes, item.transfer.take(), strict=True))
        if item.leaf is not None:
            assert self._unmerged is not None
            addends[leaf_node(self._unmerged)] = item.leaf.parts(item.span)
        low, high = item.span
        mine = [row[low:high] for row in self._rows[item.flat.sum_dtype].mine(item.flat)]
        spare = self._owner.num_registers - len(mine)
        registers = mine + [t[: high - low] for t in self._spare(item.flat.sum_dtype, spare)]
        carry_out(self._owner.rounds[0], registers, addends)
        item.transfer.close()

    def _spare(self, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
        tensors = self._scratch.setdefault(dtype, [])
        while len(tensors) < count:
            longest = max(b - a for cut in self._pieces.values() for piece in cut for a, b in piece)
            tensors.append(torch.empty(longest, dtype=dtype, device=self._world.device))
        return tensors[: max(count, 0)]


class _Rows:
    """Whole gradients of all flats of one dtype, as many as the sums of a rank need at a time."""

    def __init__(self, world: World, flats: Sequence[Flat], dtype: torch.dtype, counts: list[int]) -> None:
        self.counts = counts
        self._world = world
        self._starts, self._length = offsets(flats)
        self.board: Board = world.transport.board(counts[world.rank] * self._length, dtype)
        self.open: list[Transfer] = []

    @property
    def num_bytes(self) -> int:
        return self.board.mine.nbytes

    def place(self, rank: int, register: int, flat: Flat, span: Span) -> Span:
        """Where a stretch of a flat lies on the board of a rank."""
        start = register * self._length + self._starts[flat.number]
        return (start + span[0], start + span[1])

    def mine(self, flat: Flat) -> list[torch.Tensor]:
        """The rows of this rank, for one flat."""
        whole = (0, flat.layout.length)
        places = [self.place(self._world.rank, n, flat, whole) for n in range(self.counts[self._world.rank])]
        return [self.board.mine[low:high] for low, high in places]

    def total(self, flat: Flat, owner: int) -> torch.Tensor:
        """The finished sum of what `owner` owns: in its own memory, or gathered into mine."""
        board = self.board.peers[owner] if self.board.peers else self.board.mine
        low, high = self.place(owner, 0, flat, self._world.spans(flat)[owner])
        return board[low:high]

    def drain(self) -> None:
        """Wait until what was sent has left."""
        if not self._world.transport.is_shared:
            for transfer in self.open:
                transfer.drain()
        self.open.clear()
