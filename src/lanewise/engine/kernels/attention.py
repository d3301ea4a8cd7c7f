"""The backward of attention, whose bits depend on its inputs alone: no atomics, and one fixed way of cutting.

Two kernels follow one another. In the first, a block of queries meets all keys that it sees and sums dq; it also
leaves two numbers for each query, which both kernels need: its logarithm of sums in units of log2, and delta, the
product of the output and its gradient. In the second, a block of keys meets all queries that see it and sums dk and
dv. Scores are thus computed twice, which is two products of seven, and no two blocks ever add to the same place.

Nothing here chooses by measuring: blocks come from a table, since a choice by time would change bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lanewise.engine.kernels.launch import Launch

LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Tiles:
    """How one pass is cut, and how it is compiled."""

    queries: int
    keys: int
    warps: int
    stages: int
    described: bool = False
    """Whether tiles are read through tensor descriptors (TMA), which cost time on the host, or through pointers."""
    bundle: int = 128
    """Heads that are worked on together: the longest blocks of a bundle start first, so that no multiprocessor is
    left with one at the end."""


@dataclass(frozen=True)
class Passes:
    """The tiles of both passes."""

    queries: Tiles
    keys: Tiles


CHOSEN = {
    64: Passes(queries=Tiles(64, 64, 4, 2), keys=Tiles(64, 64, 4, 3)),
    128: Passes(queries=Tiles(128, 64, 8, 3), keys=Tiles(64, 64, 4, 2, described=True)),
}
"""For each head dimension."""


@triton.jit
def _turn(num_blocks, BUNDLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The head and the block of this program: a bundle of heads after the other, all first blocks of it first."""
    program = tl.program_id(0)
    first_head = program // (BUNDLE * num_blocks) * BUNDLE
    width = tl.minimum(BUNDLE, tl.num_programs(0) // num_blocks - first_head)
    within = program % (BUNDLE * num_blocks)
    return first_head + within % width, within // width


@triton.jit
def _tile(  # type: ignore[no-untyped-def]
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
def _head(  # type: ignore[no-untyped-def]
    source, stride_batch, stride_head, batch, head, DESCRIBED: tl.constexpr
):
    """Where a head starts; a descriptor knows by itself."""
    if DESCRIBED:
        place = source
    else:
        place = source + batch.to(tl.int64) * stride_batch + head.to(tl.int64) * stride_head
    return place


@triton.jit
def _queries_kernel(  # type: ignore[no-untyped-def]
    q, k, v, do, o, lse, dq, numbers, scale, scale_log2, q_batch, q_head, q_row, k_batch, k_head, k_row,
    v_batch, v_head, v_row, do_batch, do_head, do_row, o_batch, o_head, o_row, dq_batch, dq_head,
    dq_row, num_heads, length_q, length_k,
    TO_LOG2: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    DIM: tl.constexpr, CAUSAL: tl.constexpr, DESCRIBED: tl.constexpr, BUNDLE: tl.constexpr,
    CUT: tl.constexpr,
):  # fmt: skip
    # The last queries of a causal head see the most keys: they start first.
    num_blocks = tl.cdiv(length_q, QUERIES)
    head_of_all, block = _turn(num_blocks, BUNDLE)
    first = (num_blocks - 1 - block) * QUERIES
    batch = head_of_all // num_heads
    head = head_of_all % num_heads
    key_head = head // GROUP
    queries = first + tl.arange(0, QUERIES)

    do_head_place = _head(do, do_batch, do_head, batch, head, DESCRIBED)
    do_tile = _tile(do_head_place, do_row, length_q, batch, head, first, QUERIES, DIM, DESCRIBED, CUT)
    o_tile = _tile(
        _head(o, o_batch, o_head, batch, head, False),
        o_row, length_q, batch, head, first, QUERIES, DIM, False, CUT,
    )  # fmt: skip
    delta = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), axis=1)
    of_head = head_of_all.to(tl.int64) * length_q
    # A query past the end has infinity, which makes every probability of it zero without another mask.
    log2_sum = tl.load(lse + of_head + queries, mask=queries < length_q, other=float("inf")) * TO_LOG2
    its_numbers = numbers + of_head * 2 + queries
    tl.store(its_numbers, log2_sum, mask=queries < length_q)
    tl.store(its_numbers + length_q, delta, mask=queries < length_q)

    q_place = _head(q, q_batch, q_head, batch, head, DESCRIBED)
    q_tile = _tile(q_place, q_row, length_q, batch, head, first, QUERIES, DIM, DESCRIBED, CUT)
    its_k = _head(k, k_batch, k_head, batch, key_head, DESCRIBED)
    its_v = _head(v, v_batch, v_head, batch, key_head, DESCRIBED)
    sum_q = tl.zeros([QUERIES, DIM], dtype=tl.float32)
    if CAUSAL:
        last = tl.minimum(first + QUERIES, length_k)
    else:
        last = length_k
    for start in range(0, last, KEYS):
        start = tl.multiple_of(start, KEYS)
        keys = start + tl.arange(0, KEYS)
        k_tile = _tile(its_k, k_row, length_k, batch, key_head, start, KEYS, DIM, DESCRIBED, CUT)
        s = tl.dot(q_tile, tl.trans(k_tile))
        v_tile = _tile(its_v, v_row, length_k, batch, key_head, start, KEYS, DIM, DESCRIBED, CUT)
        dp = tl.dot(do_tile, tl.trans(v_tile))
        p = tl.math.exp2(s * scale_log2 - log2_sum[:, None])
        if CAUSAL:
            p = tl.where(queries[:, None] >= keys[None, :], p, 0.0)
        elif CUT:
            p = tl.where(keys[None, :] < length_k, p, 0.0)
        ds = p * (dp - delta[:, None])
        sum_q = tl.dot(ds.to(k_tile.dtype), k_tile, sum_q)

    dq = _head(dq, dq_batch, dq_head, batch, head, False)
    places = dq + queries[:, None] * dq_row + tl.arange(0, DIM)[None, :]
    tl.store(places, (sum_q * scale).to(dq.dtype.element_ty), mask=queries[:, None] < length_q)


@triton.jit
def _keys_kernel(  # type: ignore[no-untyped-def]
    q, k, v, do, dk, dv, numbers, scale, scale_log2, q_batch, q_head, q_row, k_batch, k_head, k_row,
    v_batch, v_head, v_row, do_batch, do_head, do_row, dk_batch, dk_head, dk_row, dv_batch, dv_head,
    dv_row, num_heads, length_q, length_k,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
    CAUSAL: tl.constexpr, DESCRIBED: tl.constexpr, BUNDLE: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    # num_heads counts heads of keys; GROUP heads of queries share each. The first keys of a causal head are seen by
    # the most queries: they start first.
    head_of_all, block = _turn(tl.cdiv(length_k, KEYS), BUNDLE)
    first = block * KEYS
    batch = head_of_all // num_heads
    head = head_of_all % num_heads
    keys = first + tl.arange(0, KEYS)

    k_place = _head(k, k_batch, k_head, batch, head, DESCRIBED)
    k_tile = _tile(k_place, k_row, length_k, batch, head, first, KEYS, DIM, DESCRIBED, CUT)
    v_place = _head(v, v_batch, v_head, batch, head, DESCRIBED)
    v_tile = _tile(v_place, v_row, length_k, batch, head, first, KEYS, DIM, DESCRIBED, CUT)
    sum_k = tl.zeros([KEYS, DIM], dtype=tl.float32)
    sum_v = tl.zeros([KEYS, DIM], dtype=tl.float32)
    if CAUSAL:
        first_query = first // QUERIES * QUERIES
    else:
        first_query = 0
    for member in range(GROUP):
        query_head = head * GROUP + member
        its_q = _head(q, q_batch, q_head, batch, query_head, DESCRIBED)
        its_do = _head(do, do_batch, do_head, batch, query_head, DESCRIBED)
        its_numbers = numbers + (head_of_all * GROUP + member).to(tl.int64) * 2 * length_q
        for start in range(first_query, length_q, QUERIES):
            start = tl.multiple_of(start, QUERIES)
            queries = start + tl.arange(0, QUERIES)
            q_tile = _tile(its_q, q_row, length_q, batch, query_head, start, QUERIES, DIM, DESCRIBED, CUT)
            if CUT:
                log2_sum = tl.load(its_numbers + queries, mask=queries < length_q, other=float("inf"))
                delta = tl.load(its_numbers + length_q + queries, mask=queries < length_q, other=0.0)
            else:
                log2_sum = tl.load(its_numbers + queries)
                delta = tl.load(its_numbers + length_q + queries)
            # Scores stand transposed, so that p and ds are left operands as they come out of the registers.
            s = tl.dot(k_tile, tl.trans(q_tile))
            do_tile = _tile(its_do, do_row, length_q, batch, query_head, start, QUERIES, DIM, DESCRIBED, CUT)
            dp = tl.dot(v_tile, tl.trans(do_tile))
            p = tl.math.exp2(s * scale_log2 - log2_sum[None, :])
            if CAUSAL:
                p = tl.where(queries[None, :] >= keys[:, None], p, 0.0)
            sum_v = tl.dot(p.to(do_tile.dtype), do_tile, sum_v)
            ds = (p * (dp - delta[None, :])).to(q_tile.dtype)
            sum_k = tl.dot(ds, q_tile, sum_k)

    inside = keys[:, None] < length_k
    columns = tl.arange(0, DIM)[None, :]
    dk = _head(dk, dk_batch, dk_head, batch, head, False) + keys[:, None] * dk_row + columns
    dv = _head(dv, dv_batch, dv_head, batch, head, False) + keys[:, None] * dv_row + columns
    tl.store(dv, sum_v.to(dv.dtype.element_ty), mask=inside)
    tl.store(dk, (sum_k * scale).to(dk.dtype.element_ty), mask=inside)


def _strides(*tensors: Tensor) -> list[int]:
    """Of batch, head and row of each."""
    return [stride for tensor in tensors for stride in tensor.stride()[:3]]


class _Pass:
    """One of the two kernels, cut in one way, for attentions of one layout."""

    def __init__(
        self, kernel: Any, tiles: Tiles, num_blocks: int, numbers: Sequence[float], constants: dict[str, Any]
    ) -> None:
        self._tiles = tiles
        self._numbers = numbers
        self._constants = constants | {
            "QUERIES": tiles.queries,
            "KEYS": tiles.keys,
            "DESCRIBED": tiles.described,
            "BUNDLE": tiles.bundle,
            "num_warps": tiles.warps,
            "num_stages": tiles.stages,
        }
        self._described = kernel[(num_blocks,)] if tiles.described else None
        self._launch = Launch(kernel, (num_blocks,), self._constants)

    def __call__(self, sources: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        """Query, key, value and the gradient of the output are read in tiles; the others are not."""
        if self._described is None:
            self._launch((*sources, *others), self._numbers)
            return
        rows = (self._tiles.queries, self._tiles.keys, self._tiles.keys, self._tiles.queries)
        descriptors = [
            TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, 1, size, tensor.shape[3]])
            for tensor, size in zip(sources, rows, strict=True)
        ]
        self._described(*descriptors, *others, *self._numbers, **self._constants)


class Backward:
    """The backward of all attentions of one layout, on one device.

    Tensors are [batch, head, row, dimension], the last one dense; logsumexp is [batch, head, row], contiguous.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        grad_out: Tensor,
        out: Tensor,
        causal: bool,
        scale: float,
        passes: Passes | None = None,
    ) -> None:
        """For tensors that are like these in type, shape and strides; with the tiles chosen, or those given."""
        passes = passes or CHOSEN[query.shape[3]]
        batch, heads_q, length_q, dim = query.shape
        heads_k, length_k = key.shape[1:3]
        self._numbers_like = (
            (batch, heads_q, 2, length_q),
            (2 * heads_q * length_q, 2 * length_q, length_q, 1),
        )
        gradients = [torch.empty_like(tensor, device="meta") for tensor in (query, key, value)]
        numbers = [scale, scale * LOG2_E, *_strides(query, key, value, grad_out)]

        def constants(tiles: Tiles) -> dict[str, Any]:
            cut = length_q % tiles.queries != 0 or length_k % tiles.keys != 0
            return {"GROUP": heads_q // heads_k, "DIM": dim, "CAUSAL": causal, "CUT": cut}

        self._of_queries = _Pass(
            _queries_kernel,
            passes.queries,
            batch * heads_q * -(-length_q // passes.queries.queries),
            [*numbers, *_strides(out, gradients[0]), heads_q, length_q, length_k],
            constants(passes.queries) | {"TO_LOG2": LOG2_E},
        )
        self._of_keys = _Pass(
            _keys_kernel,
            passes.keys,
            batch * heads_k * -(-length_k // passes.keys.keys),
            [*numbers, *_strides(*gradients[1:]), heads_k, length_q, length_k],
            constants(passes.keys),
        )

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, out: Tensor, logsumexp: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of query, key and value."""
        sources = (query, key, value, grad_out)
        grad_query, numbers = self.of_queries(sources, out, logsumexp)
        return grad_query, *self.of_keys(sources, numbers)

    def of_queries(self, sources: Sequence[Tensor], out: Tensor, logsumexp: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of queries, and the two numbers of each query: [batch, head, 2, row].

        Sources are query, key, value and the gradient of the output.
        """
        grad_query = torch.empty_like(sources[0])
        numbers = logsumexp.new_empty_strided(*self._numbers_like)
        self._of_queries(sources, (out, logsumexp, grad_query, numbers))
        return grad_query, numbers

    def of_keys(self, sources: Sequence[Tensor], numbers: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of keys and values, from the same sources and the numbers that of_queries() gave."""
        grad_key, grad_value = torch.empty_like(sources[1]), torch.empty_like(sources[2])
        self._of_keys(sources, (grad_key, grad_value, numbers))
        return grad_key, grad_value
