"""The two ways to move the data of an exchange: message by message, or as one collective."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from lanewise.engine import exchange
from lanewise.lanes.hosting import Span

_DATA_TAG = 16
_WHERE = "the start of an exchange"


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

    sends_alone: int
    """See `protocol.Transport`."""

    def exchange(
        self, mark: int, outgoing: Sequence[Parcel], whole: torch.Tensor, arriving: Sequence[Parcel]
    ) -> Flight:
        """Start to send tensors, and to receive others into `arriving`.

        `mark` tells exchanges of different kinds apart, in 16 bits.
        Those lie in `whole`, which holds what comes from rank 0, then from rank 1, and so on.
        """
        ...

    def gather(self, mark: int, whole: torch.Tensor, spans: Sequence[Span]) -> Flight:
        """Start to send my span of `whole` to all ranks and receive theirs in place."""
        ...

    def swap(
        self, received: torch.Tensor, packed: torch.Tensor, from_each: list[int], to_each: list[int]
    ) -> Flight:
        """Start to send every rank, this one too, its part of `packed`, and to receive theirs likewise."""
        ...

    def add_up(self, whole: torch.Tensor, spans: Sequence[Span], keeps_all: bool) -> Flight:
        """Start the backend's own sum in place; my span of it is enough unless `keeps_all`."""
        ...


class PeerWire:
    """One message for each pair of ranks, read from and written to where the data lies."""

    sends_alone = 1 << 15

    def __init__(self, channel: exchange.Channel | None, rank: int) -> None:
        self._channel = channel
        self._rank = rank
        self._num_flights = 0

    def exchange(
        self, mark: int, outgoing: Sequence[Parcel], whole: torch.Tensor, arriving: Sequence[Parcel]
    ) -> Flight:
        """Start every message."""
        return self._start(mark, outgoing, arriving)

    def gather(self, mark: int, whole: torch.Tensor, spans: Sequence[Span]) -> Flight:
        """Start every message."""
        parts = [whole[start:stop] for start, stop in spans]
        others = [peer for peer in range(len(parts)) if peer != self._rank]
        return self._start(mark, [(p, parts[self._rank]) for p in others], [(p, parts[p]) for p in others])

    def swap(
        self, received: torch.Tensor, packed: torch.Tensor, from_each: list[int], to_each: list[int]
    ) -> Flight:
        """Start a collective."""
        return _swap(
            self._channel.group if self._channel else None, self._rank, received, packed, from_each, to_each
        )

    def add_up(self, whole: torch.Tensor, spans: Sequence[Span], keeps_all: bool) -> Flight:
        """Start a collective."""
        group = self._channel.group if self._channel is not None else None
        return _add_up(group, self._rank, whole, spans, keeps_all)

    def _start(self, mark: int, outgoing: Sequence[Parcel], arriving: Sequence[Parcel]) -> Flight:
        flight = Flight()
        if self._channel is not None:
            self._num_flights += 1
            tag = _DATA_TAG + (self._num_flights % 256 << 16 | mark)
            channel = self._channel
            flight.receives = [(p, channel.irecv(t, p, tag, _WHERE)) for p, t in arriving if t.numel()]
            flight.sends = [(p, channel.isend(t, p, tag, _WHERE)) for p, t in outgoing if t.numel()]
        return flight


class CollectiveWire:
    """One collective for all ranks: what NCCL does best, and all that Gloo offers for GPU memory."""

    sends_alone = 1 << 62

    def __init__(self, group: exchange.Group | None, rank: int, size: int) -> None:
        self._group = group
        self._rank = rank
        self._size = size
        self._known: dict[int, tuple[Sequence[Span], int, bool]] = {}

    def exchange(
        self, mark: int, outgoing: Sequence[Parcel], whole: torch.Tensor, arriving: Sequence[Parcel]
    ) -> Flight:
        """Start one all-to-all in which each pair may exchange a different length."""
        if self._group is None:
            return Flight()
        sent = [tensor for _, tensor in sorted(outgoing, key=lambda parcel: parcel[0])]
        packed = sent[0] if len(sent) == 1 else torch.cat([whole.new_empty(0), *sent])
        to_each = [sum(t.numel() for peer, t in outgoing if peer == p) for p in range(self._size)]
        from_each = [sum(t.numel() for peer, t in arriving if peer == p) for p in range(self._size)]
        work = exchange.all_to_all(self._group, whole, packed, from_each, to_each)
        return Flight(receives=[(_neighbour(self._rank, self._size), work)])

    def gather(self, mark: int, whole: torch.Tensor, spans: Sequence[Span]) -> Flight:
        """Start an all-gather, over padded shares where they are not equal."""
        if self._group is None:
            return Flight()
        start, stop = spans[self._rank]
        longest, are_equal = self._shares(spans)
        if are_equal:
            work = exchange.all_gather(self._group, whole[: self._size * longest], whole[start:stop])
            return Flight(receives=[(_neighbour(self._rank, self._size), work)])
        padded = whole.new_zeros(self._size, longest)
        padded[self._rank, : stop - start] = whole[start:stop]
        work = exchange.all_gather(self._group, padded.view(-1), padded[self._rank].clone())

        def unpack() -> None:
            for peer, (low, high) in enumerate(spans):
                if peer != self._rank:
                    whole[low:high] = padded[peer, : high - low]

        return Flight(receives=[(_neighbour(self._rank, self._size), work)], after=unpack)

    def swap(
        self, received: torch.Tensor, packed: torch.Tensor, from_each: list[int], to_each: list[int]
    ) -> Flight:
        """Start a collective."""
        return _swap(self._group, self._rank, received, packed, from_each, to_each)

    def add_up(self, whole: torch.Tensor, spans: Sequence[Span], keeps_all: bool) -> Flight:
        """Start a collective."""
        return _add_up(self._group, self._rank, whole, spans, keeps_all)

    def _shares(self, spans: Sequence[Span]) -> tuple[int, bool]:
        """The longest span, and whether all are as long and follow one another. Known of spans seen before."""
        known = self._known.get(id(spans))
        if known is None or known[0] is not spans:
            longest = max(stop - start for start, stop in spans)
            are_equal = all(span == (n * longest, (n + 1) * longest) for n, span in enumerate(spans))
            known = self._known[id(spans)] = (spans, longest, are_equal)
        return known[1:]


def _neighbour(rank: int, size: int) -> int:
    """The rank to be asked first whom a collective waits for: any one but this."""
    return (rank + 1) % size


def _swap(
    group: exchange.Group | None,
    rank: int,
    received: torch.Tensor,
    packed: torch.Tensor,
    from_each: list[int],
    to_each: list[int],
) -> Flight:
    if group is None:
        received.copy_(packed)
        return Flight()
    work = exchange.all_to_all(group, received, packed, from_each, to_each)
    return Flight(receives=[(_neighbour(rank, len(to_each)), work)])


def _add_up(
    group: exchange.Group | None, rank: int, whole: torch.Tensor, spans: Sequence[Span], keeps_all: bool
) -> Flight:
    if group is None:
        return Flight()
    low, high = spans[rank]
    if keeps_all or any(stop - start != high - low for start, stop in spans):
        return Flight(receives=[(_neighbour(rank, len(spans)), exchange.all_reduce(group, whole))])
    mine = whole.new_empty(high - low)
    work = exchange.reduce_scatter(group, mine, whole)
    return Flight(receives=[(_neighbour(rank, len(spans)), work)], after=lambda: _copy(whole[low:high], mine))


def _copy(target: torch.Tensor, values: torch.Tensor) -> None:
    target.copy_(values)
