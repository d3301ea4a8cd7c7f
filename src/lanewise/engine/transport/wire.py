"""The two ways to move the data of an exchange: message by message, or as one collective."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from lanewise.engine import exchange
from lanewise.lanes.hosting import Span

_DATA_TAG = 16
_TAGS = 1 << 24


@dataclass
class Flight:
    """Messages on their way, with the rank at the other end."""

    sends: list[tuple[int, exchange.Work]] = field(default_factory=list)
    receives: list[tuple[int, exchange.Work]] = field(default_factory=list)
    after: Callable[[], None] | None = None

    def finish(self) -> None:
        """Do what remains when everything has come."""
        if self.after is not None:
            self.after()


Parcel = tuple[int, torch.Tensor]
"""A tensor and the rank it goes to."""


class Wire(Protocol):
    """Moves tensors between the ranks of a group."""

    def exchange(
        self, number: int, outgoing: Sequence[Parcel], incoming: Sequence[tuple[int, int]], like: torch.Tensor
    ) -> tuple[Flight, list[torch.Tensor]]:
        """Start to send tensors, and to receive so many elements `like` these from each rank named."""
        ...

    def gather(self, number: int, whole: torch.Tensor, spans: Sequence[Span]) -> Flight:
        """Start to send my span of `whole` to all ranks and receive theirs in place."""
        ...

    def add_up(self, whole: torch.Tensor, spans: Sequence[Span], keeps_all: bool) -> Flight:
        """Start the backend's own sum in place; my span of it is enough unless `keeps_all`."""
        ...


class PeerWire:
    """One message for each pair of ranks, read from and written to where the data lies."""

    def __init__(self, group: exchange.Group | None, rank: int) -> None:
        self._group = group
        self._rank = rank

    def exchange(
        self, number: int, outgoing: Sequence[Parcel], incoming: Sequence[tuple[int, int]], like: torch.Tensor
    ) -> tuple[Flight, list[torch.Tensor]]:
        """Start every message."""
        received = [like.new_empty(numel) for _, numel in incoming]
        arriving = [(peer, tensor) for (peer, _), tensor in zip(incoming, received, strict=True)]
        return self._start(number, outgoing, arriving), received

    def gather(self, number: int, whole: torch.Tensor, spans: Sequence[Span]) -> Flight:
        """Start every message."""
        parts = [whole[start:stop] for start, stop in spans]
        others = [peer for peer in range(len(parts)) if peer != self._rank]
        return self._start(number, [(p, parts[self._rank]) for p in others], [(p, parts[p]) for p in others])

    def add_up(self, whole: torch.Tensor, spans: Sequence[Span], keeps_all: bool) -> Flight:
        """Start a collective."""
        return _add_up(self._group, self._rank, whole, spans, keeps_all)

    def _start(self, number: int, outgoing: Sequence[Parcel], arriving: Sequence[Parcel]) -> Flight:
        flight = Flight()
        if self._group is not None:
            tag = _DATA_TAG + number % _TAGS
            group = self._group
            flight.receives = [(p, exchange.irecv(group, t, p, tag)) for p, t in arriving if t.numel()]
            flight.sends = [(p, exchange.isend(group, t, p, tag)) for p, t in outgoing if t.numel()]
        return flight


class CollectiveWire:
    """One collective for all ranks: what NCCL does best, and all that Gloo offers for GPU memory."""

    def __init__(self, group: exchange.Group | None, rank: int, size: int) -> None:
        self._group = group
        self._rank = rank
        self._size = size

    def exchange(
        self, number: int, outgoing: Sequence[Parcel], incoming: Sequence[tuple[int, int]], like: torch.Tensor
    ) -> tuple[Flight, list[torch.Tensor]]:
        """Start one all-to-all in which each pair may exchange a different length."""
        order = sorted(range(len(incoming)), key=lambda n: incoming[n][0])
        whole = like.new_empty(sum(numel for _, numel in incoming))
        pieces = whole.split([incoming[n][1] for n in order])
        received = [like] * len(incoming)
        for n, piece in zip(order, pieces, strict=True):
            received[n] = piece
        if self._group is None:
            return Flight(), received
        to_each = [[t for peer, t in outgoing if peer == p] for p in range(self._size)]
        from_each = [sum(numel for peer, numel in incoming if peer == p) for p in range(self._size)]
        sent = [t for tensors in to_each for t in tensors]
        lengths = [sum(t.numel() for t in tensors) for tensors in to_each]
        packed = sent[0] if len(sent) == 1 else torch.cat([like.new_empty(0), *sent])
        work = exchange.all_to_all(self._group, whole, packed, from_each, lengths)
        return Flight(receives=[(self._rank, work)]), received

    def gather(self, number: int, whole: torch.Tensor, spans: Sequence[Span]) -> Flight:
        """Start an all-gather, over padded shares where they are not equal."""
        if self._group is None:
            return Flight()
        longest = max(stop - start for start, stop in spans)
        start, stop = spans[self._rank]
        if all(span == (n * longest, (n + 1) * longest) for n, span in enumerate(spans)):
            work = exchange.all_gather(self._group, whole[: self._size * longest], whole[start:stop])
            return Flight(receives=[(self._rank, work)])
        padded = whole.new_zeros(self._size, longest)
        padded[self._rank, : stop - start] = whole[start:stop]
        work = exchange.all_gather(self._group, padded.view(-1), padded[self._rank].clone())

        def unpack() -> None:
            for peer, (low, high) in enumerate(spans):
                if peer != self._rank:
                    whole[low:high] = padded[peer, : high - low]

        return Flight(receives=[(self._rank, work)], after=unpack)

    def add_up(self, whole: torch.Tensor, spans: Sequence[Span], keeps_all: bool) -> Flight:
        """Start a collective."""
        return _add_up(self._group, self._rank, whole, spans, keeps_all)


def _add_up(
    group: exchange.Group | None, rank: int, whole: torch.Tensor, spans: Sequence[Span], keeps_all: bool
) -> Flight:
    if group is None:
        return Flight()
    low, high = spans[rank]
    if keeps_all or any(stop - start != high - low for start, stop in spans):
        return Flight(receives=[(rank, exchange.all_reduce(group, whole))])
    mine = whole.new_empty(high - low)
    work = exchange.reduce_scatter(group, mine, whole)
    return Flight(receives=[(rank, work)], after=lambda: _copy(whole[low:high], mine))


def _copy(target: torch.Tensor, values: torch.Tensor) -> None:
    target.copy_(values)
