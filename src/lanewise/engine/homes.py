"""Where the values of parameters live between their uses, one small class for each way.

A home brings a unit's values here before they are used, lets them go afterwards, and makes the optimizer's
new values visible everywhere. It never adds a gradient and never runs a model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from lanewise.engine import guard, room
from lanewise.engine.transport.messages import MessageTransport
from lanewise.engine.transport.protocol import Arrival
from lanewise.engine.unit import Flat, Unit, all_flats
from lanewise.engine.world import World
from lanewise.lanes.hosting import Span
from lanewise.lanes.layout import round_up

_GATHER = "the gather of unit "
_PAGE_BYTES = 4096


class Home(Protocol):
    """Keeps the values of all units."""

    frees: bool
    """Whether values go away between uses."""
    is_safe: bool
    """Whether to read values that are away is an error by itself, as on a GPU."""

    def settle(
        self, unit: Unit, values: Mapping[int, torch.Tensor], masters: Mapping[int, torch.Tensor]
    ) -> None:
        """Take a unit's first values, by flat: bind its parameters and keep what this rank keeps.

        `masters` has the wide copy of what this rank owns, where there is one.
        """
        ...

    def rounds(self, flat: Flat) -> bool:
        """Whether the stored values of what this rank owns are made from the master whenever they are needed."""
        ...

    def mine(self, flat: Flat) -> torch.Tensor:
        """The values of the slots that this rank owns, as stored; not to be written to where `rounds` says so."""
        ...

    def prefetch(self, unit: Unit) -> None:
        """Start to bring a unit here."""
        ...

    def need(self, unit: Unit) -> bool:
        """Have a unit's values here when this returns. Says whether they were not."""
        ...

    def spare(self, unit: Unit) -> None:
        """The unit's values may go."""
        ...

    def give_away(self, unit: Unit) -> None:
        """The unit's values may go, but views of them were given to somebody, and stay good."""
        ...

    def follow(self, leader: int) -> None:
        """Take part in the gathers of a rank that computes, up to its next exchange of another kind."""
        ...

    def publish(self) -> None:
        """The owners have written new values: let every rank see them. Collective."""
        ...

    @property
    def num_bytes(self) -> dict[str, int]:
        """Memory by what it is for; what ranks share is counted in equal parts, what comes and goes at its most."""
        ...

    @property
    def present_bytes(self) -> dict[str, int]:
        """What is in use now."""
        ...


class PrivateHome:
    """Every rank keeps everything for itself and updates everything (ddp)."""

    frees = False
    is_safe = True

    def __init__(self, world: World, units: Sequence[Unit]) -> None:
        self._world = world
        self._units = units

    def settle(
        self, unit: Unit, values: Mapping[int, torch.Tensor], masters: Mapping[int, torch.Tensor]
    ) -> None:
        """Keep all."""
        for flat in unit.flats:
            flat.storage = values[flat.number]
            flat.bind()

    def rounds(self, flat: Flat) -> bool:
        """Stored values stand beside their masters."""
        return False

    def mine(self, flat: Flat) -> torch.Tensor:
        """A part of the whole."""
        low, high = self._world.my_span(flat)
        return flat.storage[low:high]

    def prefetch(self, unit: Unit) -> None:
        """Nothing is ever away."""

    def need(self, unit: Unit) -> bool:
        """Nothing is ever away."""
        return False

    def spare(self, unit: Unit) -> None:
        """Nothing ever goes."""

    def give_away(self, unit: Unit) -> None:
        """Nothing ever goes."""

    def follow(self, leader: int) -> None:
        """Nothing is ever gathered."""

    def publish(self) -> None:
        """Every rank has written all values itself, from gradients that it may have read in others' memory."""
        if self._world.transport.is_shared:
            self._world.transport.barrier("the end of the update")

    @property
    def num_bytes(self) -> dict[str, int]:
        """All of it."""
        return {"parameters": sum(flat.num_bytes for flat in all_flats(self._units))}

    @property
    def present_bytes(self) -> dict[str, int]:
        """The same at any time."""
        return self.num_bytes


class ReplicatedHome(PrivateHome):
    """Every rank keeps all values; owners send theirs to the others after an update (zero1, zero2)."""

    def publish(self) -> None:
        """Gather every trainable flat in place."""
        under_way: list[Arrival] = []
        number = self._world.transport.announce("the gather of new values")
        for unit in self._units:
            for flat in unit.trainable:
                where = f"the gather of new values of unit {unit.name}"
                spans = self._world.spans(flat)
                under_way.append(self._world.transport.gather(flat.storage, spans, where, number))
        for arrival in under_way:
            arrival.wait()


class HostHome(PrivateHome):
    """The ranks of one host map the same values: each stands once (zero1, zero2, zero3 on one host)."""

    def __init__(self, world: World, units: Sequence[Unit]) -> None:
        super().__init__(world, units)
        starts = {}
        num_bytes = 0
        for flat in all_flats(units):
            starts[flat.number] = num_bytes
            num_bytes = round_up(num_bytes + flat.num_bytes, _PAGE_BYTES)
        memory = world.transport.common(num_bytes)
        for flat in all_flats(units):
            start = starts[flat.number]
            flat.storage = memory[start : start + flat.num_bytes].view(flat.dtype)

    def settle(
        self, unit: Unit, values: Mapping[int, torch.Tensor], masters: Mapping[int, torch.Tensor]
    ) -> None:
        """Write this rank's slots; the others write theirs."""
        for flat in unit.flats:
            low, high = self._world.my_span(flat)
            flat.storage[low:high].copy_(values[flat.number][low:high])
            flat.bind()

    @property
    def num_bytes(self) -> dict[str, int]:
        """This rank's part."""
        return {"parameters": sum(flat.num_bytes for flat in all_flats(self._units)) // self._world.size}


class Place(Enum):
    """Where the values of a unit are, under zero3 between hosts."""

    AWAY = "with their owners"
    COMING = "on their way"
    HERE = "here"


@dataclass(eq=False)
class _Shard:
    """One flat under zero3."""

    place: torch.Tensor
    """The memory of all values while they are here."""
    mine: torch.Tensor
    """The part of it that this rank owns."""
    kept: torch.Tensor
    """What this rank keeps of it for good: its own values, or their wide master."""
    spans: tuple[Span, ...]


class ShardedHome:
    """A rank keeps the values of its slots, and everything else only while it is used (zero3).

    Where a parameter has a wide master, that is all a rank keeps: the stored values are rounded from it into
    their place at each gather.
    """

    frees = True

    def __init__(self, world: World, units: Sequence[Unit]) -> None:
        self._world = world
        self._units = units
        self.recall: Callable[[], bool] = bool
        """Brings the root back when one of its parameters is touched; False where that may not be."""
        self._room = room.choose(world.device)
        self.is_safe = self._room.is_safe
        self._where = {unit.number: _GATHER + unit.name for unit in units}
        self._shards: dict[int, _Shard] = {}
        self._place = {unit.number: Place.HERE for unit in units}
        self._arrivals: dict[int, list[Arrival]] = {}
        self._gathered_bytes = 0
        self._peak_bytes = 0

    def settle(
        self, unit: Unit, values: Mapping[int, torch.Tensor], masters: Mapping[int, torch.Tensor]
    ) -> None:
        """Keep this rank's slots; let the rest go."""
        for flat in unit.flats:
            kept = masters.get(flat.number)
            low, high = self._world.my_span(flat)
            if kept is None:
                kept = values[flat.number][low:high].clone()
            self._find_place(flat, kept)
            flat.storage.copy_(values[flat.number])
            flat.bind()
            recall = self._recall if unit.number == 0 else None
            for name, parameter in zip(flat.names, flat.parameters, strict=True):
                guard.label(parameter, name, unit.name, recall)
            self._gathered_bytes += flat.num_bytes
        self.spare(unit)

    def rounds(self, flat: Flat) -> bool:
        """Where there is a master."""
        return flat.has_master

    def mine(self, flat: Flat) -> torch.Tensor:
        """This rank's slots."""
        return self._shards[flat.number].kept.to(flat.dtype)

    def prefetch(self, unit: Unit) -> None:
        """Find memory again and start the gather."""
        if self._place[unit.number] is not Place.AWAY:
            return
        arrivals = []
        where = self._where[unit.number]
        for flat in unit.flats:
            shard = self._shards[flat.number]
            self._room.fill(shard.place)
            shard.mine.copy_(shard.kept)
            arrivals.append(self._world.transport.gather(flat.storage, shard.spans, where))
            self._gathered_bytes += flat.num_bytes
        self._arrivals[unit.number] = arrivals
        self._place[unit.number] = Place.COMING
        self._peak_bytes = max(self._peak_bytes, self._gathered_bytes)

    def need(self, unit: Unit) -> bool:
        """Wait for the gather, starting it if nobody has."""
        if self._place[unit.number] is Place.HERE:
            return False
        self.prefetch(unit)
        for arrival in self._arrivals.pop(unit.number):
            arrival.wait()
        for flat in unit.flats:
            for parameter in flat.parameters:
                guard.bring_back(parameter)
            if not self._room.is_safe:
                flat.bind()
        self._place[unit.number] = Place.HERE
        return True

    def spare(self, unit: Unit) -> None:
        """Free the unit's memory. What is on its way is let in first."""
        if self._place[unit.number] is Place.AWAY:
            return
        self.need(unit)
        for flat in unit.flats:
            for parameter in flat.parameters:
                if not self._room.is_safe:
                    guard.blank(parameter)
                guard.send_away(parameter)
            self._room.empty(self._shards[flat.number].place)
            self._gathered_bytes -= flat.num_bytes
        self._place[unit.number] = Place.AWAY

    def give_away(self, unit: Unit) -> None:
        """Let the unit go, and its memory stay with whoever holds a view of it."""
        self.need(unit)
        for flat in unit.flats:
            self._find_place(flat, self._shards[flat.number].kept)
            flat.bind()
        self.spare(unit)

    def follow(self, leader: int) -> None:
        """Do what the leader's headers announce: join each gather, and let the unit go again."""
        assert isinstance(self._world.transport, MessageTransport)
        while (words := self._world.transport.follow(leader, "a round without a lane")).startswith(_GATHER):
            unit = next(unit for unit in self._units if words == _GATHER + unit.name)
            self.need(unit)
            self.spare(unit)

    def publish(self) -> None:
        """Nothing: the next gather brings the new values, and an owner joins it only after its update."""

    @property
    def num_bytes(self) -> dict[str, int]:
        """The slots of this rank that have no master, and the most that was gathered at a time."""
        flats = all_flats(self._units)
        shards = sum(self._shards[flat.number].kept.nbytes for flat in flats if not flat.has_master)
        return {"parameters": shards, "gathered": self._peak_bytes}

    @property
    def present_bytes(self) -> dict[str, int]:
        """The slots of this rank, and what is gathered."""
        return {**self.num_bytes, "gathered": self._gathered_bytes}

    def _recall(self) -> bool:
        return self.recall()

    def _find_place(self, flat: Flat, kept: torch.Tensor) -> None:
        place = self._room.make(flat.num_bytes)
        flat.storage = place.view(flat.dtype)
        low, high = self._world.my_span(flat)
        self._shards[flat.number] = _Shard(place, flat.storage[low:high], kept, self._world.spans(flat))
