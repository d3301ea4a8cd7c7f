"""The start-up handshake: what ranks must have in common to give equal bits, compared before anything else."""

import hashlib
import json
import os
import platform
import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lanewise.config import Settings
from lanewise.engine.transport import waiting
from lanewise.errors import HandshakeError
from lanewise.run.facts import facts

_SETTING = "lw.start's "
_MAY_BE_MIXED = f"{_SETTING}threads"
"""A setting that does not stop ranks from working together where it differs."""


def hello(settings: Settings, device: torch.device, size: int) -> dict[str, Any]:
    """What this rank says of itself: facts that must be equal, and where it is."""
    chosen = asdict(settings)
    del chosen["timeout"]
    equal = {**facts(device), **{f"{_SETTING}{name}": value for name, value in chosen.items()}}
    return {
        "equal": equal,
        "size": size,
        "host": _host(),
        "pid": os.getpid(),
        "gpu": _gpu(device),
        "shares": waiting.is_supported(),
    }


def check_size(mine: dict[str, Any], peer: int, theirs: dict[str, Any]) -> None:
    """Refuse a rank that counts the ranks in another way: one would wait for who never comes."""
    if mine["size"] != theirs["size"]:
        raise HandshakeError(
            f"this rank was told WORLD_SIZE={mine['size']}, but rank {peer} was told {theirs['size']}. Start all ranks "
            "with one world size; a rank of another run may have come to the same MASTER_PORT."
        )


def differences(hellos: list[dict[str, Any]]) -> dict[str, str]:
    """For each fact in which ranks differ: what is found on which rank."""
    told = [json.loads(json.dumps(entry["equal"])) for entry in hellos]
    found = {}
    for name in sorted(set().union(*told)):
        by_value: dict[str, list[int]] = {}
        for rank, entry in enumerate(told):
            by_value.setdefault(json.dumps(entry.get(name, "not set")), []).append(rank)
        if len(by_value) > 1:
            found[name] = "; ".join(
                f"{value} on rank(s) {', '.join(map(str, ranks))}" for value, ranks in by_value.items()
            )
    return found


def check(hellos: list[dict[str, Any]], allow_mixed: bool) -> list[str]:
    """Refuse ranks that differ, unless the user allows it; returns a line for each difference."""
    found = differences(hellos)
    lines = [f"{name}: {said}" for name, said in found.items()]
    settings = [name for name in found if name.startswith(_SETTING) and name != _MAY_BE_MIXED]
    if settings:
        raise HandshakeError(
            f"the ranks were started with different settings, and cannot work together:{_listed(lines)}\nGive every "
            "rank the same; allow_mixed covers hardware, versions and torch's switches only."
        )
    if found and not allow_mixed:
        raise HandshakeError(
            f"the ranks differ in what decides bits:{_listed(lines)}\nMake them equal, or start with "
            "allow_mixed=True to run without the promise of equal bits."
        )
    if found and hellos[0]["equal"][f"{_SETTING}strategy"] == "ddp":
        raise HandshakeError(
            f"the ranks differ in what decides bits:{_listed(lines)}\nWith strategy='ddp' every rank updates a copy of "
            "its own, and such copies would drift apart. Use allow_mixed=True with zero1, zero2 or zero3."
        )
    return lines


def share_a_host(hellos: list[dict[str, Any]]) -> bool:
    """Whether all ranks can map each other's memory."""
    return len({entry["host"] for entry in hellos}) == 1 and all(entry["shares"] for entry in hellos)


def share_a_gpu(hellos: list[dict[str, Any]]) -> bool:
    """Whether two ranks use the same GPU, which NCCL refuses."""
    gpus = [(entry["host"], entry["gpu"]) for entry in hellos]
    return len(set(gpus)) < len(gpus)


def _listed(lines: list[str]) -> str:
    return "".join(f"\n  - {line}" for line in lines)


def _host() -> str:
    """The running kernel and the namespaces in it: ranks with the same can see each other's memory and loopback."""
    words = [socket.gethostname(), platform.system()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid", "/proc/self/ns/net"):
        try:
            words.append(str(Path(path).readlink()) if "/ns/" in path else Path(path).read_text().strip())
        except OSError:
            words.append("?")
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]


def _gpu(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "none"
