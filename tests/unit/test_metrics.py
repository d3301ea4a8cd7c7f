"""Metrics against their plain definitions, and every message."""

import doctest
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from lanewise import metrics
from lanewise.errors import DataError, SettingsError
from lanewise.metrics import F1, Accuracy, Mean, Metric, Perplexity, Precision, Recall, Tally

CLASSES = 4
labels = st.lists(
    st.tuples(st.integers(0, CLASSES - 1), st.integers(0, CLASSES - 1)), min_size=0, max_size=30
)


def tensors(pairs):
    both = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def ratio(part, whole):
    return part / whole if whole else 0.0


def by_class(pairs, label):
    """Right, predicted and true of one class, by counting."""
    right = sum(p == t == label for p, t in pairs)
    return right, sum(p == label for p, _ in pairs), sum(t == label for _, t in pairs)


FORMULAS = {
    Precision: lambda right, predicted, true: ratio(right, predicted),
    Recall: lambda right, predicted, true: ratio(right, true),
    F1: lambda right, predicted, true: ratio(2 * right, predicted + true),
}


def test_the_examples_in_the_docstrings():
    assert doctest.testmod(metrics).failed == 0
    assert doctest.testmod(metrics).attempted > 8


@given(labels)
def test_accuracy_is_the_part_that_is_right(pairs):
    assert Accuracy()(*tensors(pairs)) == ratio(sum(p == t for p, t in pairs), len(pairs))


@given(labels, st.sampled_from(list(FORMULAS)))
def test_averages_of_precision_recall_and_f1(pairs, kind):
    formula = FORMULAS[kind]
    columns = [by_class(pairs, label) for label in range(CLASSES)]
    occurring = [formula(*column) for column in columns if any(column)]
    macro = kind(average="macro", num_classes=CLASSES)
    assert macro(*tensors(pairs)) == pytest.approx(ratio(sum(occurring), len(occurring)))
    right = sum(p == t for p, t in pairs)
    assert kind(average="micro")(*tensors(pairs)) == formula(right, len(pairs), len(pairs))
    binary = [(p % 2, t % 2) for p, t in pairs]
    assert kind()(*tensors(binary)) == formula(*by_class(binary, 1))


@given(
    labels, labels, st.sampled_from([Accuracy(), F1(average="macro", num_classes=CLASSES), Recall("micro")])
)
def test_batches_add_up(first, second, metric):
    tally = Tally(metric)
    tally.update(*tensors(first))
    tally.update(*tensors(second))
    assert tally.counts.dtype == torch.int64
    assert tally.compute() == metric(*tensors(first + second))


def test_a_class_that_never_occurs_is_left_out_of_the_mean():
    predictions, targets = torch.tensor([0, 0, 1]), torch.tensor([0, 0, 2])
    assert Recall(average="macro", num_classes=4)(predictions, targets) == pytest.approx(1 / 3)


def test_top_k():
    scores = torch.tensor([[0.1, 0.2, 0.7], [0.5, 0.3, 0.2], [0.4, 0.5, 0.1]])
    targets = torch.tensor([1, 2, 2])
    assert Accuracy()(scores, targets) == 0.0
    assert Accuracy(top_k=2)(scores, targets) == pytest.approx(1 / 3)
    assert Accuracy(top_k=3)(scores, targets) == 1.0
    assert Accuracy(top_k=2, ignore_index=2)(scores, targets) == 1.0


def test_classes_last_or_second_as_torch_has_them():
    scores = torch.randn(5, 7, CLASSES)
    targets = scores.argmax(dim=-1)
    for metric in (Accuracy(), Accuracy(top_k=2), F1(average="macro", num_classes=CLASSES)):
        assert metric(scores, targets) == metric(scores.movedim(-1, 1), targets) == 1.0
    right = Perplexity()(scores, targets)
    assert right == Perplexity()(scores.movedim(-1, 1), targets)
    assert right == pytest.approx(math.exp(F.cross_entropy(scores.flatten(0, 1), targets.flatten())))


def test_single_scores_and_their_threshold():
    scores, targets = torch.tensor([0.2, 0.5, 0.9, -1.0]), torch.tensor([0, 1, 1, 1])
    for shape in ((4,), (4, 1)):
        assert Accuracy()(scores.reshape(shape), targets) == 0.75
        assert Recall()(scores.reshape(shape), targets) == pytest.approx(2 / 3)
        assert Precision(threshold=0.0)(scores.reshape(shape), targets) == pytest.approx(2 / 3)
    assert Accuracy()(scores > 0, targets.bool()) == 0.5


@pytest.mark.parametrize("metric", [Accuracy(ignore_index=-1), F1("micro", ignore_index=-1)])
def test_ignored_targets_count_for_nothing(metric):
    predictions, targets = torch.tensor([1, 0, 2, 3]), torch.tensor([1, -1, 0, -1])
    assert metric(predictions, targets) == 0.5
    assert metric(predictions, torch.full((4,), -1)) == 0.0


def test_perplexity_of_some_tokens_and_of_none():
    scores, targets = torch.randn(2, 3, 5).bfloat16(), torch.tensor([[1, 2, -100], [-100, 4, 0]])
    expected = F.cross_entropy(scores.float().flatten(0, 1), targets.flatten())
    assert Perplexity()(scores, targets) == pytest.approx(math.exp(expected), rel=1e-6)
    assert Perplexity()(scores, torch.full((2, 3), -100)) == 1.0
    assert math.isfinite(Perplexity()(torch.tensor([[0.0, 1e4]]), torch.tensor([0])))


def test_a_mean_of_values_of_a_mean_and_of_a_pair():
    predictions, targets = torch.tensor([1.0, 2.0, 6.0]), torch.tensor([0.0, 0.0, 0.0])
    for function in (
        lambda p, t: p - t,
        lambda p, t: (p - t).mean(),
        lambda p, t: float((p - t).mean()),
        lambda p, t: ((p - t).sum(), 3),
        lambda p, t: list(p - t),
    ):
        assert Mean(function)(predictions, targets) == 3.0
    tally = Tally(Mean(F.mse_loss))
    tally.update(torch.ones(1), torch.zeros(1))
    tally.update(torch.full((3,), 3.0), torch.zeros(3))
    assert tally.compute() == 7.0
    assert Mean(lambda p, t: (0.0, 0.0))(predictions, targets) == 0.0
    assert Mean(lambda p, t: (p["sum"], 2))({"sum": torch.tensor(5.0)}, None) == 2.5
    assert Mean(lambda p, t: p)(torch.tensor(4.0), None) == 4.0


def test_every_metric_is_one():
    for kind in (Accuracy, Precision, Recall, F1, Perplexity):
        assert isinstance(kind(), Metric)
    assert not isinstance(F.cross_entropy, Metric)


X, Y = torch.zeros(3, 4), torch.zeros(3, dtype=torch.long)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Accuracy(top_k=0), r"Accuracy: top_k must be 1 or more, found 0\."),
        (lambda: Recall(average="mean"), r"Recall: average must be binary, micro or macro, found 'mean'\."),
        (lambda: F1(average="macro"), r"F1: average='macro' needs num_classes, 2 or more, found None\."),
        (lambda: F1("macro", 1), r"F1: average='macro' needs num_classes, 2 or more, found 1\."),
    ],
)
def test_settings_that_cannot_be_met(call, message):
    with pytest.raises(SettingsError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Tally(Accuracy()).compute(), r"Accuracy\(.*\) has counted nothing yet\. Call update"),
        (lambda: Accuracy(top_k=5)(X, Y), r"Accuracy\(top_k=5\) got scores of only 4 classes\."),
        (
            lambda: Precision()(Y + 2, Y),
            r"Precision\(.*knows the classes 0 to 1, found 2 to 2 in the predictions",
        ),
        (lambda: Recall()(Y, Y - 1), r"found -1 to -1 in the targets\. Set average= and num_classes="),
        (
            lambda: Accuracy()(X, Y.float()),
            r"targets must be class numbers \(integers or bool\), found torch\.float32",
        ),
        (
            lambda: Accuracy()(X, Y[:2]),
            r"predictions of shape \(3, 4\) and targets of shape \(2,\) do not fit",
        ),
        (
            lambda: Perplexity()(Y, Y),
            r"scores have one dimension more than targets, the classes, last or second",
        ),
        (
            lambda: Accuracy()(torch.zeros(2, 3, 3), torch.zeros(2, 3, dtype=torch.long)),
            r"in predictions of shape \(2, 3, 3\) either of two dimensions may be the classes\. Flatten both",
        ),
        (lambda: Mean(lambda p, t: (1, 2, 3))(X, Y), r"values or a pair \(sum, weight\), found 3\."),
        (
            lambda: Mean(lambda p, t: 1.0)({}, None),
            r"needs the size of the batch, and neither predictions nor",
        ),
    ],
)
def test_data_that_does_not_fit(call, message):
    with pytest.raises(DataError, match=message):
        call()
