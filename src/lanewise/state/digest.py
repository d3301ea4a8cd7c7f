"""The digest of a run, from pieces: each rank hashes the places in its slots, and all of them are put together.

It knows nothing of an engine. `run.digest` finds the same from the engine's own memory, and a load compares the two.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import xxhash

from lanewise.engine import hashing
from lanewise.lanes.layout import Field, FlatLayout
from lanewise.state.manifest import DTYPES, FlatEntry, piece_name

Places = dict[str, dict[str, str]]
"""The hashes of values and of states, one after the other in hexadecimal, by parameter and slot."""


def places(
    flats: Sequence[FlatEntry], lanes: int, slots: Iterable[int], piece: Callable[[str], torch.Tensor]
) -> Places:
    """The hashes of all that these slots hold. `piece` gives a tensor by its name."""
    found: Places = {}
    for slot in slots:
        for number, flat in enumerate(flats):
            fields = tuple(Field(name, start, numel) for name, start, numel, _, _ in flat.fields)
            layout = FlatLayout(fields, lanes, flat.slot)
            kept = piece(piece_name(number, flat.kept, slot))
            states = {key: piece(piece_name(number, f"state {key}", slot)) for key in flat.states}
            for part in layout.parts(layout.span((slot, slot + 1))):
                stretch = slice(part.offset, part.offset + part.stop - part.start)
                name = fields[part.field].name
                values = hashing.of([kept[stretch].to(DTYPES[flat.dtype])]).hex()
                wide = [kept[stretch]] if flat.kept == "master" else []
                wide += [value[stretch] if value.dim() else value for value in _state_of(flat, name, states)]
                state = hashing.of(wide).hex() if flat.trainable else ""
                found.setdefault(name, {})[str(slot)] = values + state
    return found


def combine(
    found: Sequence[Places],
    flats: Sequence[FlatEntry],
    buffers: Mapping[str, torch.Tensor],
    scale: tuple[float, int],
) -> str:
    """The digest of all places and buffers. `buffers` have the names of their pieces."""
    digests: dict[str, str] = {}
    for name in {name for one in found for name in one}:
        by_slot = {int(slot): text for one in found for slot, text in one.get(name, {}).items()}
        hasher = xxhash.xxh3_128()
        for slot in sorted(by_slot):
            hasher.update(bytes.fromhex(by_slot[slot]))
        digests[name] = str(hasher.hexdigest())
    for name, tensor in buffers.items():
        digests[name] = hashing.of([tensor]).hex()
    if any(flat.dtype == "F16" for flat in flats):
        digests["loss scale"] = hashing.of_words([repr(scale[0]), str(scale[1])])
    return hashing.of_words(word for name in sorted(digests) for word in (name, digests[name]))


def _state_of(flat: FlatEntry, name: str, states: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    if name not in flat.stepped:
        return []
    found = {key: states[key] for key in flat.stepped[name]}
    for key, (kind, value) in flat.numbers.get(name, {}).items():
        found[key] = torch.tensor(value, dtype=DTYPES.get(kind, torch.float64))
    return [found[key] for key in sorted(found)]
