"""The oracle: every rank of every run has the bits of a plain PyTorch loop, whatever the optimizer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as lr

from lanewise.data.loader import make_loader
from lanewise.engine.reference import Reference
from tests.helpers.cases import STRATEGIES, TRANSPORTS, Cell, grid, one_value, same_on_ranks
from tests.helpers.odd import FLATS, Odd, compare, data

LANES = 8
STEPS = 3


OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 0.1}),
    "sgd momentum": ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    "sgd nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "sgd maximize": ("SGD", {"lr": 0.01, "momentum": 0.9, "maximize": True}),
    "adam": ("Adam", {"lr": 0.01, "weight_decay": 0.01}),
    "adamw": ("AdamW", {"lr": 0.01, "weight_decay": 0.1}),
    "adamw amsgrad": ("AdamW", {"lr": 0.01, "amsgrad": True}),
    "adam eps=0": ("Adam", {"lr": 0.01, "eps": 0.0}),
    "rmsprop": ("RMSprop", {"lr": 0.01}),
    "rmsprop centered": ("RMSprop", {"lr": 0.01, "centered": True, "momentum": 0.9}),
    "adagrad": ("Adagrad", {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "adamax": ("Adamax", {"lr": 0.01}),
    "nadam": ("NAdam", {"lr": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    "radam": ("RAdam", {"lr": 0.01}),
    "adadelta": ("Adadelta", {"lr": 1.0}),
    "asgd": ("ASGD", {"lr": 0.01, "t0": 1.0}),
    "rprop": ("Rprop", {"lr": 0.01}),
    "tensor lr": ("AdamW", {"lr": torch.tensor(0.01)}),
}


@dataclass(frozen=True)
class Case:
    """What a run and its oracle train. All of this decides bits."""

    optimizer: str
    scheduler: str = ""
    micro_batches: int = 1
    weighted: bool = False
    clip: float | None = None
    clip_value: float | None = None
    implementation: str = "for loop"
    prepares_first: bool = True
    """Whether a scheduler is made after prepare, or before."""
    rarely_above: float = 0.2
    """What decides which lanes use every parameter."""

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Two groups; what is in none is a matter of other tests."""
        kind, options = OPTIMIZERS[self.optimizer]
        matrices = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{"params": matrices}, {"params": others, "lr": options["lr"] * 0.5}]
        chosen = {"foreach": self.implementation == "foreach"}
        if self.implementation == "fused":
            chosen = {"fused": True}
        return getattr(torch.optim, kind)(groups, **options, **chosen)

    def losses(self, logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The mean, or the sum over the targets that count and their number."""
        losses = F.cross_entropy(logits, targets, reduction="none")
        if not self.weighted:
            return (losses.mean(),)
        counts = 0.25 + (targets != 1).float() / 3
        return (losses * counts).sum(), counts.sum()


def build(case: Case) -> tuple[Odd, torch.optim.Optimizer]:
    torch.manual_seed(11)
    model = Odd(case.rarely_above)
    return model, case.make_optimizer(model)


@cache
def oracle(case: Case) -> tuple[list[float], list[float | None], Reference]:
    """The losses and norms of a plain loop, and what it came to."""
    torch.set_num_threads(1)
    model, optimizer = build(case)
    reference = Reference(model, optimizer, LANES, seed=0, flats=FLATS)
    dataset = data()
    loader = make_loader(
        dataset, 32, LANES, 0, case.micro_batches, False, False, 0, None, "uniform", None
    )  # fmt: skip
    made = SCHEDULERS[case.scheduler](optimizer) if case.scheduler else None
    means, norms = [], []
    for step in range(STEPS):

        def losses(lane: int, step: int = step):
            for portion in loader.portions(step, lane):
                x, y = dataset[list(portion.samples)]
                loss, *weight = case.losses(model(x), y)
                if case.weighted:
                    yield loss, float(weight[0]) if portion.share else 0.0, 1.0 if portion.share else 0.0
                else:
                    yield loss, portion.share, portion.share

        means.append(reference.step(step, losses, case.clip, case.clip_value))
        norms.append(reference.grad_norm)
        schedule(made, step, means[-1])
    return means, norms, reference


def halve_the_last_group(optimizer: torch.optim.Optimizer) -> Any:
    """No scheduler at all, but a user who edits a group."""

    def edit(step: int) -> None:
        optimizer.param_groups[-1]["lr"] *= 0.5
        optimizer.param_groups[0]["weight_decay"] = 0.01 * step

    return edit


SCHEDULERS: dict[str, Any] = {
    "edits": halve_the_last_group,
    "StepLR": lambda o: lr.StepLR(o, 2),
    "LambdaLR": lambda o: lr.LambdaLR(o, [lambda n: 1 / (n + 1), lambda n: 0.5**n]),
    "OneCycleLR": lambda o: lr.OneCycleLR(o, [0.1, 0.2], total_steps=6),
    "CyclicLR": lambda o: lr.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "CosineAnnealingWarmRestarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 2),
    "SequentialLR": lambda o: lr.SequentialLR(
        o, [lr.LinearLR(o, 0.1, 1.0, 2), lr.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr.ChainedScheduler([lr.ConstantLR(o, 0.5, 2), lr.PolynomialLR(o, 5)]),
    "ReduceLROnPlateau": lambda o: lr.ReduceLROnPlateau(o, patience=0, threshold=1.0),
    "MultiplicativeLR": lambda o: lr.MultiplicativeLR(o, lambda n: 0.8),
}


def schedule(made: Any, step: int, loss: float) -> None:
    """What a user's loop does after an update."""
    if made is None:
        return
    if isinstance(made, lr.ReduceLROnPlateau):
        made.step(loss)
    elif isinstance(made, lr.LRScheduler):
        made.step()
    else:
        made(step)


@dataclass(frozen=True)
class Trial(Cell):
    """A case in one cell of the grid."""

    case: Case = Case("adamw")


def digests_of(trials: Sequence[Trial]) -> list[str]:
    """Train every trial, each rank comparing with the oracle; one digest a case."""
    found: dict[Case, str] = {}
    for trial, digest in zip(trials, same_on_ranks(trials, equals_oracle), strict=True):
        assert found.setdefault(trial.case, digest) == digest, f"{trial} has a digest of its own"
    return list(found.values())


def equals_oracle(cell: Trial) -> str:
    case = cell.case
    means, norms, reference = oracle(case)
    run = cell.start(lanes=LANES, micro_batches=case.micro_batches)
    model, optimizer = build(case)
    make = SCHEDULERS[case.scheduler] if case.scheduler else lambda optimizer: None
    if case.prepares_first:
        run.prepare(model, optimizer)
        made = make(optimizer)
    else:
        made = make(optimizer)
        run.prepare(model, optimizer)
    loader = run.loader(data(), batch_size=32)
    for step in run.steps(loader, total=STEPS):
        for x, y in step:
            step.backward(*case.losses(model(x), y))
        step.update(clip=case.clip, clip_value=case.clip_value)
        assert step.loss == means[step.index], (step.index, step.loss, means[step.index])
        assert step.grad_norm == norms[step.index], (step.index, step.grad_norm, norms[step.index])
        schedule(made, step.index, step.loss)
    compare(run, model, reference)
    digest = run.digest()
    run.close()
    return digest


def rotated(cases: Sequence[Case], worlds: Sequence[int] = (3, 5)) -> list[Trial]:
    """Each case once in each of the worlds, going round through strategies and transports."""
    trials = []
    for n, case in enumerate(cases):
        for world in worlds:
            strategy = STRATEGIES[(n + world // 2) % 4]
            trials.append(Trial(world, strategy, TRANSPORTS[(n // 4 + world // 4) % 2], case=case))
    return trials


FULL = Case("adamw amsgrad", "OneCycleLR", micro_batches=2, weighted=True, clip=0.3, clip_value=0.02)


def test_every_world_strategy_and_transport():
    digests_of([Trial(c.world, c.strategy, c.exchange, case=FULL) for c in grid([1, 3, 5])])


def test_every_optimizer():
    cases = [Case(name) for name in OPTIMIZERS]
    digests = digests_of(rotated(cases))
    assert len(set(digests)) == len(cases)


def test_fused_and_foreach():
    """Each by itself has the bits of the same implementation on whole parameters."""
    cases = [Case(name, implementation="foreach", clip=0.5) for name in ("sgd momentum", "adamw", "rmsprop")]
    fused = Case("adamw", implementation="fused", clip=0.3, weighted=True)
    cases += [fused, replace(fused, optimizer="adam", clip_value=0.01), replace(fused, optimizer="adagrad")]
    # torch's fused SGD cannot take a parameter whose first gradient comes later than the others'.
    always = replace(fused, rarely_above=-1e9)
    cases += [replace(always, optimizer="sgd nesterov"), replace(always, optimizer="sgd momentum", clip=None)]
    digests_of(rotated(cases))


def test_accumulation_weights_and_clipping():
    cases = [Case("sgd momentum", micro_batches=2), Case("sgd momentum", micro_batches=4, weighted=True)]
    cases += [
        Case("sgd momentum", clip=0.1),
        Case("adamw", weighted=True, clip=1e9),
        Case("adamw", clip_value=1e-3),
    ]
    digests_of(rotated(cases))


def test_schedulers():
    cases = [Case("sgd momentum", s, prepares_first=n % 2 == 0) for n, s in enumerate(SCHEDULERS)]
    cases += [replace(case, prepares_first=not case.prepares_first) for case in cases[3:5]]
    digests_of(rotated(cases, worlds=[3]))


class Sizes(nn.Module):
    """Parameters of odd sizes, one of them over many slots and pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.linspace(-1, 1, n) for n in (1, 3, 63, 1_000_003, 65))

    def forward(self, x):
        return sum((torch.sin(part * x).sum() for part in self.parts), torch.zeros(()))


def odd_sizes(cell: Cell) -> list[str]:
    digests = []
    run = cell.start(lanes=8)
    model = Sizes()
    run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True))
    for step in run.steps(run.loader(torch.randn(16, generator=torch.manual_seed(1)), batch_size=8), total=2):
        for x in step:
            step.backward(model(x))
        step.update(clip=1.0)
        digests.append(run.digest())
    run.close()
    return digests


def test_a_fused_optimizer_on_odd_sizes():
    cells = [Cell(1, "zero3", "gloo"), Cell(3, "ddp", "shared"), Cell(3, "zero2", "gloo")]
    one_value([*cells, Cell(5, "zero1", "gloo"), Cell(5, "zero3", "shared")], odd_sizes)
