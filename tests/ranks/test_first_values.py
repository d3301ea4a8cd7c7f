"""First values: of models built on the meta device, from a file, and where ranks disagree."""

from dataclasses import dataclass, replace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lanewise.engine import hashing
from lanewise.engine.guard import is_away
from lanewise.errors import ModelError, StateError
from tests.helpers.cases import Cell, on_ranks
from tests.helpers.models import Gpt
from tests.helpers.traits import WIDTH, Module, Stack, linear

CELLS = [
    Cell(1, "ddp", "shared"),
    Cell(3, "zero3", "gloo"),
    Cell(3, "zero3", "shared"),
    Cell(2, "zero1", "gloo"),
]


class Tied(Stack):
    """Ties across units, in a unit and at the root; a buffer that batch norm can make again."""

    class Block(nn.Sequential):
        def reset_parameters(self):
            """Must not reach what its parts' own rules have filled."""
            nn.init.zeros_(self[0].weight)
            nn.init.ones_(self.shift)

    def block(self):
        block = self.Block(linear(), nn.BatchNorm1d(WIDTH))
        block.shift = nn.Parameter(torch.zeros(WIDTH))
        return block

    def __init__(self):
        super().__init__()
        self.blocks[2][0].weight = self.blocks[0][0].weight
        self.head.weight = self.stem.weight
        self.blocks[1][0].bias = self.blocks[1][1].bias


def by_name(name, tensor):
    """Depends on the name and torch's stream only."""
    if tensor.dim() > 1:
        nn.init.normal_(tensor, std=0.1)
    else:
        tensor.fill_(len(name) / 100)


@dataclass(frozen=True)
class JobCell(Cell):
    how: str = ""
    file: str = ""


def num_here(model):
    """Elements of parameters that have values on this rank."""
    return sum(p.numel() for p in model.parameters() if not p.is_meta and not is_away(p))


def build(how, file):
    """Train a step; returns the digest and what the values were at first."""

    def job(cell):
        run = cell.start(lanes=3)
        if how != "file":
            torch.manual_seed(run.rank)
        with torch.device("meta"):
            model = Tied()
        most = [0]

        def init(name, tensor):
            by_name(name, tensor)
            most.append(num_here(model))

        settings = {"reset": {}, "init": {"init": init}, "file": {"weights": file}}[how]
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), **settings)
        assert model.blocks[2][0].weight is model.blocks[0][0].weight
        assert model.head.weight is model.stem.weight
        assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
        with run.gathered(model):
            first = {name: hashing.of([value]).hex() for name, value in model.state_dict().items()}
            moved = all(bool(p.abs().sum() > 0) for n, p in model.named_parameters() if n.endswith("weight"))
        assert moved
        for step in run.steps(run.loader(torch.ones(12, WIDTH).cumsum(0).sin(), batch_size=12)):
            for x in step:
                step.backward(model(x).square().mean())
            step.update()
        digest = run.digest()
        if (cell.strategy, cell.exchange) == ("zero3", "gloo"):
            units = run.engine.units
            largest = max(sum(p.numel() for flat in u.flats for p in flat.parameters) for u in units)
            assert max(most) <= largest < sum(p.numel() for p in model.parameters())
        run.close()
        return digest, first

    return job


def in_turn(cell):
    return build(cell.how, cell.file)(cell)


def test_a_model_on_the_meta_device_gets_the_same_values_everywhere(tmp_path):
    torch.manual_seed(1)
    model = Tied()
    file = tmp_path / "model.safetensors"
    shared = {"head.weight", "blocks.2.0.weight", "blocks.1.1.bias"}
    save_file({name: value for name, value in model.state_dict().items() if name not in shared}, file)
    expected = {name: hashing.of([value]).hex() for name, value in model.state_dict().items()}
    kinds = [JobCell(c.world, c.strategy, c.exchange, file=str(file)) for c in CELLS]
    cells = [replace(kind, how=how) for how in ("reset", "init", "file") for kind in kinds]
    found = {"reset": [], "init": [], "file": []}
    for cell, by_rank in zip(cells, on_ranks(cells, in_turn), strict=True):
        found[cell.how] += by_rank
    for how, values in found.items():
        assert all(value == values[0] for value in values), how
    assert found["file"][0][1] == expected
    assert len({values[0][0] for values in found.values()}) == 3


def other_seeds(cell):
    """Ranks that built other values take rank 0's."""
    notices = []
    run = cell.start(lanes=3, sinks=[lambda event: notices.append(str(event))])
    torch.manual_seed(run.rank)
    model = Stack()
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    digest = run.digest()
    run.close()
    assert any("differ from rank 0's, which are taken" in text for text in notices) is (
        run.rank == 0 and cell.world > 1
    )
    return digest


def test_ranks_that_built_other_values_take_those_of_rank_0():
    cells = [Cell(1, "ddp"), Cell(3, "zero3", "gloo"), Cell(3, "ddp", "shared")]
    assert len({digest for by_rank in on_ranks(cells, other_seeds) for digest in by_rank}) == 1


class NoRule(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.fine = nn.Linear(3, 3)


class Lost(nn.Module):
    def __init__(self):
        super().__init__()
        self.fine = nn.Linear(3, 3)
        self.register_buffer("angles", torch.arange(3.0), persistent=False)


def refused(kind, rule, error=ModelError, **settings):
    import lanewise as lw

    run = lw.start(sinks=[])
    with torch.device("meta"):
        model = kind()
    with pytest.raises(error, match=rule):
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), **settings)
    assert all(p.is_meta for p in model.parameters())
    run.close()


def test_what_nothing_can_fill_is_named(tmp_path):
    refused(NoRule, r"1 parameter.s. would get no first value:\n  - scale: NoRule '' has no reset_parameters")
    refused(Lost, r"the values of these buffers were lost there: angles\. Give init=")
    save_file({"scale": torch.ones(2)}, tmp_path / "part.safetensors")
    rule = (
        r"3 parameter.*\n  - scale has shape \(3,\), in the file \(2,\)\n  - fine.weight is not in the file"
    )
    refused(NoRule, rule, weights=tmp_path / "part.safetensors")
    refused(NoRule, "there is no file", StateError, weights=tmp_path / "none.safetensors")
    (tmp_path / "text").write_text("no")
    refused(NoRule, "is not a safetensors file", StateError, weights=tmp_path / "text")


def differs_by_rank(cell):
    run = cell.start(lanes=3)
    with torch.device("meta"):
        model = Stack()
    rule = r"unit 'root' got other first values on rank 1 than on rank 0\. init= must depend only on the name"
    with pytest.raises(ModelError, match=rule):
        run.prepare(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            init=lambda name, tensor: tensor.fill_(run.rank),
        )
    run.close()


def test_an_init_that_depends_on_the_rank_is_refused():
    on_ranks([Cell(2, "zero3", "gloo"), Cell(2, "ddp", "shared")], differs_by_rank)


def test_a_module_with_parameters_of_several_units_is_reset_alike():
    """The embedding is tied to the head, which stands at the root; blocks have rules of their own."""
    import lanewise as lw

    run = lw.start(sinks=[])
    with torch.device("meta"):
        model = Module(lambda m, x: m.gpt(x), gpt=Gpt())
    with pytest.raises(ModelError, match="Gpt 'gpt' has no reset_parameters"):
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), init=by_name)
    assert model.gpt.head.weight is model.gpt.tokens.weight
    run.close()
