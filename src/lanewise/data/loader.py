"""Loading the samples of lanes with torch's DataLoader, to the same values on any number of ranks.

What a sample turns into may depend on the run's seed, the epoch and its place in the data set, never on
the rank or the worker that loads it: torch, numpy and Python's random are seeded for each sample.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset
from torch.utils.data import default_collate as torch_collate

from lanewise.data.partition import Partition, lane_of_each
from lanewise.engine.randomness import seed_all, untouched
from lanewise.errors import DataError
from lanewise.lanes.hosting import even, spans
from lanewise.lanes.order import Order
from lanewise.lanes.seeds import derive


@dataclass(frozen=True)
class Portion:
    """One micro-batch of one lane: its samples, and the part of a full micro-batch that they are."""

    step: int
    lane: int
    micro: int
    epoch: int
    samples: tuple[int, ...]
    share: float
    """1 for a full micro-batch, less for a short one, 0 for one that is computed for its shape alone."""


class Loader:
    """A data set with everything that decides its batches. Made by `run.loader`."""

    def __init__(
        self,
        dataset: Dataset[Any],
        order: Order,
        micro_batches: int,
        num_workers: int,
        collate_fn: Callable[[list[Any]], Any] | None,
    ) -> None:
        self.dataset = dataset
        self.order = order
        self.micro_batches = micro_batches
        self.num_workers = num_workers
        self.collate_fn = collate_fn or torch_collate

    def __len__(self) -> int:
        """Steps in an epoch."""
        return self.order.steps_per_epoch

    @property
    def batch_size(self) -> int:
        """Samples in a global batch."""
        return self.order.batch

    def portions(self, step: int, lane: int) -> tuple[Portion, ...]:
        """What a lane computes at a step, micro-batch by micro-batch."""
        batch = self.order.lane(step, lane)
        full = self.order.lane_batch // self.micro_batches
        if batch.padding:
            cut = [batch.samples[:full]] * self.micro_batches
            shares = [0.0] * self.micro_batches
        else:
            ranges = spans(even(len(batch.samples), self.micro_batches))
            cut = [batch.samples[low:high] or batch.samples[:1] for low, high in ranges]
            shares = [(high - low) / full for low, high in ranges]
        return tuple(
            Portion(step, lane, micro, batch.epoch, samples, share)
            for micro, (samples, share) in enumerate(zip(cut, shares, strict=True))
        )

    def stream(self, portions: Iterable[Portion], device: torch.device) -> Iterator[tuple[Portion, Any]]:
        """Load portions in order, ahead of their use where there are workers."""
        taken: list[Portion] = []

        def tickets() -> Iterator[list[tuple[int, int]]]:
            for portion in portions:
                taken.append(portion)
                yield [(s, derive(self.order.seed, "sample", portion.epoch, s)) for s in portion.samples]

        loader = DataLoader(
            _Seeded(self.dataset),
            batch_sampler=_Once(tickets()),
            num_workers=self.num_workers,
            collate_fn=self.collate_fn,
            pin_memory=device.type == "cuda",
            generator=torch.Generator().manual_seed(derive(self.order.seed, "workers")),
        )
        with untouched(device):
            batches = iter(loader)
        while True:
            with untouched(device):
                batch = next(batches, _END)
            if batch is _END:
                return
            yield taken.pop(0), move(batch, device)


_END = object()


def move(batch: Any, device: torch.device) -> Any:
    """Whatever tensors a batch holds, on the device."""
    if device.type == "cpu":
        return batch
    return tree_map_only(torch.Tensor, lambda t: t.to(device, non_blocking=True), batch)


class _Once:
    """An iterable for DataLoader around an iterator."""

    def __init__(self, tickets: Iterator[list[tuple[int, int]]]) -> None:
        self._tickets = tickets

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self._tickets


class _Seeded(Dataset[Any]):
    """A data set whose samples are asked for together with their seed."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset

    def __getitems__(self, tickets: Sequence[tuple[int, int]]) -> list[Any]:
        fetch_many = getattr(self._dataset, "__getitems__", None)
        if fetch_many is not None:
            seed_all(derive(*(seed for _, seed in tickets)))
            return list(fetch_many([sample for sample, _ in tickets]))
        samples = []
        for sample, seed in tickets:
            seed_all(seed)
            samples.append(self._dataset[sample])
        return samples


def make_loader(
    dataset: Dataset[Any],
    batch_size: int,
    lanes: int,
    seed: int,
    micro_batches: int,
    shuffle: bool,
    drop_last: bool,
    num_workers: int,
    collate_fn: Callable[[list[Any]], Any] | None,
    partition: Partition,
    key: Callable[[int], Any] | None,
) -> Loader:
    """Check everything and make a loader."""
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise DataError(
            f"run.loader needs a map-style data set with __len__ and __getitem__, found {type(dataset).__name__}. "
            "A stream has no places to deal out; read it into a list, or index it."
        )
    size = len(dataset)
    unit = lanes * micro_batches
    if batch_size < 1 or batch_size % unit:
        lower, upper = batch_size // unit * unit, (batch_size // unit + 1) * unit
        fitting = f"{lower} or {upper}" if lower > 0 else str(upper)
        divisors = [v for v in range(1, batch_size + 1) if batch_size % (v * micro_batches) == 0]
        what = f"lanes={lanes}" + (f" times micro_batches={micro_batches}" if micro_batches > 1 else "")
        raise DataError(
            f"batch_size={batch_size} is the global batch and must be a multiple of {what}. Use batch_size={fitting}"
            + (f", or lanes= one of {divisors[-8:]}." if divisors else ".")
        )
    if size == 0:
        raise DataError("the data set is empty.")
    if num_workers < 0:
        raise DataError(f"num_workers must be 0 or more, found {num_workers}.")
    order = Order(
        size, batch_size, lanes, seed, shuffle, drop_last, lane_of_each(size, lanes, partition, key)
    )
    if order.steps_per_epoch == 0:
        raise DataError(
            f"the data set has {size} samples, and with drop_last no batch of {batch_size} is full. Use a smaller "
            "batch_size, or drop_last=False."
        )
    return Loader(dataset, order, micro_batches, num_workers, collate_fn)
