"""Memory to receive in, used again and again.

All of it is as long as the longest message so far, because a heap that is asked for aligned blocks of
many lengths never gets to use its holes again (see `engine.room`).
"""

import torch


class Inbox:
    """The buffers of one rank. As many of a type as were in use at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spare: dict[torch.dtype, list[torch.Tensor]] = {}
        self._longest: dict[torch.dtype, int] = {}
        self._used_bytes = 0
        self.most_bytes = 0
        """The most that was ever in use at a time."""

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer of so many elements or more, of any value."""
        longest = self._longest[dtype] = max(numel, self._longest.get(dtype, 0))
        spare = self._spare.setdefault(dtype, [])
        spare[:] = [buffer for buffer in spare if buffer.numel() == longest]
        buffer = spare.pop() if spare else torch.empty(longest, dtype=dtype, device=self._device)
        self._used_bytes += buffer.nbytes
        self.most_bytes = max(self.most_bytes, self._used_bytes)
        return buffer

    def give_back(self, buffer: torch.Tensor) -> None:
        """Nobody reads it any more."""
        self._used_bytes -= buffer.nbytes
        self._spare[buffer.dtype].append(buffer)
