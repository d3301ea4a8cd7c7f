"""Where ranks meet before they are connected, and when they part: a store that rank 0 or the launcher serves.

It also keeps what a rank had to say when it gave up, so that the others name the rank that caused it.
"""

import contextlib
import json
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from lanewise.engine import exchange
from lanewise.engine.patience import OutOfPatienceError, within
from lanewise.errors import ExchangeError, HandshakeError, PeerLostError

_SHORTEST_S, _LONGEST_S = 0.0005, 0.02
"""Between two looks for what others have told."""
_GRACE = timedelta(seconds=2)
"""How long a rank that fails serves the store for the others' last questions."""
_IN_PEACE = timedelta(seconds=5)
"""How long a rank that is done waits for the others to be done."""
_T = TypeVar("_T")


class Meeting:
    """The ranks of one start, as far as they are known through the store."""

    def __init__(
        self, store: exchange.Store, rank: int, size: int, timeout: timedelta, server: int | None
    ) -> None:
        """`server` is the rank that serves the store; None where the launcher does."""
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._server = server
        self._has_given_up = False
        self._is_alone = False
        self.ended: Callable[[], tuple[int, ...]] = tuple
        """The ranks known to have ended; only those of the same host can be seen."""
        if self._ask(lambda: store.add(f"here/{rank}", 1)) > 1:
            raise HandshakeError(
                f"rank {rank} of this launch was started twice; this process (the second) leaves. Give every process "
                "its own RANK."
            )

    def tell_all(
        self, key: str, value: object, on_value: Callable[[int, Any], None] | None = None
    ) -> list[Any]:
        """Exchange one JSON value a rank; the values of all ranks in order. `on_value` sees each as it comes."""
        values: dict[int, Any] = {}
        deadline = time.monotonic() + self._timeout.total_seconds()
        pause = _SHORTEST_S
        self._ask(lambda: self._store.set(f"{key}/{self._rank}", json.dumps(value)))
        while True:
            gone = self.ended()
            missing = [peer for peer in range(self._size) if peer not in values]
            for peer, text in self._ask(partial(self._told, key, missing)):
                values[peer] = json.loads(text)
                if on_value is not None:
                    on_value(peer, values[peer])
            missing = [peer for peer in missing if peer not in values]
            if not missing:
                return [values[peer] for peer in range(self._size)]
            lost = [peer for peer in missing if peer in gone]
            if lost:
                raise self._lost(lost, f"waited in {key!r}", "has ended")
            if time.monotonic() > deadline:
                raise self._lost(missing, f"waited in {key!r}", f"did not come within {self._limit}")
            time.sleep(pause)
            pause = min(pause * 2, _LONGEST_S)

    def join(self, call: Callable[[], _T], what: str) -> _T:
        """Make a call that returns when all ranks make it, such as joining a group."""
        self.tell_all(what, None)

        def look() -> None:
            if gone := self.ended():
                raise self._lost(list(gone), f"was in {what}", "has ended")

        try:
            return within(self._timeout + _GRACE, call, look)
        except OutOfPatienceError:
            reason = f"no answer within {self._limit}"
        except RuntimeError as error:
            reason = exchange.first_line(error)
        look()
        raise PeerLostError(
            (),
            f"rank {self._rank} could not connect to all other ranks ({reason}). A rank may have died or stopped, or a "
            "firewall may stand between two hosts; GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names the network to use.",
        )

    def give_up(self, culprit: int | None, word: str) -> None:
        """Say why this rank ends: because of another, or by itself. What it says first counts."""
        if self._has_given_up:
            return
        self._has_given_up = True
        record = json.dumps([culprit, word])
        with contextlib.suppress(OutOfPatienceError):
            self._try(_GRACE, lambda: self._store.set(f"gave up/{self._rank}", record))

    def blame(self, peer: int, is_late: bool) -> tuple[int, str]:
        """The rank that is behind the silence of `peer`, and its last word. What is found is told to the others.

        A peer that gives up closes its connections a moment before it can say why, so a moment is waited; and one
        that dies, a moment before its end is known.
        """
        time.sleep(_LONGEST_S)
        self.give_up(peer, "")
        return self._behind(peer, timedelta(seconds=1.0 if is_late else 0.3))

    def _behind(self, peer: int, patience: timedelta) -> tuple[int, str]:
        word = ""
        met = {self._rank}
        try:
            while peer not in met:
                met.add(peer)
                record = self._try(_GRACE + patience, partial(self._record, peer, patience))
                if record is None:
                    return peer, word
                culprit, word = record
                if culprit is None or culprit in met:
                    return peer, word
                peer = culprit
        except OutOfPatienceError:
            return (peer, word) if self._server in (None, self._rank) else (self._server, word)
        return peer, word

    def part(self, in_peace: bool) -> None:
        """Wait a little for all ranks to be done; the rank that serves the store leaves last.

        A rank that does not come in time is not waited for: there is nothing left to lose.
        """
        limit = _IN_PEACE if in_peace else _GRACE
        deadline = time.monotonic() + limit.total_seconds()
        with contextlib.suppress(OutOfPatienceError):
            self._try(limit, lambda: self._part(in_peace, deadline))

    @property
    def _limit(self) -> str:
        return f"{self._timeout.total_seconds():g} s"

    def _part(self, in_peace: bool, deadline: float) -> None:
        def wait_for_all(key: str) -> None:
            while time.monotonic() < deadline:
                ended = self.ended()
                if self._store.check([f"{key}/{peer}" for peer in range(self._size) if peer not in ended]):
                    return
                time.sleep(0.001)

        self._store.set(f"done/{self._rank}", "")
        if in_peace:
            wait_for_all("done")
        self._store.set(f"gone/{self._rank}", "")
        if self._rank == self._server:
            wait_for_all("gone")

    def _told(self, key: str, peers: list[int]) -> list[tuple[int, str]]:
        come = [peer for peer in peers if self._store.check([f"{key}/{peer}"])]
        return [(peer, self._store.get(f"{key}/{peer}").decode()) for peer in come]

    def _record(self, peer: int, patience: timedelta) -> tuple[int | None, str] | None:
        deadline = time.monotonic() + patience.total_seconds()
        while not self._store.check([f"gave up/{peer}"]):
            if time.monotonic() > deadline:
                return None
            time.sleep(_LONGEST_S)
        culprit, word = json.loads(self._store.get(f"gave up/{peer}"))
        return culprit, word

    def _lost(self, peers: list[int], where: str, what: str) -> PeerLostError:
        culprit, word = self._behind(peers[0], timedelta(0))
        ranks = (culprit,) if culprit not in peers else tuple(peers)
        named = " and ".join(f"rank {rank}" for rank in ranks)
        if ranks != tuple(peers):
            what = f"is the one that rank {peers[0]} waited for"
        return PeerLostError(
            ranks,
            f"rank {self._rank} {where}: {named} {what}{f' ({word})' if word else ''}. Look at that rank's own output; "
            "it may have failed or not started.",
        )

    def _try(self, limit: timedelta, question: Callable[[], _T]) -> _T:
        """Ask a store that may be gone. If it does not answer, it is not asked again: torch's client of a store
        writes a page about each failure.
        """
        if self._is_alone or self._server in self.ended():
            raise OutOfPatienceError
        try:
            return within(limit, question)
        except (OutOfPatienceError, RuntimeError):
            self._is_alone = True
            raise OutOfPatienceError from None

    def _ask(self, question: Callable[[], _T]) -> _T:
        """Ask the store, which answers at once if it can."""
        try:
            return within(self._timeout, question)
        except OutOfPatienceError:
            reason = f"it did not answer within {self._limit}"
        except RuntimeError as error:
            reason = exchange.first_line(error)
        if self._server is None:
            raise ExchangeError(
                f"rank {self._rank} lost the launcher's store ({reason}). Look at the launcher's output."
            )
        raise PeerLostError(
            (self._server,),
            f"rank {self._rank} lost rank {self._server}, which serves the store of this run ({reason}). Look at "
            "that rank's own output.",
        )
