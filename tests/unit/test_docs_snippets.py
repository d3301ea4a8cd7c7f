"""The snippets of the pages run as they stand, one after the other, and links lead somewhere."""

import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lanewise as lw

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


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


def test_checkpoints(names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = snippets("checkpoints.md")
    digests = []
    for resumes, total, folder in ((False, 6, "first"), (False, 9, "straight"), (True, 9, "resumed")):
        here = {**names, "resumes": resumes, "total": total}
        exec(code.replace('run.save("runs/first"', f'run.save("runs/{folder}"'), here)
        digests.append(here["run"].digest())
        here["run"].close()
    assert digests[1] == digests[2] != digests[0]
    assert here["extra"] == {"note": "before the change"}


def test_transformers(tmp_path, monkeypatch, capsys):
    transformers = pytest.importorskip("transformers", reason="needs transformers, a development dependency")
    monkeypatch.chdir(tmp_path)
    names = {}
    for code in snippets("transformers.md"):
        exec(code, names)
    run = names["run"]
    assert run.position == 9
    assert [unit.name for unit in run.engine.units] == ["root", *(f"model.layers.{n}" for n in range(3))]
    assert 1.0 < names["values"]["perplexity"] < 200.0
    assert names["text"].shape == (1, 12)
    saved = transformers.LlamaForCausalLM.from_pretrained("saved")
    with run.gathered(names["model"]):
        kept = names["model"].state_dict()
        assert all(torch.equal(kept[name], value) for name, value in saved.state_dict().items())
    run.close()


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(20, 40)
        self.down = torch.nn.Linear(40, 20)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Transformer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Linear(20, 20)
        self.layers = torch.nn.ModuleList(Block() for _ in range(3))
        self.head = torch.nn.Linear(20, 3)


def started(**settings):
    """A run, ready to train."""
    run = lw.start(sinks=[], **settings)
    model = torch.nn.Linear(20, 3)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return run


def test_strategies():
    names = {"torch": torch, "Block": Block, "Transformer": Transformer, "run": started()}
    for code in snippets("strategies.md"):
        if "run.prepare" in code:
            names["run"].close()
            names["run"] = lw.start(strategy="zero3", sinks=[])
        exec(code, names)
    assert names["weights"]["head.bias"].any()
    assert not names["model"].head.bias.any()
    assert [unit.name for unit in names["run"].engine.units] == ["root", *(f"layers.{n}" for n in range(3))]
    names["run"].close()


@pytest.mark.parametrize("page", ["lanes.md", "promise.md"])
def test_on_a_run(page, capsys):
    run = started()
    for code in snippets(page):
        exec(code, {"run": run})
    run.close()


def test_readme(capsys):
    names = {}
    (code,) = snippets("../README.md")
    exec(code, names)
    assert capsys.readouterr().out == f"rank 0 of 1: {names['run'].digest()}\n"
    names["run"].close()


def test_links():
    for page in [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
            assert "://" in target or (page.parent / target).exists(), f"{page.name}: {target}"


def loss(model):
    return lambda batch: F.cross_entropy(model(batch[0]), batch[1])
