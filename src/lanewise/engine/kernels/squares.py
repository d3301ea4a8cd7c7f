"""The sum of squares of every slot, in an order that does not depend on how many slots a rank has."""

from functools import cache

import torch
import triton
import triton.language as tl

from lanewise.engine.kernels.launch import Launch

_BLOCK = 4096


@triton.jit
def _squares(values, parts, slot, num_parts, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    number = tl.program_id(0)
    part = tl.program_id(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(values + number.to(tl.int64) * slot + at, mask=at < slot, other=0.0).to(tl.float64)
    tl.store(parts + number.to(tl.int64) * num_parts + part, tl.sum(x * x, axis=0))


@triton.jit
def _collect(parts, totals, num_parts, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    number = tl.program_id(0)
    sums = tl.zeros([BLOCK], dtype=tl.float64)
    for start in range(0, num_parts, BLOCK):
        at = start + tl.arange(0, BLOCK)
        sums += tl.load(parts + number.to(tl.int64) * num_parts + at, mask=at < num_parts, other=0.0)
    tl.store(totals + number, tl.load(totals + number) + tl.sum(sums, axis=0))


def add_squares(values: torch.Tensor, slot: int, totals: torch.Tensor) -> None:
    """Add the squares of each slot, so many elements long, to its total in fp64."""
    num_slots = totals.numel()
    if not slot:
        return
    num_parts = triton.cdiv(slot, _BLOCK)
    parts = torch.empty(num_slots * num_parts, dtype=torch.float64, device=values.device)
    squares, collect = _launches(values.device, values.dtype, num_slots, slot)
    squares((values, parts), (slot, num_parts))
    collect((parts, totals), (num_parts,))


@cache
def _launches(device: torch.device, dtype: torch.dtype, num_slots: int, slot: int) -> tuple[Launch, Launch]:
    return (
        Launch(_squares, (num_slots, triton.cdiv(slot, _BLOCK)), {"BLOCK": _BLOCK, "num_warps": 8}),
        Launch(_collect, (num_slots,), {"BLOCK": 1024, "num_warps": 4}),
    )
