"""Writing a generation: into a temporary folder, read back and compared, and then published by one rename."""

import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lanewise.engine.engine import Engine
from lanewise.errors import StateError
from lanewise.state import collect, files, manifest, together
from lanewise.state.manifest import File, FlatEntry, Manifest, Piece
from lanewise.version import __version__

_WHERE = "the saving of a generation"


def name_of(step: int) -> str:
    """The folder of the generation of a step."""
    return f"step-{step:09d}"


def save(engine: Engine, folder: Path, step: int, facts: Mapping[str, Any], digest: str) -> Path:
    """Write everything that this run has learned, as a new generation. Collective.

    `facts` are the seed, the settings that decide bits, and what the user gave.
    """
    transport = engine.world.transport
    target = folder / name_of(step)
    token = together.tell_all(transport, secrets.token_hex(8), _WHERE)[0]
    work = folder / f".{target.name}-{token}"
    problem = None
    if transport.rank == 0:
        problem = _attempt(lambda: _begin(target, work))
    _raise_first(together.failures(transport, problem, _WHERE), target)
    tensors, kept = collect.take(engine)
    entries = _entries(engine, kept)
    collect.fill_in(engine, entries, tensors)
    made: dict[str, File] = {}

    def write() -> None:
        low, high = engine.world.slots[transport.rank]
        if low < high:
            name = f"slots-{low:05d}-{high:05d}.safetensors"
            made[name] = files.write(work / name, tensors)
        if transport.rank == 0:
            buffers = {
                f"buffer {name}": tensor.detach().to("cpu", copy=True)
                for name, tensor in engine.buffers.named
            }
            made["buffers.safetensors"] = files.write(work / "buffers.safetensors", buffers)

    problem = _attempt(write)
    problems = together.failures(transport, problem, _WHERE)
    told = together.tell_all(transport, {name: asdict(file) for name, file in made.items()}, _WHERE)
    if transport.rank == 0 and not problems:
        all_files = {name: _file(words) for row in told for name, words in row.items()}
        made_now = _manifest(engine, step, facts, digest, entries, all_files)
        problem = _attempt(lambda: _publish(made_now, work, target))
        problems = [f"rank 0: {problem}"] if problem is not None else []
    problems = together.tell_all(transport, problems, _WHERE)[0]
    if problems and transport.rank == 0:
        shutil.rmtree(work, ignore_errors=True)
    _raise_first(problems, target)
    return target


def _begin(target: Path, work: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        raise StateError("there is a generation of this step already, and none is ever overwritten")
    work.mkdir()


def _publish(made: Manifest, work: Path, target: Path) -> None:
    """The manifest comes last, and the name last of all: until then there is nothing to be found."""
    data = manifest.to_bytes(made)
    path = work / manifest.NAME
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    if files.read_small(path, manifest.MOST_BYTES) != data:
        raise StateError("the manifest does not read as it was written")
    manifest.from_bytes(data, str(path))
    files.keep_folder(work)
    work.rename(target)
    files.keep_folder(target.parent)


def _entries(engine: Engine, kept: Mapping[int, collect.Kept]) -> list[FlatEntry]:
    words = [asdict(kept[flat.number]) for flat in engine.flats]
    told = together.tell_all(engine.world.transport, words, _WHERE)
    return [
        collect.entry(flat, [_kept(row[number]) for row in told]) for number, flat in enumerate(engine.flats)
    ]


def _kept(words: Mapping[str, Any]) -> collect.Kept:
    numbers = {
        name: {key: (kind, value) for key, (kind, value) in states.items()}
        for name, states in words["numbers"].items()
    }
    return collect.Kept(dict(words["states"]), numbers, list(words["stepped"]))


def _file(words: Mapping[str, Any]) -> File:
    pieces = {
        name: Piece(**{**piece, "shape": tuple(piece["shape"])}) for name, piece in words["pieces"].items()
    }
    return File(words["num_bytes"], words["data"], words["xxh3_128"], pieces)


def _manifest(
    engine: Engine,
    step: int,
    facts: Mapping[str, Any],
    digest: str,
    entries: list[FlatEntry],
    all_files: dict[str, File],
) -> Manifest:
    optimizer = engine.committer.optimizer.optimizer
    scale = engine.committer.scale
    groups = tuple(
        manifest.plain({k: v for k, v in group.items() if k != "params"}, f"optimizer group {number}")
        for number, group in enumerate(optimizer.param_groups)
    )
    return Manifest(
        format=manifest.FORMAT,
        version=manifest.VERSION,
        step=step,
        lanes=engine.world.lanes,
        seed=facts["seed"],
        settings=facts["settings"],
        optimizer=type(optimizer).__name__,
        groups=groups,
        scale=(scale.value, scale.good_steps),
        extra=facts["extra"],
        flats=tuple(entries),
        files=all_files,
        digest=digest,
        versions={"lanewise": __version__, "torch": torch.__version__},
    )


def _attempt(action: Any) -> str | None:
    """What went wrong, in words."""
    try:
        action()
    except (OSError, StateError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _raise_first(problems: list[str], target: Path) -> None:
    if problems:
        raise StateError(
            f"{target} was not saved: {'; '.join(problems)}. Training is as it was, and so are older generations."
        )
