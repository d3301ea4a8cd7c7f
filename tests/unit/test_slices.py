"""Slices: the bits of whole tensors, for every optimizer, implementation and odd size."""

import pytest
import torch
from torch import nn

from lanewise.engine.optimizer import Slice, SlicedOptimizer, divide
from lanewise.engine.unit import Flat
from lanewise.lanes.hosting import even, spans
from lanewise.lanes.layout import lay_out

KINDS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Adam": {"lr": 0.01, "weight_decay": 0.01},
    "AdamW": {"lr": 0.01, "amsgrad": True},
    "RMSprop": {"lr": 0.01, "centered": True, "momentum": 0.9},
    "Adagrad": {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.1},
    "Adamax": {"lr": 0.01},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
    "Adadelta": {"lr": 1.0},
    "ASGD": {"lr": 0.01, "t0": 1.0},
    "Rprop": {"lr": 0.01},
}
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
SIZES = (1, 3, 63, 65, 1001)


def sliced(kind, options, starts, world):
    """The optimizers of all ranks of a world over parameters of one flat, and their slices."""
    parameters = tuple(nn.Parameter(start.clone()) for start in starts)
    layout = lay_out([(f"p{n}", p.numel()) for n, p in enumerate(parameters)], lanes=8)
    flat = Flat(0, "root", layout, starts[0].dtype, True, parameters, (0,) * len(parameters))
    found = []
    for rank, slots in enumerate(spans(even(8, world))):
        values = torch.zeros(layout.slot * (slots[1] - slots[0]), dtype=flat.dtype)
        slices = []
        for part in layout.parts(layout.span(slots)):
            tensor = values[part.offset : part.offset + part.stop - part.start]
            tensor.copy_(parameters[part.field].detach().reshape(-1)[part.start : part.stop])
            slices.append(Slice(flat, part, rank, tensor))
        found.append(SlicedOptimizer(getattr(torch.optim, kind)(parameters, **options), slices))
    return found


def steps(kind, options, starts, gradients, world, divisor=1.0):
    """The parameters and their state, whole again, after a step on every row of gradients."""
    optimizers = sliced(kind, options, starts, world)
    for row in gradients:
        for optimizer in optimizers:
            mine = [
                row[s.part.field].reshape(-1)[s.part.start : s.part.stop].clone() for s in optimizer.slices
            ]
            optimizer.step(mine, divisor)
    found = {}
    for optimizer in optimizers:
        for piece in optimizer.slices:
            for key, value in {"value": piece.tensor, **optimizer.state_of(piece)}.items():
                if value.shape == piece.tensor.shape:
                    found.setdefault((piece.part.field, key), []).append(value)
    return {key: torch.cat(values) for key, values in found.items()}


def plain_steps(kind, options, starts, gradients, divisor):
    """The same with whole parameters, each gradient divided first."""
    parameters = [nn.Parameter(start.clone()) for start in starts]
    optimizer = getattr(torch.optim, kind)(parameters, **options)
    for row in gradients:
        for parameter, gradient in zip(parameters, row, strict=True):
            parameter.grad = gradient / torch.tensor(divisor, dtype=gradient.dtype)
        optimizer.step()
    found = {(n, "value"): p.detach() for n, p in enumerate(parameters)}
    for n, parameter in enumerate(parameters):
        state = {k: v for k, v in optimizer.state[parameter].items() if isinstance(v, torch.Tensor)}
        found |= {(n, k): v for k, v in state.items() if v.shape == parameter.shape}
    return found


def cases():
    for kind in KINDS:
        for implementation in ("loop", "foreach", "fused"):
            if implementation != "fused" or kind in FUSED:
                yield pytest.param(kind, implementation, id=f"{kind} {implementation}")


def chosen(kind, implementation):
    how = {"fused": True} if implementation == "fused" else {"foreach": implementation == "foreach"}
    return {**KINDS[kind], **how}


def rows(sizes, dtype, count=3):
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(n, generator=generator).to(dtype) * 10 for n in sizes] for _ in range(count)]


def assert_equal(found, wanted):
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("kind", "implementation"), list(cases()))
def test_slices_have_the_bits_of_whole_parameters(kind, implementation, dtype):
    """With a divisor: a fused optimizer that divides in its own kernel has the bits of dividing first."""
    options = chosen(kind, implementation)
    starts, *gradients = rows(SIZES, dtype)
    whole = plain_steps(kind, options, starts, gradients, 7.3)
    for world in (1, 3, 5):
        assert_equal(steps(kind, options, starts, gradients, world, 7.3), whole)


@pytest.mark.parametrize(("kind", "implementation"), [("AdamW", "fused"), ("SGD", "fused"), ("Adam", "loop")])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_large_odd_size_and_two_threads(kind, implementation, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        starts, *gradients = rows((1_000_003, 65), torch.float32, 2)
        options = chosen(kind, implementation)
        whole = plain_steps(kind, options, starts, gradients, 3.0)
        for world in (3,):
            assert_equal(steps(kind, options, starts, gradients, world, 3.0), whole)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", FUSED)
def test_a_fused_optimizer_divides_by_what_the_others_divide_by(kind):
    """Extreme gradients, and divisors whose rounding to fp32 is not the number itself."""
    extreme = torch.tensor([1e38, -1e38, 1e-38, 1e-44, -0.0, 0.0, 3.1, -7e-3] * 9)
    starts = [torch.linspace(-1, 1, extreme.numel())]
    options = chosen(kind, "fused")
    for divisor in (3.0, 0.1, 65536.0 * 8, 1 / 3, 1e-30):
        wanted = plain_steps(kind, options, starts, [[extreme]], divisor)
        found = steps(kind, options, starts, [[extreme]], 3, divisor)
        for key, value in wanted.items():
            assert torch.equal(found[key].nan_to_num(5.0), value.nan_to_num(5.0)), (key, divisor)


@pytest.mark.parametrize("implementation", ["loop", "fused"])
@pytest.mark.parametrize("divisor", [1e42, 1e-43])
def test_a_divisor_that_fp32_cannot_hold_still_divides(divisor, implementation):
    """A norm of 1e42 is one of finite gradients; they are scaled, not wiped out."""
    gradient = torch.tensor([3e38, -1e38] if divisor > 1 else [1e-40, -3e-41]).repeat(100)
    wanted = (gradient.double() / divisor).float()
    assert wanted.isfinite().all()
    assert wanted.ne(0).all()
    divided = gradient.clone()
    divide(divided, divisor)
    assert torch.equal(divided, wanted)
    options = {"lr": 1.0, "fused": implementation == "fused"}
    start = [torch.zeros(200)]
    assert torch.equal(steps("SGD", options, start, [[gradient]], 3, divisor)[0, "value"], -wanted)


def test_infinity_and_nan_divide_as_usual():
    for divisor, wanted in ((float("inf"), [0.0, -0.0]), (float("nan"), [float("nan")] * 2)):
        gradient = torch.tensor([2.0, -2.0])
        divide(gradient, divisor)
        assert torch.equal(gradient.nan_to_num(9.0), torch.tensor(wanted).nan_to_num(9.0))
