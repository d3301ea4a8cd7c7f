"""The path of a GPU on a CPU: the host runs ahead of a device that is the host itself.

Every line of that path but the kernels then runs where there is no GPU, over real ranks, and must come to the bits
of the other path.
"""

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch

from lanewise.engine import room
from lanewise.engine.world import World


class _Room(room.AllocatedRoom):
    """As on a GPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.is_safe = True


@contextlib.contextmanager
def running_ahead(is_wanted: bool = True) -> Iterator[None]:
    """Runs that are started and trained inside take that path."""
    if not is_wanted:
        yield
        return
    with (
        mock.patch.object(World, "runs_ahead", property(lambda world: True)),
        mock.patch.object(room, "choose", _Room),
    ):
        yield
