"""Fetching batches with torch's DataLoader, to the same values on any number of ranks and workers.

Whoever asks for a sample gives the seed of everything that is drawn while it is made: torch, numpy and
Python's random begin anew for each sample. The process's own random streams are left as they were.
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from lanewise.engine.randomness import seed_all, untouched
from lanewise.lanes.seeds import derive

Ticket = tuple[int, int]
"""A place in the data set, and the seed of what is drawn for it."""

_END = object()


def fetch(
    dataset: Dataset[Any],
    batches: Iterable[list[Ticket]],
    collate_fn: Callable[[list[Any]], Any],
    num_workers: int,
    device: torch.device,
) -> Generator[Any, None, None]:
    """Load batches in order, ahead of their use where there are workers. Close it to end the workers."""
    loader = DataLoader(
        _Seeded(dataset),
        batch_sampler=_Once(iter(batches)),
        num_workers=num_workers,
        collate_fn=collate_fn,
        pin_memory=device.type == "cuda",
        generator=torch.Generator().manual_seed(0),
    )
    with untouched(device):
        loaded = iter(loader)
    try:
        while True:
            with untouched(device):
                batch = next(loaded, _END)
            if batch is _END:
                return
            yield move(batch, device)
    finally:
        if isinstance(loaded, _MultiProcessingDataLoaderIter):
            loaded._shutdown_workers()  # not left to its __del__, because a traceback may hold on to it


def move(batch: Any, device: torch.device) -> Any:
    """Whatever tensors a batch holds, on the device."""
    if device.type == "cpu":
        return batch
    return tree_map_only(torch.Tensor, lambda t: t.to(device, non_blocking=True), batch)


class _Once:
    """An iterable for DataLoader around an iterator."""

    def __init__(self, batches: Iterator[list[Ticket]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[Ticket]]:
        return self._batches


class _Seeded(Dataset[Any]):
    """A data set whose samples are asked for together with their seed."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset

    def __getitems__(self, tickets: list[Ticket]) -> list[Any]:
        fetch_many = getattr(self._dataset, "__getitems__", None)
        if fetch_many is not None:
            seed_all(derive(*(seed for _, seed in tickets)))
            return list(fetch_many([sample for sample, _ in tickets]))
        samples = []
        for sample, seed in tickets:
            seed_all(seed)
            samples.append(self._dataset[sample])
        return samples
