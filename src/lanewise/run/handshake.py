"""The start-up handshake: what ranks must have in common to give equal bits, compared before anything else."""

import hashlib
import json
import platform
import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lanewise import env
from lanewise.config import Settings
from lanewise.engine import device as devices
from lanewise.engine.transport import waiting
from lanewise.errors import HandshakeError
from lanewise.version import __version__

NOT_COMPARED = ("exchange", "timeout", "allow_mixed")
"""Settings that may differ between ranks without harm, or that are compared by what follows from them."""


def hello(settings: Settings, device: torch.device) -> dict[str, Any]:
    """What this rank says of itself: facts that must be equal, and the host it is on."""
    chosen = {name: value for name, value in asdict(settings).items() if name not in NOT_COMPARED}
    must_be_equal = {
        "lanewise": __version__,
        "torch": torch.__version__,
        "device": devices.describe(device),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "float32 matmul": torch.get_float32_matmul_precision(),
        **{f"settings.{name}": value for name, value in chosen.items()},
        **{f"${name}": value for name, value in env.numeric_variables().items()},
    }
    return {"equal": must_be_equal, "host": _host(), "gpu": _gpu(device), "shares": waiting.is_supported()}


def differences(hellos: list[dict[str, Any]]) -> list[str]:
    """One line for each fact in which ranks differ."""
    facts = [json.loads(json.dumps(entry["equal"])) for entry in hellos]
    lines = []
    for name in sorted(set().union(*facts)):
        by_value: dict[str, list[int]] = {}
        for rank, entry in enumerate(facts):
            by_value.setdefault(json.dumps(entry.get(name, "not set")), []).append(rank)
        if len(by_value) > 1:
            said = "; ".join(f"{value} on rank(s) {ranks}" for value, ranks in by_value.items())
            lines.append(f"{name}: {said}")
    return lines


def check(hellos: list[dict[str, Any]], allow_mixed: bool) -> list[str]:
    """Refuse ranks that differ, unless the user allows it; returns the differences."""
    found = differences(hellos)
    if found and not allow_mixed:
        listed = "".join(f"\n  - {line}" for line in found)
        raise HandshakeError(
            f"the ranks differ in what decides bits:{listed}\nMake them equal, or start with allow_mixed=True to run "
            "without the promise of equal bits."
        )
    settings = [line for line in found if line.startswith(("settings.lanes", "settings.strategy"))]
    if settings:
        raise HandshakeError(
            f"ranks cannot work together with different {settings[0]}. allow_mixed covers hardware and versions only."
        )
    return found


def share_a_host(hellos: list[dict[str, Any]]) -> bool:
    """Whether all ranks can map each other's memory."""
    return len({entry["host"] for entry in hellos}) == 1 and all(entry["shares"] for entry in hellos)


def share_a_gpu(hellos: list[dict[str, Any]]) -> bool:
    """Whether two ranks use the same GPU, which NCCL refuses."""
    gpus = [(entry["host"], entry["gpu"]) for entry in hellos]
    return len(set(gpus)) < len(gpus)


def _host() -> str:
    """The running kernel and the process namespace in it: ranks with the same can see each other's memory."""
    words = [socket.gethostname(), platform.system()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        try:
            words.append(str(Path(path).readlink()) if "/ns/" in path else Path(path).read_text().strip())
        except OSError:
            words.append("?")
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]


def _gpu(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "none"
