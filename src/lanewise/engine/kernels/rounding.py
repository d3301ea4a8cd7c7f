"""`moments.round_to_bf16` as one kernel, with one read and one write of memory. Imported on GPUs only."""

import torch
import triton
import triton.language as tl

from lanewise.engine.moments import Key

_BLOCK = 1024


def round_to_bf16(wide: torch.Tensor, narrow: torch.Tensor, key: Key, place: int) -> None:
    """See `moments.round_to_bf16`."""
    count = wide.numel()
    grid = (triton.cdiv(count, _BLOCK),)
    low, high = (word - (word >> 31 << 32) for word in key)
    _kernel[grid](wide, narrow.view(torch.int16), count, place, low, high, BLOCK=_BLOCK)


@triton.jit
def _mix(word):  # type: ignore[no-untyped-def]
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word = (word ^ (word >> 15)) * 0x846CA68B
    return word ^ (word >> 16)


@triton.jit(do_not_specialize=["count", "place", "low", "high"])
def _kernel(wide, narrow, count, place, low, high, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = index < count
    bits = tl.load(wide + index, mask=is_inside, other=0.0).to(tl.uint32, bitcast=True)
    element = index + place
    pair = element >> 1
    word = _mix(pair.to(tl.uint32) ^ low.to(tl.uint32))
    word = _mix(word ^ (high.to(tl.uint32) + (pair >> 32).to(tl.uint32)))
    noise = (word >> ((element & 1) * 16).to(tl.uint32)) & 0xFFFF
    size = bits & 0x7FFFFFFF
    noise = tl.where(size >= 0x7F7F0000, tl.where(size < 0x7F800000, 0x8000, 0), noise)
    quiet = tl.where(size > 0x7F800000, 0x40, 0)
    result = ((bits + noise.to(tl.uint32)) >> 16) | quiet.to(tl.uint32)
    tl.store(narrow + index, result.to(tl.uint16).to(tl.int16, bitcast=True), mask=is_inside)
