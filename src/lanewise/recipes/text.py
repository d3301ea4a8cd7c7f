"""The bytes of text files as a data set of windows."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils.data import Dataset

from lanewise.errors import DataError

_BETWEEN_FILES = b"\0"


class Windows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Stretches of equal length, each with the byte that follows every byte of it."""

    def __init__(self, text: torch.Tensor, length: int) -> None:
        self._text = text
        self._length = length

    def __len__(self) -> int:
        """Stretches that are whole; a rest at the end is left out."""
        return max(0, len(self._text) - 1) // self._length

    def __getitem__(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= place < len(self):
            raise IndexError(f"window {place} of {len(self)}")
        start = place * self._length
        window = self._text[start : start + self._length + 1].long()
        return window[:-1], window[1:]


def find(patterns: Sequence[str], folder: Path) -> list[Path]:
    """The files that match, each once, in the order of their names. A pattern that matches none is an error."""
    found: set[Path] = set()
    for pattern in patterns:
        path = Path(pattern).expanduser()
        root = Path(path.anchor) if path.is_absolute() else folder
        matches = root.glob(str(path.relative_to(path.anchor)))
        matching = [file.resolve() for file in matches if file.is_file()]
        if not matching:
            raise DataError(
                f"data.files: no file matches {pattern!r} in {folder}. Paths are relative to the folder of the recipe; "
                "** stands for any number of folders."
            )
        found.update(matching)
    return sorted(found)


def windows(
    patterns: Sequence[str], folder: Path, length: int, valid: float
) -> tuple[Windows, Windows | None]:
    """Windows to train on, and those of the last part of the text to evaluate."""
    files = find(patterns, folder)
    text = torch.frombuffer(
        bytearray(_BETWEEN_FILES.join(_read(file) for file in files) + _BETWEEN_FILES), dtype=torch.uint8
    )
    cut = round(len(text) * (1 - valid))
    parts = [Windows(text[:cut], length)] + ([Windows(text[cut:], length)] if valid else [])
    for part, name in zip(parts, ("train on", "evaluate"), strict=False):
        if len(part) == 0:
            raise DataError(
                f"data.files: {len(files)} file(s) with {len(text) - len(files)} bytes leave not one stretch of "
                f"model.length={length} bytes to {name} with data.valid={valid:g}. Use more text, or a shorter length."
            )
    return parts[0], parts[1] if valid else None


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(f"data.files: {file} cannot be read: {error.strerror}.") from error
