"""Which optimizers `prepare` takes, and what a prepared one says to its user."""

import copy
import re
import warnings

import pytest
import torch
from torch import nn

import lanewise as lw
from lanewise.errors import OptimizerError, StepError


class Elementwise(torch.optim.Optimizer):
    """One that nobody knows: sign descent with a memory and a plain number in its state."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["count"] = state.get("count", 0) + 1
                    memory = state.setdefault("memory", torch.zeros_like(p))
                    memory.mul_(0.9).add_(p.grad)
                    p.sub_(memory.sign(), alpha=group["lr"])


class LayerWise(Elementwise):
    """Steps by the norm of the whole tensor, as LARS does."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / p.grad.norm(), alpha=group["lr"])


class Blockwise(Elementwise):
    """Shares a scale among blocks of 256 elements, as 8-bit optimizers do."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    blocks = [b / b.abs().max() for b in p.grad.reshape(-1).split(256)]
                    p.sub_(torch.cat(blocks).view(p.shape), alpha=group["lr"])


class MatricesOnly(Elementwise):
    """Counts on tensors of two dimensions."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                rows, _ = p.shape
                p.sub_(p.grad, alpha=group["lr"] / rows)


def model_of(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 3)).to(dtype)


@pytest.fixture
def run():
    run = lw.start(lanes=4, sinks=[])
    yield run
    run.close()


def refusal(run, make):
    """What prepare says; the model and the optimizer are then as they were."""
    model = model_of()
    optimizer = make(model)
    before = [p.detach().clone() for p in model.parameters()]
    addresses = [p.data_ptr() for p in model.parameters()]
    groups = [list(group["params"]) for group in optimizer.param_groups]
    state = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(OptimizerError) as caught:
        run.prepare(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert addresses == [p.data_ptr() for p in model.parameters()]
    assert [list(map(id, g["params"])) for g in optimizer.param_groups] == [list(map(id, g)) for g in groups]
    assert str(optimizer.state_dict()) == str(state)
    return str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: torch.optim.Adafactor(m.parameters()), r"torch.optim.Adafactor .* rows and columns .*use AdamW"),
        (lambda m: torch.optim.Muon([m[0].weight]), r"torch.optim.Muon .* orthogonalises .*use AdamW"),
        (lambda m: torch.optim.LBFGS(m.parameters()), r"torch.optim.LBFGS .*use SGD with momentum or AdamW"),
        (lambda m: torch.optim.SparseAdam(list(m.parameters())), r"torch.optim.SparseAdam .*use Adam or Adagrad"),
        (lambda m: LayerWise(m.parameters()), "LayerWise gives other values when a tensor is cut into slices"),
        (lambda m: Blockwise(m.parameters()), "Blockwise gives other values when a tensor is cut into slices"),
        (lambda m: MatricesOnly(m.parameters()), r"MatricesOnly .*failed with ValueError.*such as AdamW"),
        (
            lambda m: torch.optim.Adam(m.parameters(), differentiable=True),
            "group 0 of the Adam has differentiable=True.*Leave the option out",
        ),
        (
            lambda m: torch.optim.AdamW([{"params": [m[0].weight]}, {"params": [m[2].weight], "capturable": True}]),
            "group 1 of the AdamW has capturable=True.*CPU",
        ),
        (lambda m: torch.optim.SGD(model_of().parameters()), "parameter 0 of optimizer group 0.*not one of Seq"),
    ],
)  # fmt: skip
def test_refused_at_prepare(run, make, message):
    assert re.search(message, refusal(run, make))


@pytest.mark.parametrize("kind", ["Adam", "SGD", "Adagrad", "Rprop"])
def test_an_optimizer_that_has_stepped(run, kind):
    def make(model):
        options = {"momentum": 0.9} if kind == "SGD" else {}
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, **options)
        model(torch.ones(8)).sum().backward()
        optimizer.step()
        return optimizer

    message = refusal(run, make)
    assert f"the {kind} given to prepare has already stepped" in message
    assert "Call prepare before the first optimizer.step()" in message


def test_not_an_optimizer(run):
    with pytest.raises(
        OptimizerError, match=r"needs an optimizer made on the model's parameters, found list"
    ):
        run.prepare(model_of(), [])


def train(run, model, total=3, between=lambda step: None):
    loader = run.loader(torch.randn(32, 8, generator=torch.Generator().manual_seed(1)), batch_size=8)
    for step in run.steps(loader, total=total):
        for x in step:
            step.backward(model(x).square().mean())
        step.update()
        between(step)
    return run.digest()


def test_an_unknown_elementwise_optimizer_is_taken(run):
    model = model_of()
    optimizer = Elementwise(model.parameters())
    before = copy.deepcopy(model.state_dict())
    run.prepare(model, optimizer)
    train(run, model)
    assert not torch.equal(before["0.weight"], model.state_dict()["0.weight"])
    sliced = run.engine.committer.optimizer
    assert all(sliced.state_of(piece)["count"] == 3 for piece in sliced.slices)


def test_state_that_a_constructor_made_is_cut(run):
    """Adagrad's sums, also of a scalar, and on the meta device."""
    model = model_of()
    model.gain = nn.Parameter(torch.tensor(1.0))
    optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.5)
    run.prepare(model, optimizer)
    sliced = run.engine.committer.optimizer
    for piece in sliced.slices:
        state = sliced.state_of(piece)
        assert torch.equal(state["sum"], torch.full_like(piece.tensor, 0.5))
        assert state["step"].shape == ()


def test_state_that_a_constructor_made_on_the_meta_device(run):
    with torch.device("meta"):
        model = nn.Linear(8, 3)
        optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.5)
    run.prepare(model, optimizer)
    train(run, model)
    sliced = run.engine.committer.optimizer
    assert all((sliced.state_of(piece)["sum"] >= 0.5).all() for piece in sliced.slices)


def test_zero_grad_is_harmless(run):
    model = model_of()
    _, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters()))
    with_calls = train(run, model, between=lambda step: optimizer.zero_grad())
    run.close()
    again = lw.start(lanes=4, sinks=[])
    model = model_of()
    again.prepare(model, torch.optim.AdamW(model.parameters()))
    assert train(again, model) == with_calls
    again.close()


def test_step_called_by_the_script(run):
    model = model_of()
    _, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters()))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = run.digest()
    with pytest.raises(StepError, match=r"AdamW.step was called by the script.*step.update\(\)"):
        optimizer.step()
    assert run.digest() == before
    train(run, model)


def test_state_dict_of_a_prepared_optimizer(run):
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    whole = optimizer.state_dict()
    run.prepare(model, optimizer)
    with pytest.raises(
        OptimizerError, match=r"AdamW.state_dict after prepare would hold this rank's slices only"
    ):
        optimizer.state_dict()
    with pytest.raises(OptimizerError, match=r"AdamW.load_state_dict after prepare"):
        optimizer.load_state_dict(whole)
    run.close()
    optimizer.state_dict()


def test_groups_that_change_after_prepare(run):
    model = model_of()
    extra = nn.Parameter(torch.ones(3))
    _, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters()))
    train(run, model, total=1)
    optimizer.add_param_group({"params": [extra]})
    with pytest.raises(OptimizerError, match="the optimizer has 2 groups, and had 1 at prepare"):
        train(run, model, total=2)
    del optimizer.param_groups[1]
    optimizer.param_groups[0]["params"] = list(model.parameters())
    with pytest.raises(OptimizerError, match="parameters of optimizer group 0 were replaced after prepare"):
        train(run, model, total=2)


def test_schedulers_do_not_warn_about_the_order_of_steps(run):
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    run.prepare(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(run, model, between=lambda step: scheduler.step())
    assert scheduler.get_last_lr() != [0.1]
