"""`run.evaluate` and `run.fit`: the same numbers and digests for any number of ranks, strategy and transport."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lanewise.metrics import F1, Accuracy, Mean, Perplexity
from tests.helpers.cases import grid, one_value


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
    "loss": F.cross_entropy,
    "margins": Mean(lambda scores, _: scores.max(dim=1).values.exp()),
    "perplexity": Perplexity(),
}
SIZES = (1, 2, 7, 13, 37)


def evaluate_everything(cell):
    """Sets of all sizes before, between and after steps of training, by `fit` and by hand."""
    run, model, optimizer = begin(cell)
    seen = []
    loader = run.loader(points(48), batch_size=12, shuffle=True)
    for step in run.steps(loader, total=3):
        if step.index == 1:
            seen.append(run.evaluate(points(7), METRICS, batch_size=2))
        for batch in step:
            step.backward(loss(model, batch))
        step.update()
        seen.append(run.evaluate(points(SIZES[step.index]), METRICS, batch_size=3))
    seen += [run.evaluate(points(size), METRICS, batch_size=4) for size in SIZES[3:]]
    seen.append(run.evaluate(loader, METRICS))
    result = run.fit(
        loader,
        loss,
        steps=10,
        clip=0.5,
        schedulers=torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
        evaluate=lambda: run.evaluate(points(29), METRICS, batch_size=8),
        every=2,
        watch="loss",
        progress=False,
    )
    seen.append((result.steps, result.losses, [e.values for e in result.evaluations], result.best.step))
    digest = run.digest()
    run.close()
    return repr(seen), digest


def test_all_worlds_strategies_and_transports():
    values, _ = one_value(grid([1, 2, 3, 5]), evaluate_everything)
    assert "nan" not in values
