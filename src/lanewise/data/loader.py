"""A data set as lanes see it: which samples each of them computes at a step, and those samples loaded.

What a sample turns into may depend on the run's seed, the epoch and its place in the data set, never on
the rank or the worker that loads it.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset
from torch.utils.data import default_collate as torch_collate

from lanewise.data.fetch import Ticket, fetch
from lanewise.data.partition import Partition, lane_of_each
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

    @cached_property
    def identity(self) -> tuple[int, int, int]:
        """Samples, batch size, and a hash of what else decides the order: ranks must have the same."""
        order = self.order
        lanes = order.lane_of or ()
        rest = derive("order", order.seed, int(order.shuffle), int(order.drop_last), *lanes)
        return order.size, order.batch, rest

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

    def stream(
        self, portions: Iterable[Portion], device: torch.device
    ) -> Generator[tuple[Portion, Any], None, None]:
        """Load portions in order, ahead of their use where there are workers. Close it to end the workers."""
        taken: deque[Portion] = deque()

        def tickets() -> Iterator[list[Ticket]]:
            for portion in portions:
                taken.append(portion)
                yield [(s, derive(self.order.seed, "sample", portion.epoch, s)) for s in portion.samples]

        with closing(fetch(self.dataset, tickets(), self.collate_fn, self.num_workers, device)) as batches:
            for batch in batches:
                yield taken.popleft(), batch


def check_map_style(dataset: Any, where: str) -> int:
    """The number of samples of a data set that has places, and any."""
    has_places = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(dataset, IterableDataset) or not has_places:
        raise DataError(
            f"{where} needs a map-style data set with __len__ and __getitem__, found {type(dataset).__name__}. "
            "A stream has no places to deal out; read it into a list, or index it."
        )
    size = len(dataset)
    if size == 0:
        raise DataError(f"{where}: the data set is empty.")
    return size


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
    size = check_map_style(dataset, "run.loader")
    unit = lanes * micro_batches
    for name, value in (("batch_size", batch_size), ("num_workers", num_workers)):
        if not isinstance(value, int):
            raise DataError(f"run.loader: {name} must be a whole number, found {value!r}.")
    if batch_size < 1 or batch_size % unit:
        lower = max(batch_size // unit * unit, 0)
        upper = lower + unit
        fitting = f"{lower} or {upper}" if lower > 0 else str(upper)
        divisors = [v for v in range(1, batch_size + 1) if batch_size % (v * micro_batches) == 0]
        what = f"lanes={lanes}" + (f" times micro_batches={micro_batches}" if micro_batches > 1 else "")
        raise DataError(
            f"batch_size={batch_size} is the global batch and must be a multiple of {what}. Use batch_size={fitting}"
            + (f", or lanes= one of {divisors[-8:]}." if divisors else ".")
        )
    if num_workers < 0:
        raise DataError(f"num_workers must be 0 or more, found {num_workers}.")
    order = Order(
        size, batch_size, lanes, seed, shuffle, drop_last, lane_of_each(size, lanes, partition, key)
    )
    if order.steps_per_epoch == 0 and order.lane_of is not None:
        counts = [sum(1 for chosen in order.lane_of if chosen == lane) for lane in range(lanes)]
        raise DataError(
            f"lane {counts.index(min(counts))} of the partition has only {min(counts)} samples, and with drop_last a "
            f"step needs {order.lane_batch} in each lane. Use a smaller batch_size, another partition, or "
            "drop_last=False."
        )
    if order.steps_per_epoch == 0:
        raise DataError(
            f"the data set has {size} samples, and with drop_last no batch of {batch_size} is full. Use a smaller "
            "batch_size, or drop_last=False."
        )
    return Loader(dataset, order, micro_batches, num_workers, collate_fn)
