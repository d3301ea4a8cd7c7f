"""ZeRO-1: every rank keeps parameters and gradients, and the optimizer state of its slots."""

from collections.abc import Sequence

from lanewise.config import Reduction
from lanewise.engine.finite import FiniteCheck
from lanewise.engine.homes import Home, HostHome, ReplicatedHome
from lanewise.engine.late import LateSum
from lanewise.engine.native import NativeSum
from lanewise.engine.streamed import StreamedSum
from lanewise.engine.unit import Flat, Unit
from lanewise.engine.world import World


class Zero1:
    """See the file."""

    updates_everything = False

    def home(self, world: World, units: Sequence[Unit]) -> Home:
        """A copy for each rank, or one for all on the same host."""
        return HostHome(world, units) if world.transport.is_shared else ReplicatedHome(world, units)

    def gradient_sum(
        self, world: World, flats: Sequence[Flat], reduction: Reduction, check: FiniteCheck
    ) -> LateSum | StreamedSum | NativeSum:
        """Once a step; with no more lanes than ranks, a GPU need not wait for the end of backward."""
        if reduction == "native":
            return NativeSum(world, flats, check, keeps_all=False, every_round=False)
        if world.runs_ahead and world.lanes <= world.size:
            return StreamedSum(world, flats, check, is_followed=False, keeps_all=False)
        return LateSum(world, flats, check, keeps_all=False)
