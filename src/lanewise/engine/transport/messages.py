"""Exchange by messages, as between hosts: Gloo for a CPU, NCCL (or Gloo) for a GPU.

Before the data of each exchange goes a short header that says in words what the sender is doing. Ranks
that do different things therefore learn it from the first header that does not match, on both sides, and
never wait for data that nobody sends. A rank without a lane can also follow: it reads a computing rank's
headers and takes part in what they announce.
"""

from collections import deque
from collections.abc import Sequence
from datetime import timedelta

import torch

from lanewise.engine import exchange
from lanewise.engine.transport.protocol import Board, Stretch
from lanewise.engine.transport.wire import Flight, Wire
from lanewise.errors import DivergedError, PeerLostError
from lanewise.lanes.hosting import Span

_HEADER_TAG, _SMALL_TAG = 1, 2
_NUMBER_BYTES, _WHERE_BYTES, _NOW_BYTES = 8, 120, 128
_GOODBYE = timedelta(seconds=5)
_HEADER_BYTES = _NUMBER_BYTES + _WHERE_BYTES + _NOW_BYTES


class MessageTransport:
    """Ranks that reach each other through a network. See `protocol.Transport`."""

    is_shared = False

    def __init__(
        self,
        store: exchange.Store | None,
        control: exchange.Group | None,
        wire: Wire,
        rank: int,
        size: int,
        timeout: timedelta,
        device: torch.device,
    ) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.device = device
        self._store = store
        self._control = control
        self._has_failed = False
        self._wire = wire
        self._others = [peer for peer in range(size) if peer != rank]
        self._number = 0
        self._now = b""
        self._headers: dict[int, deque[bytes]] = {peer: deque() for peer in self._others}
        self._checked = dict.fromkeys(self._others, 0)
        self._announced: deque[tuple[int, bytes]] = deque()
        self._first_announced = 1
        self._sending: deque[tuple[exchange.Work, torch.Tensor]] = deque()

    def board(self, numel: int, dtype: torch.dtype) -> Board:
        """Private memory: the others get what is sent to them."""
        return Board(torch.zeros(numel, dtype=dtype, device=self.device))

    def common(self, num_bytes: int) -> torch.Tensor:
        """Never called: there is no common memory."""
        raise AssertionError("ranks that exchange messages have no common memory")

    def open(
        self, board: Board, outgoing: Sequence[Stretch], incoming: Sequence[Stretch], where: str
    ) -> "MessageTransfer":
        """Start to send and to receive."""
        number = self._announce(where)
        sent = [(s.peer, board.mine[s.span[0] : s.span[1]]) for s in outgoing if s.span[0] < s.span[1]]
        expected = [(s.peer, s.span[1] - s.span[0]) for s in incoming]
        flight, received = self._wire.exchange(number, sent, expected, board.mine)
        return MessageTransfer(self, number, flight, received, where)

    def gather(self, whole: torch.Tensor, spans: Sequence[Span], where: str) -> "MessageArrival":
        """Start to send my span to all and to receive theirs in place."""
        number = self._announce(where)
        return MessageArrival(self, number, self._wire.gather(number, whole, spans), where)

    def add_up(
        self, whole: torch.Tensor, spans: Sequence[Span], keeps_all: bool, where: str
    ) -> "MessageArrival":
        """Start the backend's own sum in place: of everything, or (where shares are equal) of my span."""
        number = self._announce(where)
        return MessageArrival(self, number, self._wire.add_up(whole, spans, keeps_all), where)

    def share(self, values: torch.Tensor, where: str) -> torch.Tensor:
        """Give a few numbers to all ranks."""
        number = self._announce(where)
        mine = values.detach().cpu().contiguous()
        rows = torch.empty(self.size, *mine.shape, dtype=mine.dtype)
        rows[self.rank] = mine
        if mine.numel() and self._control is not None:
            sends = [exchange.isend(self._control, mine, peer, _SMALL_TAG) for peer in self._others]
            receives = [(p, exchange.irecv(self._control, rows[p], p, _SMALL_TAG)) for p in self._others]
            self.agree(number, where)
            for peer, work in receives:
                self.wait(work, (peer,), where)
            for peer, work in zip(self._others, sends, strict=True):
                self.wait(work, (peer,), where)
        else:
            self.agree(number, where)
        return rows

    def broadcast(self, values: torch.Tensor, where: str) -> None:
        """Overwrite with rank 0's."""
        flat = values.detach().view(-1)
        spans = [(0, flat.numel()), *[(flat.numel(), flat.numel())] * (self.size - 1)]
        self.gather(flat, spans, where).wait()

    def barrier(self, where: str) -> None:
        """Return when all ranks have come here: their headers are enough."""
        self.agree(self._announce(where), where)

    def say(self, what: str) -> None:
        """Leave word in the next headers."""
        self._now = what.encode()[:_NOW_BYTES]

    def follow(self, leader: int, where: str) -> str:
        """What the leader announces next. The caller then does the same."""
        while len(self._headers[leader]) <= self._number - self._checked[leader]:
            self._headers[leader].append(self._receive_header(leader, where))
        header = self._headers[leader][self._number - self._checked[leader]]
        return _words(header)

    def close(self, in_peace: bool) -> None:
        """Leave the groups. In peace, wait a little for the others: a socket that closes early may take with
        it what they have not read yet.
        """
        if in_peace and self._store is not None and not self._has_failed:
            exchange.farewell(self._store, self.rank, self.size, _GOODBYE)
        self._sending.clear()
        exchange.leave_group()

    def agree(self, number: int, where: str) -> None:
        """Check that all ranks announced what this one did, up to an exchange."""
        self._trim_sends()
        for peer in self._others:
            while self._checked[peer] < number:
                if not self._headers[peer]:
                    self._headers[peer].append(self._receive_header(peer, where))
                theirs = self._headers[peer].popleft()
                self._checked[peer] += 1
                _, mine = self._announced[self._checked[peer] - self._first_announced]
                if theirs[: _NUMBER_BYTES + _WHERE_BYTES] != mine[: _NUMBER_BYTES + _WHERE_BYTES]:
                    self._has_failed = True
                    raise DivergedError(
                        f"rank {self.rank} is in {_words(mine)} ({_now(mine)}), but rank {peer} is in "
                        f"{_words(theirs)} ({_now(theirs)}). All ranks must make the same exchanges in the same "
                        "order: run the same units in every lane and call the same functions on every rank."
                    )
        oldest = min(self._checked.values(), default=number)
        while self._announced and self._announced[0][0] <= oldest:
            self._announced.popleft()
            self._first_announced += 1

    def wait(self, work: exchange.Work, peers: tuple[int, ...], where: str) -> None:
        """Wait for one message, naming the rank if it does not come."""
        try:
            work.wait()
        except RuntimeError as error:
            names = " or ".join(f"rank {peer}" for peer in peers)
            self._has_failed = True
            reason = exchange.first_line(error)
            what = (
                f"did not come within {self.timeout.total_seconds():g} s"
                if "timed out" in reason.lower()
                else "has ended or closed its connection"
            )
            raise PeerLostError(
                peers,
                f"rank {self.rank} waited in {where}: {names} {what} ({reason}). Look at that rank's own output; "
                "a longer wait is set with timeout=.",
            ) from error

    def _announce(self, where: str) -> int:
        self._number += 1
        if self._control is None:
            return self._number
        header = _header(self._number, where, self._now)
        self._announced.append((self._number, header))
        tensor = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        for peer in self._others:
            try:
                self._sending.append((exchange.isend(self._control, tensor, peer, _HEADER_TAG), tensor))
            except RuntimeError as error:
                raise PeerLostError(
                    (peer,),
                    f"rank {self.rank} could not reach rank {peer} in {where}: {exchange.first_line(error)}. "
                    "Look at that rank's own output.",
                ) from error
        return self._number

    def _receive_header(self, peer: int, where: str) -> bytes:
        assert self._control is not None
        buffer = torch.empty(_HEADER_BYTES, dtype=torch.uint8)
        try:
            work = exchange.irecv(self._control, buffer, peer, _HEADER_TAG)
        except RuntimeError as error:
            raise PeerLostError(
                (peer,),
                f"rank {self.rank} waited in {where}: rank {peer} has ended or closed its connection "
                f"({exchange.first_line(error)}). Look at that rank's own output.",
            ) from error
        self.wait(work, (peer,), where)
        return bytes(buffer.numpy())

    def _trim_sends(self) -> None:
        """Forget headers that have surely left: those of exchanges that every rank has answered."""
        while len(self._sending) > 64 * max(len(self._others), 1):
            work, _ = self._sending.popleft()
            self.wait(work, tuple(self._others), "the sending of a header")


def _header(number: int, where: str, now: bytes) -> bytes:
    words = where.encode()[:_WHERE_BYTES].ljust(_WHERE_BYTES, b"\0")
    return number.to_bytes(_NUMBER_BYTES, "little") + words + now.ljust(_NOW_BYTES, b"\0")


def _words(header: bytes) -> str:
    return header[_NUMBER_BYTES : _NUMBER_BYTES + _WHERE_BYTES].rstrip(b"\0").decode(errors="replace")


def _now(header: bytes) -> str:
    return (
        header[_NUMBER_BYTES + _WHERE_BYTES :].rstrip(b"\0").decode(errors="replace")
        or "before the first step"
    )


class MessageTransfer:
    """A transfer whose data is on its way. See `protocol.Transfer`."""

    def __init__(
        self,
        transport: MessageTransport,
        number: int,
        flight: Flight,
        received: list[torch.Tensor],
        where: str,
    ) -> None:
        self._transport = transport
        self._number = number
        self._flight = flight
        self._received = received
        self._where = where

    def take(self) -> list[torch.Tensor]:
        """Wait for what was received."""
        self._transport.agree(self._number, self._where)
        for peer, work in self._flight.receives:
            self._transport.wait(work, (peer,), self._where)
        return self._received

    def close(self) -> None:
        """Free what was received."""
        self._received = []

    def drain(self) -> None:
        """Wait until what was sent has left."""
        for peer, work in self._flight.sends:
            self._transport.wait(work, (peer,), self._where)
        self._flight.sends.clear()


class MessageArrival:
    """A gather under way. See `protocol.Arrival`."""

    def __init__(self, transport: MessageTransport, number: int, flight: Flight, where: str) -> None:
        self._transport = transport
        self._number = number
        self._flight = flight
        self._where = where

    def wait(self) -> None:
        """Return when everything has come and left."""
        self._transport.agree(self._number, self._where)
        for peer, work in (*self._flight.receives, *self._flight.sends):
            self._transport.wait(work, (peer,), self._where)
        self._flight.finish()
