"""A small model of odd sizes with every trait that decides bits, and its comparison with a plain loop."""

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from lanewise.engine.reference import Reference

SAMPLES = 75
"""With batches of 32, the third step has lanes of one and of two samples."""


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, 5, generator=generator)
    return TensorDataset(x, torch.randint(0, 4, (SAMPLES,), generator=generator))


class Branch(nn.Module):
    """A unit with odd sizes, dropout, and a part that only some samples use."""

    def __init__(self, width: int, rarely_above: float) -> None:
        super().__init__()
        self.rarely_above = rarely_above
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 11)
        self.down = nn.Linear(11, width, bias=False)
        self.gate = nn.Parameter(torch.tensor(0.5))
        self.rare = nn.Parameter(torch.randn(3))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        y = self.down(self.dropout(torch.tanh(self.up(self.norm(x))))) * self.gate
        return x + (y * self.rare.sum() if x[0, 0] > self.rarely_above else y)


class Odd(nn.Module):
    def __init__(self, rarely_above: float = 0.2) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 7)
        self.branches = nn.ModuleList(Branch(7, rarely_above) for _ in range(3))
        self.head = nn.Linear(7, 4)
        self.never = nn.Parameter(torch.ones(2))

    def forward(self, x):
        x = self.stem(x)
        for branch in self.branches:
            x = branch(x)
        return self.head(x)


ROOT = ["never", "stem.weight", "stem.bias", "head.weight", "head.bias"]
BRANCH = ["gate", "rare", "norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight"]
FLATS = [*([f"branches.{n}.{name}" for name in BRANCH] for n in (2, 1, 0)), ROOT]
"""Odd's units, in the order of their exchange."""


def compare(run: Any, model: nn.Module, reference: Reference) -> None:
    with run.gathered(model):
        for name, parameter in model.named_parameters():
            wanted = reference.model.get_parameter(name)
            assert torch.equal(parameter, wanted), f"{name}: {parameter} is not {wanted}"
    sliced = run.engine.committer.optimizer
    for piece in sliced.slices:
        whole = reference.updated(piece.name)
        wanted = whole.detach().reshape(-1)[piece.part.start : piece.part.stop]
        assert torch.equal(piece.tensor, wanted), f"what is updated of {piece.name}"
        state = sliced.state_of(piece)
        wanted_state = reference.optimizer.state.get(whole, {})
        assert state.keys() == wanted_state.keys(), (piece.name, state.keys(), wanted_state.keys())
        for key, value in wanted_state.items():
            if key not in ("step", "mu_product", "eta", "mu"):
                assert value.shape == whole.shape, key
                value = value.reshape(-1)[piece.part.start : piece.part.stop]
            same = torch.equal(state[key], value) or (state[key] != state[key]).equal(value != value)
            assert same, f"{key} of {piece.name}: {state[key]} is not {value}"
