"""Buffers by the rule: floats move by the mean, counters must agree, whatever cannot is named."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

import lanewise as lw
from lanewise.errors import ModelError, PeerLostError
from tests.helpers.cases import Cell, grid, on_ranks, one_value
from tests.helpers.traits import WIDTH, Stack

LANES = 3


class Buffered(Stack):
    """Does to its buffer what it is told."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        first = {
            "counter": torch.zeros(2, dtype=torch.int64),
            "flag": torch.tensor(False),
            "shape": torch.zeros(2),
            "type": torch.zeros(2),
            "gone": torch.zeros(2),
            "complex": torch.zeros(2, dtype=torch.complex64),
        }[kind]
        self.register_buffer("mine", first)

    def forward(self, x):
        x = super().forward(x)
        if self.kind == "counter":
            self.mine[1] += 1 + self.lane
        elif self.kind == "flag":
            self.mine.logical_not_()
        elif self.kind == "shape":
            self.mine = torch.cat([self.mine, x.detach()[0, :1]])
        elif self.kind == "type":
            self.mine = self.mine.double()
        elif self.kind == "gone":
            self.mine = None
        else:
            self.mine += 1j
        return x


RULES = {
    "counter": "integer buffer 'mine' got different values in different lanes",
    "flag": "buffer 'mine' of type torch.bool changed in lane",
    "shape": r"buffer 'mine' of shape \(2,\) and type torch.float32 became \(3,\), torch.float32 in lane",
    "type": r"buffer 'mine' of shape \(2,\) and type torch.float32 became \(2,\), torch.float64 in lane",
    "gone": "buffer 'mine' was removed in lane",
    "complex": "buffer 'mine' of type torch.complex64 changed in lane",
}


@dataclass(frozen=True)
class KindCell(Cell):
    kind: str = ""


def refuse(cell):
    run = cell.start(lanes=LANES)
    torch.manual_seed(3)
    model = Buffered(cell.kind)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises((ModelError, PeerLostError)) as caught:
        train(run, model, 1)
    run.close()
    return type(caught.value).__name__, str(caught.value)


def train(run, model, steps):
    loader = run.loader(torch.arange(24.0 * WIDTH).reshape(-1, WIDTH).sin(), batch_size=12)
    for step in run.steps(loader, total=run.position + steps):
        for x in step:
            model.lane = step.lane
            step.backward(model(x).square().mean())
        step.update()


def test_buffers_that_cannot_be_averaged_are_named():
    kinds = [KindCell(1, "ddp", "shared"), KindCell(3, "zero1", "shared"), KindCell(3, "zero3", "gloo")]
    cells = [replace(cell, kind=kind) for kind in RULES for cell in kinds]
    for cell, by_rank in zip(cells, on_ranks(cells, refuse), strict=True):
        texts = [text for name, text in by_rank if name == "ModelError"]
        assert texts, cell
        for text in texts:
            assert pytest.RaisesExc(ModelError, match=RULES[cell.kind]).matches(ModelError(text)), text
        if cell.kind == "counter":
            assert len(texts) == cell.world, "all ranks come to the same decision"


class Norm(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.lane = 0
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, **settings)) for _ in range(2)
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def evaluate_between(cell):
    """Forwards in eval mode leave buffers alone; what the user writes between steps counts."""
    run = cell.start(lanes=LANES)
    torch.manual_seed(3)
    model = Norm()
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    train(run, model, 1)
    norm = model.blocks[0][1]
    before = norm.running_mean.clone()
    assert before.abs().sum() > 0
    assert norm.num_batches_tracked == 1
    with torch.no_grad():
        model.eval()(torch.ones(4, WIDTH))
    assert torch.equal(norm.running_mean, before)
    norm.running_var.fill_(2.0)
    train(run, model, 1)
    assert torch.equal(norm.running_mean, before)
    assert norm.num_batches_tracked == 1
    model.train()
    train(run, model, 1)
    assert norm.num_batches_tracked == 2
    assert bool((norm.running_var > 1.5).all())
    digest = run.digest()
    run.close()
    return digest, norm.running_var.tolist()


def test_batch_norm_in_both_modes():
    one_value([*grid([1], ["ddp"], ["shared"]), *grid([2, 3], ["zero1", "zero3"])], evaluate_between)


def test_sync_batch_norm_is_refused():
    run = lw.start(sinks=[])
    model = nn.SyncBatchNorm.convert_sync_batchnorm(Norm())
    with pytest.raises(ModelError, match=r"module 'blocks\.0\.1' is a SyncBatchNorm: it mixes samples"):
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    run.close()
