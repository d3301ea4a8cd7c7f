"""What every rank of a host calls, in words, where the others can read it.

All ranks make the same calls in the same order. Each writes down what it calls before it waits for
anybody, so a rank that does something else is found at once and named, and never read from.
"""

import mmap
from collections.abc import Callable, Sequence

from lanewise.errors import DivergedError

_ENTRY_BYTES = 128
_KEPT = 256
_SAFE = _KEPT // 2
"""How far behind a rank may look: what is older may be written over while it is read."""
NUM_BYTES = 64 + _KEPT * _ENTRY_BYTES
"""What the log of one rank takes."""


class Calls:
    """The logs of all ranks: this one's to write, the others' to compare."""

    def __init__(self, pages: Sequence[mmap.mmap], start: int, rank: int, now: Callable[[int], str]) -> None:
        """Each page has `NUM_BYTES` at `start` for this. `now` gives a rank's last word."""
        self._pages = tuple(pages)
        self._counts = [memoryview(page).cast("Q") for page in pages]
        self._count_index = start // 8
        self._entries_start = start + 64
        self._rank = rank
        self._now = now
        self._number = 0

    def note(self, where: str) -> int:
        """Write down the next call of this rank, before it shows in any other way; returns its number."""
        self._number = number = self._number + 1
        start = self._start(number)
        self._pages[self._rank][start : start + _ENTRY_BYTES] = where.encode()[:_ENTRY_BYTES].ljust(
            _ENTRY_BYTES, b"\0"
        )
        self._counts[self._rank][self._count_index] = number
        return number

    def check(self, number: int, peers: Sequence[int]) -> None:
        """Compare one call with that of others who have made as many, where it is not long past."""
        mine = self._entry(self._rank, number)
        for peer in peers:
            ahead = self._counts[peer][self._count_index] - number
            if 0 <= ahead < _SAFE and self._entry(peer, number) != mine:
                self._refuse(peer, number)

    def check_recent(self) -> None:
        """Compare everything that is still written down."""
        for peer, counts in enumerate(self._counts):
            last = min(self._number, counts[self._count_index])
            for number in range(max(1, self._number - _SAFE), last + 1):
                self.check(number, [peer])

    def release(self) -> None:
        """Let go of the pages."""
        for counts in self._counts:
            counts.release()
        self._counts.clear()
        self._pages = ()

    def _start(self, number: int) -> int:
        return self._entries_start + number % _KEPT * _ENTRY_BYTES

    def _entry(self, rank: int, number: int) -> bytes:
        start = self._start(number)
        return self._pages[rank][start : start + _ENTRY_BYTES]

    def _refuse(self, peer: int, number: int) -> None:
        mine, theirs = (
            self._entry(rank, number).rstrip(b"\0").decode(errors="replace") for rank in (self._rank, peer)
        )
        raise DivergedError(
            f"rank {self._rank} is in {mine} ({self._now(self._rank)}), but rank {peer} is in {theirs} "
            f"({self._now(peer)}). All ranks must make the same exchanges in the same order: run the same units in "
            "every lane, and call the same functions on every rank."
        )
