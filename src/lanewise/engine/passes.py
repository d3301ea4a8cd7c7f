"""Following a forward and its backward from unit to unit.

Autograd runs ready nodes in the reverse order of their creation. So when backward reaches the output of a
call of one unit, everything is done that was called after that call had ended: those units' gradients are
complete, and their values may go. That needs a hook on a unit's outputs only, none on a parameter.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lanewise.engine.homes import Home
from lanewise.engine.unit import Unit


@dataclass
class _Call:
    """One call of a unit in a forward, with the moments at which it began and ended."""

    unit: Unit
    began: int
    ended: int = 0


@dataclass
class _Pass:
    """The calls of the forwards since the last backward."""

    calls: list[_Call] = field(default_factory=list)
    open: list[_Call] = field(default_factory=list)
    clock: int = 0
    first_calls: list[_Call] = field(default_factory=list)
    """The first call of every unit that backward has not left yet."""
    seen: set[int] = field(default_factory=set)

    def tick(self) -> int:
        """The next moment."""
        self.clock += 1
        return self.clock


class Passes:
    """Installs the hooks of all units and turns them into events of the home and of the sums."""

    def __init__(self, units: tuple[Unit, ...], home: Home, on_complete: Callable[[Unit], None]) -> None:
        self._units = units
        self._home = home
        self._on_complete = on_complete
        self._handles: list[Any] = []
        self._pass = _Pass()
        self._order: list[int] = []
        self._in_backward = False
        self._lingering: Unit | None = None
        self.is_held = False
        """Whether values stay here whatever is called (see `Engine.gathered`)."""
        self.is_training = False
        """Whether a lane is being computed, so that forwards will be followed by a backward."""

    def install(self) -> None:
        """Hook every unit."""
        for unit in self._units:
            before, after = self._hooks(unit)
            self._handles.append(unit.module.register_forward_pre_hook(before, prepend=True))
            self._handles.append(unit.module.register_forward_hook(after))

    def remove(self) -> None:
        """Unhook every unit."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def run_backward(self, backward: Callable[[], None]) -> None:
        """Run a backward, and let every unit's values go when it is over."""
        self._in_backward = True
        try:
            backward()
        finally:
            self._in_backward = False
            order = [call.unit.number for call in self._pass.calls]
            if order:
                self._order = order
            self.reset()

    def reset(self) -> None:
        """Forget what was called, and let everything go."""
        self._pass = _Pass()
        self._lingering = None
        if self._home.frees and not self.is_held:
            for unit in self._units:
                self._home.spare(unit)

    def _hooks(self, unit: Unit) -> tuple[Any, Any]:
        def before(module: nn.Module, arguments: Any) -> None:
            self._before_forward(unit)

        def after(module: nn.Module, arguments: Any, output: Any) -> None:
            self._after_forward(unit, output)

        hook: Any
        for hook in (before, after):
            hook._torchdynamo_disable = True
        return before, after

    def _before_forward(self, unit: Unit) -> None:
        if self._in_backward:
            calls = [call for call in self._pass.calls if call.unit is unit]
            self._entered(unit, max((call.ended for call in calls), default=0))
            return
        if self._lingering is not None and self._lingering is not unit:
            self._release(self._lingering)
        self._lingering = None
        self._home.need(unit)
        if not self.is_training:
            return
        call = _Call(unit, self._pass.tick())
        self._pass.calls.append(call)
        self._pass.open.append(call)
        if unit.number not in self._pass.seen:
            self._pass.seen.add(unit.number)
            self._pass.first_calls.append(call)
        if self._home.frees:
            self._prefetch_after(len(self._pass.calls))

    def _after_forward(self, unit: Unit, output: Any) -> None:
        if self._in_backward:
            return
        is_root = unit.number == 0
        if self.is_training and self._pass.open and self._pass.open[-1].unit is unit:
            call = self._pass.open.pop()
            call.ended = self._pass.tick()
            for tensor in tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(self._entering(call))
            if not is_root:
                self._lingering = unit
            return
        self._release(unit)
        if is_root and self._lingering is not None:
            self._release(self._lingering)
            self._lingering = None

    def _entering(self, call: _Call) -> Callable[[torch.Tensor], None]:
        def entered(gradient: torch.Tensor) -> None:
            self._entered(call.unit, call.ended)

        return entered

    def _entered(self, unit: Unit, ended: int) -> None:
        """Backward has come to a call that ended at this moment."""
        first_calls = self._pass.first_calls
        while ended and first_calls and first_calls[-1].began > ended:
            later = first_calls.pop().unit
            self._on_complete(later)
            self._release(later)
        self._home.need(unit)
        if self._home.frees and self._in_backward:
            earlier = [call.unit for call in self._pass.calls if 0 < call.ended < ended]
            if earlier:
                self._home.prefetch(earlier[-1])

    def _prefetch_after(self, position: int) -> None:
        """Start to bring the unit that was called next the last time."""
        called = [call.unit.number for call in self._pass.calls]
        if called == self._order[:position] and position < len(self._order):
            self._home.prefetch(self._units[self._order[position]])

    def _release(self, unit: Unit) -> None:
        if self._home.frees and not self.is_held:
            self._home.spare(unit)
