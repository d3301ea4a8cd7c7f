"""The digest: one short hash of everything a run has learned, the same for any number of ranks.

Every parameter is hashed slot by slot, by those who have the slot: its stored values, its master, and the
optimizer's state of it. Padding is left out. Ranks that keep copies of each other's values hash those too,
and a copy that differs is an error that names it.
"""

from collections.abc import Iterator

import torch
import xxhash

from lanewise.engine import hashing
from lanewise.engine.engine import Engine
from lanewise.engine.homes import HostHome, ShardedHome
from lanewise.engine.optimizer import Slice
from lanewise.errors import ExchangeError
from lanewise.lanes.hosting import Span
from lanewise.lanes.layout import Part

_HASH_BYTES = 16
Place = tuple[int, int, int]
"""A flat, a slot, and a field that has elements in that slot."""


def parameter_digests(engine: Engine) -> dict[str, str]:
    """A hash of every parameter with its optimizer state, and of every buffer. Collective."""
    places = list(_places(engine))
    values = _exchange(engine, places, _hash_values(engine), "values")
    states = _exchange(engine, places, _hash_states(engine), "optimizer state")
    digests: dict[str, xxhash.xxh3_128] = {}
    for place in places:
        flat = engine.flats[place[0]]
        hasher = digests.setdefault(flat.names[place[2]], xxhash.xxh3_128())
        hasher.update(values[place])
        hasher.update(states[place])
    result = {name: str(hasher.hexdigest()) for name, hasher in digests.items()}
    for name, tensor in engine.buffers.named:
        result[f"buffer {name}"] = hashing.of([tensor]).hex()
    scale = engine.committer.scale
    if scale.is_active:
        result["loss scale"] = hashing.of_words([repr(scale.value), str(scale.good_steps)])
    return result


def digest(engine: Engine) -> str:
    """All of `parameter_digests` as one. Collective."""
    return combine(parameter_digests(engine))


def combine(digests: dict[str, str]) -> str:
    """One hash of many."""
    return hashing.of_words(word for name in sorted(digests) for word in (name, digests[name]))


def _places(engine: Engine) -> Iterator[Place]:
    for flat in engine.flats:
        for slot in range(flat.layout.lanes):
            for part in flat.layout.parts(flat.layout.span((slot, slot + 1))):
                yield (flat.number, slot, part.field)


def _hash_values(engine: Engine) -> dict[Place, bytes]:
    """The stored values of every place that this rank has a copy of."""
    world = engine.world
    home = engine.home
    hashes = {}
    for flat in engine.flats:
        has_all = not isinstance(home, (HostHome, ShardedHome))
        slots: Span = (0, flat.layout.lanes) if has_all else world.slots[world.rank]
        base = 0 if has_all else world.my_span(flat)[0]
        source = flat.storage if has_all else home.mine(flat)
        for slot in range(*slots):
            start = flat.layout.span((slot, slot + 1))[0] - base
            for part in flat.layout.parts(flat.layout.span((slot, slot + 1))):
                low = start + part.offset
                hashes[flat.number, slot, part.field] = hashing.of(
                    [source[low : low + part.stop - part.start]]
                )
    return hashes


def _hash_states(engine: Engine) -> dict[Place, bytes]:
    """The master and the optimizer's state of every place that this rank updates."""
    hashes = {}
    for piece in engine.committer.optimizer.slices:
        for slot, part in _slots_of(engine, piece):
            low = part.start - piece.part.start
            high = low + part.stop - part.start
            tensors = [piece.tensor[low:high]] if piece.flat.has_master else []
            state = engine.committer.optimizer.state_of(piece)
            shape = piece.tensor.shape
            tensors += [value[low:high] if value.shape == shape else value for value in state.values()]
            hashes[piece.flat.number, slot, piece.part.field] = hashing.of(tensors)
    return hashes


def _slots_of(engine: Engine, piece: Slice) -> Iterator[tuple[int, Part]]:
    """The slots that a slice lies in, with what each of them holds of the parameter."""
    layout = piece.flat.layout
    for slot in range(*engine.world.slots[piece.owner]):
        for part in layout.parts(layout.span((slot, slot + 1))):
            if part.field == piece.part.field:
                yield slot, part


def _exchange(engine: Engine, places: list[Place], mine: dict[Place, bytes], what: str) -> dict[Place, bytes]:
    """Every place's hash, from any rank that has it; ranks that have the same place must agree."""
    nothing = bytes(_HASH_BYTES + 1)
    packed = b"".join(b"\1" + mine[place] if place in mine else nothing for place in places)
    table = torch.frombuffer(bytearray(packed or b"\0"), dtype=torch.uint8)
    rows = [bytes(row.numpy()) for row in engine.world.transport.share(table, "the digest")]
    found: dict[Place, bytes] = {}
    for number, place in enumerate(places):
        start = number * (_HASH_BYTES + 1)
        for rank, row in enumerate(rows):
            entry = row[start : start + _HASH_BYTES + 1]
            if entry[0] and found.setdefault(place, entry[1:]) != entry[1:]:
                flat = engine.flats[place[0]]
                raise ExchangeError(
                    f"rank {rank} has other {what} of parameter {flat.names[place[2]]!r} (unit {flat.unit_name!r}, "
                    f"slot {place[1]}) than the ranks before it. Copies must be equal: a rank's memory may be faulty, "
                    "or something changed the parameter on one rank only."
                )
    return {place: found.get(place, b"") for place in places}
