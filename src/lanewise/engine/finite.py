"""Whether gradients are finite, found out where they are added.

NaN and infinity stay in a sum whatever else is added. So one look at a new sum tells of all that went into
it, and only if that look fails is each lane's part looked at, while it is still there.
"""

from collections.abc import Mapping, Sequence

import torch

from lanewise.config import NonFinite
from lanewise.engine.precision import LossScale
from lanewise.engine.sum import Addend, Leaf, LeafParts
from lanewise.engine.unit import Flat
from lanewise.lanes.hosting import Span
from lanewise.lanes.layout import Part
from lanewise.lanes.program import Action, Instruction
from lanewise.lanes.tree import Node


def is_finite(gradient: torch.Tensor) -> bool:
    """Whether every element is finite. A finite sum proves it; only another one needs a closer look."""
    wide = gradient.sum() if gradient.dtype == torch.float64 else gradient.sum(dtype=torch.float32)
    return bool(torch.isfinite(wide)) or bool(torch.isfinite(gradient).all())


class FiniteCheck:
    """What this rank has seen of gradients that are not finite, in the step under way."""

    def __init__(self, nonfinite: NonFinite, scale: LossScale) -> None:
        """Whatever the policy, the scale of an fp16 loss depends on it; only an error has to name a lane."""
        self._nonfinite = nonfinite
        self._scale = scale
        self._is_wanted = nonfinite != "ignore" or scale.is_active
        self._names_lanes = False
        self.flats: set[int] = set()
        """Flats with a sum that is not finite."""
        self.leaves: set[tuple[int, int, int]] = set()
        """Leaves that are not finite, as lane, flat and field."""

    def begin_step(self) -> None:
        """Nothing has been seen."""
        self._names_lanes = self._nonfinite == "raise" and not self._scale.can_shrink
        self.flats.clear()
        self.leaves.clear()

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
        if not self._is_wanted or not (is_last or self._names_lanes):
            return
        if is_last and self._names_lanes and not instructions:
            return  # the sum was complete before, and was looked at then
        fresh = {0} if is_last else _fresh(instructions)
        if all(is_finite(registers[register]) for register in fresh):
            return
        self.flats.add(flat.number)
        if self._names_lanes:
            for node, arrival in arrivals.items():
                if node[1] - node[0] == 1:
                    self._look_at_leaf(node[0], flat, flat.layout.parts(span), arrival)

    def look_at_total(self, flat: Flat, total: torch.Tensor) -> None:
        """Look at a sum that somebody else has made."""
        if self._is_wanted and not is_finite(total):
            self.flats.add(flat.number)

    def look_at_whole_leaf(self, lane: int, flat: Flat, leaf: Leaf) -> None:
        """Look at a lane's gradients before they go where nobody can tell them apart."""
        if self._names_lanes:
            whole = (0, flat.layout.length)
            self._look_at_leaf(lane, flat, flat.layout.parts(whole), leaf.parts(whole))

    def _look_at_leaf(self, lane: int, flat: Flat, parts: Sequence[Part], leaf: Addend) -> None:
        for part in parts:
            if isinstance(leaf, LeafParts):
                values = leaf.values(part)
            else:
                values = leaf[part.offset : part.offset + part.stop - part.start]
            if values is not None and not is_finite(values):
                self.leaves.add((lane, flat.number, part.field))


def _fresh(instructions: Sequence[Instruction]) -> set[int]:
    """The registers that hold something new after a round."""
    fresh: set[int] = set()
    for step in instructions:
        if step.action is Action.MERGE and step.source is not None:
            fresh.discard(step.source)
        fresh.add(step.register)
    return fresh
