"""All values on every rank, for a while: to read them, or to change them and hand the changes back.

Who writes gets a private copy of everything, since ranks may share the values themselves. At the end all
ranks must have written the same; every rank then takes over what it keeps, and nobody's half-written
values are ever seen.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lanewise.engine import hashing
from lanewise.engine.engine import Engine
from lanewise.engine.homes import HostHome
from lanewise.engine.unit import Flat
from lanewise.errors import ModelError, StepError

_HASH_BYTES = 16
_Values = dict[int, torch.Tensor]
"""The values of every flat, by its number."""


@contextmanager
def reading(engine: Engine) -> Iterator[None]:
    """Have all values here. Collective at its beginning. May be nested."""
    _refuse_in_lane(engine)
    engine.passes.hold()
    try:
        before = engine.original.versions()
        yield
        engine.original.check_values("inside run.gathered(model)", before)
    finally:
        engine.passes.let_go()


@contextmanager
def writing(engine: Engine) -> Iterator[None]:
    """Have all values here and keep what is written to them. Collective at both ends, and not to be nested.

    After an exception inside, all values are as they were.
    """
    _refuse_in_lane(engine)
    if engine.passes.is_held:
        raise StepError(
            "run.gathered(model, write=True) was opened inside another run.gathered. Close that first."
        )
    engine.passes.hold()
    shapes = {id(p): p.shape for flat in engine.flats for p in flat.parameters}
    try:
        values = {flat.number: flat.storage.clone() for flat in engine.flats}
        _bind(engine, values, shapes)
        yield
        _collect(engine, values, shapes)
        _compare(engine, values)
        for flat in engine.flats:
            _keep(engine, flat, values[flat.number])
        engine.home.publish()
    finally:
        _bind(engine, {flat.number: flat.storage for flat in engine.flats}, shapes)
        engine.passes.let_go()
        engine.original.remember()


def _refuse_in_lane(engine: Engine) -> None:
    if engine.passes.is_training:
        raise StepError(
            "run.gathered was opened inside `for batch in step:`, where other ranks are at other lanes. Open it before "
            "that loop, or after step.update()."
        )


def _bind(engine: Engine, values: _Values, shapes: dict[int, torch.Size]) -> None:
    """Have the parameters show these values."""
    for flat in engine.flats:
        for place, parameter in zip(flat.layout.fields, flat.parameters, strict=True):
            parameter.data = values[flat.number][place.start : place.stop].view(shapes[id(parameter)])


def _collect(engine: Engine, values: _Values, shapes: dict[int, torch.Size]) -> None:
    """Take what the parameters hold now, wherever it lies."""
    for flat in engine.flats:
        for place, parameter in zip(flat.layout.fields, flat.parameters, strict=True):
            if parameter.shape != shapes[id(parameter)]:
                raise ModelError(
                    f"parameter {place.name!r} got shape {tuple(parameter.shape)} inside run.gathered; it was prepared "
                    f"with {tuple(shapes[id(parameter)])}. Values may change, shapes may not."
                )
            values[flat.number][place.start : place.stop].copy_(parameter.detach().reshape(-1))


def _compare(engine: Engine, values: _Values) -> None:
    """Every rank must have written the same to parameters and buffers."""
    names, hashes = [], []
    for flat in engine.flats:
        for place in flat.layout.fields:
            names.append(f"parameter {place.name!r}")
            hashes.append(hashing.of([values[flat.number][place.start : place.stop]]))
    for name, buffer in engine.model.named_buffers():
        names.append(f"buffer {name!r}")
        hashes.append(hashing.of([buffer]))
    mine = torch.frombuffer(bytearray(b"".join(hashes)), dtype=torch.uint8).view(-1, _HASH_BYTES)
    rows = engine.world.transport.share(mine, "the comparison of written values")
    for number, name in enumerate(names):
        others = [rank for rank, row in enumerate(rows) if not torch.equal(row[number], rows[0, number])]
        if others:
            raise ModelError(
                f"{name} got other values on ranks {others} than on rank 0 inside run.gathered(model, write=True). "
                "Write the same on all ranks: read the same file, or seed before you draw. Nothing was changed."
            )


def _keep(engine: Engine, flat: Flat, values: torch.Tensor) -> None:
    """Take over what this rank keeps. A master is left alone where the stored value did not change."""
    committer, world = engine.committer, engine.world
    if flat.has_master:
        for owner in committer.owners:
            low, high = world.spans(flat)[owner]
            written, master = values[low:high], committer.masters[flat.number, owner]
            is_new = written != committer.stored(flat, owner)
            master.copy_(torch.where(is_new, written.to(master.dtype), master))
    low, high = world.my_span(flat)
    if not engine.home.rounds(flat):
        engine.home.mine(flat).copy_(values[low:high])
    if not engine.home.frees and not isinstance(engine.home, HostHome):
        flat.storage.copy_(values)
