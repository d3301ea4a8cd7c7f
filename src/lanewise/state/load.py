"""Reading a generation: found by its content, compared with the run, every piece with its hash, then put in place.

Nothing is changed before every rank has read all that it needs.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lanewise.engine.engine import Engine
from lanewise.errors import StateError
from lanewise.state import collect, files, manifest, together
from lanewise.state.manifest import Manifest

_WHERE = "the loading of a generation"
_NAME = re.compile(r"step-\d{9}")


def is_name(name: str) -> bool:
    """Whether a folder of this name is a generation."""
    return _NAME.fullmatch(name) is not None


def generations(folder: Path) -> list[str]:
    """The published generations of a folder, the newest step first. Whether they are whole is another question."""
    try:
        entries = sorted((entry.name for entry in folder.iterdir()), reverse=True)
    except OSError as error:
        raise StateError(f"{folder} cannot be read: {error.strerror}.") from error
    return [name for name in entries if is_name(name)]


def open_manifest(folder: Path) -> Manifest:
    """The manifest of a generation."""
    path = folder / manifest.NAME
    found = manifest.from_bytes(files.read_small(path, manifest.MOST_BYTES), str(path))
    if folder.name != f"step-{found.step:09d}":
        raise StateError(
            f"{path}: it is of step {found.step}, and lies in {folder.name}. It was moved or copied there."
        )
    return found


def load(
    engine: Engine,
    folder: Path,
    names: Sequence[str],
    schedulers: Sequence[str],
    notify: Callable[[str], None],
) -> Manifest:
    """Take over the first of these generations that is whole. Collective."""
    transport = engine.world.transport
    tried: list[str] = []
    for name in together.tell_all(transport, list(names), _WHERE)[0]:
        found: Manifest | None = None
        tensors: dict[str, torch.Tensor] = {}
        problem = None
        try:
            found = open_manifest(folder / name)
            check_layout(engine, found, folder / name, schedulers)
            tensors = _read(engine, found, folder / name)
        except (StateError, OSError) as error:
            problem = str(error)
        problems = together.failures(transport, problem, _WHERE)
        if any(together.tell_all(transport, _is_foreign(problem), _WHERE)):
            raise StateError("; ".join(problems))
        if not problems:
            assert found is not None
            collect.put(engine, found, tensors)
            _put_rest(engine, found)
            return found
        tried += problems
        notify(f"{folder / name} is not whole, so an older generation is tried: {problems[0]}")
    listed = "".join(f"\n  - {problem}" for problem in tried)
    raise StateError(f"{folder} has no generation that can be loaded.{listed or ' It has none at all.'}")


_FOREIGN = "it is the state of something else"


def _is_foreign(problem: str | None) -> bool:
    """Whether a generation is whole and belongs to another model or run."""
    return problem is not None and _FOREIGN in problem


def check_layout(engine: Engine, found: Manifest, where: Path, schedulers: Sequence[str]) -> None:
    """Refuse the state of another model, optimizer or number of lanes, or with other schedulers."""

    def refuse(what: str, saved: Any, here: Any) -> None:
        if saved != here:
            raise StateError(f"{where}: {_FOREIGN}: {what} is {saved} there and {here} here.")

    refuse("the number of lanes", found.lanes, engine.world.lanes)
    saved_schedulers = [str(entry.get("type")) for entry in found.extra.get("schedulers", ())]
    refuse("the list of schedulers", saved_schedulers, list(schedulers))
    refuse("the optimizer", found.optimizer, type(engine.committer.optimizer.optimizer).__name__)
    refuse(
        "the number of optimizer groups",
        len(found.groups),
        len(engine.committer.optimizer.optimizer.param_groups),
    )
    refuse("the number of flats", len(found.flats), len(engine.flats))
    for flat, saved in zip(engine.flats, found.flats, strict=True):
        here = collect.entry(flat, [])
        for field in ("unit", "dtype", "trainable", "slot", "fields", "kept"):
            refuse(f"{field} of unit {flat.unit_name!r}", getattr(saved, field), getattr(here, field))
    buffers = {
        name: (piece.dtype, piece.shape)
        for file in found.files.values()
        for name, piece in file.pieces.items()
        if name.startswith("buffer ")
    }
    here_now = {
        f"buffer {name}": (manifest.dtype_name(tensor.dtype), tuple(tensor.shape))
        for name, tensor in engine.buffers.named
    }
    refuse("the set of buffers", sorted(buffers), sorted(here_now))
    for name, kind in here_now.items():
        refuse(f"type and shape of {name}", buffers[name], kind)


def _read(engine: Engine, found: Manifest, folder: Path) -> dict[str, torch.Tensor]:
    wanted = {*collect.wanted(engine, found), *collect.buffer_names(engine)}
    tensors: dict[str, torch.Tensor] = {}
    for name, file in found.files.items():
        here = sorted(wanted & file.pieces.keys(), key=lambda key: file.pieces[key].start)
        if here:
            tensors |= files.read(folder / name, file, iter(here))
    return tensors


def _put_rest(engine: Engine, found: Manifest) -> None:
    scale = engine.committer.scale
    scale.value, scale.good_steps = found.scale
    for group, saved in zip(engine.committer.optimizer.optimizer.param_groups, found.groups, strict=True):
        for key, value in saved.items():
            now = group.get(key)
            if isinstance(now, torch.Tensor):
                now.fill_(manifest.restore(value))
            else:
                group[key] = tuple(value) if isinstance(now, tuple) else manifest.restore(value)
