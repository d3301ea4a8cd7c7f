"""Who is to blame for a wait: the rank that everybody waits for in the end, not the one who waits for it too.

A rank that gives up on another says so before it raises, and one that waits long says for whom, both where
the others can read it even after it has ended.
"""

import mmap
from collections.abc import Sequence

NUM_BYTES = 16
"""What this takes of a rank's page."""


class Suspects:
    """The accusations and the long waits of all ranks: this one's to write, the others' to read."""

    def __init__(self, pages: Sequence[mmap.mmap], start: int, rank: int) -> None:
        """Each page has `NUM_BYTES` at `start` for this."""
        self._words = [memoryview(page).cast("Q") for page in pages]
        self._accused, self._awaited = start // 8, start // 8 + 1
        self._rank = rank

    def await_(self, peer: int | None) -> None:
        """Say for whom this rank waits, or that it waits no more."""
        self._words[self._rank][self._awaited] = 0 if peer is None else peer + 1

    def accuse(self, peer: int) -> None:
        """Say that this rank gives up on another."""
        self._words[self._rank][self._accused] = peer + 1

    def behind(self, peer: int, has_ended: bool) -> int:
        """The rank that is behind the silence of `peer`. One that has ended waits for nobody."""
        met = {self._rank}
        while peer not in met:
            met.add(peer)
            words = self._words[peer]
            named = words[self._accused] or (0 if has_ended else words[self._awaited])
            if not named or named - 1 in met:
                return peer
            peer, has_ended = named - 1, False
        return peer

    def release(self) -> None:
        """Let go of the pages."""
        for words in self._words:
            words.release()
        self._words.clear()
