"""What differs between a CPU and a GPU, behind functions that both have."""

import ctypes
import platform
import sys
from typing import Any

import torch

from lanewise import env


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
            env.set_default("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
            deterministic: Any = torch.utils.deterministic
            deterministic.fill_uninitialized_memory = False
            torch.backends.cudnn.benchmark = False


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


def synchronize(device: torch.device) -> None:
    """Wait for what was started on a GPU; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
