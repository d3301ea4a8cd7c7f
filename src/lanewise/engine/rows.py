"""Room for whole gradients: the registers in which a rank adds its own lanes.

Where memory is shared, they lie on a board that the owners read. Elsewhere they are made when they are
needed and dropped when the step ends, since what others need is sent to them.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from lanewise.engine.transport.protocol import Board, Incoming
from lanewise.engine.unit import Flat
from lanewise.engine.world import World, offsets
from lanewise.lanes.hosting import Span


class Rows(Protocol):
    """The registers of all flats whose gradients are summed in one type."""

    board: Board

    def whole(self, flat: Flat, register: int) -> torch.Tensor:
        """A register over the whole of a flat."""
        ...

    def mine(self, flat: Flat, register: int, span: Span) -> torch.Tensor:
        """A register over a stretch of what this rank owns."""
        ...

    def incoming(
        self, peer: int, register: int, flat: Flat, span: Span, segments: Sequence[Span]
    ) -> Incoming:
        """A stretch of another rank's register."""
        ...

    def total(self, flat: Flat, owner: int) -> torch.Tensor:
        """The finished sum of what a rank owns."""
        ...

    def end_step(self) -> None:
        """The sums have been used."""
        ...

    @property
    def num_bytes(self) -> int:
        """Memory in use, or its most in the last step."""
        ...


class BoardRows:
    """Registers on a board; `counts` says how many each rank has."""

    def __init__(
        self, world: World, flats: Sequence[Flat], dtype: torch.dtype, counts: Sequence[int]
    ) -> None:
        self._world = world
        self._starts, self._length = offsets(flats)
        self.board = world.transport.board(counts[world.rank] * self._length, dtype)

    def whole(self, flat: Flat, register: int) -> torch.Tensor:
        """A part of the board."""
        low, high = self._place(register, flat, (0, flat.layout.length))
        return self.board.mine[low:high]

    def mine(self, flat: Flat, register: int, span: Span) -> torch.Tensor:
        """A part of the board."""
        low, high = self._place(register, flat, span)
        return self.board.mine[low:high]

    def incoming(
        self, peer: int, register: int, flat: Flat, span: Span, segments: Sequence[Span]
    ) -> Incoming:
        """Where it lies on the peer's board, which has the same order of flats."""
        return Incoming(peer, self._place(register, flat, span), segments)

    def total(self, flat: Flat, owner: int) -> torch.Tensor:
        """The owner's own memory."""
        low, high = self._place(0, flat, self._world.spans(flat)[owner])
        return self.board.peers[owner][low:high]

    def end_step(self) -> None:
        """Nothing: the board is used again."""

    @property
    def num_bytes(self) -> int:
        """The whole board."""
        return self.board.mine.nbytes

    def _place(self, register: int, flat: Flat, span: Span) -> Span:
        start = register * self._length + self._starts[flat.number]
        return (start + span[0], start + span[1])


class PrivateRows:
    """Registers made on demand: over a whole flat where lanes are added here or every sum is gathered here,
    else over what this rank owns.
    """

    def __init__(self, world: World, dtype: torch.dtype, keeps_whole: bool) -> None:
        self.board = Board(torch.empty(0, dtype=dtype, device=world.device))
        self._world = world
        self._keeps_whole = keeps_whole
        self._registers: dict[tuple[int, int], torch.Tensor] = {}
        self._most_bytes = 0

    def whole(self, flat: Flat, register: int) -> torch.Tensor:
        """Made at its first use."""
        return self._get(flat, register, flat.layout.length)

    def mine(self, flat: Flat, register: int, span: Span) -> torch.Tensor:
        """Made at its first use, whole or as much as this rank owns."""
        low, high = self._world.my_span(flat)
        tensor = self._get(flat, register, flat.layout.length if self._keeps_whole else high - low)
        base = 0 if tensor.numel() == flat.layout.length else low
        return tensor[span[0] - base : span[1] - base]

    def incoming(
        self, peer: int, register: int, flat: Flat, span: Span, segments: Sequence[Span]
    ) -> Incoming:
        """Where it lies does not matter; it will be sent."""
        return Incoming(peer, span, segments)

    def total(self, flat: Flat, owner: int) -> torch.Tensor:
        """My own sum, or another's that has been gathered."""
        return self.mine(flat, 0, self._world.spans(flat)[owner])

    def end_step(self) -> None:
        """Drop everything."""
        self._registers.clear()

    @property
    def num_bytes(self) -> int:
        """The most that was in use at a time."""
        return self._most_bytes

    def _get(self, flat: Flat, register: int, length: int) -> torch.Tensor:
        key = (flat.number, register)
        if key not in self._registers:
            dtype = self.board.mine.dtype
            self._registers[key] = torch.empty(length, dtype=dtype, device=self._world.device)
            self._most_bytes = max(self._most_bytes, sum(t.nbytes for t in self._registers.values()))
        return self._registers[key]
