"""What every rank of a host calls, in words, where the others can read it.

All ranks make the same calls in the same order. Each writes down what it calls before it waits for
anybody, so a rank that does something else is found at once and named, and never read from.

A log keeps the last few calls; each has one writer. The writer writes the words of a call and then raises
the count, and begins to write over call n only once its count stands at n + _KEPT - 1. So a reader who
finds the count below that after it has read a call has read the whole of it. That needs loads and stores
in program order, as on x86 (see `waiting.is_supported`).
"""

import mmap
from collections.abc import Callable, Sequence

from lanewise.engine.transport import words

_ENTRY_BYTES = 128
_KEPT = 256
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
        self._compared = [0] * len(pages)
        """The last call of each peer that was compared."""

    def note(self, where: str) -> int:
        """Write down the next call of this rank, before it shows in any other way; returns its number."""
        number = self._number + 1
        start = self._entries_start + number % _KEPT * _ENTRY_BYTES
        entry = where.encode()[:_ENTRY_BYTES].ljust(_ENTRY_BYTES, b"\0")
        self._pages[self._rank][start : start + _ENTRY_BYTES] = entry
        self._counts[self._rank][self._count_index] = self._number = number
        return number

    def check(self, peers: Sequence[int]) -> None:
        """Compare all calls that both this rank and a peer have made, and that are still written down."""
        for peer in peers:
            count = self._counts[peer][self._count_index]
            last = min(self._number, count)
            first = max(self._compared[peer] + 1, self._number - _KEPT + 1, count - _KEPT + 2)
            for number in range(first, last + 1):
                mine, theirs = self._entry(self._rank, number), self._entry(peer, number)
                was_kept = self._counts[peer][self._count_index] < number + _KEPT - 1
                if theirs != mine and was_kept:
                    raise words.difference(
                        self._rank, _text(mine), self._now(self._rank), peer, _text(theirs), self._now(peer)
                    )
            self._compared[peer] = max(last, self._compared[peer])

    def check_all(self) -> None:
        """Compare with every other rank."""
        self.check([peer for peer in range(len(self._pages)) if peer != self._rank])

    def release(self) -> None:
        """Let go of the pages."""
        for counts in self._counts:
            counts.release()
        self._counts.clear()
        self._pages = ()

    def _entry(self, rank: int, number: int) -> bytes:
        start = self._entries_start + number % _KEPT * _ENTRY_BYTES
        return self._pages[rank][start : start + _ENTRY_BYTES]


def _text(entry: bytes) -> str:
    return entry.rstrip(b"\0").decode(errors="replace")
