"""What differs between a CPU and a GPU, behind functions that both have."""

import ctypes
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from lanewise import env

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_PAUSE_S = 0.00005
"""Between two looks at a GPU."""


def choose(local_rank: int) -> torch.device:
    """The GPU of this local rank where there are GPUs, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    return torch.device("cpu")


def settle(device: torch.device, threads: int, exact: bool) -> None:
    """Make kernels repeat their bits: equal threads everywhere, deterministic kernels on a GPU."""
    torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if exact:
            torch.use_deterministic_algorithms(True)
            deterministic: Any = torch.utils.deterministic
            deterministic.fill_uninitialized_memory = False
            torch.backends.cudnn.benchmark = False
            _begin_cublas(device)


def _begin_cublas(device: torch.device) -> None:
    """Start cuBLAS with a fixed workspace, as deterministic algorithms want it.

    torch asks for the variable before the first product, and gives cuBLAS a workspace of its own in any case. While
    the variable is set, torch 2.11 parses it at every product, which takes longer than to launch one.
    """
    small = torch.ones(16, 16, device=device)
    with env.temporarily(_WORKSPACE, ":4096:8"):
        torch.mm(small, small)


def keep_freed_memory() -> bool:
    """Have the C library keep what is freed, so that the next step does not fault it in page by page.

    A first touch of a page costs forty times a later one. Returns whether the library obeyed.
    """
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return False
    trim_threshold, top_pad, mmap_max = -1, -2, -4
    settings = ((mmap_max, 0), (trim_threshold, 2**31 - 1), (top_pad, 64 << 20))
    return all(libc.mallopt(name, value) == 1 for name, value in settings)


def describe(device: torch.device) -> str:
    """The part of the hardware that decides bits: a GPU's model, or a CPU's instruction set."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


@cache
def has_kernels(device: torch.device) -> bool:
    """Whether kernels written in Triton run on a device."""
    return device.type == "cuda" and find_spec("triton") is not None


class Mark:
    """A point in the work of a queue. On a CPU all work before it is done."""

    def __init__(self, queue: "Queue") -> None:
        """The point that a queue has come to."""
        self._event = torch.cuda.Event() if queue.stream is not None else None
        if self._event is not None:
            self._event.record(queue.stream)

    def hold_back(self, queue: "Queue") -> None:
        """Have a queue go on only after this point. The host does not wait."""
        if self._event is not None:
            self._event.wait(queue.stream)

    def is_reached(self, limit: timedelta) -> bool:
        """Have the host wait for this point, for so long at most."""
        if self._event is None or self._event.query():
            return True
        deadline = time.monotonic() + limit.total_seconds()
        while not self._event.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE_S)
        return True


class Queue:
    """Work of a device, in order. `stream` is torch's name for it, None on a CPU, where all work is done at once.

    Held as an object, because to ask torch for the present one takes longer than to use it.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    @classmethod
    def present(cls, device: torch.device) -> "Queue":
        """The queue that the model's work goes to."""
        return cls(torch.cuda.current_stream(device) if device.type == "cuda" else None)

    @classmethod
    def another(cls, device: torch.device) -> "Queue":
        """One for what may go on while the model computes."""
        return cls(torch.cuda.Stream(device) if device.type == "cuda" else None)

    @contextmanager
    def in_place_of(self, main: "Queue") -> Iterator[None]:
        """What is started inside goes here, and then to `main` again."""
        if self.stream is None:
            yield
            return
        torch.cuda.set_stream(self.stream)
        try:
            yield
        finally:
            torch.cuda.set_stream(main.stream)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Start a copy of a tensor to memory of the host; it is there when a later `Mark` is reached."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return target.copy_(tensor, non_blocking=True)


def from_host(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Start a copy of a host's tensor to a device, without waiting for what the device does now."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
