"""DDP: every rank keeps everything, learns every sum of gradients, and updates all of it."""

from collections.abc import Sequence

from lanewise.config import Reduction
from lanewise.engine.finite import FiniteCheck
from lanewise.engine.homes import Home, PrivateHome
from lanewise.engine.late import LateSum
from lanewise.engine.native import NativeSum
from lanewise.engine.unit import Flat, Unit
from lanewise.engine.world import World


class Ddp:
    """See the file."""

    updates_everything = True

    def home(self, world: World, units: Sequence[Unit]) -> Home:
        """Each rank for itself, so that any of them could go on alone."""
        return PrivateHome(world, units)

    def gradient_sum(
        self, world: World, flats: Sequence[Flat], reduction: Reduction, check: FiniteCheck
    ) -> LateSum | NativeSum:
        """Once a step."""
        if reduction == "native":
            return NativeSum(world, flats, check, keeps_all=True, every_round=False)
        return LateSum(world, flats, check, keeps_all=True)
