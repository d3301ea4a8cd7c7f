"""Every precision has the bits of a plain loop with masters; scales, sums and decisions are the same everywhere."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn
from torch.nn import functional as F

from lanewise.data.loader import make_loader
from lanewise.engine.reference import Reference
from tests.helpers.cases import STRATEGIES, TRANSPORTS, Cell, one_value, same_on_ranks
from tests.helpers.odd import FLATS, Odd, compare, data

LANES = 8
STEPS = 3
SCALE = 1024.0


class Mixed(Odd):
    """Parameters of three types, two of them in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.branches[1].bfloat16()
        self.head.double()

    def forward(self, x):
        x = self.stem(x)
        for branch in self.branches:
            x = branch(x.to(branch.up.weight.dtype)).float()
        return self.head(x.double())


@dataclass(frozen=True)
class Kind:
    """A way to come to a precision: what the user gives, and what the run is told."""

    build: Callable[[], nn.Module]
    precision: str
    stored: torch.dtype | None
    """What the reference is converted to; None leaves it as it was built."""
    data: torch.dtype = torch.float32
    flats: tuple[tuple[str, ...], ...] = tuple(tuple(flat) for flat in FLATS)


MIXED_FLATS = (*map(tuple, FLATS[:3]), ("never", "stem.weight", "stem.bias"), ("head.weight", "head.bias"))
KINDS = {
    "fp32": Kind(Odd, "fp32", torch.float32),
    "fp32 from fp64": Kind(lambda: Odd().double(), "fp32", torch.float32, torch.float64),
    "bf16": Kind(Odd, "bf16", torch.bfloat16),
    "bf16 model": Kind(lambda: Odd().bfloat16(), "model", torch.bfloat16, torch.bfloat16),
    "fp16": Kind(Odd, "fp16", torch.float16),
    "fp64": Kind(lambda: Odd().double(), "model", torch.float64, torch.float64),
    "mixed": Kind(Mixed, "model", None, flats=MIXED_FLATS),
}


@dataclass(frozen=True)
class Trial(Cell):
    """One kind in one cell."""

    kind: str = "fp32"


def build(kind: Kind) -> nn.Module:
    torch.manual_seed(11)
    return kind.build()


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    logits = model(x.to(dtype))
    return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), y)


@cache
def plain(name: str) -> tuple[list[float], list[float | None], Reference]:
    """The losses and norms of a plain loop."""
    torch.set_num_threads(1)
    kind = KINDS[name]
    model = build(kind)
    narrow = {n for n, p in model.named_parameters() if (kind.stored or p.dtype).itemsize == 2}
    masters = {n: p.detach().float().clone() for n, p in model.named_parameters() if n in narrow}
    model.to(kind.stored)
    updated = [masters.get(n, p) for n, p in model.named_parameters()]
    optimizer = torch.optim.AdamW(updated, lr=0.01, foreach=False)
    scale = SCALE if name == "fp16" else 1.0
    reference = Reference(model, optimizer, LANES, 0, kind.flats, masters, scale)
    loader = make_loader(data(), 32, LANES, 0, 1, False, False, 0, None, "uniform", None)
    dtype = kind.stored or torch.float32
    means, norms = [], []
    for step in range(STEPS):

        def losses(lane: int, step: int = step):
            for portion in loader.portions(step, lane):
                loss = loss_of(model, *data()[list(portion.samples)], dtype)
                yield loss, portion.share, portion.share

        means.append(reference.step(step, losses, clip=0.5))
        norms.append(reference.grad_norm)
    return means, norms, reference


def equals_plain_loop(trial: Trial) -> str:
    means, norms, reference = plain(trial.kind)
    kind = KINDS[trial.kind]
    run = trial.start(lanes=LANES, precision=kind.precision)
    model = build(kind)
    run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False))
    run.engine.committer.scale.value = SCALE if trial.kind == "fp16" else 1.0
    for step in run.steps(run.loader(data(), batch_size=32), total=STEPS):
        for x, y in step:
            step.backward(loss_of(model, x, y, kind.data))
        step.update(clip=0.5)
        assert (step.loss, step.grad_norm) == (means[step.index], norms[step.index])
    compare(run, model, reference)
    for piece in run.engine.committer.optimizer.slices:
        assert piece.tensor.dtype == (torch.float32 if piece.flat.dtype.itemsize == 2 else piece.flat.dtype)
        state = run.engine.committer.optimizer.state_of(piece)
        assert {t.dtype for key, t in state.items() if key != "step"} <= {piece.tensor.dtype}
    digest = run.digest()
    run.close()
    return digest


def test_every_precision_equals_a_plain_loop_with_masters():
    trials = []
    for n, kind in enumerate(KINDS):
        trials += [
            Trial(3, STRATEGIES[n % 4], TRANSPORTS[n % 2], kind=kind),
            Trial(5, STRATEGIES[(n + 2) % 4], TRANSPORTS[(n + 1) % 2], kind=kind),
            Trial(5, STRATEGIES[(n + 3) % 4], TRANSPORTS[n % 2], kind=kind),
        ]
    digests = same_on_ranks(trials, equals_plain_loop)
    assert digests[0::3] == digests[1::3] == digests[2::3]
    assert len(set(digests)) == len(KINDS) - 1, "an fp64 copy of fp32 values is stored as those"


ALL = [
    Cell(1, "ddp", "shared"),
    Cell(3, "zero1", "gloo"),
    Cell(3, "zero3", "shared"),
    Cell(5, "ddp", "shared"),
    Cell(5, "zero2", "gloo"),
    Cell(5, "zero3", "gloo"),
]


def tiny_updates_add_up(cell: Cell) -> list[str]:
    """bf16 has 8 bits: 1 - 2**-11 is 1. Only a master that is there remembers such a step."""
    run = cell.start(lanes=8, precision="bf16")
    model = nn.Linear(9, 70, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=2.0**-11))
    committer = run.engine.committer
    moved = []
    for step in run.steps(run.loader(torch.ones(8, 9), batch_size=8), total=6):
        for x in step:
            step.backward(model(x).float().sum())
        step.update()
        for piece in committer.optimizer.slices:
            wanted = torch.full_like(piece.tensor, 1.0 - (step.index + 1) * 2.0**-11)
            assert piece.tensor.dtype == torch.float32
            assert torch.equal(piece.tensor, wanted), f"after step {step.index}: {piece.tensor[0]}"
        with run.gathered(model):
            assert model.weight.dtype == torch.bfloat16
            assert model.weight.unique().numel() == 1
            moved.append(bool(model.weight[0, 0] < 1.0))
    share = sum(master.numel() for master in committer.masters.values())
    slots = sum(high - low for owner in committer.owners for low, high in [run.engine.world.slots[owner]])
    assert share == slots * run.engine.flats[0].layout.slot
    assert run.memory()["masters"] == 4 * share
    assert not any(moved[:3])
    assert moved[-1]
    run.close()
    return [str(moved)]


def test_tiny_updates_add_up_in_the_masters():
    one_value(ALL, tiny_updates_add_up)


class WithBuffers(nn.Module):
    """Batch norm keeps its statistics, and a table of places its type."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 8)
        self.statistics = nn.BatchNorm1d(8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)
        self.register_buffer("shift", torch.full((8,), 1 + 2.0**-12))

    def forward(self, x):
        assert x.dtype == self.stem.weight.dtype
        x = self.norm(self.statistics(self.stem(x)))
        assert self.shift[0] != 1
        return self.head(x + self.shift.to(x.dtype))


def with_buffers(cell: Cell) -> list[str]:
    found = []
    run = cell.start(lanes=8, precision="bf16")
    torch.manual_seed(1)
    model = WithBuffers()
    run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    for step in run.steps(run.loader(data(), batch_size=32), total=2):
        for x, y in step:
            step.backward(F.cross_entropy(model(x).float(), y))
        step.update()
        found.append(run.digest())
    assert {t.dtype for n, t in model.named_buffers() if "num" not in n} == {torch.float32}
    assert model.statistics.weight.dtype == torch.float32
    assert model.norm.weight.dtype == model.head.weight.dtype == torch.bfloat16
    run.close()
    return found


def test_buffers_and_batch_norm_stay_in_fp32():
    assert len(set(one_value(ALL, with_buffers))) == 2


def overflows(cell: Cell) -> list[tuple[int, bool, float, str]]:
    """One lane overflows at step 1; the scale halves, and grows again after two good steps."""
    run = cell.start(lanes=8, precision="fp16")
    torch.manual_seed(11)
    model = Odd()
    run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    scale = run.engine.committer.scale
    scale.value, scale.growth_interval = SCALE, 2
    found = []
    before = ""
    for step in run.steps(run.loader(data(), batch_size=32), total=5):
        for x, y in step:
            loss = loss_of(model, x, y, torch.float32)
            step.backward(loss * 1e6 if (step.index, step.lane) == (1, 5) else loss)
        values = [piece.tensor.clone() for piece in run.engine.committer.optimizer.slices]
        step.update(clip=0.5)
        after = [piece.tensor for piece in run.engine.committer.optimizer.slices]
        unmoved = all(torch.equal(a, b) for a, b in zip(values, after, strict=True))
        assert unmoved == step.skipped or not values, "a rank may own nothing but padding"
        found.append((step.index, step.skipped, scale.value, run.digest()))
        assert found[-1][3] != before
        before = found[-1][3]
    run.close()
    return found


def test_the_scale_of_an_fp16_loss():
    found = one_value(ALL, overflows)
    assert [entry[1] for entry in found] == [False, True, False, False, False]
    assert [entry[2] for entry in found] == [1024.0, 512.0, 512.0, 1024.0, 1024.0]
