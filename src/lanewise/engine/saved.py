"""What autograd saved of a unit's values: brought back here before a node of backward reads it.

Hooks on a unit's outputs do that as a rule, and early. But a loss may lead into a unit past its outputs,
and reading values that are away would be garbage or a crash. So, where values go away at all, whatever a
lane's forward saves of them comes back through here.
"""

from typing import Any

import torch

from lanewise.engine.homes import Home
from lanewise.engine.unit import Unit

_Packed = tuple[torch.Tensor, int, Unit | None]


class SavedValues:
    """Hooks on the tensors that autograd saves in this thread."""

    def __init__(self, units: tuple[Unit, ...], home: Home) -> None:
        self._units = units
        self._home = home
        self._hooks: Any = None
        self._unit_of: dict[int, Unit] = {}
        self.has_brought_back = False
        """Whether anything has been read that was away, since `enter`."""

    @property
    def is_listening(self) -> bool:
        """Whether `enter` was called and `leave` was not."""
        return self._hooks is not None

    def enter(self) -> None:
        """From now on, know what is saved."""
        self.leave()
        self.refresh()
        self.has_brought_back = False
        self._hooks = torch.autograd.graph.saved_tensors_hooks(
            torch.compiler.disable(self._pack), torch.compiler.disable(self._unpack)
        )
        self._hooks.__enter__()

    def refresh(self) -> None:
        """Values lie in other memory now."""
        self._unit_of = {
            flat.storage.untyped_storage()._cdata: unit for unit in self._units for flat in unit.flats
        }

    def leave(self) -> None:
        """What is saved from now on is nobody's business."""
        if self._hooks is not None:
            self._hooks.__exit__()
            self._hooks = None

    def _pack(self, tensor: torch.Tensor) -> _Packed:
        has_storage = tensor.layout == torch.strided
        unit = self._unit_of.get(tensor.untyped_storage()._cdata) if has_storage else None
        return tensor, tensor._version, unit

    def _unpack(self, packed: _Packed) -> torch.Tensor:
        tensor, version, unit = packed
        if tensor._version != version:
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} that is needed for the gradient was modified by an inplace "
                f"operation: it is at version {tensor._version}, and {version} was saved."
            )
        if unit is not None and self._home.need(unit):
            self.has_brought_back = True
        return tensor
