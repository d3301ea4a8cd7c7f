"""Files of tensors in the format of safetensors: written once, read back, and later read piece by piece.

Readers trust the manifest's places and hashes, and never parse a file's own header; it is there for other tools.
"""

import ctypes
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from io import FileIO
from pathlib import Path

import torch
import xxhash

from lanewise.errors import StateError
from lanewise.state.manifest import DTYPES, File, Piece, dtype_name, numel

_CHUNK = 1 << 24


def write(path: Path, tensors: Mapping[str, torch.Tensor], words: Mapping[str, str] | None = None) -> File:
    """Write a new file, have the disk keep it, and compare what it then holds with what was written.

    `words` go into its header for other programs.
    """
    header: dict[str, object] = {"__metadata__": dict(words)} if words else {}
    pieces: dict[str, Piece] = {}
    position = 0
    for name, tensor in tensors.items():
        stop = position + tensor.nbytes
        kind, shape = dtype_name(tensor.dtype), tuple(tensor.shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": (position, stop)}
        pieces[name] = Piece(kind, shape, position, stop, xxhash.xxh3_128(_bytes(tensor)).hexdigest())
        position = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    start = len(text).to_bytes(8, "little") + text
    hasher = xxhash.xxh3_128(start)
    with path.open("xb") as file:
        file.write(start)
        for tensor in tensors.values():
            raw = _bytes(tensor)
            hasher.update(raw)
            file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    made = File(len(start) + position, len(start), hasher.hexdigest(), pieces)
    check(path, made)
    return made


def check(path: Path, file: File) -> None:
    """Read a whole file and compare its hash."""
    hasher = xxhash.xxh3_128()
    for chunk in _chunks(path, file.num_bytes):
        hasher.update(chunk)
    if hasher.hexdigest() != file.xxh3_128:
        raise StateError(f"{path}: its bytes are not those that were written (the hash differs).")


def read(path: Path, file: File, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """The pieces of these names, each compared with its hash."""
    found = {}
    with _open(path, file.num_bytes) as stream:
        for name in names:
            piece = file.pieces[name]
            stream.seek(file.data + piece.start)
            tensor = torch.empty(numel(piece.shape), dtype=DTYPES[piece.dtype])
            raw = _bytes(tensor)
            if stream.readinto(raw) != tensor.nbytes or xxhash.xxh3_128(raw).hexdigest() != piece.xxh3_128:
                raise StateError(f"{path}: piece {name!r} is not what was written (its hash differs).")
            found[name] = tensor.view(piece.shape)
    return found


def keep_folder(path: Path) -> None:
    """Have the disk keep the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_small(path: Path, most: int) -> bytes:
    """All of a file that may have so many bytes."""
    with _open(path, None) as stream:
        data = stream.read(most + 1)
    if len(data) > most:
        raise StateError(f"{path}: it is longer than {most} bytes, and no such file is.")
    return data


def _open(path: Path, num_bytes: int | None) -> FileIO:
    """Open an ordinary file: no link, no pipe, no device."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise StateError(f"{path}: it cannot be opened as an ordinary file ({error.strerror}).") from error
    stream = FileIO(descriptor, "rb")
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or (num_bytes is not None and status.st_size != num_bytes):
        stream.close()
        size = "" if num_bytes is None else f" of {num_bytes} bytes (found {status.st_size})"
        raise StateError(f"{path}: it is not an ordinary file{size}.")
    return stream


def _chunks(path: Path, num_bytes: int) -> Iterator[bytes]:
    with _open(path, num_bytes) as stream:
        while chunk := stream.read(_CHUNK):
            yield chunk


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU. Not by way of numpy, which has no bf16."""
    assert tensor.is_contiguous(), "memory is taken as it lies"
    if not tensor.numel():
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
