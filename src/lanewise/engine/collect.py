"""From autograd to the sum: turns a unit's finished gradients into leaves and hands them on in order.

Units leave a backward in the order the model happens to run; they are handed on in one fixed order, the
same on every rank, so that exchanges always meet, whatever a lane did or did not run.
"""

from collections.abc import Callable, Sequence

import torch

from lanewise.engine import guard, sparse
from lanewise.engine.report import LaneReport
from lanewise.engine.strategies import GradientSum
from lanewise.engine.sum import Leaf
from lanewise.engine.unit import Flat, Unit
from lanewise.errors import ModelError


class Collector:
    """Collects one lane's gradients at a time."""

    def __init__(self, units_in_order: Sequence[Unit], gradient_sum: GradientSum) -> None:
        self.order = tuple(unit for unit in units_in_order if unit.trainable)
        """The units that are exchanged, one after the other."""
        self._sum = gradient_sum
        self._next = len(self.order)
        self._complete: set[int] = set()
        self._lane = LaneReport()
        self.observer: Callable[[LaneReport, Flat, Sequence[torch.Tensor | None]], None] | None = None
        """Sees each flat's gradients of a lane, as autograd made them, before they are added to anything."""
        self.present: set[int] = set()
        """The parameters that have got a gradient since the step began, by index."""
        self.parameters: list[tuple[Flat, int]] = []
        """Every trainable parameter, as its flat and its place there, in the order of the exchange."""
        self._first: dict[int, int] = {}
        for unit in self.order:
            for flat in unit.trainable:
                self._first[flat.number] = len(self.parameters)
                self.parameters += [(flat, place) for place in range(len(flat.parameters))]
        self._all = [flat.parameters[place] for flat, place in self.parameters]

    def begin_step(self) -> None:
        """Forget which parameters were used."""
        self.present = set()

    def clear(self) -> None:
        """Drop gradients that were left behind by somebody else's backward."""
        with guard.unguarded():
            for parameter in self._all:
                if parameter.grad is not None:
                    parameter.grad = None

    def begin(self, lane: LaneReport) -> None:
        """The next backward completes this lane's gradients."""
        self._lane = lane
        self._next = 0
        self._complete.clear()

    def unit_complete(self, unit: Unit) -> None:
        """Backward has left a unit. Before the last micro-batch of a lane that means nothing."""
        if self._next < len(self.order):
            self._complete.add(unit.number)
            self._hand_on()

    def end(self) -> None:
        """Backward is over: units that it never reached have no gradient."""
        self._complete.update(unit.number for unit in self.order)
        self._hand_on()
        with guard.unguarded():
            left = next((n for n, parameter in enumerate(self._all) if parameter.grad is not None), None)
        if left is not None:
            flat, place = self.parameters[left]
            raise ModelError(
                f"parameter {flat.names[place]!r} got a gradient after backward had left its unit "
                f"{flat.unit_name!r}: it was also used outside that unit, before the unit's own forward. Use "
                "it after that forward (a penalty on all parameters, say, after the model has run), or choose "
                "units with run.prepare(..., units=[...]) that contain every use; units=[] makes the whole model "
                "one."
            )

    def _hand_on(self) -> None:
        while self._next < len(self.order) and self.order[self._next].number in self._complete:
            unit = self.order[self._next]
            self._next += 1
            self._sum.deposit(unit, [self._leaf(flat) for flat in unit.trainable])

    def _leaf(self, flat: Flat) -> Leaf:
        with guard.unguarded():
            gradients = [parameter.grad for parameter in flat.parameters]
            for parameter in flat.parameters:
                parameter.grad = None
        if self._lane.is_padding:
            gradients = [None] * len(gradients)
        gradients = [
            gradient if gradient is None or gradient.layout == torch.strided else sparse.tidy(gradient, flat)
            for gradient in gradients
        ]
        first = self._first[flat.number]
        self.present.update(first + n for n, gradient in enumerate(gradients) if gradient is not None)
        if self.observer is not None:
            self.observer(self._lane, flat, gradients)
        return Leaf(flat.layout, gradients, flat.storage.device)
