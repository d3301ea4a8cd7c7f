"""Random streams: every lane has its own, and the user's own goes on as if lanes did not exist."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lanewise.lanes.seeds import derive


def seed_all(seed: int) -> None:
    """Seed torch on every device, Python's random, and numpy if it is loaded.

    As `torch.manual_seed` does, which takes a tenth of a millisecond to ask which other devices there might be.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        for generator in torch.cuda.default_generators:
            generator.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def seed_lane(seed: int, step: int, lane: int) -> None:
    """Begin the stream of one lane at one step. Micro-batches of a lane continue it."""
    seed_all(derive(seed, "lane", step, lane))


@contextmanager
def untouched(device: torch.device) -> Iterator[None]:
    """Whatever is drawn inside, the streams continue afterwards from where they were."""
    state = take(device)
    try:
        yield
    finally:
        put_back(state, device)


def take(device: torch.device) -> tuple[Any, ...]:
    """The state of all streams."""
    numpy = sys.modules.get("numpy")
    return (
        torch.get_rng_state(),
        torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        random.getstate(),
        numpy.random.get_state() if numpy is not None else None,
    )


def put_back(state: tuple[Any, ...], device: torch.device) -> None:
    """Continue all streams from a state."""
    on_cpu, on_gpu, python, with_numpy = state
    torch.set_rng_state(on_cpu)
    if on_gpu is not None:
        torch.cuda.set_rng_state(on_gpu, device)
    random.setstate(python)
    if with_numpy is not None:
        sys.modules["numpy"].random.set_state(with_numpy)
