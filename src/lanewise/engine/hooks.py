"""Hooks on a unit's module: they tell of its calls, and of nothing else."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lanewise.engine.unit import Unit


class _UnitHook:
    """A hook on a module. It does nothing for copies of that module, and nothing when it is unpickled.

    Compilers leave it alone, and all that it calls.
    """

    def __init__(self, unit: Unit, tell: Callable[..., None]) -> None:
        self._unit = unit
        self._tell = torch.compiler.disable(tell)

    def __deepcopy__(self, memo: object) -> "_UnitHook":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _idle_hook, ()


class Before(_UnitHook):
    """Tells that a unit is called."""

    def __call__(self, module: nn.Module, arguments: Any) -> None:
        """What torch calls before a forward."""
        if module is self._unit.module:
            self._tell(self._unit)


class After(_UnitHook):
    """Tells that a call of a unit has ended, and with what."""

    def __call__(self, module: nn.Module, arguments: Any, output: Any) -> None:
        """What torch calls after a forward."""
        if module is self._unit.module:
            self._tell(self._unit, output)


def _idle_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*arguments: Any) -> None:
    """What remains of a hook in a model that was pickled."""
