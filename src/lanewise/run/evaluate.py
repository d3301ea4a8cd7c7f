"""Evaluation: every rank counts its share of a data set's batches, and all ranks get the same bits.

What a batch is depends on the data set and the batch size alone. The counts of batches are added in the
canonical tree over all of them, so it makes no difference who counted which. A rank that has run out of
batches takes part in the gathers of those that have not.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import Dataset, default_collate

from lanewise.data.fetch import Ticket, fetch
from lanewise.data.loader import Loader, check_map_style
from lanewise.engine.randomness import seed_all, untouched
from lanewise.engine.transport.protocol import Transport
from lanewise.errors import DataError
from lanewise.lanes.hosting import even, spans
from lanewise.lanes.seeds import derive
from lanewise.lanes.tree import Node, aligned, leaf, parent, root, sibling
from lanewise.metrics import Mean, Metric
from lanewise.run import agree

if TYPE_CHECKING:
    from lanewise.run.session import Run

Forward = Callable[[nn.Module, Any], tuple[Any, Any]]
"""From the model and a batch to predictions and targets."""

_BATCH_SIZE = 64
_ROUNDS_TOGETHER = 8
"""Ranks wait for each other this often, so that a fast one never waits long enough to give up."""
_DTYPES = (torch.int64, torch.float64)
_MOST_DIMENSIONS = 4


def evaluate(
    run: "Run",
    dataset: Dataset[Any] | Loader,
    metrics: Mapping[str, Metric | Callable[[Any, Any], Any]],
    *,
    batch_size: int | None = None,
    forward: Forward | None = None,
    num_workers: int | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> dict[str, float]:
    """Compute metrics over all samples of a data set, without gradient and in eval mode. Call it on all ranks.

    The result is the same to the last bit for any number of ranks and any strategy. The random streams, the
    buffers and the position of the run are afterwards as they were.

    A metric is one of `lanewise.metrics`, or a function of predictions and targets whose mean is taken.
    `forward(model, batch)` gives those two; without it the last of a batch is the targets, and the model is
    called with what comes before. `batch_size` samples (64 if nothing is said) go through the model at a
    time. A loader of this run may stand for its data set: then its micro-batches and workers are used.

    >>> run.evaluate(valid, {"accuracy": Accuracy(), "loss": F.cross_entropy})   # doctest: +SKIP
    {'accuracy': 0.9375, 'loss': 0.21083984375}
    """
    engine, transport = run.engine, run.engine.world.transport
    run.check_between_steps("run.evaluate")
    if isinstance(dataset, Loader):
        batch_size = batch_size or dataset.order.lane_batch // dataset.micro_batches
        num_workers = dataset.num_workers if num_workers is None else num_workers
        collate_fn = collate_fn or dataset.collate_fn
        dataset = dataset.dataset
    size = check_map_style(dataset, "run.evaluate")
    batch_size = _BATCH_SIZE if batch_size is None else batch_size
    if batch_size < 1:
        raise DataError(f"run.evaluate: batch_size must be 1 or more, found {batch_size}.")
    if not metrics:
        raise DataError("run.evaluate: no metrics were given.")
    forward = forward or _predict
    counts = [Counts(name, metric, -(-size // batch_size)) for name, metric in metrics.items()]
    agree.on_evaluation((size, batch_size, len(counts)), transport)
    shares = spans(even(-(-size // batch_size), run.world_size))
    first, stop = shares[run.rank]
    tickets = _tickets(range(first, stop), batch_size, size, run.settings.seed)
    loading = fetch(dataset, tickets, collate_fn or default_collate, num_workers or 0, run.device)
    with untouched(run.device), engine.evaluating(), closing(loading) as batches:
        for turn in range(shares[0][1]):
            number = first + turn
            if number < stop:
                transport.say(f"evaluation, batch {number}")
                batch = next(batches)
                seed_all(derive(run.settings.seed, "evaluate", "batch", number))
                predictions, targets = forward(engine.model, batch)
                for count in counts:
                    count.add(number, predictions, targets)
            else:
                engine.home.follow(0)
            if (turn + 1) % _ROUNDS_TOGETHER == 0:
                transport.barrier("an evaluation")
    combine(counts, shares, run.rank, transport)
    return {count.name: count.compute() for count in counts}


class Counts:
    """One metric's counts of batches, added up as far as siblings are here."""

    def __init__(self, name: str, metric: Metric | Callable[[Any, Any], Any], num_batches: int) -> None:
        if isinstance(metric, type):
            raise DataError(
                f"metric {name!r} is the class {metric.__name__}; give an object of it: {metric.__name__}()."
            )
        if not callable(metric) and not isinstance(metric, Metric):
            raise DataError(
                f"metric {name!r} must be one of lanewise.metrics or a function of predictions and targets, "
                f"found {type(metric).__name__}."
            )
        self.name = name
        self.metric: Metric = metric if isinstance(metric, Metric) else Mean(metric)
        self.num_batches = num_batches
        self.pending: dict[Node, torch.Tensor] = {}
        """Sums of the subtrees whose siblings are still to come."""

    def add(self, number: int, predictions: Any, targets: Any) -> None:
        """Count one batch."""
        self.merge(leaf(number), self._checked(self.metric.count(predictions, targets), number))

    def merge(self, node: Node, value: torch.Tensor) -> None:
        """Add a subtree's sum to its sibling's, and so on up the tree."""
        while node != root(self.num_batches):
            other = self.pending.pop(sibling(node, self.num_batches), None)
            if other is None:
                break
            value = value + other
            node = parent(node, self.num_batches)
        self.pending[node] = value

    def compute(self) -> float:
        """The metric of all batches."""
        return float(self.metric.compute(self.pending[root(self.num_batches)]))

    @property
    def kind(self) -> list[int]:
        """Type and shape of the counts in numbers, or all -1 where nothing was counted here."""
        if not self.pending:
            return [-1] * (2 + _MOST_DIMENSIONS)
        value = next(iter(self.pending.values()))
        padding = [0] * (_MOST_DIMENSIONS - value.dim())
        return [_DTYPES.index(value.dtype), value.dim(), *value.shape, *padding]

    def _checked(self, value: Any, number: int) -> torch.Tensor:
        where = f"metric {self.name!r}, batch {number} of the evaluation"
        if not isinstance(value, torch.Tensor) or value.is_complex() or value.dim() > _MOST_DIMENSIONS:
            found = type(value).__name__
            if isinstance(value, torch.Tensor):
                found = f"{value.dtype} of {value.dim()} dimensions"
            raise DataError(
                f"{where}: count must give a tensor of numbers with at most {_MOST_DIMENSIONS} dimensions, "
                f"found {found}."
            )
        dtype = torch.float64 if value.is_floating_point() else torch.int64
        counts: torch.Tensor = value.detach().cpu().to(dtype)
        for earlier in self.pending.values():
            if (earlier.dtype, earlier.shape) != (counts.dtype, counts.shape):
                raise DataError(
                    f"{where}: count gave {counts.dtype} of shape {tuple(counts.shape)}, and {earlier.dtype} of shape "
                    f"{tuple(earlier.shape)} before. All batches of a metric must be counted alike."
                )
        return counts


def combine(counts: Sequence[Counts], shares: Sequence[Node], rank: int, transport: Transport) -> None:
    """Exchange what is pending on each rank, so that every rank has every sum. Collective."""
    kinds = torch.tensor([count.kind for count in counts], dtype=torch.int64)
    by_rank = transport.share(kinds, "the kinds of evaluated counts").tolist()
    for number, count in enumerate(counts):
        known = {tuple(kinds[number]) for kinds in by_rank if kinds[number][0] >= 0}
        if len(known) > 1:
            raise DataError(
                f"metric {count.name!r}: count gave other types or shapes on other ranks. All batches of a metric must "
                "be counted alike."
            )
        index, dimensions, *shape = known.pop()
        _combine_one(count, _DTYPES[index], shape[:dimensions], shares, rank, transport)


def _combine_one(
    count: Counts,
    dtype: torch.dtype,
    shape: Sequence[int],
    shares: Sequence[Node],
    rank: int,
    transport: Transport,
) -> None:
    nodes = [aligned(*share, count.num_batches) for share in shares]
    sent = torch.zeros(max(len(row) for row in nodes), *shape, dtype=dtype)
    for number, node in enumerate(nodes[rank]):
        sent[number] = count.pending[node]
    received = transport.share(sent, f"the counts of metric {count.name}")
    count.pending = {}
    for values, row in zip(received, nodes, strict=True):
        for value, node in zip(values, row, strict=False):
            count.merge(node, value)


def _tickets(numbers: range, batch_size: int, size: int, seed: int) -> Iterator[list[Ticket]]:
    for number in numbers:
        samples = range(number * batch_size, min((number + 1) * batch_size, size))
        yield [(sample, derive(seed, "evaluate", sample)) for sample in samples]


def _predict(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        raise DataError(
            f"run.evaluate: a batch is a {type(batch).__name__}, not inputs followed by targets. Say what to do with "
            "it: forward=lambda model, batch: (model(...), targets)."
        )
    *inputs, targets = batch
    return model(*inputs), targets
