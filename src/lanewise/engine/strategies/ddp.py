"""DDP: every rank keeps everything, learns every sum of gradients, and updates all of it."""

from collections.abc import Sequence

from lanewise.config import Reduction
from lanewise.engine.finite import FiniteCheck
from lanewise.engine.homes import Home, PrivateHome
from lanewise.engine.late import LateSum
from lanewise.engine.native import NativeSum
from lanewise.engine.streamed import StreamedSum
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
    ) -> LateSum | StreamedSum | NativeSum:
        """Once a step; with no more lanes than ranks, a GPU need not wait for the end of backward."""
        if reduction == "native":
            return NativeSum(world, flats, check, keeps_all=True, every_round=False)
        if world.runs_ahead and world.lanes <= world.size:
            return StreamedSum(world, flats, check, is_followed=False, keeps_all=True)
        return LateSum(world, flats, check, keeps_all=True)
