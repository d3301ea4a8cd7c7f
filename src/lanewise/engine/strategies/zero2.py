"""ZeRO-2: every rank keeps parameters, and the gradients and optimizer state of its slots."""

from collections.abc import Sequence

from lanewise.config import Reduction
from lanewise.engine.eager import EagerSum
from lanewise.engine.finite import FiniteCheck
from lanewise.engine.homes import Home, HostHome, ReplicatedHome
from lanewise.engine.native import NativeSum
from lanewise.engine.streamed import StreamedSum
from lanewise.engine.unit import Flat, Unit
from lanewise.engine.world import World


class Zero2:
    """See the file."""

    updates_everything = False

    def home(self, world: World, units: Sequence[Unit]) -> Home:
        """A copy for each rank, or one for all on the same host."""
        return HostHome(world, units) if world.transport.is_shared else ReplicatedHome(world, units)

    def gradient_sum(
        self, world: World, flats: Sequence[Flat], reduction: Reduction, check: FiniteCheck
    ) -> EagerSum | NativeSum:
        """As each unit's backward ends, in every round."""
        if reduction == "native":
            return NativeSum(world, flats, check, keeps_all=False, every_round=True)
        if world.runs_ahead:
            return StreamedSum(world, flats, check, is_followed=False, keeps_all=False)
        return EagerSum(world, flats, check, is_followed=False)
