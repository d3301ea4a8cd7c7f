"""From a user's model and optimizer to an engine. Everything is checked before anything is changed."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from lanewise.config import Settings
from lanewise.engine import accept, hashing, strategies
from lanewise.engine.build import build_units, group_of_each, layout_words
from lanewise.engine.engine import Engine
from lanewise.engine.find import Selector, check_model, find_units
from lanewise.engine.first_values import FirstValues, Init
from lanewise.engine.moments import Moments
from lanewise.engine.precision import STORED
from lanewise.engine.unit import Flat, Unit, all_flats
from lanewise.engine.world import World
from lanewise.errors import HandshakeError, ModelError

_WORD_BYTES = 256


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: Settings,
    world: World,
    selectors: Sequence[Selector] | None,
    init: Init | None,
    weights: str | Path | None,
    notify: Callable[[str], None],
) -> Engine:
    """Make an engine. Collective."""
    check_model(model)
    accept.check(optimizer, world.device)
    groups = group_of_each(model, optimizer)
    found = find_units(model, selectors)
    units = build_units(found, groups, settings.precision, settings.lanes)
    _compare_layouts(units, world)
    first = FirstValues(model, world.device, settings.seed, init, weights)
    _leave_out(model, groups, notify)
    real = [f for f in all_flats(units) if not any(p.is_meta for p in f.parameters)]
    if weights is None:
        _agree_on_values(real, world, notify)
    engine = Engine(
        model, units, world, strategies.choose(settings.strategy), settings.reduction, settings.nonfinite
    )
    hashes = []
    with torch.no_grad():
        for unit in units:
            first.fill(unit)
            hashes.append(_settle(unit, engine))
    _check_made_values(units, hashes, world)
    engine.committer.adopt(optimizer)
    if settings.moments == "bf16":
        engine.committer.optimizer.keep_narrow(Moments(settings.seed, world.device))
    engine.install(STORED[settings.precision])
    engine.original.remember()
    world.transport.barrier("the end of prepare")
    return engine


def _settle(unit: Unit, engine: Engine) -> bytes:
    """Move a unit's values into its flats; returns their hash."""
    values, masters = {}, {}
    for flat in unit.flats:
        wide = torch.zeros(flat.layout.length, dtype=flat.update_dtype, device=engine.world.device)
        for place, parameter in zip(flat.layout.fields, flat.parameters, strict=True):
            wide[place.start : place.stop].copy_(parameter.detach().reshape(-1))
            parameter.grad = None
        if flat.has_master:
            for owner in engine.committer.owners:
                low, high = engine.world.spans(flat)[owner]
                engine.committer.masters[flat.number, owner] = wide[low:high].clone()
            masters[flat.number] = engine.committer.masters[flat.number, engine.world.rank]
        values[flat.number] = wide.to(flat.dtype)
    digest = hashing.of(values.values())
    engine.home.settle(unit, values, masters)
    return digest


def _leave_out(model: nn.Module, groups: dict[int, int], notify: Callable[[str], None]) -> None:
    """Parameters that nobody will update need no gradient."""
    idle = [(name, p) for name, p in model.named_parameters() if p.requires_grad and id(p) not in groups]
    for _, parameter in idle:
        parameter.requires_grad_(False)
    if idle:
        names = ", ".join(name for name, _ in idle[:5]) + (" ..." if len(idle) > 5 else "")
        notify(f"{len(idle)} parameter(s) are in no optimizer group and are treated as frozen: {names}")


def _share_hash(digest: bytes, world: World, where: str) -> list[bytes]:
    rows = world.transport.share(torch.frombuffer(bytearray(digest), dtype=torch.uint8), where)
    return [bytes(row.numpy()) for row in rows]


def _compare_layouts(units: Sequence[Unit], world: World) -> None:
    words = layout_words(units)
    hashes = _share_hash(bytes.fromhex(hashing.of_words(words)), world, "the comparison of layouts")
    different = [rank for rank, digest in enumerate(hashes) if digest != hashes[0]]
    if different:
        theirs, mine = _first_difference(words, world, different[0])
        raise HandshakeError(
            f"the models of rank(s) {', '.join(map(str, different))} and rank 0 differ in names, shapes, types, units "
            f"or optimizer groups. Where they first differ, rank {different[0]} has {theirs}, and rank 0 {mine}. Every "
            "rank must build the same model and optimizer: do not let them depend on the rank."
        )


def _first_difference(words: Sequence[str], world: World, rank: int) -> tuple[str, str]:
    """What a rank and rank 0 have in the first place where their layouts differ."""
    where = "the comparison of layouts"
    counts = world.transport.share(torch.tensor([len(words)]), where)
    hashes = [bytes.fromhex(hashing.of_words([word])) for word in words[: int(counts.min())]]
    rows = world.transport.share(torch.frombuffer(bytearray(b"".join(hashes)), dtype=torch.uint8), where)
    places = (rows[rank] != rows[0]).nonzero()
    first = int(places[0]) // len(hashes[0]) if len(places) else len(hashes)
    word = words[first] if first < len(words) else "nothing more"
    said = world.transport.share(torch.tensor(list(word.encode()[:_WORD_BYTES].ljust(_WORD_BYTES))), where)
    found = [bytes(row.tolist()).decode(errors="replace").rstrip() for row in (said[rank], said[0])]
    return found[0], found[1]


def _agree_on_values(flats: Sequence[Flat], world: World, notify: Callable[[str], None]) -> None:
    """Where ranks built different values, take rank 0's."""
    digest = hashing.of(p for flat in flats for p in flat.parameters)
    hashes = _share_hash(digest, world, "the comparison of first values")
    different = [rank for rank, other in enumerate(hashes) if other != hashes[0]]
    if not different:
        return
    notify(
        f"the first values of ranks {different} differ from rank 0's, which are taken. Seed before the model is "
        "built, or build it after lw.start, which seeds, to get the same values in every run"
    )
    for flat in flats:
        for name, parameter in zip(flat.names, flat.parameters, strict=True):
            world.transport.broadcast(parameter.data, f"the broadcast of {name}")


def _check_made_values(units: Sequence[Unit], hashes: Sequence[bytes], world: World) -> None:
    whole = _share_hash(b"".join(hashes), world, "the comparison of made values")
    for rank, digests in enumerate(whole):
        for number, unit in enumerate(units):
            if digests[number * 16 : number * 16 + 16] != whole[0][number * 16 : number * 16 + 16]:
                raise ModelError(
                    f"unit {unit.name!r} got other first values on rank {rank} than on rank 0. init= must depend only "
                    "on the name it is given and on torch's random stream, which is seeded for each name."
                )
