"""What a generation says of itself, found out from its files alone: its digest, its tensors, and how two differ."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from lanewise.errors import StateError
from lanewise.state import digest, files
from lanewise.state.load import open_manifest
from lanewise.state.manifest import BUFFER, Manifest, piece_name


@dataclass(frozen=True)
class Difference:
    """A tensor that two generations have otherwise."""

    name: str
    num_other: int
    """Elements that are not the same."""
    largest: float
    """The largest difference of two elements."""


class Generation:
    """A generation on a disk, whose manifest has been read and checked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: Manifest = open_manifest(folder)

    def verify(self) -> None:
        """Read every byte, compare it with its hashes, and the whole with the digest of the run that wrote it."""
        for name, file in self.manifest.files.items():
            files.check(self.folder / name, file)
        found = self.digest()
        if found != self.manifest.digest:
            raise StateError(
                f"{self.folder}: its tensors have digest {found}, and its manifest says {self.manifest.digest}. Every "
                "hash fits, so both were changed by somebody who knows how they are made."
            )

    def piece(self, name: str) -> torch.Tensor:
        """One tensor of the files."""
        file_name = self._place[name]
        return files.read(self.folder / file_name, self.manifest.files[file_name], [name])[name]

    def whole(self, number: int, kind: str) -> torch.Tensor:
        """All slots of a flat's values or state."""
        return torch.cat([self.piece(piece_name(number, kind, slot)) for slot in range(self.manifest.lanes)])

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter, state of the optimizer and buffer, by a name for people."""
        for number, flat in enumerate(self.manifest.flats):
            whole = self.whole(number, flat.kept)
            for name, start, numel, shape, _ in flat.fields:
                label = name if flat.kept == "values" else f"{name} ({flat.kept})"
                yield label, whole[start : start + numel].view(shape)
            for key in sorted(flat.states):
                whole = self.whole(number, f"state {key}")
                for name, start, numel, shape, _ in flat.fields:
                    if key in flat.stepped.get(name, ()):
                        yield f"{name} ({key})", whole[start : start + numel].view(shape)
        for name, tensor in self.buffers():
            yield BUFFER + name, tensor

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every buffer of the model, by its name there."""
        for name in sorted(self._place):
            if name.startswith(BUFFER):
                yield name.removeprefix(BUFFER), self.piece(name)

    def digest(self) -> str:
        """The digest of the run, from the files."""
        lanes, flats = self.manifest.lanes, self.manifest.flats
        found = digest.places(flats, lanes, range(lanes), self.piece)
        buffers = {BUFFER + name: tensor for name, tensor in self.buffers()}
        return digest.combine([found], flats, buffers, self.manifest.scale)

    @cached_property
    def _place(self) -> dict[str, str]:
        return {piece: name for name, file in self.manifest.files.items() for piece in file.pieces}


def differences(one: Generation, other: Generation) -> Iterator[Difference]:
    """The tensors of two generations that are not the same; one that only one of them has differs in all elements."""
    theirs = dict(other.tensors())
    for name, mine in one.tensors():
        their = theirs.pop(name, None)
        if their is None or their.shape != mine.shape:
            yield Difference(name, mine.numel(), float("nan"))
            continue
        unlike = (mine != their) & ~((mine != mine) & (their != their))
        if bool(unlike.any()):
            yield Difference(name, int(unlike.sum()), float((mine.double() - their.double()).abs().max()))
    for name, their in theirs.items():
        yield Difference(name, their.numel(), float("nan"))
