"""Metrics: rules from predictions and targets to counts, and from counts to one number.

A metric is a frozen object without state. `count` says what one batch holds, `compute` what all of it comes
to. Counts that are integers are added, which is exact in any order; those that are fp64 are added in the
canonical order of the batches. So a metric has the same bits however many ranks have counted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import exp
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch.nn import functional

from lanewise.errors import DataError, SettingsError

Average = Literal["binary", "micro", "macro"]


@runtime_checkable
class Metric(Protocol):
    """What `run.evaluate` asks of a metric. Any object with these two methods is one."""

    def count(self, predictions: Any, targets: Any) -> torch.Tensor:
        """The counts of one batch: int64, or fp64 where there is no way to count in integers."""
        ...

    def compute(self, counts: torch.Tensor) -> float:
        """The value of the counts of all batches, added up."""
        ...


class _Callable:
    def __call__(self: Metric, predictions: Any, targets: Any) -> float:
        """The value of one batch alone."""
        return self.compute(self.count(predictions, targets))


class Tally:
    """Counts of one metric that grow batch by batch, for a loop of your own.

    >>> tally = Tally(Accuracy())
    >>> tally.update(torch.tensor([1, 0, 2]), torch.tensor([1, 0, 1]))
    >>> tally.update(torch.tensor([1]), torch.tensor([1]))
    >>> tally.compute()
    0.75
    """

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self.counts: torch.Tensor | None = None
        """What was counted so far; counts of other ranks or parts can be added to it."""

    def update(self, predictions: Any, targets: Any) -> None:
        """Add one batch."""
        counts = self.metric.count(predictions, targets)
        self.counts = counts if self.counts is None else self.counts + counts

    def compute(self) -> float:
        """The value of everything so far."""
        if self.counts is None:
            raise DataError(f"{self.metric!r} has counted nothing yet. Call update before compute.")
        return self.metric.compute(self.counts)


@dataclass(frozen=True)
class Accuracy(_Callable):
    """The part of samples (or tokens) whose class is predicted.

    Predictions are class numbers, or scores with one column a class; `top_k` counts a sample as right when
    its class is among the `top_k` highest scores. Targets equal to `ignore_index` are left out. 0.0 where
    nothing is left.

    >>> scores = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.3, 0.2]])
    >>> Accuracy()(scores, torch.tensor([1, 1])), Accuracy(top_k=2)(scores, torch.tensor([1, 1]))
    (0.5, 1.0)
    """

    top_k: int = 1
    ignore_index: int | None = None
    threshold: float = 0.5
    """From where on a single score means class 1. Use 0 where scores are logits."""

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise SettingsError(f"Accuracy: top_k must be 1 or more, found {self.top_k}.")

    def count(self, predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """How many are right, and how many there are."""
        if self.top_k > 1:
            hits, kept = self._count_top(predictions, targets)
        else:
            chosen, actual = _classes(predictions, targets, self.threshold, self.ignore_index)
            hits, kept = int((chosen == actual).sum()), actual.numel()
        return torch.tensor([hits, kept], dtype=torch.int64)

    def compute(self, counts: torch.Tensor) -> float:
        """Right ones over all."""
        return _ratio(counts[0], counts[1])

    def _count_top(self, predictions: torch.Tensor, targets: torch.Tensor) -> tuple[int, int]:
        scores = _scores_last(predictions, targets)
        if scores.shape[-1] < self.top_k:
            raise DataError(f"Accuracy(top_k={self.top_k}) got scores of only {scores.shape[-1]} classes.")
        kept = _kept(targets, self.ignore_index)
        best = scores.topk(self.top_k, dim=-1).indices
        hits = (best == targets.unsqueeze(-1)).any(dim=-1)
        return int(hits[kept].sum()), int(kept.sum())


@dataclass(frozen=True)
class _ByClass(_Callable):
    """Counts by class: how often it was right, predicted, and true.

    `average="binary"` looks at class 1 alone, "micro" at all samples together, "macro" takes the mean over
    classes, leaving out those that were neither predicted nor true. A division by nothing gives 0.0.
    """

    average: Average = "binary"
    num_classes: int | None = None
    ignore_index: int | None = None
    threshold: float = 0.5
    """From where on a single score means class 1. Use 0 where scores are logits."""

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.average not in ("binary", "micro", "macro"):
            raise SettingsError(f"{name}: average must be binary, micro or macro, found {self.average!r}.")
        if self.average == "macro" and (self.num_classes is None or self.num_classes < 2):
            raise SettingsError(
                f"{name}: average='macro' needs num_classes, 2 or more, found {self.num_classes}."
            )

    def count(self, predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Three rows (right, predicted, true) with a column for each class that matters."""
        chosen, actual = _classes(predictions, targets, self.threshold, self.ignore_index)
        right = actual[chosen == actual]
        if self.average == "micro":
            return torch.tensor([[right.numel()], [chosen.numel()], [actual.numel()]], dtype=torch.int64)
        classes = 2 if self.average == "binary" else self.num_classes
        assert classes is not None
        for what, values in (("predictions", chosen), ("targets", actual)):
            if values.numel() and not 0 <= int(values.min()) <= int(values.max()) < classes:
                raise DataError(
                    f"{self!r} knows the classes 0 to {classes - 1}, found {int(values.min())} to "
                    f"{int(values.max())} in the {what}. Set average= and num_classes= to fit, or ignore_index=."
                )
        rows = torch.stack([torch.bincount(v, minlength=classes) for v in (right, chosen, actual)])
        return rows[:, 1:] if self.average == "binary" else rows

    def compute(self, counts: torch.Tensor) -> float:
        """The mean over the classes that occur."""
        rows = [self._of(*column) for column in counts.T.tolist() if any(column)]
        return sum(rows) / len(rows) if rows else 0.0

    def _of(self, right: int, predicted: int, true: int) -> float:
        raise NotImplementedError


@dataclass(frozen=True)
class Precision(_ByClass):
    """Of what was predicted, the part that is true.

    >>> Precision()(torch.tensor([1, 1, 0, 1]), torch.tensor([1, 0, 0, 0]))
    0.3333333333333333
    """

    def _of(self, right: int, predicted: int, true: int) -> float:
        return _ratio(right, predicted)


@dataclass(frozen=True)
class Recall(_ByClass):
    """Of what is true, the part that was predicted.

    >>> Recall()(torch.tensor([1, 1, 0, 0]), torch.tensor([1, 0, 1, 0]))
    0.5
    """

    def _of(self, right: int, predicted: int, true: int) -> float:
        return _ratio(right, true)


@dataclass(frozen=True)
class F1(_ByClass):
    """The harmonic mean of precision and recall, class by class.

    >>> F1(average="macro", num_classes=2)(torch.tensor([1, 1, 0, 0]), torch.tensor([1, 0, 0, 0]))
    0.7333333333333334
    """

    def _of(self, right: int, predicted: int, true: int) -> float:
        return _ratio(2 * right, predicted + true)


@dataclass(frozen=True)
class Mean(_Callable):
    """The mean of any function of predictions and targets, such as a loss.

    The function gives one value a sample (or token), or their mean, which is then weighed by the size of the
    batch, or a pair (sum, weight) as `step.backward` takes. Sums are fp64.

    >>> Mean(lambda p, t: (p - t).abs())(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 4.0]))
    1.5
    """

    function: Callable[[Any, Any], Any]

    def count(self, predictions: Any, targets: Any) -> torch.Tensor:
        """The sum and the weight."""
        return _sum_and_weight(self.function(predictions, targets), _length(predictions, targets))

    def compute(self, counts: torch.Tensor) -> float:
        """The sum over the weight; 0.0 where nothing was counted."""
        return _ratio(counts[0], counts[1])


@dataclass(frozen=True)
class Perplexity(_Callable):
    """The exponential of the mean cross-entropy of each token. 1.0 where nothing was counted.

    >>> round(Perplexity()(torch.zeros(2, 5, 7), torch.ones(2, 5, dtype=torch.long)), 4)
    7.0
    """

    ignore_index: int = -100

    def count(self, predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The sum of the cross-entropies and the number of tokens."""
        scores = _scores_last(predictions, targets).flatten(0, -2).float()
        kept = _kept(targets, self.ignore_index).flatten()
        losses = functional.cross_entropy(scores[kept], targets.flatten()[kept], reduction="none")
        return torch.stack([losses.double().sum().cpu(), kept.sum().double().cpu()])

    def compute(self, counts: torch.Tensor) -> float:
        """The exponential of the mean."""
        return exp(min(_ratio(counts[0], counts[1]), 700.0))


def _sum_and_weight(value: Any, length: int | None) -> torch.Tensor:
    if isinstance(value, tuple):
        if len(value) != 2:
            raise DataError(
                f"Mean: the function must give values or a pair (sum, weight), found {len(value)}."
            )
        both = [float(torch.as_tensor(number).detach()) for number in value]
        return torch.tensor(both, dtype=torch.float64)
    values = torch.as_tensor(value).detach().double()
    if values.numel() != 1:
        return torch.tensor([float(values.sum()), values.numel()], dtype=torch.float64)
    if length is None:
        raise DataError(
            "Mean: one number for a whole batch needs the size of the batch, and neither predictions nor targets are a "
            "tensor. Let the function give one value a sample, or a pair (sum, weight)."
        )
    return torch.tensor([float(values) * length, length], dtype=torch.float64)


def _length(predictions: Any, targets: Any) -> int | None:
    for values in (targets, predictions):
        if isinstance(values, torch.Tensor):
            return values.shape[0] if values.dim() else 1
    return None


def _ratio(part: Any, whole: Any) -> float:
    return float(part) / float(whole) if whole else 0.0


def _kept(targets: torch.Tensor, ignore_index: int | None) -> torch.Tensor:
    return torch.ones_like(targets, dtype=torch.bool) if ignore_index is None else targets != ignore_index


def _scores_last(predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Scores with classes last, whether they came so or as torch's losses have them (second)."""
    if predictions.dim() == targets.dim() + 1:
        is_last = predictions.shape[:-1] == targets.shape
        is_second = (predictions.shape[0], *predictions.shape[2:]) == tuple(targets.shape)
        if is_last and is_second and predictions.dim() > 2:
            raise DataError(
                f"in predictions of shape {tuple(predictions.shape)} either of two dimensions may be the classes. "
                "Flatten both: predictions.flatten(0, 1), targets.flatten()."
            )
        if is_last or is_second:
            return predictions if is_last else predictions.movedim(1, -1)
    raise DataError(
        f"predictions of shape {tuple(predictions.shape)} and targets of shape {tuple(targets.shape)} do not fit: "
        "scores have one dimension more than targets, the classes, last or second."
    )


def _classes(
    predictions: torch.Tensor, targets: torch.Tensor, threshold: float, ignore_index: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Predicted and true class numbers, flat, on the CPU, without those to be ignored."""
    if targets.is_floating_point():
        raise DataError(f"targets must be class numbers (integers or bool), found {targets.dtype}.")
    if predictions.shape != targets.shape:
        scores = _scores_last(predictions, targets)
        predictions = scores.squeeze(-1) if scores.shape[-1] == 1 else scores.argmax(dim=-1)
    if predictions.is_floating_point():
        predictions = predictions >= threshold
    kept = _kept(targets, ignore_index)
    return predictions[kept].long().cpu(), targets[kept].long().cpu()
