"""`lanewise ckpt`, on generations of runs of many kinds."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import lanewise as lw
from lanewise.cli.main import app
from lanewise.errors import StateError
from lanewise.state.inspect import Generation


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


KINDS = {
    "fp32, AdamW": ({}, adamw),
    "bf16 with masters, narrow moments": ({"precision": "bf16", "moments": "bf16"}, adamw),
    "fp16, SGD with momentum": ({"precision": "fp16"}, lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9)),
    "SGD without state": ({}, lambda p: torch.optim.SGD(p, lr=1e-2)),
    "NAdam, numbers of many kinds": ({}, lambda p: torch.optim.NAdam(p, lr=1e-2)),
    "Adagrad, state from the start": ({}, lambda p: torch.optim.Adagrad(p, lr=1e-2)),
}


def make(folder, kind="fp32, AdamW", steps=(2,)):
    """Generations after these steps."""
    settings, optimizer = KINDS[kind]
    run = lw.start(lanes=3, sinks=[], **settings)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 9), nn.BatchNorm1d(9), nn.Linear(9, 2), nn.Linear(2, 2))
    model[3].requires_grad_(False)
    run.prepare(model, optimizer([p for p in model.parameters() if p.requires_grad]))
    data = torch.randn(24, 7, generator=torch.Generator().manual_seed(1))
    paths = []
    for until in steps:
        for step in run.steps(run.loader(data, batch_size=6), total=until):
            for x in step:
                step.backward(model(x).float().square().mean())
            step.update()
        paths.append(run.save(folder, wait=True))
    run.close()
    return paths


def call(*words):
    result = CliRunner().invoke(app, ["ckpt", *map(str, words)])
    return result.exit_code, result.output


@pytest.mark.parametrize("kind", KINDS)
def test_the_digest_of_a_run_can_be_found_from_its_files(tmp_path, kind):
    (path,) = make(tmp_path, kind)
    Generation(path).verify()
    code, text = call("verify", tmp_path, "--json")
    assert (code, json.loads(text)[0]["is"]) == (0, "whole")


def test_a_digest_that_does_not_belong_to_the_tensors_is_found(tmp_path):
    from tests.unit.test_generation import forge

    (path,) = make(tmp_path)
    forge(path, lambda words: words.update(digest="0" * 32))
    with pytest.raises(StateError, match="changed by somebody who knows how"):
        Generation(path).verify()


def test_listed_shown_and_compared(tmp_path):
    first, second = make(tmp_path, steps=(1, 3))
    code, text = call("ls", tmp_path)
    assert code == 0
    assert [line.split()[1] for line in text.splitlines()] == [second.name, first.name]
    code, text = call("show", first, "--json")
    shown = json.loads(text)
    assert (code, shown["step"], shown["lanes"], shown["optimizer"]) == (0, 1, 3, "AdamW")
    assert {"tensor": "0.weight (exp_avg)", "type": "float32", "shape": [9, 7]} in shown["tensors"]
    assert call("diff", first, first)[0] == 0
    code, text = call("diff", first, second, "--json")
    names = {row["name"] for row in json.loads(text)}
    assert code == 1
    assert {"0.weight", "2.bias (exp_avg_sq)", "buffer 1.running_mean"} <= names
    assert "3.weight" not in names


def test_damage_is_told_with_its_file(tmp_path):
    first, second = make(tmp_path, steps=(1, 3))
    file = second / "buffers.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    code, text = call("verify", tmp_path)
    assert code == 1
    assert "buffers.safetensors" in text
    assert f"name {first.name}  is whole" in text


def test_a_folder_without_generations(tmp_path):
    result = CliRunner().invoke(app, ["ckpt", "ls", str(tmp_path)])
    assert isinstance(result.exception, StateError)


@pytest.mark.parametrize("kind", ["fp32, AdamW", "bf16 with masters, narrow moments"])
def test_an_export_holds_the_values_of_the_model(tmp_path, kind):
    settings, optimizer = KINDS[kind]
    run = lw.start(lanes=3, sinks=[], strategy="zero3", **settings)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 9), nn.BatchNorm1d(9), nn.Linear(9, 2))
    run.prepare(model, optimizer(model.parameters()))
    data = torch.randn(24, 7, generator=torch.Generator().manual_seed(1))
    for step in run.steps(run.loader(data, batch_size=6), total=2):
        for x in step:
            step.backward(model(x).float().square().mean())
        step.update()
    path = run.save(tmp_path / "run", wait=True)
    code, text = call("export", path, tmp_path / "out", "--json")
    assert code == 0
    written = [row["written"] for row in json.loads(text)]
    found = {key: value for name in written[:-1] for key, value in load_file(name).items()}
    with run.gathered(model):
        wanted = model.state_dict()
        assert found.keys() == wanted.keys()
        assert all(
            torch.equal(found[key], value) and found[key].dtype == value.dtype
            for key, value in wanted.items()
        )
    assert set(
        json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    ) == set(wanted)
    assert isinstance(
        CliRunner().invoke(app, ["ckpt", "export", str(path), str(tmp_path / "out")]).exception, StateError
    )
    run.close()


def test_from_pretrained_reads_an_export(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs transformers, a development dependency")
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=32)
    run = lw.start(lanes=2, sinks=[])
    model = transformers.GPT2LMHeadModel(config)
    run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    path = run.save(tmp_path / "run", wait=True)
    assert call("export", path, tmp_path / "out")[0] == 0
    config.save_pretrained(tmp_path / "out")
    read = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    assert all(torch.equal(value, read.state_dict()[key]) for key, value in model.state_dict().items())
    run.close()
