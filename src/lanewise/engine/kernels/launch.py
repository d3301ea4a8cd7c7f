"""Starting a kernel often: Triton looks up the compiled kernel anew each time, by all its arguments."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


class Launch:
    """Starts a kernel without looking it up, from the second time on.

    One is for one device, and for starts that Triton compiles the same code for: with the same types, and with
    numbers that are alike in whether they are 1, whether 16 divides them, and whether they have more than 32 bits.
    Tensors that are not aligned as usual are seen to.
    """

    def __init__(self, kernel: Any, grid: Sequence[int], constants: Mapping[str, Any]) -> None:
        """A kernel's parameters are tensors, numbers, and then constants, which come here with Triton's options."""
        self._kernel = kernel
        self._grid = (*grid, 1, 1)[:3]
        self._constants = constants
        self._last: tuple[Any, ...] = ()
        self._compiled: Callable[..., object] | None = None

    def __call__(self, tensors: Sequence[torch.Tensor], numbers: Sequence[float]) -> None:
        """Start it on the current device and stream."""
        places = [tensor.data_ptr() for tensor in tensors]
        bits = 0
        for place in places:
            bits |= place
        if self._compiled is not None and not bits % 16:
            self._compiled(*places, *numbers, *self._last)
            return
        compiled = self._kernel[self._grid](*tensors, *numbers, **self._constants)
        # Triton's interpreter compiles nothing.
        if compiled is not None and not bits % 16:
            names = self._kernel.arg_names[len(tensors) + len(numbers) :]
            self._last = tuple(self._constants[name] for name in names)
            self._compiled = compiled[self._grid]
