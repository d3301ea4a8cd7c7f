"""Writing a generation: into a temporary folder, read back and compared, and then published by one rename.

The ranks agree on what is to be written and copy it, between two steps; the rest goes on beside the next steps, in a
thread of each rank. There ranks say nothing to each other: each leaves a receipt in the folder, and rank 0 publishes
when all receipts are there.
"""

import contextlib
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lanewise.engine.engine import Engine
from lanewise.errors import StateError
from lanewise.state import collect, digest, files, manifest, together
from lanewise.state.inspect import Generation
from lanewise.state.manifest import File, FlatEntry, Manifest, Piece
from lanewise.version import __version__

_WHERE = "the saving of a generation"
_PAUSE_S = 0.005
"""Between two looks for receipts."""


@dataclass(frozen=True)
class Facts:
    """What a generation says of its run beside the tensors."""

    step: int
    seed: int
    settings: Mapping[str, Any]
    extra: Mapping[str, Any]


class Saving:
    """One save, from the copies to the published generation. Made by `begin`."""

    def __init__(
        self,
        engine: Engine,
        target: Path,
        work: Path,
        facts: Facts,
        tensors: Mapping[str, torch.Tensor],
        entries: list[FlatEntry],
        patience: float,
        then: Callable[[], None],
    ) -> None:
        """`then` is done on rank 0 when the generation is published.

        A rank that takes ten times as long as this one, and `patience` more, is not waited for.
        """
        self._patience = patience
        self._began = time.monotonic()
        self.target = target
        self._rank, self._size = engine.world.rank, engine.world.size
        self._slots = engine.world.slots[self._rank]
        self._work = work
        self._tensors = tensors
        self._buffers = (
            {
                manifest.BUFFER + name: tensor.detach().to("cpu", copy=True).contiguous()
                for name, tensor in engine.buffers.named
            }
            if self._rank == 0
            else {}
        )
        self._then = then
        optimizer, scale = engine.committer.optimizer.optimizer, engine.committer.scale
        self._manifest = Manifest(
            format=manifest.FORMAT,
            version=manifest.VERSION,
            step=facts.step,
            lanes=engine.world.lanes,
            seed=facts.seed,
            settings=dict(facts.settings),
            optimizer=type(optimizer).__name__,
            groups=_groups(optimizer),
            scale=(scale.value, scale.good_steps),
            extra=dict(facts.extra),
            flats=tuple(entries),
            files={},
            digest="",
            versions={"lanewise": __version__, "torch": torch.__version__},
        )
        self._is_abandoned = threading.Event()
        self.problem: str | None = None
        """Why nothing was published: on rank 0 whosever fault it was, elsewhere this rank's own."""
        self.untidy: str | None = None
        """Why what should be done afterwards was not, on rank 0."""
        self._thread = threading.Thread(target=self._run, name="lanewise save", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether this rank's part is over, well or badly."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait for this rank's part; on rank 0, until the generation is published or cannot be."""
        self._thread.join()

    def abandon(self) -> None:
        """Do not wait for other ranks any more."""
        self._is_abandoned.set()
        self._thread.join()

    def _run(self) -> None:
        self.problem, words = _attempt(self._write)
        receipt = {"problem": self.problem, **(words or {})}
        unable, _ = _attempt(lambda: _leave(self._work, self._rank, receipt))
        self.problem = self.problem or unable
        self._deadline = time.monotonic() + 10 * (time.monotonic() - self._began) + self._patience
        if self._rank != 0:
            while self._work.exists() and time.monotonic() < self._deadline:
                if self._is_abandoned.wait(_PAUSE_S):
                    return
            return
        if unable is None:
            self.problem, _ = _attempt(self._finish)
        if self.problem is not None:
            _remove(self._work)
        else:
            self.untidy, _ = _attempt(self._then)

    def _write(self) -> dict[str, Any]:
        made: dict[str, File] = {}
        low, high = self._slots
        if low < high:
            name = f"slots-{low:05d}-{high:05d}.safetensors"
            made[name] = files.write(self._work / name, self._tensors)
        if self._rank == 0:
            made["buffers.safetensors"] = files.write(self._work / "buffers.safetensors", self._buffers)
        found = digest.places(
            self._manifest.flats, self._manifest.lanes, range(low, high), self._tensors.__getitem__
        )
        self._tensors = {}
        return {"files": {name: asdict(file) for name, file in made.items()}, "places": found}

    def _finish(self) -> None:
        receipts = [self._receipt(rank) for rank in range(self._size)]
        problems = [f"rank {n}: {r['problem']}" for n, r in enumerate(receipts) if r["problem"] is not None]
        if problems:
            raise StateError("; ".join(problems))
        whole = digest.combine(
            [receipt["places"] for receipt in receipts],
            self._manifest.flats,
            self._buffers,
            self._manifest.scale,
        )
        all_files = {name: _file(words) for receipt in receipts for name, words in receipt["files"].items()}
        made = replace(self._manifest, files=all_files, digest=whole)
        for rank in range(self._size):
            _place(self._work, rank).unlink()
        _publish(made, self._work, self.target)

    def _receipt(self, rank: int) -> dict[str, Any]:
        while True:
            with contextlib.suppress(FileNotFoundError):
                body = manifest.unsealed(_place(self._work, rank).read_bytes())
                if body is not None:
                    found: dict[str, Any] = json.loads(body)
                    return found
            if self._is_abandoned.wait(_PAUSE_S):
                raise StateError(f"the run ended before rank {rank} had written its part")
            if time.monotonic() > self._deadline:
                raise StateError(
                    f"rank {rank} did not write its part in time. It may have died, or be unable to write to "
                    f"{self._work.parent}; look at its own output"
                )


def begin(engine: Engine, folder: Path, facts: Facts, patience: float, then: Callable[[], None]) -> Saving:
    """Agree on a new generation, copy what goes into it, and start to write. Collective."""
    transport = engine.world.transport
    target = folder / manifest.name_of(facts.step)
    token = together.tell_all(transport, secrets.token_hex(8), _WHERE)[0]
    work = folder / f".{target.name}-{token}"
    problem = _attempt(lambda: work.mkdir(parents=True))[0] if transport.rank == 0 else None
    problems = together.failures(transport, problem, _WHERE)
    if not problems:
        unseen = None if work.is_dir() else f"it does not see {work}, which rank 0 has made there"
        problems = together.failures(transport, unseen, _WHERE)
        if problems and transport.rank == 0:
            _remove(work)
    if problems:
        raise not_saved(target, problems)
    tensors, kept = collect.take(engine)
    entries = _entries(engine, kept)
    collect.fill_in(engine, entries, tensors)
    return Saving(engine, target, work, facts, tensors, entries, patience, then)


class NotSavedError(StateError):
    """A save that came to nothing."""

    def __init__(self, target: Path, message: str) -> None:
        super().__init__(message)
        self.target = target


def not_saved(target: Path, problems: list[str]) -> NotSavedError:
    """The error of a save that failed."""
    return NotSavedError(
        target,
        f"{target} was not saved: {'; '.join(problems)}. Training is as it was, and so are older generations.",
    )


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
    if target.exists() and _is_there_already(made, target):
        _remove(work)
        return
    work.rename(target)
    files.keep_folder(target.parent)


def _is_there_already(made: Manifest, target: Path) -> bool:
    """Whether a generation of this step and this digest is there. One that is damaged is moved aside, and kept."""
    try:
        found = Generation(target)
        found.verify()
    except (StateError, OSError):
        target.rename(target.with_name(f".{target.name}-damaged-{secrets.token_hex(4)}"))
        return False
    if found.manifest.digest != made.digest:
        raise StateError(
            f"there is another state of this step already (digest {found.manifest.digest}, and this one has "
            f"{made.digest}), and none is ever overwritten. Save to another folder"
        )
    return True


def _place(work: Path, rank: int) -> Path:
    return work / f"receipt-{rank:05d}.json"


def _leave(work: Path, rank: int, words: Mapping[str, Any]) -> None:
    """Write a receipt, so that who finds it finds all of it."""
    _place(work, rank).write_bytes(manifest.sealed(json.dumps(words).encode()))


def _remove(work: Path) -> None:
    """Take back what was written of a generation that will not be."""
    with contextlib.suppress(OSError):
        for path in work.iterdir():
            path.unlink()
        work.rmdir()


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
    stepped = {name: tuple(keys) for name, keys in words["stepped"].items()}
    return collect.Kept(dict(words["states"]), numbers, stepped)


def _file(words: Mapping[str, Any]) -> File:
    pieces = {
        name: Piece(**{**piece, "shape": tuple(piece["shape"])}) for name, piece in words["pieces"].items()
    }
    return File(words["num_bytes"], words["data"], words["xxh3_128"], pieces)


def _groups(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], ...]:
    return tuple(
        manifest.plain({k: v for k, v in group.items() if k != "params"}, f"optimizer group {number}")
        for number, group in enumerate(optimizer.param_groups)
    )


def _attempt(action: Callable[[], Any]) -> tuple[str | None, Any]:
    """What went wrong, in words, or what came of it."""
    try:
        return None, action()
    except (OSError, StateError) as error:
        return f"{type(error).__name__}: {error}", None
    except Exception as error:  # a thread has nobody to raise to
        return f"{type(error).__name__}: {error} (a fault of Lanewise)", None
