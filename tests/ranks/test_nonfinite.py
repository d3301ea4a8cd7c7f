"""Gradients that are not finite, or hardly: one decision on every rank, and a step that leaves no trace."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lanewise.errors import NonFiniteError
from tests.helpers.cases import Cell, one_value, same_on_ranks
from tests.helpers.odd import Odd, data

ALL = [
    Cell(1, "ddp", "shared"),
    Cell(3, "zero1", "gloo"),
    Cell(3, "zero3", "shared"),
    Cell(5, "ddp", "shared"),
    Cell(5, "zero2", "gloo"),
    Cell(5, "zero3", "gloo"),
]
NAN, INF = float("nan"), float("inf")


class Poisoned(Odd):
    """Each of the two elements of `never` has just the gradient it is told, and statistics see every input."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics = nn.BatchNorm1d(5)

    def forward(self, x, poison):
        shift = (self.never - self.never.detach()).sum()
        return super().forward(self.statistics(x)), shift * poison


@dataclass(frozen=True)
class Plan:
    """The poison of every lane at every step; 0 where nothing is said."""

    policy: str
    poison: tuple[tuple[int, int, float], ...] = ()
    """(step, lane, gradient); lane -1 is every lane."""
    clip: float | None = None
    precision: str = "model"
    scale: float = 1.0
    steps: int = 4

    def of(self, step: int, lane: int) -> float:
        """The gradient of `never` in a lane."""
        return next((p for s, v, p in self.poison if s == step and v in (lane, -1)), 0.0)


@dataclass(frozen=True)
class Trial(Cell):
    """A plan in one cell."""

    plan: Plan = Plan("raise")


def follow(cell: Trial) -> list[Any]:
    """What came of every step: the error or whether it was skipped, the norm, and the digest."""
    plan = cell.plan
    run = cell.start(lanes=8, nonfinite=plan.policy, precision=plan.precision)
    torch.manual_seed(11)
    model = Poisoned()
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    if plan.scale != 1.0:
        run.engine.committer.scale.value = plan.scale
    found = []
    for step in run.steps(run.loader(data(), batch_size=32), total=plan.steps):
        if step.index % 3 == 2:
            model.statistics.eval()
        for x, y in step:
            logits, extra = model(x, plan.of(step.index, step.lane))
            step.backward(F.cross_entropy(logits.float(), y) + extra.float())
        try:
            step.update(clip=plan.clip)
        except NonFiniteError as error:
            found.append(str(error))
        else:
            found.append(step.skipped)
        model.statistics.train()
        found.append((step.skipped, repr(step.grad_norm), run.digest()))
        assert run.position == step.index + 1
    with run.gathered(model):
        found.append(str(model.never.tolist()))
    run.close()
    return found


TROUBLE = ((1, 5, NAN), (2, -1, 3e38))
"""NaN in one lane on one rank; then finite gradients everywhere whose sum is not."""
EXTREMES = ((0, -1, 1e30), (1, 3, 3e38), (2, 2, INF))
PLANS = {
    "raise": Plan("raise", TROUBLE),
    "skip": Plan("skip", TROUBLE),
    "ignore": Plan("ignore", TROUBLE),
    "clip": Plan("ignore", EXTREMES, clip=0.5, steps=3),
    "fp16": Plan("raise", tuple((step, 6, NAN) for step in (0, 1, 2)), precision="fp16", scale=2.0),
}


@pytest.fixture(scope="module")
def results() -> dict[str, list[Any]]:
    """What every rank of every cell found, for each plan."""
    trials = [Trial(c.world, c.strategy, c.exchange, plan=plan) for plan in PLANS.values() for c in ALL]
    values = same_on_ranks(trials, follow)
    found = {}
    for n, name in enumerate(PLANS):
        first, *others = values[n * len(ALL) : (n + 1) * len(ALL)]
        assert all(other == first for other in others), f"cells differ under {name}: {first} {others}"
        found[name] = first
    return found


def test_raise_names_the_lane_and_the_parameter_and_the_run_goes_on(results):
    found = results["raise"]
    first, nan, inf, last = found[0::2][:4]
    assert first is last is False
    assert nan.startswith(
        "step 1: the gradient of parameter 'never' of unit 'root' is not finite in lane 5. Nothing was updated."
    )
    assert "nonfinite='skip' leaves such steps out" in nan
    assert inf.startswith(
        "step 2: the gradient of parameter 'never' of unit 'root' is finite in every lane, but its sum over the lanes"
    )
    digests = [entry[2] for entry in found[1::2]]
    assert digests[0] == digests[1] == digests[2] != digests[3]


def test_skip_leaves_everything_as_it_was(results):
    found = results["skip"]
    assert found[0:8:2] == [False, True, True, False]
    digests = [entry[2] for entry in found[1::2]]
    assert digests[0] == digests[1] == digests[2] != digests[3]
    assert found[-1] == "[1.0, 1.0]"


def test_ignore_updates_all_the_same(results):
    found = results["ignore"]
    assert found[0:8:2] == [False] * 4
    assert len({entry[2] for entry in found[1::2]}) == 4
    assert found[-1] == "[nan, nan]"


def test_clipping_by_norm_at_the_edges_of_fp32(results):
    """Norms of 1e30, and beyond what fp32 holds, are norms; one without end wipes out what is finite."""
    found = results["clip"]
    norms = [float(entry[1]) for entry in found[1::2]]
    assert abs(norms[0] / (2**0.5 * 1e30) - 1) < 1e-6
    assert abs(norms[1] / (2**0.5 * 3e38 / 8) - 1) < 1e-6
    assert norms[2] == INF
    assert found[-1] == "[nan, nan]"


def clip_alone(cell: Cell) -> list[tuple]:
    """A parameter with known gradients only: clipped by a norm beyond fp32, and gradients of zero."""
    run = cell.start(lanes=8)
    model = nn.Linear(1, 300, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    found = []
    for step in run.steps(run.loader(torch.ones(8, 1), batch_size=8), total=2):
        for x in step:
            gradient = 3e37 if step.index == 0 else 0.0
            step.backward(model(x).sum() * gradient)
        step.update(clip=1e-3)
        with run.gathered(model):
            found.append((step.grad_norm, model.weight.detach().clone().view(-1).tolist()))
    run.close()
    return found


def test_a_clipped_gradient_is_scaled_however_large_the_norm():
    (norm, values), (no_norm, same) = one_value(ALL, clip_alone)
    assert abs(norm / (3e37 * 300**0.5) - 1) < 1e-6
    assert norm / 1e-3 > 3.4e38, "the divisor is beyond fp32"
    assert all(abs(value * 300**0.5 / -1e-3 - 1) < 1e-5 for value in values)
    assert no_norm == 0.0
    assert same == values


def test_an_fp16_scale_that_cannot_shrink_is_not_to_blame(results):
    found = results["fp16"]
    first, second, third, last = found[0::2][:4]
    assert (first, last) == (True, False)
    assert "is not finite in lane 6. Nothing was updated" in second
    assert third.startswith("step 2: ")
