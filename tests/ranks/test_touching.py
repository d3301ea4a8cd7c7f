"""Touching a model between its steps: what zero3 keeps elsewhere, what gathers it, and what may be changed."""

import copy
import io
from dataclasses import dataclass, replace
from functools import partial

import numpy
import pytest
import torch
from torch import nn

from lanewise.errors import ModelError, ShardedParameterError, StepError
from tests.helpers.cases import Cell, grid, on_ranks, one_value
from tests.helpers.traits import WIDTH, Stack

LANES = 3
AWAY = "parameter 'blocks.0.0.weight' was touched while its values are with their owners"


def data():
    return torch.arange(LANES * 4 * 4 * WIDTH, dtype=torch.float32).reshape(-1, WIDTH).sin()


def prepared(cell, build=Stack, **settings):
    run = cell.start(lanes=LANES, **settings)
    torch.manual_seed(3)
    model = build()
    run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    return run, model, run.loader(data(), batch_size=4 * LANES)


def train(run, model, loader, steps):
    for step in run.steps(loader, total=run.position + steps):
        for x in step:
            step.backward(model(x).square().mean())
        step.update()


def saved(thing):
    stream = io.BytesIO()
    torch.save(thing, stream)
    stream.seek(0)
    return stream


TOUCHES = {
    "sum": lambda m, p: p.sum(),
    "arithmetic": lambda m, p: p * 2,
    "comparison": lambda m, p: p == p,
    "clone": lambda m, p: p.clone(),
    "detach": lambda m, p: p.detach(),
    "data": lambda m, p: p.data,
    "set data": lambda m, p: setattr(p, "data", torch.zeros(WIDTH, WIDTH)),
    "in place": lambda m, p: torch.nn.init.zeros_(p),
    "index": lambda m, p: p[0],
    "item": lambda m, p: p[0, 0].item(),
    "list": lambda m, p: p.tolist(),
    "truth": lambda m, p: bool(p.any()),
    "numpy": lambda m, p: p.detach().numpy(),
    "numpy, straight": lambda m, p: numpy.asarray(p),
    "pointer": lambda m, p: p.data_ptr(),
    "storage": lambda m, p: p.untyped_storage(),
    "move": lambda m, p: p.to(torch.float64),
    "share": lambda m, p: p.share_memory_(),
    "a list of tensors": lambda m, p: torch.cat([torch.ones(1, WIDTH), p]),
    "foreach": lambda m, p: torch._foreach_norm([p, p]),
    "dlpack": lambda m, p: torch.from_dlpack(p),
    "copy": lambda m, p: copy.copy(p),
    "deepcopy": lambda m, p: copy.deepcopy(p),
    "deepcopy of the model": lambda m, p: copy.deepcopy(m),
    "save": lambda m, p: saved(p),
    "save of the model": lambda m, p: saved(m),
    "state_dict": lambda m, p: m.state_dict(),
    "save of state_dict": lambda m, p: saved(m.state_dict(keep_vars=True)),
    "half": lambda m, p: m.half(),
    "to": lambda m, p: m.to(torch.float64),
    "vector": lambda m, p: nn.utils.parameters_to_vector(m.parameters()),
    "functional": lambda m, p: nn.functional.linear(torch.ones(1, WIDTH), p),
    "a part's forward by hand": lambda m, p: m.blocks[0][0].forward(torch.ones(1, WIDTH)),
}


def harmless(m, p):
    """What reads no values."""
    assert p.shape == p.size() == (WIDTH, WIDTH)
    assert (p.dim(), p.numel(), p.dtype, p.device.type) == (2, WIDTH**2, torch.float32, "cpu")
    assert "with their owners" in repr(p)
    assert "with their owners" in f"{p}"
    assert "Linear" in repr(m)
    assert p.requires_grad_(p.requires_grad) is p
    m.zero_grad()
    assert p.grad is None
    assert nn.utils.clip_grad_norm_(m.parameters(), 1.0) == 0
    assert sum(q.numel() for q in m.parameters()) == 5 * (WIDTH**2 + WIDTH)
    assert isinstance(p, nn.Parameter)
    assert p in {p: 1}
    m.eval().train()


def touch(cell):
    run, model, loader = prepared(cell)
    train(run, model, loader, 1)
    parameter = model.blocks[0][0].weight
    for name, action in TOUCHES.items():
        try:
            action(model, parameter)
        except ShardedParameterError as error:
            if "parameter '" not in str(error):
                return f"{name}: {error}"
        else:
            return f"{name} raised nothing"
    harmless(model, parameter)
    with pytest.raises(ShardedParameterError, match=AWAY):
        parameter.sum()
    run.close()
    return "refused"


def test_what_zero3_keeps_elsewhere_cannot_be_touched():
    assert one_value([Cell(1, "zero3", "gloo"), Cell(2, "zero3", "gloo")], touch) == "refused"


def read(cell):
    """Everything that a user does with values, in gathered and after it."""
    run, model, loader = prepared(cell)
    train(run, model, loader, 1)
    x = torch.ones(2, WIDTH)
    with run.gathered(model):
        with run.gathered():
            pass
        expected = model(x).detach()
        kept = model.state_dict()
        state = {name: value.clone() for name, value in kept.items()}
        twin = copy.deepcopy(model)
        loaded = torch.load(saved(model), weights_only=False)
        numpy.asarray(model.head.weight.detach())
        list(torch.load(saved(model.state_dict()), weights_only=True))
    assert all(torch.equal(kept[name], value) for name, value in state.items())
    assert torch.equal(model(x), expected)
    assert torch.equal(twin(x), expected)
    assert torch.equal(loaded(x), expected)
    with torch.no_grad():
        assert torch.equal(model(x), expected)
        assert torch.equal(model.eval()(x), expected)
    model.train()
    probe = x.clone().requires_grad_()
    model(probe).sum().backward()
    assert torch.equal(probe.grad, torch.autograd.grad(twin(x2 := x.clone().requires_grad_()).sum(), x2)[0])
    with pytest.raises(ZeroDivisionError), run.gathered(model):
        _ = 1 / 0
    train(run, twin, loader, 0)
    with torch.no_grad():
        model(twin(x))
    train(run, model, loader, 1)
    digest = run.digest()
    run.close()
    return digest, {name: value.sum().item() for name, value in state.items()}


def test_gathered_values_are_whole_and_the_same_everywhere():
    cells = [*grid([1], ["ddp"], ["shared"]), *grid([3], transports=["shared", "gloo"])]
    one_value(cells, read)


def write(cell, precision):
    """Values that every rank writes alike count; others are refused and leave no trace."""
    run, model, loader = prepared(cell, precision=precision)
    train(run, model, loader, 1)
    weight = model.blocks[1][0].weight
    with run.gathered(model, write=True):
        old = {name: value.clone() for name, value in model.state_dict().items()}
        torch.nn.init.constant_(weight, 0.125)
        model.head.bias.data = torch.full((WIDTH,), 0.5)
        model.load_state_dict({"stem.bias": torch.arange(float(WIDTH))}, strict=False)
    with run.gathered(model):
        assert torch.equal(weight, torch.full_like(weight, 0.125))
        assert torch.equal(model.head.bias, torch.full_like(model.head.bias, 0.5))
        assert torch.equal(model.stem.bias, torch.arange(float(WIDTH)).to(model.stem.bias.dtype))
        assert torch.equal(model.stem.weight, old["stem.weight"])
    before = run.digest()
    with pytest.raises(ZeroDivisionError), run.gathered(model, write=True):
        weight.data.div_(1 // weight.data.zero_().sum().long().item())
    assert run.digest() == before
    if cell.world > 1:
        rule = r"parameter 'blocks.1.0.weight' got other values on ranks \[1.*\] than on rank 0"
        with pytest.raises(ModelError, match=rule), run.gathered(model, write=True):
            weight.data.fill_(float(run.rank > 0))
        assert run.digest() == before
    with pytest.raises(ModelError, match=r"got shape \(2,\) inside run.gathered"), run.gathered(write=True):
        model.head.bias.data = torch.zeros(2)
    assert model.head.bias.shape == (WIDTH,)
    with (
        run.gathered(),
        pytest.raises(StepError, match="inside another run"),
        run.gathered(write=True),
    ):
        pass
    train(run, model, loader, 1)
    digest = run.digest()
    run.close()
    return before, digest


def test_values_written_in_gathered_are_kept():
    cells = [*grid([1], ["ddp"], ["shared"]), *grid([3], transports=["shared", "gloo"])]
    one_value(cells, write, "model")
    one_value([Cell(1, "ddp"), Cell(3, "zero2", "shared"), Cell(3, "zero3", "gloo")], write, "bf16")


def misused(cell):
    run, model, loader = prepared(cell)
    with pytest.raises(ModelError, match="a Linear that is not the prepared model"):
        run.gathered(model.head)
    for step in run.steps(loader, total=2):
        for x in step:
            with pytest.raises(StepError, match="inside `for batch in step:`"), run.gathered(model):
                pass
            step.backward(model(x).sum())
        step.update()
    run.close()


def written_unasked(cell):
    run, model, loader = prepared(cell)
    train(run, model, loader, 1)
    rule = "parameter 'head.bias' .1 in all. was changed in place inside run.gathered"
    with pytest.raises(ModelError, match=rule), run.gathered(model), torch.no_grad():
        model.head.bias.add_(1.0)
    run.close()


def changed_between_steps(cell, change, rule):
    run, model, loader = prepared(cell)
    train(run, model, loader, 1)
    change(model)
    with pytest.raises(ModelError, match=rule):
        train(run, model, loader, 1)
    run.close()


class Frozen(Stack):
    def __init__(self):
        super().__init__()
        self.blocks[0].requires_grad_(False)


def thawed(cell):
    run, model, loader = prepared(cell, Frozen)
    train(run, model, loader, 1)
    model.blocks[0].requires_grad_(True)
    with pytest.raises(ModelError, match="weight' requires a gradient, but was frozen"):
        train(run, model, loader, 1)
    run.close()


def scale_in_place(model):
    with torch.no_grad():
        model.stem.weight.mul_(2.0)


def replace_parameter(model):
    model.head.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))


CHANGES = [
    (scale_in_place, "'stem.weight' .1 in all. was changed in place since the last step"),
    (lambda model: model.double(), "'stem.weight' was moved to other memory since prepare"),
    (replace_parameter, "'head.weight' was replaced by another object"),
]


JOBS = [
    *(partial(changed_between_steps, change=c, rule=r) for c, r in CHANGES),
    thawed,
    misused,
    written_unasked,
]


@dataclass(frozen=True)
class JobCell(Cell):
    number: int = 0


def numbered(cell):
    JOBS[cell.number](cell)


def test_a_model_that_was_changed_since_prepare_is_refused():
    kinds = [JobCell(1, "ddp", "shared"), JobCell(2, "zero1", "gloo"), JobCell(2, "zero3", "shared")]
    cells = [replace(kind, number=n) for n in range(len(JOBS)) for kind in kinds]
    cells += [JobCell(2, "zero3", "gloo", number=n) for n in range(2, len(JOBS))]
    on_ranks(cells, numbered)
