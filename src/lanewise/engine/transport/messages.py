"""Exchange by messages, as between hosts: Gloo for a CPU, NCCL (or Gloo) for a GPU.

Before the data of each exchange goes a short header that says in words what the sender is doing. Ranks
that do different things therefore learn it from the first header that does not match, on both sides, and
never wait for data that nobody sends. A rank without a lane can also follow: it reads a computing rank's
headers and takes part in what they announce. On GPUs, where every rank has a lane in every round, a ledger
takes the place of headers within a step; see `ledger`.
"""

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch

from lanewise.engine import exchange
from lanewise.engine.meeting import Meeting
from lanewise.engine.transport import words
from lanewise.engine.transport.headers import Headers
from lanewise.engine.transport.inbox import Inbox
from lanewise.engine.transport.ledger import WRITTEN, Ledger
from lanewise.engine.transport.protocol import Board, Incoming, Outgoing
from lanewise.engine.transport.waiting import Watch
from lanewise.engine.transport.wire import Flight, Wire
from lanewise.errors import ExchangeError, PeerLostError
from lanewise.lanes.hosting import Span
from lanewise.lanes.layout import between

_SMALL_TAG = 1 << 25


class MessageTransport:
    """Ranks that reach each other through a network. See `protocol.Transport`."""

    is_shared = False

    @property
    def sends_alone(self) -> int:
        """What the wire prefers."""
        return self._wire.sends_alone

    def __init__(
        self,
        meeting: Meeting | None,
        watch: Watch | None,
        control: exchange.Channel | None,
        wire: Wire,
        rank: int,
        size: int,
        device: torch.device,
        patience: timedelta = timedelta(seconds=30),
        may_hush: bool = False,
    ) -> None:
        """`control` carries headers and a few numbers, `wire` the data. `watch` is closed with this.

        `patience` is how long to wait for others, and `may_hush` says that a ledger may take the place of headers.
        """
        self.rank = rank
        self.size = size
        self.device = device
        self.patience = patience
        self._may_hush = may_hush
        self._meeting = meeting
        self._watch = watch
        self._control = control
        self._wire = wire
        self._others = [peer for peer in range(size) if peer != rank]
        self._headers = Headers(control, rank, self._others)
        self._inbox = Inbox(device)
        self.ledger = Ledger()
        self._row_spans: tuple[Span, ...] = ()
        self._is_quiet = False

    def hush(self, is_quiet: bool) -> None:
        """From now on, write down what is announced in place of sending it, or send it again. Collective."""
        self._is_quiet = is_quiet and self._may_hush
        if is_quiet:
            self.ledger = Ledger()

    def board(self, numel: int, dtype: torch.dtype) -> Board:
        """Private memory: the others get what is sent to them."""
        return Board(torch.zeros(numel, dtype=dtype, device=self.device))

    def common(self, num_bytes: int) -> torch.Tensor:
        """Never called: there is no common memory."""
        raise AssertionError("ranks that exchange messages have no common memory")

    @property
    def received_bytes(self) -> int:
        """The most that was received and not used up yet at a time."""
        return self._inbox.most_bytes

    def announce(self, where: str) -> int:
        """Send a header, or write it down."""
        return self.ledger.announce(where) if self._is_quiet else self._headers.announce(where)

    def open(
        self,
        board: Board,
        outgoing: Sequence[Outgoing],
        incoming: Sequence[Incoming],
        where: str,
        under: int | None = None,
    ) -> "MessageTransfer":
        """Start to send and to receive."""
        number = self.announce(where) if under is None else under
        sent = [(item.peer, tensor) for item in outgoing for tensor in item.tensors]
        by_peer = sorted(range(len(incoming)), key=lambda n: incoming[n].peer)
        lengths = [incoming[n].span[1] - incoming[n].span[0] for n in by_peer]
        buffer = self._inbox.take(sum(lengths), board.mine.dtype)
        whole = buffer[: sum(lengths)]
        received = [whole] * len(incoming)
        arriving = []
        for n, part in zip(by_peer, whole.split(lengths), strict=True):
            received[n] = part
            for low, high in between(incoming[n].segments, part.numel()):
                part[low:high].zero_()
            arriving += [(incoming[n].peer, part[low:high]) for low, high in incoming[n].segments]
        flight = self._wire.exchange(words.mark(where), sent, whole, arriving)
        return MessageTransfer(self, number, flight, received, where, lambda: self._inbox.give_back(buffer))

    def gather(
        self, whole: torch.Tensor, spans: Sequence[Span], where: str, under: int | None = None
    ) -> "MessageArrival":
        """Start to send my span to all and to receive theirs in place."""
        number = self.announce(where) if under is None else under
        flight = self._wire.gather(words.mark(where), whole, spans)
        return MessageArrival(self, number, flight, where)

    def swap(
        self,
        received: torch.Tensor,
        packed: torch.Tensor,
        from_each: list[int],
        to_each: list[int],
        where: str,
        under: int | None = None,
    ) -> "MessageArrival":
        """Start to send every rank its part of `packed`, one after the other, and to receive theirs likewise."""
        number = self.announce(where) if under is None else under
        return MessageArrival(self, number, self._wire.swap(received, packed, from_each, to_each), where)

    def rows(self, mine: torch.Tensor, where: str) -> torch.Tensor:
        """Give a few numbers that lie on the device to all ranks, without a wait of the host; one row for each."""
        numel = mine.numel()
        if len(self._row_spans) != self.size or self._row_spans[0][1] != numel:
            self._row_spans = tuple((rank * numel, (rank + 1) * numel) for rank in range(self.size))
        rows = mine.new_empty(self.size, numel)
        rows[self.rank].copy_(mine)
        self.gather(rows.view(-1), self._row_spans, where).wait()
        return rows

    def silence(self, where: str) -> ExchangeError:
        """The error for a device that does not get to the end of what it was given."""
        if self._meeting is None or self._control is None or not self._others:
            return ExchangeError(f"rank {self.rank}: the device did not get to {where} in time.")
        culprit, word = self._control.behind(self._others[0], True)
        return PeerLostError(
            (culprit,),
            f"rank {self.rank} waited for {where}: rank {culprit} did not come in time{f' ({word})' if word else ''}. "
            f"The last exchange this rank started was {self.ledger.last!r}. Look at that rank's own output; a longer "
            "wait is set with timeout=.",
        )

    def add_up(
        self, whole: torch.Tensor, spans: Sequence[Span], keeps_all: bool, where: str
    ) -> "MessageArrival":
        """Start the backend's own sum in place: of everything, or (where shares are equal) of my span."""
        number = self.announce(where)
        return MessageArrival(self, number, self._wire.add_up(whole, spans, keeps_all), where)

    def share(self, values: torch.Tensor, where: str) -> torch.Tensor:
        """Give a few numbers to all ranks."""
        number = self.announce(where)
        mine = values.detach().cpu().contiguous()
        rows = torch.empty(self.size, *mine.shape, dtype=mine.dtype)
        rows[self.rank] = mine
        works = []
        if mine.numel() and self._control is not None:
            tag = _SMALL_TAG + words.mark(where)
            works += [(p, self._control.irecv(rows[p], p, tag, where)) for p in self._others]
            works += [(p, self._control.isend(mine, p, tag, where)) for p in self._others]
        self.finish(number, works, where)
        return rows

    def broadcast(self, values: torch.Tensor, where: str) -> None:
        """Overwrite with rank 0's."""
        flat = values.detach().view(-1)
        spans = [(0, flat.numel()), *[(flat.numel(), flat.numel())] * (self.size - 1)]
        self.gather(flat, spans, where).wait()

    def barrier(self, where: str) -> None:
        """Return when all ranks have come here: their headers are enough."""
        number = self._headers.announce(where)
        self._headers.agree(number, where)

    def say(self, what: str) -> None:
        """Leave word in the next headers."""
        self._headers.say(what)

    def follow(self, leader: int, where: str) -> str:
        """What the leader announces next. The caller then does the same."""
        return self._headers.peek(leader, where)

    def finish(self, number: int, works: Sequence[tuple[int, exchange.Work]], where: str) -> None:
        """Wait for messages, after a look at what the other ranks say they are doing."""
        if number != WRITTEN:
            self._headers.agree(number, where)
        for peer, work in works:
            if self._control is None:
                work.wait()
            else:
                self._control.wait(work, peer, where)

    def close(self, failure: str | None) -> None:
        """Leave the groups. In peace, wait a little for the others: a socket that closes early may take with
        it what they have not read yet.
        """
        if self._meeting is not None and self._control is not None:
            in_peace = failure is None and not self._control.has_failed
            if in_peace:
                with contextlib.suppress(ExchangeError):
                    self._headers.announce(words.THE_END)
            else:
                self._meeting.give_up(None, self._headers.word + (f"; {failure}" if failure else ""))
                self._control.hang_up()
            self._meeting.part(in_peace)
        exchange.leave_group()
        if self._watch is not None:
            self._watch.close()


class MessageTransfer:
    """A transfer whose data is on its way. See `protocol.Transfer`."""

    def __init__(
        self,
        transport: MessageTransport,
        number: int,
        flight: Flight,
        received: list[torch.Tensor],
        where: str,
        give_back: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._number = number
        self._flight = flight
        self._received = received
        self._where = where
        self._give_back = give_back

    def take(self) -> list[torch.Tensor]:
        """Wait for what was received."""
        self._transport.finish(self._number, self._flight.receives, self._where)
        return self._received

    def close(self) -> None:
        """Have what was received used again."""
        self._received = []
        self._flight.receives = []
        self._give_back()

    def drain(self) -> None:
        """Wait until what was sent has left."""
        self._transport.finish(self._number, self._flight.sends, self._where)
        self._flight.sends = []


class MessageArrival:
    """A gather under way. See `protocol.Arrival`."""

    def __init__(self, transport: MessageTransport, number: int, flight: Flight, where: str) -> None:
        self._transport = transport
        self._number = number
        self._flight = flight
        self._where = where

    def wait(self) -> None:
        """Return when everything has come and left."""
        self._transport.finish(self._number, self._flight.receives + self._flight.sends, self._where)
        self._flight.finish()
