"""Headers: what every rank says before each exchange, in words, and the check that all say the same.

Receives for headers are posted ahead. A header that must first ask for its receiver waits behind whatever
data is on its way, and costs a millisecond in place of microseconds.
"""

from collections import deque

import torch

from lanewise.engine import exchange
from lanewise.engine.transport import words
from lanewise.errors import PeerLostError

_TAG = 1
_AHEAD = 8
_KEPT = 32
"""Headers that may be on their way to a peer; a rank that is further ahead waits for it. Their memory is small,
but what lives long in the middle of a heap keeps large holes from being used again.
"""
_NUMBER_BYTES, _WHERE_BYTES, _NOW_BYTES = 8, 120, 128
_COMPARED_BYTES = _NUMBER_BYTES + _WHERE_BYTES
_HEADER_BYTES = _COMPARED_BYTES + _NOW_BYTES


class Headers:
    """The headers between this rank and all others."""

    def __init__(self, channel: exchange.Channel | None, rank: int, others: list[int]) -> None:
        self._channel = channel
        self._rank = rank
        self._others = others
        self._number = 0
        self._now = b""
        self._mine: deque[bytes] = deque()
        self._checked = dict.fromkeys(others, 0)
        self._received: dict[int, deque[bytes]] = {peer: deque() for peer in others}
        self._posted: dict[int, deque[tuple[exchange.Work, torch.Tensor]]] = {
            peer: deque() for peer in others
        }
        self._sent: deque[tuple[int, exchange.Work, torch.Tensor]] = deque()
        for peer in others:
            for _ in range(_AHEAD):
                self._post(peer)

    def say(self, what: str) -> None:
        """Words that the next headers carry for the error message of whoever finds that they differ."""
        self._now = what.encode()[:_NOW_BYTES]

    @property
    def word(self) -> str:
        """What was said last."""
        return self._now.decode(errors="replace")

    def announce(self, where: str) -> int:
        """Tell all ranks what comes next; returns its number."""
        self._number += 1
        if not self._others:
            return self._number
        said = where.encode()[:_WHERE_BYTES].ljust(_WHERE_BYTES, b"\0")
        header = self._number.to_bytes(_NUMBER_BYTES, "little") + said + self._now.ljust(_NOW_BYTES, b"\0")
        self._mine.append(header)
        tensor = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        for peer in self._others:
            assert self._channel is not None
            self._sent.append((peer, self._channel.isend(tensor, peer, _TAG, where), tensor))
        return self._number

    def agree(self, number: int, where: str) -> None:
        """Check that every rank announced what this one did, up to a number."""
        for peer in self._others:
            while self._checked[peer] < number:
                if not self._received[peer]:
                    self._receive(peer, where)
                theirs = self._received[peer].popleft()
                mine = self._mine[self._checked[peer] - (self._number - len(self._mine))]
                self._checked[peer] += 1
                if theirs[:_COMPARED_BYTES] != mine[:_COMPARED_BYTES]:
                    self._refuse(peer, mine, theirs)
                self._post(peer)
        while self._mine and self._number - len(self._mine) < min(self._checked.values()):
            self._mine.popleft()
        while len(self._sent) > _KEPT * len(self._others):
            peer, work, _ = self._sent.popleft()
            assert self._channel is not None
            self._channel.wait(work, peer, where)

    def peek(self, leader: int, where: str) -> str:
        """The words of the leader's next header, which this rank has not announced yet."""
        position = self._number - self._checked[leader]
        while len(self._received[leader]) <= position:
            self._receive(leader, where)
        return _words(self._received[leader][position])

    def _post(self, peer: int) -> None:
        assert self._channel is not None
        buffer = torch.empty(_HEADER_BYTES, dtype=torch.uint8)
        self._posted[peer].append((self._channel.irecv(buffer, peer, _TAG, "the posting of headers"), buffer))

    def _receive(self, peer: int, where: str) -> None:
        assert self._channel is not None
        work, buffer = self._posted[peer].popleft()
        self._channel.wait(work, peer, where)
        self._received[peer].append(bytes(buffer.numpy()))

    def _refuse(self, peer: int, mine: bytes, theirs: bytes) -> None:
        assert self._channel is not None
        error = words.difference(self._rank, _words(mine), _now(mine), peer, _words(theirs), _now(theirs))
        self._channel.has_failed = True
        if isinstance(error, PeerLostError):
            self._channel.behind(peer, False)
        raise error


def _words(header: bytes) -> str:
    return header[_NUMBER_BYTES:_COMPARED_BYTES].rstrip(b"\0").decode(errors="replace")


def _now(header: bytes) -> str:
    return header[_COMPARED_BYTES:].rstrip(b"\0").decode(errors="replace")
