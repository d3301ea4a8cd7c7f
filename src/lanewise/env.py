"""The one reader of the environment. Everything else gets what it needs as arguments."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lanewise.errors import SettingsError

OVERRIDES = "LANEWISE_OVERRIDES"
"""Settings that the launcher puts over the script's, as JSON."""
RECORD = "LANEWISE_RECORD"
"""What a proof wants recorded, as JSON."""

FAILURES = "LANEWISE_FAILURES"
"""The folder in which a rank leaves word of the exception that ended it."""
LAUNCHER = "LANEWISE_LAUNCHER"
"""The process that started the ranks, and with which they end."""

NUMERIC_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_MAX_CPU_ISA",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
"""Variables that change the bits of a kernel, so that ranks must agree on them."""


@dataclass(frozen=True)
class Launch:
    """What a launcher (ours, torchrun, mpirun by hand) says about this process."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    address: str = "127.0.0.1"
    port: int = 0
    attempt: str = "0"
    launcher_serves_store: bool = False


def launch(environ: Mapping[str, str] = os.environ) -> Launch:
    """Read the variables that torchrun sets. Without them this is a world of one."""
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return Launch()
    missing = [n for n in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if n not in environ]
    if missing:
        raise SettingsError(
            f"the environment names only part of a launch: {', '.join(missing)} not set. Start the script "
            "with `lanewise run` or `torchrun`, or unset RANK and WORLD_SIZE to run alone."
        )
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        text = environ.get(name, environ["RANK"] if name == "LOCAL_RANK" else "")
        if not text.isdecimal():
            raise SettingsError(f"the environment variable {name} must be a whole number, found {text!r}.")
        numbers[name] = int(text)
    if not numbers["RANK"] < numbers["WORLD_SIZE"]:
        raise SettingsError(
            f"the environment says RANK={numbers['RANK']} of WORLD_SIZE={numbers['WORLD_SIZE']}: "
            "ranks count from 0 and stay below the world size."
        )
    if numbers["WORLD_SIZE"] > 1 and not 0 < numbers["MASTER_PORT"] < 1 << 16:
        raise SettingsError(
            f"the environment variable MASTER_PORT must be between 1 and 65535, found {numbers['MASTER_PORT']}."
        )
    return Launch(
        rank=numbers["RANK"],
        world_size=numbers["WORLD_SIZE"],
        local_rank=numbers["LOCAL_RANK"],
        address=environ["MASTER_ADDR"],
        port=numbers["MASTER_PORT"],
        attempt=environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        launcher_serves_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def overrides(environ: Mapping[str, str] = os.environ) -> dict[str, object]:
    """The settings that the launcher puts over the script's own."""
    return _json_object(environ, OVERRIDES)


def record(environ: Mapping[str, str] = os.environ) -> dict[str, object]:
    """What a proof wants recorded, or nothing."""
    return _json_object(environ, RECORD)


def failures(environ: Mapping[str, str] = os.environ) -> Path:
    """Where a rank leaves word of its exception."""
    return Path(environ[FAILURES])


def launcher(environ: Mapping[str, str] = os.environ) -> int:
    """The process that started this rank."""
    return int(environ[LAUNCHER])


def for_ranks(overrides: Mapping[str, object], failures: Path, launcher: int) -> dict[str, str]:
    """What ranks are told beside their place in the world."""
    return {
        OVERRIDES: json.dumps(dict(overrides)),
        FAILURES: str(failures),
        LAUNCHER: str(launcher),
        **threads_for_ranks(overrides.get("threads", 1)),
    }


def threads_for_ranks(threads: object) -> dict[str, str]:
    """What a library must be told before it starts its threads, unless the user has."""
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}


def place(rank: int, world_size: int, port: int, attempt: int) -> dict[str, str]:
    """What `launch` reads: a rank of this host, whose launcher serves the store."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def set_all(values: Mapping[str, str]) -> None:
    """Set variables, for the processes that this one starts."""
    os.environ.update(values)


def numeric_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that change bits and are set."""
    return {name: environ[name] for name in NUMERIC_VARIABLES if name in environ}


@contextlib.contextmanager
def temporarily(name: str, value: str | None) -> Iterator[None]:
    """Have a variable set for a library that reads it inside, unless the user has set it or there is no value."""
    if value is None or name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def _json_object(environ: Mapping[str, str], name: str) -> dict[str, object]:
    try:
        value = json.loads(environ.get(name, "{}"))
    except json.JSONDecodeError as error:
        raise SettingsError(f"the environment variable {name} is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise SettingsError(f"the environment variable {name} must hold a JSON object, found {value!r}.")
    return value
