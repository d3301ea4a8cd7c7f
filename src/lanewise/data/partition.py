"""Partitions: rules that say which lane a sample always goes to."""

from collections.abc import Callable
from operator import index
from typing import Any, Literal

import numpy as np
import torch

from lanewise.errors import DataError
from lanewise.lanes.seeds import derive

Partition = Literal["uniform", "hash"] | Callable[[int], int]
"""Uniform: lanes share one shuffled row. Hash: samples with equal keys share a lane. Or a function from the
place of a sample to its lane."""


def lane_of_each(
    size: int, lanes: int, partition: Partition, key: Callable[[int], Any] | None
) -> tuple[int, ...] | None:
    """The lane of every sample, or None where any sample may go to any lane."""
    if key is not None and partition != "hash":
        found = repr(partition) if isinstance(partition, str) else "a function"
        raise DataError(f"key= is used with partition='hash' only; the partition here is {found}.")
    if partition == "uniform":
        return None
    if partition == "hash":
        if key is None:
            raise DataError(
                "partition='hash' needs key=, a function from the place of a sample to what it belongs to, such as "
                "key=lambda i: user_ids[i]."
            )
        return tuple(derive("key", _word(key(sample), sample)) % lanes for sample in range(size))
    if not callable(partition):
        raise DataError(f"partition must be 'uniform', 'hash' or a function, found {partition!r}.")
    return tuple(_lane(partition(sample), sample, lanes) for sample in range(size))


def _lane(chosen: Any, sample: int, lanes: int) -> int:
    try:
        lane = index(chosen)
    except TypeError:
        lane = -1
    if not 0 <= lane < lanes:
        raise DataError(
            f"the partition function put sample {sample} into lane {chosen!r}; lanes are whole numbers from 0 to "
            f"{lanes - 1}."
        )
    return lane


def _word(key: Any, sample: int) -> str:
    """A key in words that are the same in every process, unlike its hash or the address in its repr."""
    if isinstance(key, (np.generic, torch.Tensor)) and key.ndim == 0:
        key = key.item()
    if isinstance(key, tuple):
        return f"({','.join(_word(part, sample) for part in key)})"
    if key is None or isinstance(key, (str, bytes, int, float)):
        return repr(key)
    raise DataError(
        f"key= gave a {type(key).__name__} for sample {sample}. Give a string, a number, or a tuple of them: only "
        "those are told apart in the same way by every rank."
    )
