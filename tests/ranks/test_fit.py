"""`run.evaluate` and `run.fit`: the same numbers and digests for any number of ranks, strategy and transport."""

import multiprocessing
import random
import re

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from lanewise.errors import LanewiseError
from lanewise.metrics import F1, Accuracy, Mean, Perplexity
from tests.helpers.cases import Cell, grid, one_value


class Classifier(nn.Module):
    """Has batch norm, dropout and blocks, so that eval mode matters and units are gathered one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 10)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10), nn.GELU(), nn.Dropout(0.2)) for _ in range(2)
        )
        self.head = nn.Linear(10, 4)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def points(samples):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(samples, 6, generator=generator)
    return TensorDataset(x, (x[:, 0] * 2 + x[:, 1]).long() % 4)


def begin(cell, **settings):
    run = cell.start(lanes=6, seed=1, **settings)
    model = Classifier()
    model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.02))
    return run, model, optimizer


def loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


METRICS = {
    "accuracy": Accuracy(),
    "f1": F1(average="macro", num_classes=4),
    "perplexity": Perplexity(),
    "loss": F.cross_entropy,
    # More digits than fp32, which fp64 would add without rounding in any order.
    "fine": Mean(lambda scores, _: scores.double().exp()),
}


def evaluate_and_fit(cell):
    """Sets of many sizes before and between steps, and through `fit`: fewer batches than ranks, and uneven ones."""
    run, model, optimizer = begin(cell)
    seen = []
    loader = run.loader(points(48), batch_size=12, shuffle=True)
    for step in run.steps(loader, total=2):
        seen.append(run.evaluate(points(7), METRICS, batch_size=2))
        for batch in step:
            step.backward(loss(model, batch))
        step.update()
        seen.append(run.evaluate(points(1), METRICS))
    seen.append(run.evaluate(points(27), METRICS, batch_size=1))
    seen.append(run.evaluate(loader, METRICS))
    result = run.fit(
        loader,
        loss,
        steps=6,
        clip=0.5,
        schedulers=torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
        evaluate=lambda: run.evaluate(points(21), METRICS, batch_size=5),
        every=2,
        watch="loss",
        patience=1,
        progress=False,
    )
    seen.append((result.steps, result.losses, [e.values for e in result.evaluations], result.stopped_early))
    digest = run.digest()
    run.close()
    return repr(seen), digest


def test_all_worlds_strategies_and_transports():
    values, _ = one_value(grid([1, 2, 3, 5]), evaluate_and_fit)
    assert "nan" not in values


class Noisy(Dataset):
    """Points with noise from every global stream."""

    def __init__(self, samples):
        self.points = points(samples)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, place):
        x, y = self.points[place]
        return x + torch.randn(6) + float(np.random.rand()) + random.random(), y


def train_with_workers(cell):
    """Worlds of 1 load by themselves, the others with two workers a rank."""
    multiprocessing.current_process()._config["daemon"] = (
        False  # as a launched rank is: workers are its children
    )
    multiprocessing.set_start_method("fork", force=True)
    run, model, _ = begin(cell)
    num_workers = 0 if cell.world == 1 else 2
    loader = run.loader(Noisy(30), 12, shuffle=True, num_workers=num_workers, partition=lambda i: i % 5)
    seen = []
    for step in run.steps(loader, epochs=2):
        for batch in step:
            step.backward(loss(model, batch))
        step.update()
        if step.index == 4:
            break
        run.rehost((1, *[0] * (cell.world - 1)) if step.index == 1 else "even")
    seen.append(run.evaluate(loader, METRICS))
    seen.append(run.evaluate(Noisy(11), METRICS, batch_size=4, num_workers=num_workers))
    digest = run.digest()
    run.close()
    return repr(seen), digest, len(multiprocessing.active_children())


def test_workers_and_ranks_change_no_bit_of_what_is_drawn():
    cells = [Cell(1, "ddp"), Cell(3, "zero3", "gloo"), Cell(3, "zero1", "shared"), Cell(5, "zero2", "shared")]
    assert one_value(cells, train_with_workers)[2] == 0


def evaluate_without_trace(cell):
    """Worlds of 1 only train; the others evaluate between, and look whether anything has changed."""
    run, model, _ = begin(cell)
    model.blocks[1].eval()
    loader = run.loader(points(48), batch_size=12)
    for step in run.steps(loader, total=3):
        if cell.world > 1:
            before, memory = state(model), run.memory()
            run.evaluate(points(7), METRICS, batch_size=2, forward=meddle)
            assert state(model) == before
            assert step.index == 0 or run.memory() == memory
        for batch in step:
            step.backward(loss(model, batch))
        step.update()
    digest = run.digest()
    if cell.world > 1:
        outside = run.evaluate(points(5), METRICS, batch_size=2)
        with run.gathered():
            assert run.evaluate(points(5), METRICS, batch_size=2) == outside
    run.close()
    return digest


def state(model):
    """All that an evaluation might disturb."""
    return (
        [module.training for module in model.modules()],
        [(name, buffer.tolist()) for name, buffer in model.named_buffers()],
        [parameter.grad for parameter in model.parameters()],
        torch.get_rng_state().tolist(),
        random.getstate(),
        torch.is_grad_enabled(),
    )


def meddle(model, batch):
    """A forward that does what it should not: it trains a batch norm, and draws."""
    model.blocks[0].train()
    torch.rand(3), random.random()
    x, y = batch
    return model(torch.cat([x, x + 1]))[: len(x)], y


def test_an_evaluation_leaves_no_trace():
    one_value([Cell(1, "ddp"), *grid([3], ["ddp", "zero1", "zero3"])], evaluate_without_trace)


def differ(cell):
    """The errors of ranks that bring unlike data, values or counts."""
    run, _, _ = begin(cell)
    odd = run.rank == 2
    messages = []

    def note(call):
        try:
            call()
        except LanewiseError as error:
            messages.append(f"{type(error).__name__}: {error}")

    def steps(loader):
        return lambda: next(run.steps(loader))

    note(lambda: run.evaluate(points(6 if odd else 9), METRICS))
    note(lambda: run.evaluate(points(9), {"x": Shape(2 if odd else 3)}, batch_size=3))
    note(steps(run.loader(points(24 if odd else 48), 12)))
    note(steps(run.loader(points(48), 12, shuffle=odd)))
    note(
        lambda: run.fit(
            run.loader(points(48), 12), loss, steps=1, evaluate=lambda: {"x": odd}, progress=False
        )
    )
    run.close()
    return messages


class Shape:
    """Counts of a chosen size."""

    def __init__(self, size):
        self.size = size

    def count(self, predictions, targets):
        return torch.zeros(self.size)

    def compute(self, counts):
        return 0.0


DIFFERENCES = [
    r"DataError: run\.evaluate: rank 0 has 9 samples, batch_size=64 and 5 metric\(s\), but rank 2 has 6, 64 and 5\.",
    r"DataError: metric 'x': count gave other types or shapes on other ranks\. All batches",
    r"DataError: rank 2 has a loader of 24 samples with batch_size=12, but rank 0 one of 48 with batch_size=12\. Give",
    r"DataError: the loaders of rank 2 and rank 0 differ in shuffle, drop_last or partition\. All ranks",
    r"DivergedError: run\.fit: evaluate gave other values on rank\(s\) \[2\] than on rank 0, so the ranks would",
]


def test_ranks_that_bring_other_data_are_told():
    messages = one_value(grid([3], ["ddp", "zero3"]), differ)
    assert len(messages) == len(DIFFERENCES)
    for message, expected in zip(messages, DIFFERENCES, strict=True):
        assert re.match(expected, message)
