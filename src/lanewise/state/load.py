"""Reading a generation: found by its content, compared with the run, every piece with its hash, then put in place.

Nothing is changed before every rank has read all that it needs.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lanewise.engine.engine import Engine
from lanewise.errors import StateError
from lanewise.state import collect, files, manifest, together
from lanewise.state.manifest import Manifest

_WHERE = "the loading of a generation"


def generations(folder: Path) -> list[str]:
    """The published generations of a folder, the newest step first. Whether they are whole is another question."""
    try:
        entries = sorted((entry.name for entry in folder.iterdir()), reverse=True)
    except OSError as error:
        raise StateError(f"{folder} cannot be read: {error.strerror}.") from error
    return [name for name in entries if manifest.is_generation(name)]


def open_manifest(folder: Path) -> Manifest:
    """The manifest of a generation."""
    path = folder / manifest.NAME
    found = manifest.from_bytes(files.read_small(path, manifest.MOST_BYTES), str(path))
    if folder.name != manifest.name_of(found.step):
        raise StateError(
            f"{path}: it is of step {found.step}, and lies in {folder.name}. It was moved or copied there."
        )
    return found


class ForeignStateError(StateError):
    """A generation that is whole and belongs to another model or run."""


def load(
    engine: Engine,
    folder: Path,
    step: int | None,
    schedulers: Sequence[str],
    notify: Callable[[str], None],
) -> Manifest:
    """Take over the newest generation that is whole, or that of a step. Collective."""
    transport = engine.world.transport
    tried: list[str] = []
    for name in _names(engine, folder, step):
        found: Manifest | None = None
        tensors: dict[str, torch.Tensor] = {}
        problem, is_foreign = None, False
        try:
            found = open_manifest(folder / name)
            check_layout(engine, found, folder / name, schedulers)
            tensors = _read(engine, found, folder / name)
        except (StateError, OSError) as error:
            problem, is_foreign = str(error), isinstance(error, ForeignStateError)
        told = together.tell_all(transport, [problem, is_foreign], _WHERE)
        problems = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(told) if text is not None]
        if any(foreign for _, foreign in told):
            raise ForeignStateError("; ".join(problems))
        if not problems:
            assert found is not None
            collect.put(engine, found, tensors)
            _put_rest(engine, found)
            return found
        tried += problems
        notify(f"{folder / name} is not whole, so an older generation is tried: {problems[0]}")
    listed = "".join(f"\n  - {problem}" for problem in tried)
    raise StateError(f"{folder} has no generation that can be loaded.{listed or ' It has none at all.'}")


def _names(engine: Engine, folder: Path, step: int | None) -> list[str]:
    """What may be loaded, the newest first, as rank 0 sees it. Collective."""
    if step is not None:
        return [manifest.name_of(step)]
    names: list[str] = []
    problem = None
    if engine.world.rank == 0:
        try:
            names = generations(folder)
        except StateError as error:
            problem = str(error)
    names, problem = together.tell_all(engine.world.transport, [names, problem], _WHERE)[0]
    if problem is not None:
        raise StateError(problem)
    return names


def check_layout(engine: Engine, found: Manifest, where: Path, schedulers: Sequence[str]) -> None:
    """Refuse the state of another model, optimizer or number of lanes, or with other schedulers."""

    def refuse(what: str, saved: Any, here: Any) -> None:
        if saved != here:
            raise ForeignStateError(
                f"{where}: it is the state of something else: {what} is {saved} there and {here} here."
            )

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
        if name.startswith(manifest.BUFFER)
    }
    here_now = {
        manifest.BUFFER + name: (manifest.dtype_name(tensor.dtype), tuple(tensor.shape))
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
            tensors |= files.read(folder / name, file, here)
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
