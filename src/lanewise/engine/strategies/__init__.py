"""DDP and ZeRO-1, 2, 3: which of the slots a rank keeps between uses, one small file each."""

from collections.abc import Sequence
from typing import Protocol

import torch

from lanewise.config import Reduction
from lanewise.config import Strategy as StrategyName
from lanewise.engine.finite import FiniteCheck
from lanewise.engine.homes import Home
from lanewise.engine.sum import Leaf
from lanewise.engine.unit import Flat, Unit
from lanewise.engine.world import World
from lanewise.lanes.schedule import Schedule


class GradientSum(Protocol):
    """Takes the lanes' gradients, unit by unit, and leaves their sum with the owners."""

    def schedule(self, shares: Sequence[int]) -> Schedule:
        """The table of a step in which each rank hosts so many lanes."""
        ...

    def begin_step(self, schedule: Schedule) -> None:
        """Plan a step. Collective."""
        ...

    def deposit(self, unit: Unit, leaves: Sequence[Leaf] | None) -> None:
        """One lane's gradients of a unit, or None in a round in which this rank has no lane."""
        ...

    def end_round(self) -> None:
        """Every unit has been deposited in this round."""
        ...

    def finish(self) -> None:
        """Return when every sum that this rank owns is complete."""
        ...

    def gather(self) -> None:
        """Give all sums to all ranks."""
        ...

    def total(self, flat: Flat, owner: int) -> torch.Tensor:
        """The sum over all lanes of what `owner` owns of a flat."""
        ...

    def end_step(self) -> None:
        """The sums have been used."""
        ...

    @property
    def num_bytes(self) -> dict[str, int]:
        """Memory by what it is for, at its most."""
        ...

    @property
    def present_bytes(self) -> dict[str, int]:
        """Memory in use now, as far as that is known."""
        ...


class Strategy(Protocol):
    """What a rank keeps, and when gradients are exchanged."""

    updates_everything: bool
    """Whether every rank updates all slots, or only its own."""

    def home(self, world: World, units: Sequence[Unit]) -> Home:
        """Where parameters live."""
        ...

    def gradient_sum(
        self, world: World, flats: Sequence[Flat], reduction: Reduction, check: FiniteCheck
    ) -> GradientSum:
        """How gradients are summed."""
        ...


def choose(name: StrategyName) -> Strategy:
    """The strategy of this name."""
    from lanewise.engine.strategies import ddp, zero1, zero2, zero3

    strategies: dict[StrategyName, Strategy] = {
        "ddp": ddp.Ddp(),
        "zero1": zero1.Zero1(),
        "zero2": zero2.Zero2(),
        "zero3": zero3.Zero3(),
    }
    return strategies[name]
