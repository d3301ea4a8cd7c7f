# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator, no-untyped-def"
"""The backward of attention, whose bits depend on its inputs alone: no atomics, and one fixed way of cutting.

Three kernels follow one another. The first makes two numbers for each query: its logarithm of sums in units of
log2, and delta, the product of the output and its gradient. In the second, a block of keys meets all queries that
see it and sums dk and dv; in the third, a block of queries meets all keys that it sees and sums dq. No two blocks
ever add to the same place. The third either computes the scores and their gradients once more, which is two products
of seven, or reads gradients that the second has kept, for as many heads at a time as there is room for.

Nothing here chooses by measuring: blocks come from a table, since a choice by time would change bits.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

SIDE = 128
"""Gradients of scores are kept in squares of this side."""
LOG2_E = 1.4426950408889634
PADDING = 128
"""The numbers of a head's queries are kept in a multiple of this, so that no block reads past them."""


@dataclass(frozen=True)
class Tiles:
    """How one pass is cut, and how it is compiled."""

    queries: int
    keys: int
    warps: int
    stages: int
    loops: int = 1
    """1: one loop, with a mask in every step; 2: the blocks on the diagonal have a loop of their own."""
    described: bool = False
    """Whether tiles are read through tensor descriptors (TMA) or through pointers."""
    bundle: int = 16
    """Heads that are worked on together. The longest blocks of a bundle start first, so that no multiprocessor is
    left with one at the end; and what a bundle reads should stay in the cache."""
    specialised: bool = False
    """Whether some warps only read and others only compute; compiles for some tiles with 4 warps, described."""
    registers: int | None = None
    """A limit on the registers of a thread, for more blocks on one multiprocessor."""


@dataclass(frozen=True)
class Passes:
    """The tiles of both passes."""

    keys: Tiles
    queries: Tiles
    most_bytes_kept: int = 0
    """Memory for the gradients of scores, kept by the first pass for the second; 0: the second makes its own."""


MOST_KEPT = 320 << 20
CHOSEN = {
    (64, True): Passes(Tiles(64, 128, 8, 3), Tiles(128, 64, 8, 3), MOST_KEPT),
    (64, False): Passes(Tiles(64, 128, 8, 3), Tiles(128, 64, 8, 3), MOST_KEPT),
    (128, True): Passes(Tiles(64, 128, 8, 2), Tiles(128, 64, 8, 3), MOST_KEPT),
    (128, False): Passes(Tiles(64, 128, 8, 2), Tiles(128, 64, 8, 3), MOST_KEPT),
}
"""For each head dimension, causal or not."""


@triton.jit
def _turn(num_blocks, BUNDLE: tl.constexpr):
    """The head and the block of this program: a bundle of heads after the other, all first blocks of it first."""
    program = tl.program_id(0)
    first_head = program // (BUNDLE * num_blocks) * BUNDLE
    width = tl.minimum(BUNDLE, tl.num_programs(0) // num_blocks - first_head)
    within = program % (BUNDLE * num_blocks)
    return first_head + within % width, within // width


@triton.jit
def _tile(
    source,
    stride,
    length,
    batch,
    head,
    start,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DESCRIBED: tl.constexpr,
    CUT: tl.constexpr,
):
    """Rows of a head from start on; zeros past the end."""
    if DESCRIBED:
        tile = source.load([batch, head, start, 0]).reshape(ROWS, DIM)
    else:
        rows = start + tl.arange(0, ROWS)
        places = source + rows[:, None] * stride + tl.arange(0, DIM)[None, :]
        if CUT:
            tile = tl.load(places, mask=rows[:, None] < length, other=0.0)
        else:
            tile = tl.load(places)
    return tile


@triton.jit
def _head(source, stride_batch, stride_head, batch, head, DESCRIBED: tl.constexpr):
    """Where a head starts; a descriptor knows by itself."""
    if DESCRIBED:
        place = source
    else:
        place = source + batch.to(tl.int64) * stride_batch + head.to(tl.int64) * stride_head
    return place


@triton.jit
def _numbers_kernel(
    out,
    dout,
    lse,
    numbers,
    out_batch,
    out_head,
    out_row,
    dout_batch,
    dout_head,
    dout_row,
    lse_batch,
    lse_head,
    num_heads,
    length,
    padded,
    TO_LOG2: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    head_of_all = tl.program_id(0).to(tl.int64)
    batch = head_of_all // num_heads
    head = head_of_all % num_heads
    start = tl.program_id(1) * ROWS
    rows = start + tl.arange(0, ROWS)
    inside = rows < length
    out = _head(out, out_batch, out_head, batch, head, False)
    dout = _head(dout, dout_batch, dout_head, batch, head, False)
    o = _tile(out, out_row, length, batch, head, start, ROWS, DIM, False, True).to(tl.float32)
    do = _tile(dout, dout_row, length, batch, head, start, ROWS, DIM, False, True).to(tl.float32)
    # A query past the end has infinity, which makes every probability of it zero without another mask.
    log2_sum = tl.load(lse + batch * lse_batch + head * lse_head + rows, mask=inside, other=float("inf"))
    place = numbers + head_of_all * 2 * padded + rows
    tl.store(place, log2_sum * TO_LOG2)
    tl.store(place + padded, tl.sum(o * do, axis=1))


@triton.jit
def _kept_tile(head, key_block, query_block, length_q, length_k, CAUSAL: tl.constexpr, SIDE: tl.constexpr):
    """Where a tile of ds is kept, all tiles of a head and of a block of keys in a row; causal ones in a triangle."""
    num_query_blocks = tl.cdiv(length_q, SIDE)
    num_key_blocks = tl.cdiv(length_k, SIDE)
    if CAUSAL:
        num_tiles = num_query_blocks * (num_query_blocks + 1) // 2
        tile = key_block * num_query_blocks - key_block * (key_block + 1) // 2 + query_block
    else:
        num_tiles = num_query_blocks * num_key_blocks
        tile = key_block * num_query_blocks + query_block
    return (head.to(tl.int64) * num_tiles + tile) * (SIDE * SIDE)


@triton.jit
def _meet_queries(
    dk,
    dv,
    k,
    v,
    q_head,
    do_head,
    numbers,
    scale_log2,
    q_row,
    do_row,
    length_q,
    padded,
    batch,
    head,
    first,
    last,
    first_key,
    length_k,
    kept,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    MASKED: tl.constexpr,
    DESCRIBED: tl.constexpr,
    CUT: tl.constexpr,
    SPECIALISED: tl.constexpr,
    KEEP: tl.constexpr,
    SIDE: tl.constexpr,
):
    """Add to dk and dv of a block of keys what queries from first to last give."""
    keys = first_key + tl.arange(0, KEYS)
    for start in tl.range(first, last, QUERIES, warp_specialize=SPECIALISED):
        start = tl.multiple_of(start, QUERIES)
        rows = start + tl.arange(0, QUERIES)
        q = _tile(q_head, q_row, length_q, batch, head, start, QUERIES, DIM, DESCRIBED, CUT)
        log2_sum = tl.load(numbers + rows)
        # Scores stand transposed, so that p and ds are left operands as they come out of the registers.
        s = tl.dot(k, tl.trans(q))
        do = _tile(do_head, do_row, length_q, batch, head, start, QUERIES, DIM, DESCRIBED, CUT)
        dp = tl.dot(v, tl.trans(do))
        delta = tl.load(numbers + padded + rows)
        p = tl.math.exp2(s * scale_log2 - log2_sum[None, :])
        if MASKED:
            p = tl.where(rows[None, :] >= keys[:, None], p, 0.0)
        elif CUT and KEEP:
            p = tl.where(keys[:, None] < length_k, p, 0.0)
        dv = tl.dot(p.to(do.dtype), do, dv)
        ds = (p * (dp - delta[None, :])).to(q.dtype)
        dk = tl.dot(ds, q, dk)
        if KEEP:
            # Written past the caches as far as may be: they hold what other blocks still read.
            column = tl.multiple_of(start % SIDE, QUERIES)
            within = tl.arange(0, KEYS)[:, None] * SIDE + column + tl.arange(0, QUERIES)[None, :]
            tl.store(kept + (start // SIDE).to(tl.int64) * (SIDE * SIDE) + within, ds, cache_modifier=".cs")
    return dk, dv


@triton.jit(do_not_specialize=["first_head"])
def _keys_kernel(
    q,
    k,
    v,
    do,
    dk,
    dv,
    numbers,
    scale,
    scale_log2,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    do_batch,
    do_head,
    do_row,
    dk_batch,
    dk_head,
    dk_row,
    dv_batch,
    dv_head,
    dv_row,
    num_heads,
    length_q,
    length_k,
    padded,
    kept,
    first_head,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    LOOPS: tl.constexpr,
    DESCRIBED: tl.constexpr,
    BUNDLE: tl.constexpr,
    CUT: tl.constexpr,
    SPECIALISED: tl.constexpr,
    KEEP: tl.constexpr,
    SIDE: tl.constexpr,
):
    # num_heads counts heads of keys; GROUP heads of queries share each.
    head_here, block = _turn(tl.cdiv(length_k, KEYS), BUNDLE)
    first_key = block * KEYS
    head_of_all = first_head + head_here
    batch = head_of_all // num_heads
    head = head_of_all % num_heads

    k_tile = _tile(
        _head(k, k_batch, k_head, batch, head, DESCRIBED),
        k_row, length_k, batch, head, first_key, KEYS, DIM, DESCRIBED, CUT,
    )  # fmt: skip
    v_tile = _tile(
        _head(v, v_batch, v_head, batch, head, DESCRIBED),
        v_row, length_k, batch, head, first_key, KEYS, DIM, DESCRIBED, CUT,
    )  # fmt: skip
    sum_k = tl.zeros([KEYS, DIM], dtype=tl.float32)
    sum_v = tl.zeros([KEYS, DIM], dtype=tl.float32)
    if CAUSAL:
        first = first_key // QUERIES * QUERIES
    else:
        first = 0
    for member in range(GROUP):
        query_head = head * GROUP + member
        its_q = _head(q, q_batch, q_head, batch, query_head, DESCRIBED)
        its_do = _head(do, do_batch, do_head, batch, query_head, DESCRIBED)
        its_numbers = numbers + (head_of_all * GROUP + member).to(tl.int64) * 2 * padded
        if KEEP:
            its_kept = kept + _kept_tile(
                head_here * GROUP + member, first_key // SIDE, 0, length_q, length_k, CAUSAL, SIDE
            )
        else:
            its_kept = kept
        if CAUSAL and LOOPS == 2:
            past_diagonal = tl.minimum(tl.cdiv(first_key + KEYS, QUERIES) * QUERIES, length_q)
            sum_k, sum_v = _meet_queries(
                sum_k, sum_v, k_tile, v_tile, its_q, its_do, its_numbers, scale_log2, q_row, do_row, length_q,
                padded, batch, query_head, first, past_diagonal, first_key, length_k, its_kept,
                QUERIES, KEYS, DIM, True, DESCRIBED, CUT, SPECIALISED,
                KEEP, SIDE,
            )  # fmt: skip
            sum_k, sum_v = _meet_queries(
                sum_k, sum_v, k_tile, v_tile, its_q, its_do, its_numbers, scale_log2, q_row, do_row, length_q,
                padded, batch, query_head, past_diagonal, length_q, first_key, length_k, its_kept,
                QUERIES, KEYS, DIM, False, DESCRIBED, CUT, SPECIALISED,
                KEEP, SIDE,
            )  # fmt: skip
        else:
            sum_k, sum_v = _meet_queries(
                sum_k, sum_v, k_tile, v_tile, its_q, its_do, its_numbers, scale_log2, q_row, do_row, length_q,
                padded, batch, query_head, first, length_q, first_key, length_k, its_kept,
                QUERIES, KEYS, DIM, CAUSAL, DESCRIBED, CUT, SPECIALISED,
                KEEP, SIDE,
            )  # fmt: skip

    rows = first_key + tl.arange(0, KEYS)
    inside = rows[:, None] < length_k
    columns = tl.arange(0, DIM)[None, :]
    dk = _head(dk, dk_batch, dk_head, batch, head, False) + rows[:, None] * dk_row + columns
    dv = _head(dv, dv_batch, dv_head, batch, head, False) + rows[:, None] * dv_row + columns
    tl.store(dv, sum_v.to(dv.dtype.element_ty), mask=inside)
    tl.store(dk, (sum_k * scale).to(dk.dtype.element_ty), mask=inside)


@triton.jit
def _meet_keys(
    dq,
    q,
    do,
    log2_sum,
    delta,
    k_head,
    v_head,
    scale_log2,
    k_row,
    v_row,
    length_k,
    batch,
    head,
    first,
    last,
    first_query,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    MASKED: tl.constexpr,
    DESCRIBED: tl.constexpr,
    CUT: tl.constexpr,
    SPECIALISED: tl.constexpr,
):
    """Add to dq of a block of queries what keys from first to last give."""
    queries = first_query + tl.arange(0, QUERIES)
    for start in tl.range(first, last, KEYS, warp_specialize=SPECIALISED):
        start = tl.multiple_of(start, KEYS)
        columns = start + tl.arange(0, KEYS)
        k = _tile(k_head, k_row, length_k, batch, head, start, KEYS, DIM, DESCRIBED, CUT)
        s = tl.dot(q, tl.trans(k))
        v = _tile(v_head, v_row, length_k, batch, head, start, KEYS, DIM, DESCRIBED, CUT)
        dp = tl.dot(do, tl.trans(v))
        p = tl.math.exp2(s * scale_log2 - log2_sum[:, None])
        if MASKED:
            p = tl.where(queries[:, None] >= columns[None, :], p, 0.0)
        elif CUT:
            p = tl.where(columns[None, :] < length_k, p, 0.0)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    return dq


@triton.jit
def _queries_kernel(
    q,
    k,
    v,
    do,
    dq,
    numbers,
    scale,
    scale_log2,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    do_batch,
    do_head,
    do_row,
    dq_batch,
    dq_head,
    dq_row,
    num_heads,
    length_q,
    length_k,
    padded,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    LOOPS: tl.constexpr,
    DESCRIBED: tl.constexpr,
    BUNDLE: tl.constexpr,
    CUT: tl.constexpr,
    SPECIALISED: tl.constexpr,
):
    # The last queries of a causal head see the most keys: they start first.
    num_blocks = tl.cdiv(length_q, QUERIES)
    head_of_all, block = _turn(num_blocks, BUNDLE)
    first_query = (num_blocks - 1 - block) * QUERIES
    batch = head_of_all // num_heads
    head = head_of_all % num_heads
    key_head = head // GROUP

    q_tile = _tile(
        _head(q, q_batch, q_head, batch, head, DESCRIBED),
        q_row, length_q, batch, head, first_query, QUERIES, DIM, DESCRIBED, CUT,
    )  # fmt: skip
    do_tile = _tile(
        _head(do, do_batch, do_head, batch, head, DESCRIBED),
        do_row, length_q, batch, head, first_query, QUERIES, DIM, DESCRIBED, CUT,
    )  # fmt: skip
    rows = first_query + tl.arange(0, QUERIES)
    its_numbers = numbers + head_of_all.to(tl.int64) * 2 * padded + rows
    log2_sum = tl.load(its_numbers)
    delta = tl.load(its_numbers + padded)
    its_k = _head(k, k_batch, k_head, batch, key_head, DESCRIBED)
    its_v = _head(v, v_batch, v_head, batch, key_head, DESCRIBED)
    sum_q = tl.zeros([QUERIES, DIM], dtype=tl.float32)
    if CAUSAL:
        last = tl.minimum(first_query + QUERIES, length_k)
    else:
        last = length_k
    if CAUSAL and LOOPS == 2:
        diagonal = first_query // KEYS * KEYS
        sum_q = _meet_keys(
            sum_q, q_tile, do_tile, log2_sum, delta, its_k, its_v, scale_log2, k_row, v_row, length_k,
            batch, key_head, 0, diagonal, first_query, QUERIES, KEYS, DIM, False, DESCRIBED, CUT, SPECIALISED,
        )  # fmt: skip
        sum_q = _meet_keys(
            sum_q, q_tile, do_tile, log2_sum, delta, its_k, its_v, scale_log2, k_row, v_row, length_k,
            batch, key_head, diagonal, last, first_query, QUERIES, KEYS, DIM, True, DESCRIBED, CUT, SPECIALISED,
        )  # fmt: skip
    else:
        sum_q = _meet_keys(
            sum_q, q_tile, do_tile, log2_sum, delta, its_k, its_v, scale_log2, k_row, v_row, length_k,
            batch, key_head, 0, last, first_query, QUERIES, KEYS, DIM, CAUSAL, DESCRIBED, CUT, SPECIALISED,
        )  # fmt: skip

    columns = tl.arange(0, DIM)[None, :]
    dq = _head(dq, dq_batch, dq_head, batch, head, False) + rows[:, None] * dq_row + columns
    tl.store(dq, (sum_q * scale).to(dq.dtype.element_ty), mask=rows[:, None] < length_q)


@triton.jit(do_not_specialize=["first_head"])
def _kept_kernel(
    kept,
    k,
    dq,
    scale,
    k_batch,
    k_head,
    k_row,
    dq_batch,
    dq_head,
    dq_row,
    num_heads,
    length_q,
    length_k,
    first_head,
    GROUP: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    BUNDLE: tl.constexpr,
    CUT: tl.constexpr,
    SIDE: tl.constexpr,
):
    """dq from what the pass of keys has kept of ds: one product only."""
    num_blocks = tl.cdiv(length_q, SIDE)
    head_here, block = _turn(num_blocks, BUNDLE)
    query_block = num_blocks - 1 - block
    head_of_all = first_head + head_here
    batch = head_of_all // num_heads
    head = head_of_all % num_heads
    its_k = _head(k, k_batch, k_head, batch, head // GROUP, False)
    sum_q = tl.zeros([SIDE, DIM], dtype=tl.float32)
    if CAUSAL:
        last = tl.minimum((query_block + 1) * SIDE, length_k)
    else:
        last = length_k
    within = tl.arange(0, KEYS)[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
    for start in range(0, last, KEYS):
        start = tl.multiple_of(start, KEYS)
        place = _kept_tile(head_here, start // SIDE, query_block, length_q, length_k, CAUSAL, SIDE)
        ds = tl.load(kept + place + start % SIDE * SIDE + within)
        k_tile = _tile(its_k, k_row, length_k, batch, head, start, KEYS, DIM, False, CUT)
        sum_q = tl.dot(tl.trans(ds), k_tile, sum_q)
    rows = query_block * SIDE + tl.arange(0, SIDE)
    columns = tl.arange(0, DIM)[None, :]
    dq = _head(dq, dq_batch, dq_head, batch, head, False) + rows[:, None] * dq_row + columns
    tl.store(dq, (sum_q * scale).to(dq.dtype.element_ty), mask=rows[:, None] < length_q)


def _strides(*tensors: Tensor) -> list[int]:
    """Of batch, head and row of each."""
    return [stride for tensor in tensors for stride in tensor.stride()[:3]]


def _sources(tiles: Tiles, sizes: tuple[int, ...], *tensors: Tensor) -> list[Any]:
    """What the kernel reads from: the tensors, or descriptors of tiles of them."""
    if not tiles.described:
        return list(tensors)
    return [
        TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, 1, rows, tensor.shape[3]])
        for tensor, rows in zip(tensors, sizes, strict=True)
    ]


def _options(tiles: Tiles, group: int, dim: int, causal: bool, cut: bool) -> dict[str, Any]:
    options: dict[str, Any] = {
        "GROUP": group,
        "QUERIES": tiles.queries,
        "KEYS": tiles.keys,
        "DIM": dim,
        "CAUSAL": causal,
        "LOOPS": tiles.loops,
        "DESCRIBED": tiles.described,
        "BUNDLE": tiles.bundle,
        "CUT": cut,
        "SPECIALISED": tiles.specialised,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }
    if tiles.registers is not None:
        options["maxnreg"] = tiles.registers
    return options


@dataclass(frozen=True)
class Problem:
    """One attention whose backward is wanted; tensors are [batch, head, row, dimension], the last one dense."""

    grad_out: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    logsumexp: Tensor
    causal: bool
    scale: float

    def numbers(self) -> Tensor:
        """Logarithm of sums and delta of each query, in rows of a multiple of PADDING."""
        batch, num_heads, length, dim = self.query.shape
        padded = -(-length // PADDING) * PADDING
        numbers = torch.empty((batch, num_heads, 2, padded), dtype=torch.float32, device=self.query.device)
        rows = 64
        _numbers_kernel[(batch * num_heads, padded // rows)](
            self.out,
            self.grad_out,
            self.logsumexp,
            numbers,
            *_strides(self.out, self.grad_out),
            *self.logsumexp.stride()[:2],
            num_heads,
            length,
            padded,
            TO_LOG2=LOG2_E,
            ROWS=rows,
            DIM=dim,
            num_warps=4,
        )
        return numbers

    def of_keys(
        self,
        numbers: Tensor,
        tiles: Tiles,
        into: tuple[Tensor, Tensor] | None = None,
        kept: Tensor | None = None,
        heads: range | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The gradients of keys and values; of some heads only, and with ds kept, where that is asked for."""
        batch, num_heads, length_k, dim = self.key.shape
        length_q = self.query.shape[2]
        grad_key, grad_value = into or (torch.empty_like(self.key), torch.empty_like(self.value))
        heads = heads or range(batch * num_heads)
        cut = length_q % tiles.queries != 0 or length_k % tiles.keys != 0
        # A square of what is kept is written by one block.
        assert kept is None or (tiles.keys == SIDE and SIDE % tiles.queries == 0)
        read = (self.query, self.key, self.value, self.grad_out)
        sizes = (tiles.queries, tiles.keys, tiles.keys, tiles.queries)
        _keys_kernel[(len(heads) * triton.cdiv(length_k, tiles.keys),)](
            *_sources(tiles, sizes, *read),
            grad_key,
            grad_value,
            numbers,
            self.scale,
            self.scale * LOG2_E,
            *_strides(*read, grad_key, grad_value),
            num_heads,
            length_q,
            length_k,
            numbers.shape[3],
            numbers if kept is None else kept,
            heads.start,
            KEEP=kept is not None,
            SIDE=SIDE,
            **_options(tiles, self.query.shape[1] // num_heads, dim, self.causal, cut),
        )
        return grad_key, grad_value

    def of_queries(self, numbers: Tensor, tiles: Tiles) -> Tensor:
        """The gradient of queries."""
        batch, num_heads, length_q, dim = self.query.shape
        length_k = self.key.shape[2]
        grad_query = torch.empty_like(self.query)
        cut = length_q % tiles.queries != 0 or length_k % tiles.keys != 0
        read = (self.query, self.key, self.value, self.grad_out)
        sizes = (tiles.queries, tiles.keys, tiles.keys, tiles.queries)
        _queries_kernel[(batch * num_heads * triton.cdiv(length_q, tiles.queries),)](
            *_sources(tiles, sizes, *read),
            grad_query,
            numbers,
            self.scale,
            self.scale * LOG2_E,
            *_strides(*read, grad_query),
            num_heads,
            length_q,
            length_k,
            numbers.shape[3],
            **_options(tiles, num_heads // self.key.shape[1], dim, self.causal, cut),
        )
        return grad_query

    def room_for_kept(self, most_bytes: int) -> tuple[Tensor, int]:
        """Memory for ds of as many heads of keys as fit, and their number, which is at least one."""
        batch, num_heads, length_k, _ = self.key.shape
        rows, columns = triton.cdiv(self.query.shape[2], SIDE), triton.cdiv(length_k, SIDE)
        num_tiles = rows * (rows + 1) // 2 if self.causal else rows * columns
        of_head = num_tiles * SIDE * SIDE * (self.query.shape[1] // num_heads)
        # Equal parts: the last one should not be a small one, which leaves multiprocessors idle.
        parts = triton.cdiv(batch * num_heads * of_head * self.query.element_size(), most_bytes)
        heads = max(1, triton.cdiv(batch * num_heads, parts))
        kept = torch.empty(heads * of_head, dtype=self.query.dtype, device=self.query.device)
        return kept, heads

    def of_kept(self, kept: Tensor, tiles: Tiles, grad_query: Tensor, heads: range) -> Tensor:
        """The gradient of queries from ds of these heads of keys."""
        num_heads, length_k, dim = self.key.shape[1:]
        length_q = self.query.shape[2]
        group = self.query.shape[1] // num_heads
        _kept_kernel[(len(heads) * group * triton.cdiv(length_q, SIDE),)](
            kept,
            self.key,
            grad_query,
            self.scale,
            *_strides(self.key, grad_query),
            self.query.shape[1],
            length_q,
            length_k,
            heads.start * group,
            GROUP=group,
            KEYS=tiles.keys,
            DIM=dim,
            CAUSAL=self.causal,
            BUNDLE=tiles.bundle,
            CUT=length_k % tiles.keys != 0,
            SIDE=SIDE,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
        return grad_query

    def backward(self, passes: Passes | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of query, key and value, with the tiles chosen for this kind of problem or those given."""
        passes = passes or CHOSEN[self.query.shape[3], self.causal]
        numbers = self.numbers()
        if passes.most_bytes_kept == 0:
            grad_key, grad_value = self.of_keys(numbers, passes.keys)
            return self.of_queries(numbers, passes.queries), grad_key, grad_value
        grad_query = torch.empty_like(self.query)
        grad_key, grad_value = torch.empty_like(self.key), torch.empty_like(self.value)
        kept, num_at_once = self.room_for_kept(passes.most_bytes_kept)
        num_heads = self.key.shape[0] * self.key.shape[1]
        for first in range(0, num_heads, num_at_once):
            heads = range(first, min(first + num_at_once, num_heads))
            self.of_keys(numbers, passes.keys, (grad_key, grad_value), kept, heads)
            self.of_kept(kept, passes.queries, grad_query, heads)
        return grad_query, grad_key, grad_value
