"""The path on which the device decides and the host looks later: same bits, same errors, one step late."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from lanewise.errors import ModelError, NonFiniteError, StepError
from tests.helpers.ahead import running_ahead
from tests.helpers.cases import STRATEGIES, Cell, Recipe, grid, on_ranks, one_value, train


@dataclass(frozen=True)
class Way:
    """A cell on one of the two paths."""

    cell: Cell
    is_ahead: bool

    @property
    def world(self) -> int:
        return self.cell.world


def train_on(way: Way, recipe: Recipe) -> list[str]:
    with running_ahead(way.is_ahead):
        return train(way.cell, recipe)


UNEVEN = [Cell(3, s, "gloo", hosting=(3.0, 1.0, 2.0), rehost={2: "even"}) for s in STRATEGIES]
CELLS = [Way(Cell(1, "ddp"), False), *(Way(cell, True) for cell in [*grid([1, 2, 3, 5], transports=["gloo"]), *UNEVEN])]


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(steps=4, fused=True, clip=0.05, dropout=0.1),
        Recipe(steps=4, fused=True, precision="bf16", weighted=True, micro_batches=2),
    ],
    ids=["fp32, clipped", "bf16, weighted, two micro-batches"],
)
def test_both_paths_have_the_same_bits(recipe):
    one_value(CELLS, train_on, recipe)
