"""Adding gradients: carries out the programs of `lanes.program` on tensors. The only file that adds them.

A leaf is copied, never added into zeros (that would turn -0.0 into +0.0); a parameter without a gradient
in a lane is a leaf of +0.0. Low precision is widened first, so a partial sum is never rounded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from lanewise.engine import device, sparse
from lanewise.lanes.hosting import Span
from lanewise.lanes.layout import FlatLayout, Part
from lanewise.lanes.program import Action, Instruction
from lanewise.lanes.tree import Node

_SQUARES_BLOCK = 1 << 16


@dataclass
class LeafParts:
    """A stretch of a leaf, still lying where autograd left it."""

    parts: Sequence[Part]
    gaps: Sequence[Span]
    gradients: Sequence[torch.Tensor | None]

    def copy_to(self, target: torch.Tensor) -> None:
        """Write the stretch, with zeros as padding."""
        places, values, empty = self._places(target)
        if places:
            torch._foreach_copy_(places, values)
        for place in empty:
            place.zero_()
        self._clear_gaps(target)

    def add_to(self, target: torch.Tensor) -> None:
        """Add the stretch. No gradient adds +0.0, which is not the same as adding nothing."""
        places, values, empty = self._places(target)
        if places:
            torch._foreach_add_(places, values)
        for place in empty:
            place.add_(0.0)

    def write_sum(self, target: torch.Tensor, other: torch.Tensor) -> None:
        """Write the stretch plus `other`, in one pass over memory."""
        for part in self.parts:
            stretch = slice(part.offset, part.offset + part.stop - part.start)
            value = self.values(part)
            if value is None:
                torch.add(other[stretch], 0.0, out=target[stretch])
            else:
                torch.add(value, other[stretch], out=target[stretch])
        self._clear_gaps(target)

    def values(self, part: Part) -> torch.Tensor | None:
        """What a part holds, where it lies; made dense where it is sparse."""
        gradient = self.gradients[part.field]
        if gradient is None:
            return None
        if gradient.layout != torch.strided:
            return sparse.stretch(gradient, part.start, part.stop)
        return gradient.reshape(-1)[part.start : part.stop]

    def _clear_gaps(self, target: torch.Tensor) -> None:
        for low, high in self.gaps:
            target[low:high].zero_()

    def _places(
        self, target: torch.Tensor
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """Places in `target`, the gradients that belong there, and the places that have none."""
        places, values, empty = [], [], []
        for part in self.parts:
            place = target[part.offset : part.offset + part.stop - part.start]
            value = self.values(part)
            if value is None:
                empty.append(place)
            else:
                places.append(place)
                values.append(value)
        return places, values, empty


@dataclass
class Leaf:
    """The gradients of one flat in one lane, as autograd left them: one a parameter, None for no gradient.

    A sparse one is tidy; see `engine.sparse`.
    """

    layout: FlatLayout
    gradients: Sequence[torch.Tensor | None]
    device: torch.device

    def parts(self, span: Span) -> LeafParts:
        """The stretch of the leaf that lies in `span` of the flat."""
        return LeafParts(self.layout.parts(span), self.layout.gaps(span), self.gradients)

    def parcels(self, span: Span, alone: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """The messages that a stretch is sent as: large gradients as they lie, small ones packed."""
        found = []
        for low, high in self.layout.segments(span, alone):
            inside = self.parts((span[0] + low, span[0] + high))
            is_alone = len(inside.parts) == 1 and high - low >= alone
            value = inside.values(inside.parts[0]) if is_alone else None
            if value is not None and value.dtype == dtype:
                found.append(value)
            else:
                packed = torch.empty(high - low, dtype=dtype, device=self.device)
                inside.copy_to(packed)
                found.append(packed)
        return found


Addend = torch.Tensor | LeafParts
"""What arrives to be added: a tensor, or a leaf where it lies."""


def carry_out(
    instructions: Sequence[Instruction], registers: Sequence[torch.Tensor], arrivals: Mapping[Node, Addend]
) -> None:
    """Do the additions of one round. All tensors cover the same stretch of the same flat."""
    for step in instructions:
        target = registers[step.register]
        if step.action is Action.MERGE:
            assert step.source is not None
            target.add_(registers[step.source])
            continue
        assert step.arrival is not None
        first = arrivals[step.arrival]
        if step.action is Action.LOAD:
            _load(target, first)
        elif step.action is Action.FOLD:
            _fold(target, first)
        else:
            assert step.second is not None
            _pair(target, first, arrivals[step.second])


def _load(target: torch.Tensor, arrival: Addend) -> None:
    if isinstance(arrival, LeafParts):
        arrival.copy_to(target)
    else:
        target.copy_(arrival)


def _fold(target: torch.Tensor, arrival: Addend) -> None:
    if isinstance(arrival, LeafParts):
        arrival.add_to(target)
    else:
        target.add_(arrival)


def _pair(target: torch.Tensor, first: Addend, second: Addend) -> None:
    if isinstance(second, LeafParts):
        first, second = second, first
    if not isinstance(second, torch.Tensor) or second.dtype != target.dtype:
        _load(target, first)
        _fold(target, second)
    elif isinstance(first, LeafParts):
        first.write_sum(target, second)
    else:
        torch.add(first, second, out=target)


def add_squares(values: torch.Tensor, slot: int, totals: torch.Tensor) -> None:
    """Add the sum of squares of every slot, so many elements long, to its total."""
    if device.has_kernels(values.device):
        from lanewise.engine.kernels import squares

        squares.add_squares(values, slot, totals)
        return
    for number, total in enumerate(totals):
        total += sum_of_squares(values[number * slot : (number + 1) * slot])


def sum_of_squares(values: torch.Tensor) -> torch.Tensor:
    """The fp64 sum of squares of one slot, by blocks of fixed size: always the same order of additions."""
    total = torch.zeros((), dtype=torch.float64, device=values.device)
    for block in values.split(_SQUARES_BLOCK):
        wide = block.double()
        total += torch.dot(wide, wide)
    return total


def tree_sum(values: Sequence[float]) -> float:
    """The canonical sum of one Python number a lane."""
    level = list(values)
    while len(level) > 1:
        paired = [level[n] + level[n + 1] for n in range(0, len(level) - 1, 2)]
        level = paired + level[len(paired) * 2 :]
    return level[0]
