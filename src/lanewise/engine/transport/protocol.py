"""What the engine asks of a transport. It moves bytes; it never adds a gradient."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from lanewise.lanes.hosting import Span


@dataclass(frozen=True)
class Outgoing:
    """What one rank is to get. Where memory is shared it must lie on the board already."""

    peer: int
    tensors: Sequence[torch.Tensor]


@dataclass(frozen=True)
class Incoming:
    """What is to come from one rank: a stretch of its board, sent as `segments` counted from its beginning."""

    peer: int
    span: Span
    segments: Sequence[Span]


@dataclass(frozen=True)
class Board:
    """A stretch of memory from which the other ranks may take. `peers` is empty where they cannot look."""

    mine: torch.Tensor
    peers: tuple[torch.Tensor, ...] = ()


class Transfer(Protocol):
    """One exchange, opened by every rank of the world in the same order."""

    def take(self) -> list[torch.Tensor]:
        """Wait for what was to come, in the order in which it was asked for."""
        ...

    def close(self) -> None:
        """Say that what was taken has been used and may be overwritten."""
        ...

    def drain(self) -> None:
        """Wait until every other rank has closed, so that what was offered may be overwritten."""
        ...


class Arrival(Protocol):
    """A gather that is under way."""

    def wait(self) -> None:
        """Return when every rank's part is there."""
        ...


class Transport(Protocol):
    """The ranks of a run, and the ways to exchange with them.

    Every call is collective: all ranks make the same calls in the same order. `where` says in words what
    is being done, for the error if they do not, or if a rank does not come.
    """

    rank: int
    size: int

    @property
    def is_shared(self) -> bool:
        """Whether all ranks map the same memory, so that a value need stand only once."""
        ...

    @property
    def sends_alone(self) -> int:
        """Elements from which a part of a gradient is sent by itself, in place of being packed with others."""
        ...

    def board(self, numel: int, dtype: torch.dtype) -> Board:
        """Memory to exchange from. Ranks may ask for different sizes."""
        ...

    def common(self, num_bytes: int) -> torch.Tensor:
        """Memory that all ranks map, zeroed. Only where `is_shared`."""
        ...

    @property
    def received_bytes(self) -> int:
        """The most that was received and not used up yet at a time; 0 where nothing is sent."""
        ...

    def announce(self, where: str) -> int:
        """Tell all ranks what comes next; returns the number of these words.

        Exchanges that always follow each other need to be announced only once, and are then started
        `under` that number.
        """
        ...

    def open(
        self,
        board: Board,
        outgoing: Sequence[Outgoing],
        incoming: Sequence[Incoming],
        where: str,
        under: int | None = None,
    ) -> Transfer:
        """Offer what others need and ask for what they have. All of it has the type of the board."""
        ...

    def gather(
        self, whole: torch.Tensor, spans: Sequence[Span], where: str, under: int | None = None
    ) -> Arrival:
        """Send my span of `whole` to all ranks and receive theirs in place."""
        ...

    def share(self, values: torch.Tensor, where: str) -> torch.Tensor:
        """Give a few numbers to all ranks; returns one row for each."""
        ...

    def broadcast(self, values: torch.Tensor, where: str) -> None:
        """Overwrite `values` with rank 0's."""
        ...

    def barrier(self, where: str) -> None:
        """Return when all ranks have come here."""
        ...

    def say(self, what: str) -> None:
        """Leave word of what this rank does now, for the error message of a rank that waits for it."""
        ...

    def close(self, failure: str | None) -> None:
        """Give everything back. `failure` says what went wrong, where this rank does not end as planned."""
        ...
