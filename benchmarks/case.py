"""What is trained in a benchmark, the same for every engine."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

StepFunction = Callable[[], float]
"""One training step of a rank; returns its loss."""


@dataclass(frozen=True)
class Case:
    """A model, a micro-batch a rank, and how many lanes (or accumulation steps) a rank has."""

    size: str
    micro_batch: int
    world: int
    lanes_per_rank: int = 1

    def __str__(self) -> str:
        return (
            f"GPT {self.size}, micro-batch {self.micro_batch}, {self.world} ranks, "
            f"{self.lanes_per_rank} lane(s) a rank, fp32, fused AdamW"
        )


def adamw(parameters) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)
