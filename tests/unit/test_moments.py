"""Moments in bf16: how they are rounded, that chunks and ranks change no bit, and that nothing is lost."""

import math
import warnings

import pytest
import torch
from torch import nn

import lanewise as lw
from lanewise.engine import moments as narrow
from lanewise.engine.moments import Moments, key_of, round_to_bf16
from lanewise.engine.optimizer import Slice, SlicedOptimizer
from lanewise.engine.unit import Flat
from lanewise.events import Table
from lanewise.lanes.hosting import even, spans
from lanewise.lanes.layout import lay_out

CPU = torch.device("cpu")
KEY = key_of(0, 3, 1, "exp_avg")
KINDS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
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


def rounded(wide, key=KEY, place=0):
    found = torch.empty_like(wide, dtype=torch.bfloat16)
    round_to_bf16(wide, found, key, place)
    return found


def of_bits(*bits):
    return torch.tensor([b - (b >> 31 << 32) for b in bits], dtype=torch.int32).view(torch.float32)


def bits_of(tensor):
    return [b & 0xFFFF for b in tensor.view(torch.int16).tolist()]


def mixed(word):
    """The mixing, once more in plain integers."""
    word = (word ^ word >> 16) * 0x7FEB352D % 2**32
    word = (word ^ word >> 15) * 0x846CA68B % 2**32
    return word ^ word >> 16


def noise(place, key):
    """The 16 random bits of an element, once more in plain integers."""
    low, high = (place // 2) % 2**32, place // 2 // 2**32
    word = mixed(mixed(low ^ key[0]) ^ (key[1] + high) % 2**32)
    return word >> 16 if place % 2 else word & 0xFFFF


@pytest.mark.parametrize("place", [0, 64, 65536 - 64, 2**32 - 128, 2**33 - 64, 2**33, 2**40 + 64])
def test_the_bits_are_a_function_of_key_and_place(place):
    for key in (KEY, (0, 0), (2**31 - 1, 2**32 - 1)):
        wide = torch.randn(131)
        patterns = [b & 0xFFFFFFFF for b in wide.view(torch.int32).tolist()]
        wanted = [(b + noise(place + n, key)) >> 16 for n, b in enumerate(patterns)]
        assert bits_of(rounded(wide, key, place)) == wanted


def test_parts_are_rounded_as_the_whole():
    wide = torch.randn(200_001)
    whole = rounded(wide, place=640)
    parts = [rounded(wide[a:b], place=640 + a) for a, b in ((0, 64), (64, 131_136), (131_136, len(wide)))]
    assert torch.equal(torch.cat(parts), whole)
    assert rounded(wide[:0]).numel() == 0


def test_one_of_two_neighbours():
    wide = torch.cat([torch.randn(50_000), torch.randn(50_000) * 1e-38, torch.randn(50_000) * 1e38 / 8])
    found = rounded(wide).view(torch.int16)
    below = (wide.view(torch.int32) >> 16).to(torch.int16)
    assert torch.isin(found - below, torch.tensor([0, 1], dtype=torch.int16)).all()
    assert ((found - below) == 1).any()
    assert torch.equal(rounded(-wide), -rounded(wide)), "the sign stands apart"


def test_what_bf16_can_say_stays():
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for step in range(4):
        again = rounded(every.float(), key_of(0, step, 0, "exp_avg"))
        is_number = ~every.isnan()
        assert torch.equal(again.view(torch.int16)[is_number], every.view(torch.int16)[is_number])
        assert again[~is_number].isnan().all()
        assert torch.equal(rounded(again.float()).view(torch.int16), again.view(torch.int16))


def test_the_ends_of_the_range():
    """NaN stays one however few bits say so, and only what is rounded to infinity by nearest becomes it."""
    cases = {
        0x00000000: 0x0000, 0x80000000: 0x8000, 0x7F800000: 0x7F80, 0xFF800000: 0xFF80, 0x7F800001: 0x7FC0,
        0xFF80FFFF: 0xFFC0, 0x7FC00000: 0x7FC0, 0xFFFFFFFF: 0xFFFF, 0x7F7F0000: 0x7F7F, 0x7F7F7FFF: 0x7F7F,
        0xFF7F7FFF: 0xFF7F, 0x7F7F8000: 0x7F80, 0x7F7FFFFF: 0x7F80, 0xFF7FFFFF: 0xFF80,
    }  # fmt: skip
    for step in range(20):
        assert bits_of(rounded(of_bits(*cases), key_of(0, step, 0, "x"))) == list(cases.values())
    finite = [b for b in cases if b & 0x7FFFFFFF < 0x7F800000]
    nearest = of_bits(*finite).bfloat16()
    assert bits_of(rounded(of_bits(*finite))) == bits_of(nearest)


@pytest.mark.parametrize("share", [1 / 64, 0.3, 0.5, 0.97])
def test_the_mean_is_right(share):
    """Of one value at many steps, for each element by itself and for all together."""
    steps, elements = 500, 1024
    for sign in (1.0, -1.0):
        value = sign * (1 + share * 2**-7)
        ups = torch.zeros(elements)
        for step in range(steps):
            found = rounded(torch.full((elements,), value), key_of(0, step, 0, "exp_avg_sq")).float()
            ups += found != sign
        deviation = math.sqrt(share * (1 - share) / steps)
        assert abs(float(ups.mean()) / steps - share) < 5 * deviation / math.sqrt(elements)
        assert float((ups / steps - share).abs().max()) < 6 * deviation
        spread = float((ups / steps).std()) / deviation
        assert 0.85 < spread < 1.15, "as if elements were tossed apart"


def test_elements_steps_flats_and_names_are_tossed_apart():
    count = 1 << 18
    half = torch.full((count,), 1 + 2**-8)

    def tosses(seed, step, flat, name, place=0):
        return (rounded(half, key_of(seed, step, flat, name), place) != 1).double() * 2 - 1

    base = tosses(0, 5, 2, "exp_avg")
    others = {
        "the next element": base.roll(1),
        "the one after it": base.roll(2),
        "64 elements on": base.roll(64),
        "another seed": tosses(1, 5, 2, "exp_avg"),
        "the next step": tosses(0, 6, 2, "exp_avg"),
        "the next flat": tosses(0, 5, 3, "exp_avg"),
        "the other moment": tosses(0, 5, 2, "exp_avg_sq"),
        "another place": tosses(0, 5, 2, "exp_avg", place=count),
        "2**33 elements on": tosses(0, 5, 2, "exp_avg", place=2**33),
    }
    for what, other in others.items():
        assert abs(float((base * other).mean())) < 5 / math.sqrt(count), what


def test_every_bit_of_the_noise_is_even():
    """A chi-square over the upper and the lower bytes."""
    words = narrow._random_bits(0, 1 << 16, KEY, CPU)
    for shift in (0, 8):
        counts = torch.bincount(words >> shift & 0xFF, minlength=256).double()
        chi = float(((counts - 256) ** 2 / 256).sum())
        assert 255 - 5 * math.sqrt(510) < chi < 255 + 5 * math.sqrt(510)


def optimizers(kind, options, starts, world, chunk=narrow.CHUNK, is_narrow=True):
    """The optimizers of all ranks of a world over parameters of one flat."""
    parameters = tuple(nn.Parameter(start.clone()) for start in starts)
    layout = lay_out([(f"p{n}", p.numel()) for n, p in enumerate(parameters)], lanes=8)
    flat = Flat(4, "root", layout, starts[0].dtype, True, parameters, (0,) * len(parameters))
    found = []
    for rank, slots in enumerate(spans(even(8, world))):
        values = torch.zeros(layout.slot * (slots[1] - slots[0]), dtype=flat.dtype)
        slices = []
        for part in layout.parts(layout.span(slots)):
            tensor = values[part.offset : part.offset + part.stop - part.start]
            tensor.copy_(parameters[part.field].detach().reshape(-1)[part.start : part.stop])
            slices.append(Slice(flat, part, rank, tensor))
        make = kind if isinstance(kind, type) else getattr(torch.optim, kind)
        one = SlicedOptimizer(make(parameters, **options), slices)
        if is_narrow:
            one.keep_narrow(Moments(0, CPU, chunk))
        found.append(one)
    return found


def run_steps(found, gradients, divisor=1.0):
    for number, row in enumerate(gradients):
        for one in found:
            one.number = number
            mine = [
                None if row[s.part.field] is None else row[s.part.field][s.part.start : s.part.stop].clone()
                for s in one.slices
            ]
            one.step(mine, divisor)


def whole(found):
    """Parameters and state, put together again from all slices."""
    parts = {}
    for one in found:
        for piece in one.slices:
            for key, value in {"value": piece.tensor, **one.state_of(piece)}.items():
                if value.shape == piece.tensor.shape and key not in ("step", "eta", "mu", "mu_product"):
                    parts.setdefault((piece.part.field, key), []).append(value)
                else:
                    assert parts.setdefault((piece.part.field, key), [value])[0] == value
    return {key: torch.cat(values) if values[0].dim() else values[0] for key, values in parts.items()}


def values_of(kind, options, world, chunk=narrow.CHUNK, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randn(size, generator=generator).to(dtype) for size in SIZES]
    rows = [[torch.randn(size, generator=generator).to(dtype) for size in SIZES] for _ in range(4)]
    rows[1][1] = rows[2][3] = None
    if not options.get("fused") or kind != "SGD":
        rows[0][4] = None
    found = optimizers(kind, options, starts, world, chunk)
    run_steps(found, rows)
    return whole(found)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_and_chunks_change_no_bit(kind):
    for options in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        if "fused" in options and kind not in FUSED:
            continue
        one = values_of(kind, {**KINDS[kind], **options}, world=1)
        assert {v.dtype for (_, key), v in one.items() if v.dim() and key != "value"} == {torch.bfloat16}
        for world, chunk in ((3, narrow.CHUNK), (1, 64), (1, 640), (5, 128), (2, 1 << 10)):
            other = values_of(kind, {**KINDS[kind], **options}, world, chunk)
            assert one.keys() == other.keys()
            for key, value in one.items():
                assert torch.equal(value, other[key]), (options, world, chunk, key)


def test_state_in_fp64_stays():
    found = values_of("AdamW", KINDS["AdamW"], 1, 64, torch.float64)
    assert {v.dtype for v in found.values() if v.dim()} == {torch.float64}


def test_equals_a_plain_loop_that_rounds():
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randn(size, generator=generator) for size in (70, 1001)]
    rows = [[torch.randn(size, generator=generator) for size in (70, 1001)] for _ in range(4)]
    found = optimizers("AdamW", {"lr": 0.01, "fused": True}, starts, world=3)
    run_steps(found, rows)
    mine = whole(found)
    plain = [nn.Parameter(start.clone()) for start in starts]
    optimizer = torch.optim.AdamW(plain, lr=0.01, fused=True)
    for step, row in enumerate(rows):
        for parameter, gradient in zip(plain, row, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        for parameter, place in zip(plain, (0, 128), strict=True):
            for name in ("exp_avg", "exp_avg_sq"):
                state = optimizer.state[parameter]
                state[name] = rounded(state[name], key_of(0, step, 4, name), place).float()
    for field, parameter in enumerate(plain):
        assert torch.equal(mine[field, "value"], parameter)
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(mine[field, name].float(), optimizer.state[parameter][name])


def test_what_has_no_gradient_is_left_alone():
    starts = [torch.ones(65), torch.ones(300)]
    (one,) = optimizers("AdamW", {}, starts, world=1, chunk=64)
    run_steps([one], [[torch.randn(65), torch.randn(300)]])
    before = {key: value.clone() for key, value in one.state_of(one.slices[1]).items()}
    run_steps([one], [[torch.randn(65), None], [None, None]])
    after = one.state_of(one.slices[1])
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert one.state_of(one.slices[0])["step"] == 2


def test_a_fused_step_that_is_called_off_changes_nothing():
    (one,) = optimizers("AdamW", {"fused": True}, [torch.randn(300)], world=1, chunk=64)
    run_steps([one], [[torch.randn(300)]] * 2)
    before = {key: value.clone() for key, value in one.state_of(one.slices[0]).items()}
    piece = one.slices[0]
    piece.tensor.grad = torch.full((300,), math.inf)
    one.optimizer.grad_scale, one.optimizer.found_inf = torch.ones(()), torch.ones(())
    one._is_stepping = True
    one._moments.step(one.optimizer, one.slices, 2)
    assert all(torch.equal(before[key], value) for key, value in one.state_of(piece).items())


def test_no_more_than_a_chunk_is_wide():
    (one,) = optimizers("AdamW", {}, [torch.ones(size) for size in (65, 700, 64, 1, 130)], world=1)
    chunks = list(narrow._chunks(one.slices, 128))
    lengths = [[stretch.high - stretch.low for stretch in chunk] for chunk in chunks]
    assert all(sum(row) <= 128 for row in lengths)
    assert lengths == [[65], [128], [128], [128], [128], [128], [60, 64, 1], [128], [2]]


class Counts(torch.optim.SGD):
    """Counts its calls in its groups, as some optimizers outside of torch do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
        return super().step(closure)


def test_an_unknown_optimizer_is_called_once():
    (one,) = optimizers(Counts, {"lr": 0.1, "momentum": 0.9}, [torch.ones(65), torch.ones(300)], 1, chunk=64)
    run_steps([one], [[torch.ones(65), torch.ones(300)]] * 3)
    assert one.optimizer.param_groups[0]["calls"] == 3
    assert one.state_of(one.slices[1])["momentum_buffer"].dtype == torch.bfloat16
    (known,) = optimizers("SGD", {"lr": 0.1, "momentum": 0.9}, [torch.ones(65), torch.ones(300)], 1, chunk=64)
    run_steps([known], [[torch.ones(65), torch.ones(300)]] * 3)
    for key, value in whole([known]).items():
        assert torch.equal(value, whole([one])[key])


def test_hooks_and_schedulers_see_one_step():
    starts = [torch.ones(65), torch.ones(300)]
    (one,) = optimizers("AdamW", {"lr": 0.1}, starts, world=1, chunk=64)
    seen = []

    def look(optimizer, *_):
        params = optimizer.param_groups[0]["params"]
        dtypes = {v.dtype for p in params for k, v in optimizer.state.get(p, {}).items() if k != "step"}
        seen.append(([p.numel() for p in params], [p.grad is not None for p in params], dtypes))

    one.optimizer.register_step_pre_hook(look)
    one.optimizer.register_step_post_hook(look)
    scheduler = torch.optim.lr_scheduler.StepLR(one.optimizer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            run_steps([one], [[torch.ones(65), torch.ones(300)]])
            scheduler.step()
    before = ([65, 300], [True, True], set())
    after = ([65, 300], [True, True], {torch.bfloat16})
    assert seen == [before, after, after, after]
    one.check_groups()
    assert len(one.optimizer._optimizer_step_pre_hooks) == 2
    assert len(one.optimizer._optimizer_step_post_hooks) == 1


def test_a_step_that_fails_leaves_the_optimizer_whole():
    (one,) = optimizers("AdamW", {}, [torch.ones(300)], world=1, chunk=64)
    run_steps([one], [[torch.ones(300)]])
    one.optimizer.param_groups[0]["lr"] = "fast"
    with pytest.raises(TypeError):
        run_steps([one], [[torch.ones(300)]])
    one.check_groups()
    assert one.state_of(one.slices[0])["exp_avg"].dtype == torch.bfloat16


def train(moments, precision="fp32", make=torch.optim.AdamW, nonfinite="raise", bad_step=None):
    """What a run said at its start, what it keeps, and its digests."""
    seen = []
    run = lw.start(lanes=4, moments=moments, precision=precision, nonfinite=nonfinite, sinks=[seen.append])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 3))
    run.prepare(model, make(model.parameters(), lr=0.01))
    at_start = run.memory()["optimizer"]
    loader = run.loader(torch.randn(32, 8, generator=torch.Generator().manual_seed(1)), batch_size=8)
    digests = []
    for step in run.steps(loader, total=3):
        for x in step:
            step.backward(model(x).float().square().mean() * (math.nan if step.index == bad_step else 1))
        step.update()
        digests.append(run.digest())
    (table,) = [event for event in seen if isinstance(event, Table)]
    memory = run.memory()["optimizer"]
    run.close()
    return table.rows, at_start, memory, digests


ELEMENTS = 8 * 64 + 64 + 64 * 3 + 3


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_table_and_the_memory_of_a_run(precision):
    rows, _, memory, digests = train("bf16", precision)
    wide_rows, _, wide_memory, wide_digests = train("fp32", precision)
    steps = 4 * 4
    assert memory == ELEMENTS * 4 + steps
    assert wide_memory == ELEMENTS * 8 + steps
    assert (rows[0][-1], wide_rows[0][-1]) == ("bf16", "fp32")
    assert rows[0][:-1] == wide_rows[0][:-1]
    assert not set(digests) & set(wide_digests)
    assert train("bf16", precision)[3] == digests


def test_what_a_constructor_made_is_narrow_at_once():
    assert train("bf16", make=torch.optim.Adagrad)[1] == ELEMENTS * 2 + 4 * 4


def test_a_skipped_step_changes_nothing():
    _, _, _, digests = train("bf16", nonfinite="skip", bad_step=1)
    assert digests[0] == digests[1] != digests[2]
    _, _, _, digests = train("bf16", precision="fp16", bad_step=0)
    assert len(set(digests)) == 3


def losses(kind, steps=2000, count=512):
    """A gradient that is large at first and then small: the second moments must fade, each step by a thousandth."""
    (one,) = optimizers("AdamW", {"lr": 2e-3, "weight_decay": 0.0}, [torch.zeros(count)], 1, is_narrow=False)
    if kind != "fp32":
        moments = Moments(0, CPU)
        one.keep_narrow(moments)
        if kind == "nearest":
            moments._round = lambda wide, found, key, place: found.copy_(wide)
    x = one.slices[0].tensor
    target, curvature = torch.linspace(1, 3, count), torch.logspace(0, -2, count)
    for number in range(steps):
        one.number = number
        one.step([curvature * (x - target) * (10.0 if number < 100 else 1.0)], 1.0)
    return float((curvature * (x - target) ** 2).mean())


def test_training_goes_as_with_fp32_where_rounding_to_nearest_stalls():
    wide, random, nearest = losses("fp32"), losses("bf16"), losses("nearest")
    assert random == pytest.approx(wide, rel=0.02)
    assert nearest > 1.5 * wide
