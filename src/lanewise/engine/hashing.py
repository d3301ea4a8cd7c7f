"""Hashes of tensors: 128 bits that tell two contents apart, on any device."""

import ctypes
from collections.abc import Iterable

import torch
import xxhash


def update(hasher: xxhash.xxh3_128, tensor: torch.Tensor) -> None:
    """Feed a tensor's bytes, in the order of its elements.

    Not by way of numpy, which would make the tensor's storage unfit to be freed and refilled.
    """
    flat = tensor.detach().cpu().contiguous()
    if flat.numel():
        hasher.update((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr()))


def of(tensors: Iterable[torch.Tensor]) -> bytes:
    """The hash of tensors, one after the other."""
    hasher = xxhash.xxh3_128()
    for tensor in tensors:
        update(hasher, tensor)
    return hasher.digest()


def of_words(words: Iterable[str]) -> str:
    """The hash of words that may hold anything, as 32 hexadecimal digits."""
    hasher = xxhash.xxh3_128()
    for word in words:
        raw = word.encode()
        hasher.update(len(raw).to_bytes(8, "little"))
        hasher.update(raw)
    return str(hasher.hexdigest())


def short(words: Iterable[str]) -> int:
    """A hash of words that an fp64 holds exactly, for a report of numbers."""
    return int(of_words(words)[:13], 16)
