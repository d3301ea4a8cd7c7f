"""What a GPU's memory is used for at the moment when most of it is.

The allocator knows how much was in use at the peak, and nobody knows when that was. So in the first steps the
allocator is asked wherever a unit begins or ends: when its peak has risen, what this rank holds at that moment is
noted. What is left of the peak belongs to the model: activations, gradients that were not sent yet, and whatever a
kernel needs for itself.
"""

from collections.abc import Callable, Mapping

import torch

_STEPS = 3
"""Steps in which to look: the second has the optimizer's state, and the third the memory that the second freed."""


class Meter:
    """Watches the peak of one GPU."""

    def __init__(self, device: torch.device, held: Callable[[], Mapping[str, int]]) -> None:
        """`held` says what this rank holds now, by what it is for."""
        self._device = device
        self._held = held
        self._peak = 0
        self._at_peak: Mapping[str, int] = {}
        self._steps = 0

    def begin_step(self) -> Callable[[], None] | None:
        """What to call wherever a unit begins or ends in this step; None when enough was seen."""
        self._steps += 1
        return self.look if self._steps <= _STEPS else None

    def look(self) -> None:
        """Note what is held, if the peak has risen."""
        peak = torch.cuda.max_memory_allocated(self._device)
        if peak > self._peak:
            self._peak, self._at_peak = peak, self._held()

    def memory(self) -> dict[str, int]:
        """The allocator's peak by what it was for, and what the allocator holds beside it for nobody."""
        peak = torch.cuda.max_memory_allocated(self._device)
        held = dict(self._at_peak or self._held())
        return {
            **held,
            "activations": max(peak - sum(held.values()), 0),
            "unused": max(torch.cuda.max_memory_reserved(self._device) - peak, 0),
        }
