"""The snippets of the pages on training and data run as they stand, one after the other."""

import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lanewise as lw

DOCS = Path(__file__).parents[2] / "docs"


def snippets(page):
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


def points(size):
    x = torch.randn(size, 20)
    return TensorDataset(x, x[:, :3].argmax(dim=1))


@pytest.fixture
def names():
    valid = points(30)
    return {
        "valid": valid,
        "records": [{"inputs": x, "label": y} for x, y in valid],
        "dataset": points(200),
        "user_of": [f"user {n % 9}" for n in range(200)],
        "region_of": [n % 3 for n in range(200)],
    }


def test_training(names, capsys):
    for code in snippets("training.md"):
        exec(code, names)
    assert names["result"].steps == names["run"].position
    assert set(names["values"]) == {"accuracy", "loss"}
    near = lw.metrics.Tally(names["Within"](1.0))
    near.update(torch.tensor([1.0, 2.0]), torch.tensor([1.5, 4.0]))
    assert near.compute() == 0.5
    names["run"].close()


def test_data(names):
    run = names["run"] = lw.start(lanes=8, sinks=[])
    model = torch.nn.Linear(20, 3)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for code in snippets("data.md"):
        exec(
            code.replace("        ...", "        step.backward(loss(batch))\n    step.update()"),
            {**names, "loss": loss(model)},
        )
    assert run.position == 3 * 4
    run.close()


def loss(model):
    return lambda batch: F.cross_entropy(model(batch[0]), batch[1])
