"""Which generations stay, and how others go: never the newest whole one, and nothing that Lanewise did not write."""

import contextlib
import secrets
from collections.abc import Sequence
from pathlib import Path

from lanewise.errors import SettingsError, StateError
from lanewise.state import files
from lanewise.state.load import open_manifest
from lanewise.state.manifest import NAME, name_of


def superfluous(steps: Sequence[int], keep_last: int, keep_every: int | None) -> list[int]:
    """The steps whose generations may go: all but the last few, and but every so many steps.

    >>> superfluous([10, 20, 30, 40, 50], keep_last=2, keep_every=20)
    [10, 30]
    """
    if keep_last < 1 or (keep_every is not None and keep_every < 1):
        raise SettingsError(
            f"keep_last and keep_every must be 1 or more, found {keep_last} and {keep_every}."
        )
    old = sorted(steps)[:-keep_last]
    return [step for step in old if keep_every is None or step % keep_every]


def prune(
    folder: Path, names: Sequence[str], keep_last: int, keep_every: int | None, is_sure: bool = False
) -> list[str]:
    """Remove what may go of these generations, and say which went. Damaged ones are left for a person to look at.

    The newest generation must be whole, by every byte of it; else nothing goes. `is_sure` says that it has just been
    written and compared.
    """
    whole = {}
    for name in names:
        with contextlib.suppress(StateError, OSError):
            found = open_manifest(folder / name)
            whole[found.step] = found
    gone = superfluous(list(whole), keep_last, keep_every)
    if gone and not is_sure:
        newest = max(whole)
        for name, file in whole[newest].files.items():
            files.check(folder / name_of(newest) / name, file)
    for step in gone:
        _remove(folder / name_of(step), [*whole[step].files, NAME])
    return [name_of(step) for step in gone]


def _remove(generation: Path, listed: Sequence[str]) -> None:
    """Take its name away first, so that a generation is either whole or not there."""
    hidden = generation.with_name(f".{generation.name}-going-{secrets.token_hex(4)}")
    generation.rename(hidden)
    files.keep_folder(hidden.parent)
    for name in listed:
        (hidden / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        hidden.rmdir()  # stays if somebody has put other files there
