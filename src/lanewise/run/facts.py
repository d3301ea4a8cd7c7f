"""What decides the bits of a kernel in this process: versions, hardware, and torch's switches.

A switch that cannot change a bit is left out: ranks may differ in the number of inter-op threads, in
Python, in limits of memory.
"""

import platform
from pathlib import Path
from typing import Any

import torch

from lanewise import env
from lanewise.engine import device as devices
from lanewise.version import __version__

_CPU_FLAGS = (
    "fma", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16",
    "amx_tile", "amx_bf16", "amx_int8", "asimd", "asimddp", "asimdhp", "bf16", "i8mm", "sve", "sve2",
)  # fmt: skip
"""Instructions that matrix libraries choose their kernels by."""


def facts(device: torch.device) -> dict[str, Any]:
    """Everything but the settings of the run, by a name that a user can look up."""
    return {
        "lanewise version": __version__,
        "torch version": str(torch.__version__),
        "torch commit": torch.version.git_version,
        "device": devices.describe(device),
        "cpu": _cpu(),
        "number of threads": torch.get_num_threads(),
        "torch.get_default_dtype": str(torch.get_default_dtype()),
        "torch.are_deterministic_algorithms_enabled": torch.are_deterministic_algorithms_enabled(),
        "torch.get_float32_matmul_precision": torch.get_float32_matmul_precision(),
        "torch.set_flush_denormal": _flushes_denormals(),
        **_switches(device),
        **{f"${name}": value for name, value in env.numeric_variables().items()},
    }


def _switches(device: torch.device) -> dict[str, Any]:
    backends: Any = torch.backends
    found = {
        "torch.backends.mkldnn.enabled": backends.mkldnn.enabled,
        "torch.backends.mkldnn.deterministic": backends.mkldnn.deterministic,
        "torch.backends.mkldnn.allow_tf32": backends.mkldnn.allow_tf32,
        "torch.backends.mha fast path": backends.mha.get_fastpath_enabled(),
        "torch.backends.opt_einsum.enabled": backends.opt_einsum.enabled,
        "torch.backends.opt_einsum.strategy": backends.opt_einsum.strategy,
        "flash attention": backends.cuda.flash_sdp_enabled(),
        "memory-efficient attention": backends.cuda.mem_efficient_sdp_enabled(),
        "math attention": backends.cuda.math_sdp_enabled(),
    }
    if device.type == "cuda":
        found |= {
            "cuda version": torch.version.cuda,
            "cudnn version": backends.cudnn.version(),
            "cudnn attention": backends.cuda.cudnn_sdp_enabled(),
            "preferred blas library": str(backends.cuda.preferred_blas_library()),
            "torch.backends.cuda.matmul.allow_tf32": backends.cuda.matmul.allow_tf32,
            "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": str(
                backends.cuda.matmul.allow_fp16_reduced_precision_reduction
            ),
            "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": str(
                backends.cuda.matmul.allow_bf16_reduced_precision_reduction
            ),
            **{
                f"torch.backends.cudnn.{name}": getattr(backends.cudnn, name)
                for name in ("enabled", "benchmark", "deterministic", "allow_tf32")
            },
        }
    return found


def _flushes_denormals() -> bool:
    """Whether this thread's arithmetic takes the smallest numbers for zero. torch has no question for it."""
    return float(torch.tensor(1e-40, dtype=torch.float32) * 1.0) == 0.0


def _cpu() -> str:
    """The maker and the instructions of the CPU, as far as the kernel tells."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    entries = dict(line.partition(":")[::2] for line in text.split("\n\n")[0].splitlines())
    words = {key.strip().lower(): value.strip() for key, value in entries.items()}
    flags = set((words.get("flags") or words.get("features") or "").split())
    maker = words.get("vendor_id") or words.get("cpu implementer") or platform.machine()
    return " ".join([maker, *(flag for flag in _CPU_FLAGS if flag in flags)])
