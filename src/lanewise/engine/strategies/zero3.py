"""ZeRO-3: every rank keeps its slots of everything; a unit's parameters come here only while it runs."""

from collections.abc import Sequence

from lanewise.config import Reduction
from lanewise.engine.eager import EagerSum
from lanewise.engine.finite import FiniteCheck
from lanewise.engine.homes import Home, HostHome, ShardedHome
from lanewise.engine.native import NativeSum
from lanewise.engine.streamed import StreamedSum
from lanewise.engine.unit import Flat, Unit
from lanewise.engine.world import World


class Zero3:
    """See the file."""

    updates_everything = False

    def home(self, world: World, units: Sequence[Unit]) -> Home:
        """Sharded; on one host every value stands once in memory that all ranks map, so a gather is a read."""
        return HostHome(world, units) if world.transport.is_shared else ShardedHome(world, units)

    def gradient_sum(
        self, world: World, flats: Sequence[Flat], reduction: Reduction, check: FiniteCheck
    ) -> EagerSum | NativeSum:
        """As each unit's backward ends, in every round."""
        if reduction == "native":
            return NativeSum(world, flats, check, keeps_all=False, every_round=True)
        if world.runs_ahead:
            return StreamedSum(world, flats, check, is_followed=True, keeps_all=False)
        return EagerSum(world, flats, check, is_followed=True)
