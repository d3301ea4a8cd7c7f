"""Recipes on ranks: each task trains, to the same bits on one rank and on three, and leaves its weights."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from lanewise.recipes.models import ConvNet, Gpt, Perceptron
from lanewise.recipes.recipe import Output, parse_text
from lanewise.recipes.train import train
from tests.helpers.cases import Cell, one_value

TEXT = """
task = "gpt"
run = {lanes = 4}
model = {width = 16, layers = 2, heads = 2, length = 8, dropout = 0.1}
data = {files = ["*.txt"], valid = 0.2}
optimizer = {lr = 1e-2, weight_decay = 0.1}
schedule = {kind = "cosine", warmup = 2}
train = {batch_size = 8, steps = 12, clip = 1.0, evaluate_every = 6}
"""
TABLE = """
task = "table"
run = {lanes = 4}
model = {width = 8, layers = 2}
data = {file = "t.csv", label = "boat", categorical = ["wind"], missing = "mean", valid = 0.25}
optimizer = {kind = "sgd", lr = 0.2, momentum = 0.9}
train = {batch_size = 16, epochs = 4}
"""
IMAGES = """
task = "images"
run = {lanes = 4, precision = "bf16"}
model = {width = 8, stages = 2}
data = {folder = "pictures", size = 8, flip = true, valid = 0.25}
optimizer = {lr = 2e-2}
train = {batch_size = 8, epochs = 4, evaluate_every = 3, patience = 3}
"""
RECIPES = {"gpt": TEXT, "table": TABLE, "images": IMAGES}
CELLS = [Cell(1, "ddp"), Cell(3, "zero3"), Cell(3, "zero1", "gloo"), Cell(3, "zero3", "gloo")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipes")
    (path / "poem.txt").write_bytes(b"the sea the sea the open sea, it rose and rose and rose to me. " * 12)
    rows = [
        f"{'north' if n % 3 else 'east'},{n % 7 if n % 11 else ''},{'go' if n % 7 > 3 else 'stay'}"
        for n in range(80)
    ]
    (path / "t.csv").write_text("\n".join(["wind,sea,boat", *rows, ""]))
    random = numpy.random.default_rng(0)
    for value, name in ((60, "dark"), (190, "light")):
        (path / "pictures" / name).mkdir(parents=True)
        for number in range(16):
            noise = random.integers(-60, 60, (10, 9, 3))
            numpy.save(path / "pictures" / name / f"{number}.npy", (value + noise).astype(numpy.uint8))
    return path


def run_all(cell: Cell, folder: Path):
    values = {}
    session = os.environ["TORCHELASTIC_RESTART_COUNT"]
    settings = {"strategy": cell.strategy, "exchange": cell.exchange, "timeout": 60.0, "sinks": []}
    for task, toml in RECIPES.items():
        os.environ["TORCHELASTIC_RESTART_COUNT"] = f"{session}.{task}"
        recipe = parse_text(toml, task)
        recipe = replace(
            recipe, output=Output(f"out/{task}-{cell.world}-{cell.strategy}-{cell.exchange}.safetensors")
        )
        said = []
        result = train(recipe, folder, said.append, **settings)
        evaluations = [(e.step, dict(e.values)) for e in result.fit.evaluations]
        values[task] = (result.digest, result.fit.losses, evaluations)
    return values


def test_every_task_learns_to_the_same_bits(folder):
    values = one_value(CELLS, run_all, folder)
    for task, (digest, losses, evaluations) in values.items():
        assert len(digest) == 32
        assert sum(losses[-3:]) < 0.8 * sum(losses[:3]), (task, losses)
        assert evaluations[-1][1]["loss"] < evaluations[0][1]["loss"]
    assert set(values["gpt"][2][0][1]) == {"loss", "perplexity"}
    assert values["images"][2][-1][1]["accuracy"] == 1.0
    assert [step for step, _ in values["gpt"][2]] == [6, 12]

    models = {
        "gpt": lambda facts: Gpt(16, 2, 2, 8, 0.0),
        "table": lambda facts: Perceptron(torch.zeros(1), torch.zeros(1), [3], 2, 8, 2, 0.0),
        "images": lambda facts: ConvNet(8, 2, 2, 0.0).bfloat16(),
    }
    for task, build in models.items():
        files = sorted((folder / "out").glob(f"{task}-*"))
        assert len(files) == len(CELLS)
        assert len({file.read_bytes() for file in files}) == 1
        with safe_open(files[0], framework="pt") as opened:
            facts = json.loads(opened.metadata()["recipe"])
        assert facts["task"] == task
        model = build(facts)
        assert not any(model.load_state_dict(load_file(files[0])))
        if task == "table":
            assert facts["classes"] == ["go", "stay"]
            assert facts["categories"] == {"wind": ["east", "north"]}
            assert model.mean.item() != 0
    assert not list((folder / "out").glob("*.part"))


def lanewise(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "lanewise", *arguments], capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout, done.stderr


def test_the_command_trains_and_says_what_came_of_it(folder):
    (folder / "r.toml").write_text(TEXT.replace("steps = 12", "steps = 4"))
    code, out, err = lanewise("train", str(folder / "r.toml"), "--ranks", "3", "--strategy", "zero3")
    assert code == 0, err
    lines = out.splitlines()
    assert "parameters, 4 steps, loss 5." in lines[0]
    assert lines[1].startswith("evaluated: loss ")
    assert lines[2].startswith("digest ")
    assert "strategy='zero3' from the launcher" in err


def test_a_mistake_in_the_data_is_told_once_and_without_a_traceback(folder):
    (folder / "bad.toml").write_text(TABLE.replace('"boat"', '"boot"'))
    code, out, err = lanewise("train", str(folder / "bad.toml"), "--ranks", "3")
    assert (code, out) == (1, "")
    assert err.count("data.label: there is no column 'boot'; did you mean 'boat'?") == 1
    assert "Traceback" not in err
