"""A generation as files that other programs read: safetensors with an index, as Hugging Face models are stored."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from lanewise.errors import StateError
from lanewise.state import files
from lanewise.state.inspect import Generation
from lanewise.state.manifest import DTYPES

INDEX = "model.safetensors.index.json"


def export(generation: Generation, folder: Path) -> list[Path]:
    """Write all parameters and buffers under the names that the model has for them, a unit at a time.

    Parameters are in the type that the model was stored in. A parameter that stands under several names is written
    under the first; `from_pretrained` and `load_state_dict(strict=False)` tie it again.
    """
    if folder.exists() and any(folder.iterdir()):
        raise StateError(f"{folder} is not empty, and nothing is ever written over. Choose a new folder.")
    folder.mkdir(parents=True, exist_ok=True)
    shards = list(_shards(generation))
    weights: dict[str, str] = {}
    paths = []
    total = 0
    for number, flat in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = dict(_tensors(generation, flat))
        files.write(folder / name, tensors, {"format": "pt"})
        weights |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
        paths.append(folder / name)
    index = json.dumps({"metadata": {"total_size": total}, "weight_map": weights}, indent=1, sort_keys=True)
    with (folder / INDEX).open("x", encoding="utf-8") as file:
        file.write(index)
        file.flush()
        os.fsync(file.fileno())
    files.keep_folder(folder)
    return [*paths, folder / INDEX]


def _shards(generation: Generation) -> Iterator[int | None]:
    """The flats, one file each, and None for the buffers."""
    yield from range(len(generation.manifest.flats))
    if any(True for _ in generation.buffers()):
        yield None


def _tensors(generation: Generation, flat: int | None) -> Iterator[tuple[str, torch.Tensor]]:
    if flat is None:
        yield from generation.buffers()
        return
    entry = generation.manifest.flats[flat]
    whole = generation.whole(flat, entry.kept).to(DTYPES[entry.dtype])
    for name, start, numel, shape, _ in entry.fields:
        yield name, whole[start : start + numel].view(shape)
