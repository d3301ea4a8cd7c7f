"""Shares: how many lanes each rank hosts and which slots it owns. Never changes a bit of the result."""

from collections.abc import Sequence

Span = tuple[int, int]
"""A half-open range, as ``(start, stop)``."""


def even(total: int, ranks: int) -> tuple[int, ...]:
    """Share `total` among `ranks`, the first ones getting one more where it does not divide.

    >>> even(8, 3)
    (3, 3, 2)
    """
    return tuple(total // ranks + (rank < total % ranks) for rank in range(ranks))


def weighted(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Share `total` in proportion to `weights`, by largest remainder; a weight of 0 gets nothing.

    >>> weighted(8, [3, 2, 1])
    (4, 3, 1)
    """
    whole = sum(weights)
    if not weights or min(weights) < 0 or not 0 < whole < float("inf"):
        raise ValueError(f"weights must be finite, not negative and not all 0: {list(weights)}")
    exact = [total * weight / whole for weight in weights]
    shares = [int(value) for value in exact]
    by_remainder = sorted(range(len(weights)), key=lambda rank: (shares[rank] - exact[rank], rank))
    for rank in by_remainder[: total - sum(shares)]:
        shares[rank] += 1
    return tuple(shares)


def spans(shares: Sequence[int]) -> tuple[Span, ...]:
    """Lay shares side by side.

    >>> spans((3, 3, 2))
    ((0, 3), (3, 6), (6, 8))
    """
    result = []
    start = 0
    for share in shares:
        result.append((start, start + share))
        start += share
    return tuple(result)
