"""The words in which ranks tell each other what they do, and the error when two of them differ."""

import zlib

from lanewise.errors import DivergedError, ExchangeError, PeerLostError

THE_END = "the end of the run"
"""What a rank announces when it closes its run as planned."""
SILENCE = "before the first step"
"""The last word of a rank that has not spoken yet."""


def difference(rank: int, mine: str, my_word: str, peer: int, theirs: str, their_word: str) -> ExchangeError:
    """The error of a rank that is in `mine` when a peer is in `theirs`; a word says how far each had come."""
    if theirs == THE_END:
        return PeerLostError(
            (peer,),
            f"rank {rank} is in {mine} ({my_word or SILENCE}), but rank {peer} has ended its run "
            f"({their_word or SILENCE}). Look at that rank's own output: its script may have finished early. All "
            "ranks must run the same number of steps.",
        )
    return DivergedError(
        f"rank {rank} is in {mine} ({my_word or SILENCE}), but rank {peer} is in {theirs} ({their_word or SILENCE}). "
        "All ranks must make the same exchanges in the same order: run the same units in every lane, and call the "
        "same functions on every rank."
    )


def mark(where: str) -> int:
    """A number of 16 bits for the tag of a message. Ranks that do different things thus never mix up their data,
    whose lengths differ: Gloo ends the process on a message that is too long.
    """
    return zlib.crc32(where.encode()) & 0xFFFF
