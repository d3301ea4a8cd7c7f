"""Between an engine and the pieces of a generation: what a rank keeps, slot by slot, and how it is put back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lanewise.engine.engine import Engine
from lanewise.engine.homes import HostHome, PrivateHome
from lanewise.engine.unit import Flat
from lanewise.lanes.hosting import Span
from lanewise.state.manifest import BUFFER, DTYPES, FlatEntry, Manifest, dtype_name, piece_name


@dataclass
class Kept:
    """What one rank has of one flat, beside the tensors."""

    states: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, dict[str, tuple[str, float]]] = field(default_factory=dict)
    stepped: dict[str, tuple[str, ...]] = field(default_factory=dict)


def take(engine: Engine) -> tuple[dict[str, torch.Tensor], dict[int, Kept]]:
    """Copies of all that this rank owns, on the host, by the names of pieces."""
    tensors: dict[str, torch.Tensor] = {}
    kept: dict[int, Kept] = {}
    world = engine.world
    first, _ = world.slots[world.rank]
    for flat in engine.flats:
        arrays = {_widest(flat): _own(engine, flat)}
        kept[flat.number] = Kept()
        for key, array in _states(engine, flat, kept[flat.number]).items():
            arrays[f"state {key}"] = array
        for kind, array in arrays.items():
            for number, part in enumerate(array.split(flat.layout.slot)):
                tensors[piece_name(flat.number, kind, first + number)] = part
    return tensors, kept


def entry(flat: Flat, kept: list[Kept]) -> FlatEntry:
    """The manifest's words on a flat, from what all ranks have of it."""
    numbers: dict[str, dict[str, tuple[str, float]]] = {}
    states: dict[str, str] = {}
    stepped: dict[str, tuple[str, ...]] = {}
    for one in kept:
        numbers |= one.numbers
        states |= one.states
        stepped |= one.stepped
    fields = tuple(
        (place.name, place.start, place.numel, tuple(parameter.shape), group)
        for place, parameter, group in zip(flat.layout.fields, flat.parameters, flat.groups, strict=True)
    )
    return FlatEntry(
        unit=flat.unit_name,
        dtype=dtype_name(flat.dtype),
        trainable=flat.trainable,
        slot=flat.layout.slot,
        fields=fields,
        kept=_widest(flat),
        states=states,
        numbers=numbers,
        stepped=stepped,
    )


def fill_in(engine: Engine, entries: Sequence[FlatEntry], tensors: dict[str, torch.Tensor]) -> None:
    """Zeros for states that only parameters in other ranks' slots have."""
    for flat, saved in zip(engine.flats, entries, strict=True):
        for key, dtype in saved.states.items():
            for slot in range(*engine.world.slots[engine.world.rank]):
                name = piece_name(flat.number, f"state {key}", slot)
                if name not in tensors:
                    tensors[name] = torch.zeros(flat.layout.slot, dtype=DTYPES[dtype])


def wanted(engine: Engine, manifest: Manifest) -> list[str]:
    """The pieces that this rank needs to go on."""
    world = engine.world
    updated = [slot for owner in engine.committer.owners for slot in range(*world.slots[owner])]
    shown = range(world.lanes) if _shows_all(engine) else range(*world.slots[world.rank])
    names = []
    for flat, saved in zip(engine.flats, manifest.flats, strict=True):
        names += [piece_name(flat.number, saved.kept, slot) for slot in sorted({*updated, *shown})]
        names += [piece_name(flat.number, f"state {key}", slot) for key in saved.states for slot in updated]
    return names


def put(engine: Engine, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the pieces where they belong. Collective at its end."""
    world = engine.world
    with torch.no_grad():
        for flat, saved in zip(engine.flats, manifest.flats, strict=True):

            def array(kind: str, slots: Span, flat: Flat = flat) -> torch.Tensor:
                parts = [tensors[piece_name(flat.number, kind, slot)] for slot in range(*slots)]
                return torch.cat(parts) if parts else torch.empty(0)

            if flat.has_master:
                for owner in engine.committer.owners:
                    engine.committer.masters[flat.number, owner].copy_(array("master", world.slots[owner]))
            if _shows_all(engine):
                flat.storage.copy_(array(saved.kept, (0, world.lanes)))
            elif not engine.home.rounds(flat):
                engine.home.mine(flat).copy_(array(saved.kept, world.slots[world.rank]))
            _put_states(engine, flat, saved, array)
        for (_, buffer), name in zip(engine.buffers.named, buffer_names(engine), strict=True):
            buffer.copy_(tensors[name].view(buffer.shape))
    engine.buffers.begin_step()
    engine.home.publish()
    engine.original.remember()
    world.transport.barrier("the end of loading")


def buffer_names(engine: Engine) -> list[str]:
    """The names of the pieces of buffers."""
    return [BUFFER + name for name, _ in engine.buffers.named]


def _widest(flat: Flat) -> str:
    return "master" if flat.has_master else "values"


def _shows_all(engine: Engine) -> bool:
    """Whether this rank has all values in memory of its own."""
    return isinstance(engine.home, PrivateHome) and not isinstance(engine.home, HostHome)


def _own(engine: Engine, flat: Flat) -> torch.Tensor:
    if flat.has_master:
        return engine.committer.masters[flat.number, engine.world.rank].to("cpu", copy=True)
    return engine.home.mine(flat).to("cpu", copy=True)


def _states(engine: Engine, flat: Flat, kept: Kept) -> dict[str, torch.Tensor]:
    optimizer = engine.committer.optimizer
    low, high = engine.world.my_span(flat)
    arrays: dict[str, torch.Tensor] = {}
    for piece in optimizer.slices:
        if piece.flat is not flat or piece.owner != engine.world.rank:
            continue
        state = optimizer.optimizer.state.get(piece.tensor, {})
        if state:
            has = [
                k for k, v in state.items() if isinstance(v, torch.Tensor) and v.shape == piece.tensor.shape
            ]
            kept.stepped[piece.name] = tuple(sorted(has))
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == piece.tensor.shape:
                if key not in arrays:
                    arrays[key] = torch.zeros(high - low, dtype=value.dtype)
                    kept.states[key] = dtype_name(value.dtype)
                arrays[key][piece.part.offset : piece.part.offset + value.numel()].copy_(value)
            else:
                kind = dtype_name(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__
                kept.numbers.setdefault(piece.name, {})[key] = (kind, float(value))
    return arrays


def _put_states(engine: Engine, flat: Flat, saved: FlatEntry, array: Any) -> None:
    optimizer = engine.committer.optimizer
    for owner in engine.committer.owners:
        arrays = {key: array(f"state {key}", engine.world.slots[owner]) for key in saved.states}
        for piece in optimizer.slices:
            if piece.flat is not flat or piece.owner != owner:
                continue
            state = optimizer.optimizer.state[piece.tensor]
            state.clear()
            if piece.name not in saved.stepped:
                continue
            stop = piece.part.offset + piece.tensor.numel()
            for key in saved.stepped[piece.name]:
                state[key] = arrays[key][piece.part.offset : stop].to(piece.tensor.device, copy=True)
            group = optimizer.optimizer.param_groups[piece.group]
            beside = (
                piece.tensor.device if group.get("fused") or group.get("capturable") else torch.device("cpu")
            )
            for key, (kind, number) in saved.numbers.get(piece.name, {}).items():
                state[key] = _number(kind, number, beside)


def _number(kind: str, value: float, device: torch.device) -> Any:
    if kind in ("int", "bool"):
        return int(value)
    if kind == "float":
        return value
    return torch.tensor(value, dtype=DTYPES[kind], device=device)
