"""What is to be launched: checked before any rank is started. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lanewise import config
from lanewise.errors import SettingsError


@dataclass(frozen=True)
class Job:
    """A script to be run on ranks of this host."""

    script: str
    arguments: tuple[str, ...] = ()
    ranks: int | None = None
    """How many processes; None for one a GPU, or one."""
    overrides: Mapping[str, object] = field(default_factory=dict)
    """Settings that win over those of the script."""
    port: int | None = None
    """Where the ranks meet; None for a free one."""


def parse_hosting(text: str | None) -> str | tuple[float, ...] | None:
    """What was given as hosting: a word, or weights separated by commas."""
    if text is None or text.isalpha():
        return text
    try:
        return tuple(float(weight) for weight in text.split(","))
    except ValueError:
        raise SettingsError(
            f"--hosting must be 'even' or one weight a rank, such as 2,1,1; found {text!r}."
        ) from None


def check(job: Job, where: str) -> None:
    """Refuse what cannot be run."""
    check_script(job.script)
    if job.ranks is not None and job.ranks < 1:
        raise SettingsError(f"--ranks must be at least 1, found {job.ranks}.")
    if job.port is not None and not 0 < job.port < 2**16:
        raise SettingsError(f"--port must be between 1 and 65535, found {job.port}.")
    settings = config.parse(config.Settings, job.overrides, where)
    if isinstance(settings.hosting, str) or job.ranks is None:
        return
    if len(settings.hosting) != job.ranks:
        raise SettingsError(
            f"--hosting names {len(settings.hosting)} weights for {job.ranks} ranks; give one for each rank."
        )


def check_script(script: str) -> None:
    """Refuse a script that is not there."""
    path = Path(script)
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "does not exist"
        raise SettingsError(f"the script {script!r} {found}; give the path of a Python file.")
