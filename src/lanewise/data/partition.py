"""Partitions: rules that say which lane a sample always goes to."""

from collections.abc import Callable, Hashable
from typing import Literal

from lanewise.errors import DataError
from lanewise.lanes.seeds import derive

Partition = Literal["uniform", "hash"] | Callable[[int], int]
"""Uniform: lanes share one shuffled row. Hash: samples with equal keys share a lane. Or a function from the
place of a sample to its lane."""


def lane_of_each(
    size: int, lanes: int, partition: Partition, key: Callable[[int], Hashable] | None
) -> tuple[int, ...] | None:
    """The lane of every sample, or None where any sample may go to any lane."""
    if partition == "uniform":
        if key is not None:
            raise DataError("key= is used with partition='hash' only; the partition here is 'uniform'.")
        return None
    if partition == "hash":
        if key is None:
            raise DataError(
                "partition='hash' needs key=, a function from the place of a sample to what it belongs to, such as "
                "key=lambda i: user_ids[i]."
            )
        return tuple(derive("key", repr(key(sample))) % lanes for sample in range(size))
    if not callable(partition):
        raise DataError(f"partition must be 'uniform', 'hash' or a function, found {partition!r}.")
    chosen = []
    for sample in range(size):
        lane = partition(sample)
        if not isinstance(lane, int) or not 0 <= lane < lanes:
            raise DataError(
                f"the partition function put sample {sample} into lane {lane!r}; lanes go from 0 to {lanes - 1}."
            )
        chosen.append(lane)
    return tuple(chosen)
