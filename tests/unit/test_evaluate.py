"""`run.evaluate` on one rank: what it computes, when it may be called, and every message."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset, TensorDataset

import lanewise as lw
from lanewise.engine.sum import tree_sum
from lanewise.errors import DataError, StepError
from lanewise.metrics import Accuracy, Mean, Perplexity


def points(size):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(size, 6, generator=generator)
    return TensorDataset(x, (x[:, 0] * 2 + x[:, 1]).long() % 4)


@pytest.fixture
def run():
    run = lw.start(lanes=4, sinks=[])
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    yield run
    run.close()


def step_over(run, step):
    for x, y in step:
        step.backward(F.cross_entropy(run.engine.model(x), y))
    step.update()


def fine_loss(scores, targets):
    """Has more digits than fp32, which fp64 would add without rounding in any order."""
    return F.cross_entropy(scores.double(), targets)


@pytest.mark.parametrize("size", [1, 3, 40, 41, 150])
def test_it_is_the_plain_loop_with_batches_added_by_the_tree(run, size):
    model = run.engine.model
    found = run.evaluate(points(size), {"accuracy": Accuracy(), "loss": fine_loss}, batch_size=3)
    model.eval()
    right, losses, counts = 0, [], []
    for x, y in torch.utils.data.DataLoader(points(size), batch_size=3):
        with torch.no_grad():
            scores = model(x)
        right += int((scores.argmax(dim=1) == y).sum())
        losses.append(float(fine_loss(scores, y)) * len(y))
        counts.append(len(y))
    assert found == {"accuracy": right / size, "loss": tree_sum(losses) / sum(counts)}
    if size == 150:
        assert sum(losses) != tree_sum(losses)


def test_a_loader_stands_for_its_data_set(run):
    loader = run.loader(points(50), batch_size=24, shuffle=True, drop_last=True, collate_fn=lambda s: s)
    sizes = []

    def forward(model, batch):
        sizes.append(len(batch))
        x = torch.stack([x for x, _ in batch])
        return model(x), torch.stack([y for _, y in batch])

    found = run.evaluate(loader, {"x": Accuracy()}, forward=forward)
    assert sizes == [6] * 8 + [2]
    assert found == run.evaluate(points(50), {"x": Accuracy()}, batch_size=6)
    run.evaluate(loader, {"x": Accuracy()}, forward=forward, batch_size=25)
    assert sizes[9:] == [25, 25]
    assert run.evaluate(loader, {"x": Accuracy()}, collate_fn=torch.utils.data.default_collate) == found


def test_inputs_come_before_the_targets_and_64_at_a_time(run):
    x, y = points(70).tensors
    seen = []

    class Pair(nn.Module):
        def forward(self, a, b):
            seen.append((len(a), self.training, torch.is_grad_enabled()))
            return a + b

    run.engine.model.append(Pair())
    data = TensorDataset(x, x, y)
    run.engine.model.forward = lambda a, b: run.engine.model[-1](a, b)
    run.evaluate(data, {"x": Mean(lambda scores, targets: scores[:, 0])})
    assert seen == [(64, False, False), (6, False, False)]


def test_it_may_come_before_between_and_after_but_not_inside_a_step(run):
    data, metrics = points(16), {"x": Perplexity()}
    loader = run.loader(data, batch_size=8)
    first = run.evaluate(data, metrics)
    for step in run.steps(loader):
        run.evaluate(data, metrics)
        for x, y in step:
            with pytest.raises(
                StepError, match=rf"step {step.index}: run\.evaluate was called inside the step\. Call"
            ):
                run.evaluate(data, metrics)
            step.backward(F.cross_entropy(run.engine.model(x), y))
        with pytest.raises(StepError, match=r"inside the step\. Call it after step\.update\(\), or before"):
            run.evaluate(data, metrics)
        step.update()
        assert run.evaluate(data, metrics) != first
    run.evaluate(data, metrics)
    assert run.position == 2


def test_it_needs_a_prepared_model():
    run = lw.start(lanes=4, sinks=[])
    with pytest.raises(StepError, match=r"call run\.prepare\(model, optimizer\) first\."):
        run.evaluate(points(4), {"x": Accuracy()})
    run.close()


class Stream(IterableDataset):
    def __iter__(self):
        yield 0


class Counting:
    """A metric whose counts are given, one batch after the other."""

    def __init__(self, *counts):
        self.counts = iter(counts)

    def count(self, predictions, targets):
        return next(self.counts)

    def compute(self, counts):
        return float(counts.sum())


def test_a_metric_of_any_number_type_and_shape(run):
    counts = [torch.tensor([[True, False]]), torch.tensor([[3, 4]], dtype=torch.int8)]
    assert run.evaluate(points(2), {"x": Counting(*counts)}, batch_size=1) == {"x": 8.0}
    assert run.evaluate(points(1), {"x": Counting(torch.tensor(0.5).half())}) == {"x": 0.5}


@pytest.mark.parametrize(
    ("dataset", "metrics", "options", "message"),
    [
        (Stream(), {"x": Accuracy()}, {}, r"run\.evaluate needs a map-style data set .* found Stream"),
        ([], {"x": Accuracy()}, {}, r"run\.evaluate: the data set is empty\."),
        (points(4), {}, {}, r"run\.evaluate: no metrics were given\."),
        (
            points(4),
            {"x": Accuracy()},
            {"batch_size": 0},
            r"run\.evaluate: batch_size must be 1 or more, found 0\.",
        ),
        (
            points(4),
            {"x": Accuracy},
            {},
            r"metric 'x' is the class Accuracy; give an object of it: Accuracy\(\)\.",
        ),
        (
            points(4),
            {"x": "accuracy"},
            {},
            r"metric 'x' must be one of lanewise\.metrics or a function .* found str",
        ),
        (
            torch.zeros(4, 6),
            {"x": Accuracy()},
            {},
            r"a batch is a Tensor, not inputs followed by targets\. Say what to do with it: forward=lambda",
        ),
        ([(torch.zeros(6),)], {"x": Accuracy()}, {}, r"a batch is a list, not inputs followed by targets"),
        (
            points(4),
            {"x": Counting(0.5)},
            {},
            r"metric 'x', batch 0 of the evaluation: count must give a tensor of numbers .* found float\.",
        ),
        (
            points(4),
            {"x": Counting(torch.zeros(1, dtype=torch.cfloat))},
            {},
            r"found torch\.complex64 of 1 dim",
        ),
        (
            points(4),
            {"x": Counting(torch.zeros(1, 1, 1, 1, 1))},
            {},
            r"at most 4 dimensions, found torch\.float32 of 5",
        ),
        (
            points(4),
            {"x": Counting(torch.zeros(2), torch.zeros(3))},
            {"batch_size": 2},
            r"metric 'x', batch 1 of the evaluation: count gave torch\.float64 of shape \(3,\), and torch\.float64 of "
            r"shape \(2,\) before\. All batches",
        ),
        (
            points(4),
            {"x": Counting(torch.zeros(2), torch.zeros(2, dtype=torch.int32))},
            {"batch_size": 2},
            r"count gave torch\.int64 of shape \(2,\), and torch\.float64 of",
        ),
    ],
)
def test_what_cannot_be_evaluated(run, dataset, metrics, options, message):
    with pytest.raises(DataError, match=message):
        run.evaluate(dataset, metrics, **options)
    assert run.engine.model.training
    assert torch.is_grad_enabled()
