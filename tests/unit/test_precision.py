"""The table of types that a run prints, the scale of an fp16 loss, and the norm against plain fp64."""

import copy

import pytest
import torch
from torch import nn

import lanewise as lw
from lanewise.engine.precision import LossScale
from lanewise.events import Table
from tests.helpers.models import Gpt, token_data, token_loss

COLUMNS = ("parameters", "elements", "stored", "computed", "sent", "summed", "master", "moments")


def table(model, precision, strategy):
    """The rows of the table that `prepare` prints, and what the engine really keeps."""
    seen = []
    run = lw.start(lanes=4, precision=precision, strategy=strategy, sinks=[seen.append])
    run.prepare(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))
    (found,) = [event for event in seen if isinstance(event, Table)]
    assert found.title == "what is kept in which type"
    assert found.columns == COLUMNS
    masters = sum(m.nbytes for m in run.engine.committer.masters.values())
    assert (masters > 0) == any(row[6].startswith("fp32") for row in found.rows)
    run.close()
    return found.rows


def layers():
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2, bias=False))


@pytest.mark.parametrize(
    ("precision", "strategy", "row"),
    [
        ("fp32", "ddp", ("fp32", "fp32", "fp32", "fp32", "the stored values", "fp32")),
        ("fp32", "zero3", ("fp32", "fp32", "fp32", "fp32", "the stored values", "fp32")),
        ("bf16", "ddp", ("bf16", "bf16", "fp32", "fp32", "fp32", "fp32")),
        ("bf16", "zero1", ("bf16", "bf16", "fp32", "fp32", "fp32", "fp32")),
        ("bf16", "zero2", ("bf16", "bf16", "bf16", "fp32", "fp32", "fp32")),
        ("bf16", "zero3", ("bf16", "bf16", "bf16", "fp32", "fp32", "fp32")),
        ("fp16", "ddp", ("fp16", "fp16", "fp32", "fp32", "fp32", "fp32")),
        ("fp16", "zero3", ("fp16", "fp16", "fp16", "fp32", "fp32", "fp32")),
    ],
)
def test_the_table_says_every_type(precision, strategy, row):
    assert table(layers(), precision, strategy) == (("trainable", "104", *row),)


def test_the_table_of_an_fp64_model():
    row = ("fp64", "fp64", "fp64", "fp64", "the stored values", "fp64")
    assert table(layers().double(), "model", "zero2") == (("trainable", "104", *row),)


def test_the_table_of_a_mixed_model_with_frozen_parameters():
    model = layers()
    model[0].bfloat16().requires_grad_(False)
    model[2].bfloat16()
    assert table(model, "model", "zero3") == (
        ("trainable", "16", "fp32", "fp32", "fp32", "fp32", "the stored values", "fp32"),
        ("trainable", "16", "bf16", "bf16", "bf16", "fp32", "fp32", "fp32"),
        ("frozen", "72", "bf16", "bf16", "-", "-", "-", "-"),
    )


def test_the_table_says_that_batch_norm_stays_in_fp32():
    rows = table(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), "bf16", "ddp")
    assert [(row[1], row[2]) for row in rows] == [("72", "bf16"), ("16", "fp32")]


def test_the_scale_halves_and_grows():
    scale = LossScale(value=4.0, growth_interval=2, is_active=True)
    values = []
    for overflowed in (False, True, False, False, False, True, True, True, True):
        scale.update(overflowed)
        values.append(scale.value)
    assert values == [4.0, 2.0, 2.0, 4.0, 4.0, 2.0, 1.0, 1.0, 1.0]
    assert not scale.can_shrink


@pytest.mark.parametrize(("frozen", "value"), [(torch.float16, 65536.0), (torch.bfloat16, 1.0)])
def test_frozen_fp16_parameters_need_a_scale_too(frozen, value):
    """Gradients flow through them, and through activations of their type."""
    run = lw.start(lanes=4, sinks=[])
    model = nn.Sequential(nn.Linear(8, 8).to(frozen).requires_grad_(False), nn.Linear(8, 2))
    run.prepare(model, torch.optim.AdamW(model[1].parameters()))
    assert run.engine.committer.scale.value == value
    run.close()


def test_inputs_arrive_in_the_stored_type():
    run = lw.start(lanes=4, precision="bf16", sinks=[])
    seen = []

    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x, places, *, extra):
            seen.append((x.dtype, places.dtype, extra["y"][0].dtype))
            return self.layer(x)

    model = Looks()
    run.prepare(model, torch.optim.AdamW(model.parameters()))
    model(torch.ones(2, 3), torch.arange(3), extra={"y": [torch.ones(1).double()]})
    assert seen.pop() == (torch.bfloat16, torch.int64, torch.bfloat16)
    run.close()
    with pytest.raises(RuntimeError, match="dtype"):
        model(torch.ones(2, 3), torch.arange(3), extra={"y": [torch.ones(1)]})


def test_the_norm_is_that_of_plain_fp64_up_to_rounding():
    run = lw.start(lanes=4, sinks=[])
    model = Gpt(layers=2)
    plain = copy.deepcopy(model).double()
    run.prepare(model, torch.optim.AdamW(model.parameters()))
    for step in run.steps(run.loader(token_data(16), batch_size=16), total=1):
        for tokens, targets in step:
            step.backward(token_loss(model(tokens), targets))
        step.update(clip=1.0)
    tokens, targets = token_data(16).tensors
    logits = plain(tokens)
    nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    assert step.grad_norm == pytest.approx(float(norm), rel=1e-6)
    run.close()
