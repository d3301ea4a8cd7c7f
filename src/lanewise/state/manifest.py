"""The manifest of a generation: what is in its files, and the hash of every piece of them.

Whatever a manifest says is taken for a claim: it is parsed strictly, its own hash must fit, and every name, length
and place in it is checked against the rules before a file is opened. Hashes tell whether bytes are those that were
written. They do not tell who wrote them.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import xxhash
from pydantic import ConfigDict, TypeAdapter, ValidationError

from lanewise.errors import StateError

NAME = "manifest.json"
FORMAT = "lanewise generation"
VERSION = 1
MOST_BYTES = 1 << 28
"""No manifest is longer."""
_GENERATION = re.compile(r"step-\d{9}")
BUFFER = "buffer "
"""What the names of the pieces of buffers begin with."""
_FILE = re.compile(r"(slots-\d{5}-\d{5}|buffers)\.safetensors")
_HASH = re.compile(r"[0-9a-f]{32}")
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""Types of elements by their names in safetensors."""
_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class Piece:
    """A tensor in a file: bytes `start` to `stop` of the file's data."""

    __pydantic_config__ = _STRICT
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    xxh3_128: str


@dataclass(frozen=True)
class File:
    """A file of a generation. Its data begin at byte `data`, after the header that safetensors wants."""

    __pydantic_config__ = _STRICT
    num_bytes: int
    data: int
    xxh3_128: str
    pieces: dict[str, Piece]


@dataclass(frozen=True)
class FlatEntry:
    """A flat: which parameters stand where, and what of them is in the files."""

    __pydantic_config__ = _STRICT
    unit: str
    dtype: str
    trainable: bool
    slot: int
    fields: tuple[tuple[str, int, int, tuple[int, ...], int], ...]
    """Name, first element, number of elements, shape, and optimizer group (-1 for frozen)."""
    kept: str
    """`master` or `values`: the widest copy, from which the other is rounded."""
    states: dict[str, str]
    """The optimizer's states that have a number for each element, and their types."""
    numbers: dict[str, dict[str, tuple[str, float]]]
    """Its states that are one number for a parameter: type and value, by names of parameter and state."""
    stepped: dict[str, tuple[str, ...]]
    """The parameters that have a state at all, and which of `states` they have."""


@dataclass(frozen=True)
class Manifest:
    """See the file."""

    __pydantic_config__ = _STRICT
    format: str
    version: int
    step: int
    lanes: int
    seed: int
    settings: dict[str, Any]
    optimizer: str
    groups: tuple[dict[str, Any], ...]
    """The options of each optimizer group."""
    scale: tuple[float, int]
    extra: dict[str, Any]
    """What the user gave: states of schedulers and the like."""
    flats: tuple[FlatEntry, ...]
    files: dict[str, File]
    digest: str
    versions: dict[str, str]


_ADAPTER = TypeAdapter(Manifest)


def name_of(step: int) -> str:
    """The folder of the generation of a step."""
    return f"step-{step:09d}"


def is_generation(name: str) -> bool:
    """Whether a folder of this name is a generation."""
    return _GENERATION.fullmatch(name) is not None


def sealed(body: bytes) -> bytes:
    """A text with its hash in a last line."""
    return body + b"\n" + xxhash.xxh3_128(body).hexdigest().encode()


def unsealed(data: bytes) -> bytes | None:
    """The text without that line; None where the hash is not that of the text."""
    body, _, last = data.rpartition(b"\n")
    return body if xxhash.xxh3_128(body).hexdigest().encode() == last else None


def to_bytes(manifest: Manifest) -> bytes:
    """The manifest as JSON, with its own hash in the last line."""
    return sealed(json.dumps(asdict(manifest), sort_keys=True, indent=1, allow_nan=False).encode()) + b"\n"


def from_bytes(data: bytes, where: str) -> Manifest:
    """Read a manifest that anybody may have written."""
    body = unsealed(data.rstrip(b"\n"))
    if body is None:
        raise StateError(
            f"{where}: the hash in its last line is not that of the lines before it. The file is damaged or cut short; "
            "use another generation."
        )
    try:
        manifest = _ADAPTER.validate_json(body)
    except (ValidationError, RecursionError) as error:
        problems = error.errors() if isinstance(error, ValidationError) else []
        place = ".".join(map(str, problems[0]["loc"])) if problems else ""
        first = f"{place}: {problems[0]['msg']}" if problems else "it is nested too deep"
        raise StateError(f"{where}: it is not a manifest of this format ({first}).") from error
    _check(manifest, where)
    return manifest


def _check(manifest: Manifest, where: str) -> None:
    if (manifest.format, manifest.version) != (FORMAT, VERSION):
        raise StateError(
            f"{where}: format {manifest.format!r} version {manifest.version}, and this Lanewise reads {FORMAT!r} "
            f"version {VERSION}. Use the Lanewise that wrote it ({manifest.versions.get('lanewise', 'unknown')})."
        )
    for name, file in manifest.files.items():
        _check_file(name, file, where)
    wanted = manifest.lanes * sum(1 + len(flat.states) for flat in manifest.flats)
    there = sum(name.startswith("flat ") for file in manifest.files.values() for name in file.pieces)
    if wanted != there:
        raise StateError(f"{where}: {wanted} pieces of flats are needed, found {there}.")
    for name, tensor in required(manifest).items():
        owners = [file for file in manifest.files.values() if name in file.pieces]
        if len(owners) != 1:
            raise StateError(f"{where}: piece {name!r} must be in one file, found it in {len(owners)}.")
        piece = owners[0].pieces[name]
        if (piece.dtype, piece.shape) != tensor:
            raise StateError(
                f"{where}: piece {name!r} must be {tensor[0]} of shape {tensor[1]}, found {piece.dtype} of shape "
                f"{piece.shape}."
            )


def _check_file(name: str, file: File, where: str) -> None:
    if not _FILE.fullmatch(name):
        raise StateError(
            f"{where}: file name {name!r} is not one that Lanewise writes (slots-00000-00003.safetensors). Names may "
            "not lead out of the folder."
        )
    position = 0
    for key, piece in sorted(file.pieces.items(), key=lambda item: item[1].start):
        rule = None
        if piece.dtype not in DTYPES:
            rule = f"type {piece.dtype!r} is unknown"
        elif any(size < 0 for size in piece.shape):
            rule = f"shape {piece.shape} has a negative size"
        elif piece.start != position:
            rule = f"it begins at byte {piece.start}, and the piece before it ends at {position}"
        elif piece.stop - piece.start != numel(piece.shape) * DTYPES[piece.dtype].itemsize:
            rule = f"{piece.stop - piece.start} bytes are not {piece.shape} elements of {piece.dtype}"
        elif not _HASH.fullmatch(piece.xxh3_128):
            rule = "its hash is not 32 hexadecimal digits"
        if rule is not None:
            raise StateError(f"{where}: piece {key!r} of {name}: {rule}.")
        position = piece.stop
    if not 0 < file.data <= file.num_bytes or file.data + position != file.num_bytes:
        raise StateError(
            f"{where}: {name} has {file.num_bytes} bytes, and its header of {file.data} and pieces of {position} do "
            "not add up to that."
        )


def required(manifest: Manifest) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Every piece that the flats must have, with type and shape."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for number, flat in enumerate(manifest.flats):
        kinds = {flat.kept: "F32" if flat.kept == "master" else flat.dtype}
        kinds |= {f"state {key}": dtype for key, dtype in flat.states.items()}
        for kind, dtype in kinds.items():
            for slot in range(manifest.lanes):
                found[piece_name(number, kind, slot)] = (dtype, (flat.slot,))
    return found


def piece_name(flat: int, kind: str, slot: int) -> str:
    """The name of one slot of one flat: of its values or master, or of a state of the optimizer."""
    return f"flat {flat:04d}/{kind}/slot {slot:05d}"


def numel(shape: tuple[int, ...]) -> int:
    """How many elements a shape has."""
    count = 1
    for size in shape:
        count *= size
    return count


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a type in safetensors."""
    for name, known in DTYPES.items():
        if known == dtype:
            return name
    raise StateError(f"tensors of type {dtype} cannot be saved.")


_ITEMS, _KIND, _FLOAT = "lanewise items", "lanewise kind", "lanewise float"


def plain(value: Any, where: str) -> Any:
    """A value in words that JSON has, for `restore`; or an error that names what cannot be said in them.

    Tuples become lists.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return plain(value.item(), where)
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, Mapping):
        items = [[plain(key, where), plain(item, f"{where}.{key}")] for key, item in value.items()]
        return {_ITEMS: items, _KIND: "Counter" if isinstance(value, Counter) else "dict"}
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{where}[{n}]") for n, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: repr(value)}
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    raise StateError(
        f"{where} is a {type(value).__name__} ({value!r:.60}), and a checkpoint keeps plain values only: numbers, "
        "text, lists and tables of these."
    )


def restore(value: Any) -> Any:
    """The value that `plain` was given."""
    if isinstance(value, list):
        return [restore(item) for item in value]
    if isinstance(value, dict) and _ITEMS in value:
        items = {restore(key): restore(item) for key, item in value[_ITEMS]}
        return Counter(items) if value.get(_KIND) == "Counter" else items
    if isinstance(value, dict) and _FLOAT in value:
        return float(value[_FLOAT])
    if isinstance(value, dict):
        return {key: restore(item) for key, item in value.items()}
    return value
