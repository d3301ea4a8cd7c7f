"""Whether gradients are finite, found out where they are added.

NaN and infinity stay in a sum whatever else is added. So one look at a new sum tells of all that went into
it, and only if that look fails is each lane's part looked at, while it is still there.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from lanewise.config import NonFinite
from lanewise.engine import device
from lanewise.engine.precision import LossScale
from lanewise.engine.report import NOTHING
from lanewise.engine.sum import Addend, Leaf, LeafParts
from lanewise.engine.unit import Flat
from lanewise.engine.world import World, offsets
from lanewise.lanes.hosting import Span
from lanewise.lanes.layout import Part
from lanewise.lanes.program import Action, Instruction
from lanewise.lanes.tree import Node


def is_finite(gradient: torch.Tensor) -> bool:
    """Whether every element is finite. A finite sum proves it; only another one needs a closer look."""
    wide = gradient.sum() if gradient.dtype == torch.float64 else gradient.sum(dtype=torch.float32)
    return bool(torch.isfinite(wide)) or bool(torch.isfinite(gradient).all())


class Places:
    """Every element of every trainable flat by one number, in the order of the exchange."""

    def __init__(self, flats: Sequence[Flat]) -> None:
        self._starts, _ = offsets(flats)
        self._first: list[int] = []
        for flat in flats:
            self._first += [self._starts[flat.number] + place.start for place in flat.layout.fields]

    def start(self, flat: Flat) -> int:
        """The number of a flat's first element."""
        return self._starts[flat.number]

    def index(self, number: int) -> int:
        """The parameter that an element belongs to, counted in the order of the exchange."""
        return bisect_right(self._first, number) - 1


class FiniteCheck(Protocol):
    """What this rank has seen of gradients that are not finite, in the step under way."""

    def begin_step(self) -> None:
        """Nothing has been seen."""
        ...

    def look(
        self,
        flat: Flat,
        span: Span,
        instructions: Sequence[Instruction],
        registers: Sequence[torch.Tensor],
        arrivals: Mapping[Node, Addend],
        is_last: bool,
    ) -> None:
        """Look at what `carry_out` has just made. `is_last` says that register 0 now holds the whole sum."""
        ...

    def look_at_total(self, flat: Flat, total: torch.Tensor) -> None:
        """Look at a sum of what this rank owns that somebody else has made."""
        ...

    def look_at_whole_leaf(self, lane: int, flat: Flat, leaf: Leaf) -> None:
        """Look at a lane's gradients before they go where nobody can tell them apart."""
        ...

    def found(self) -> tuple[int, dict[int, int]]:
        """The first parameter with a bad sum, and of each lane with a bad gradient the first such parameter."""
        ...


class HostCheck:
    """Looks, and waits for what it sees. See `FiniteCheck`."""

    def __init__(self, world: World, flats: Sequence[Flat], nonfinite: NonFinite, scale: LossScale) -> None:
        """Whatever the policy, the scale of an fp16 loss depends on it; only an error has to name a lane."""
        self._world = world
        self._places = Places(flats)
        self._nonfinite = nonfinite
        self._scale = scale
        self._is_wanted = is_wanted(nonfinite, scale)
        self._names_lanes = False
        self._total = NOTHING
        self._leaves: dict[int, int] = {}

    def begin_step(self) -> None:
        """Nothing has been seen."""
        self._names_lanes = self._nonfinite == "raise" and not self._scale.can_shrink
        self._total = NOTHING
        self._leaves.clear()

    def look(
        self,
        flat: Flat,
        span: Span,
        instructions: Sequence[Instruction],
        registers: Sequence[torch.Tensor],
        arrivals: Mapping[Node, Addend],
        is_last: bool,
    ) -> None:
        """See `FiniteCheck`."""
        if not self._is_wanted or not (is_last or self._names_lanes):
            return
        if is_last and self._names_lanes and not instructions:
            return  # the sum was complete before, and was looked at then
        parts = flat.layout.parts(span)
        fresh = {0} if is_last else _fresh(instructions)
        bad = [registers[register] for register in fresh if not is_finite(registers[register])]
        for register in bad:
            self._total = min(self._total, self._first_bad(flat, parts, register))
        if bad and self._names_lanes:
            for node, arrival in arrivals.items():
                if node[1] - node[0] == 1:
                    self._look_at_leaf(node[0], flat, parts, arrival)

    def look_at_total(self, flat: Flat, total: torch.Tensor) -> None:
        """See `FiniteCheck`."""
        if self._is_wanted and not is_finite(total):
            parts = flat.layout.parts(self._world.my_span(flat))
            self._total = min(self._total, self._first_bad(flat, parts, total))

    def look_at_whole_leaf(self, lane: int, flat: Flat, leaf: Leaf) -> None:
        """See `FiniteCheck`."""
        if self._names_lanes:
            whole = (0, flat.layout.length)
            self._look_at_leaf(lane, flat, flat.layout.parts(whole), leaf.parts(whole))

    def found(self) -> tuple[int, dict[int, int]]:
        """See `FiniteCheck`."""
        return self._total, self._leaves

    def _look_at_leaf(self, lane: int, flat: Flat, parts: Sequence[Part], leaf: Addend) -> None:
        first = self._first_bad(flat, parts, leaf)
        if first != NOTHING:
            self._leaves[lane] = min(first, self._leaves.get(lane, NOTHING))

    def _first_bad(self, flat: Flat, parts: Sequence[Part], values: Addend) -> int:
        """The first parameter of a stretch that is not finite."""
        for part in parts:
            if isinstance(values, LeafParts):
                inside = values.values(part)
            else:
                inside = values[part.offset : part.offset + part.stop - part.start]
            if inside is not None and not is_finite(inside):
                start = self._places.start(flat) + flat.layout.fields[part.field].start
                return self._places.index(start)
        return NOTHING


class DeviceCheck:
    """Has the device note what it sees, and waits for nothing. See `FiniteCheck`."""

    def __init__(self, world: World, flats: Sequence[Flat], nonfinite: NonFinite, scale: LossScale) -> None:
        self._world = world
        self.places = Places(flats)
        self._is_wanted = is_wanted(nonfinite, scale)
        self.flags = torch.full((1 + world.lanes,), NOTHING, dtype=torch.int64, device=world.device)
        """The first element of a bad sum, and of each lane's leaf the first bad element; `NOTHING` for none."""

    @property
    def wanted_flags(self) -> torch.Tensor | None:
        """The flags, where anybody asks for them."""
        return self.flags if self._is_wanted else None

    def begin_step(self) -> None:
        """Nothing has been seen."""
        self.flags.fill_(NOTHING)

    def look(
        self,
        flat: Flat,
        span: Span,
        instructions: Sequence[Instruction],
        registers: Sequence[torch.Tensor],
        arrivals: Mapping[Node, Addend],
        is_last: bool,
    ) -> None:
        """Note a bad sum when it is whole. The lane that it comes from is not known then."""
        if self._is_wanted and is_last:
            note(registers[0], self.flags[:1], self.places.start(flat) + span[0])

    def look_at_total(self, flat: Flat, total: torch.Tensor) -> None:
        """Note a bad sum."""
        if self._is_wanted:
            note(total, self.flags[:1], self.places.start(flat) + self._world.my_span(flat)[0])

    def look_at_whole_leaf(self, lane: int, flat: Flat, leaf: Leaf) -> None:
        """Nothing: it would take a kernel for each parameter."""

    def found(self) -> tuple[int, dict[int, int]]:
        """Waits for the device."""
        total, *leaves = [NOTHING if n >= NOTHING else self.places.index(n) for n in self.flags.tolist()]
        return total, {lane: index for lane, index in enumerate(leaves) if index != NOTHING}


def is_wanted(nonfinite: NonFinite, scale: LossScale) -> bool:
    """Whether anybody asks if gradients are finite."""
    return nonfinite != "ignore" or scale.is_active


def note(values: torch.Tensor, flag: torch.Tensor, position: int) -> None:
    """Lower a flag to the position of the first value that is not finite, if there is one."""
    if not values.numel():
        return
    if device.has_kernels(values.device):
        from lanewise.engine.kernels import adding

        adding.note(values, flag, position)
        return
    is_bad = ~torch.isfinite(values)
    first = torch.where(is_bad.any(), is_bad.to(torch.uint8).argmax() + position, NOTHING)
    flag.copy_(torch.minimum(flag, first))


def _fresh(instructions: Sequence[Instruction]) -> set[int]:
    """The registers that hold something new after a round."""
    fresh: set[int] = set()
    for step in instructions:
        if step.action is Action.MERGE and step.source is not None:
            fresh.discard(step.source)
        fresh.add(step.register)
    return fresh
