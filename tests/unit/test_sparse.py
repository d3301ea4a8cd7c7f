"""Rows left out and put back: the bits of the dense gradient, whatever was left out, and never more of them."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from lanewise.engine import sparse
from lanewise.engine.build import build_units
from lanewise.engine.find import Found
from lanewise.engine.sum import Leaf
from lanewise.engine.unit import Flat

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SIZES = [(5, 3, 40), (300, 17, 500), (7, 1, 1), (50, 200, 3), (11, 64, 0)]
"""Rows, columns, and how many rows a lane uses, one often more than once."""


def same_bits(a, b):
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


def flat_of(module: nn.Module) -> Flat:
    named = list(module.named_parameters())
    (unit,) = build_units([Found("", module, tuple(named))], {id(p): 0 for _, p in named}, "model", 8)
    return unit.flats[0]


def gradient_of(rows: int, columns: int, used: int, dtype: torch.dtype) -> tuple[Flat, torch.Tensor]:
    """A flat, and its gradient as autograd makes it: some of it -0.0, some not a number."""
    generator = torch.Generator().manual_seed(used)
    module = nn.Embedding(rows, columns, sparse=True, dtype=dtype)
    upstream = (
        torch.randn(used, columns, generator=generator) * 100 * torch.rand(used, 1, generator=generator)
    )
    upstream[torch.rand(used, generator=generator) < 0.3] = -0.0
    upstream[40:42] = torch.tensor(float("nan"))
    module(torch.randint(0, rows, (used,), generator=generator)).backward(upstream.to(dtype))
    return flat_of(module), module.weight.grad


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_tidy_gradient_has_the_bits_of_the_dense_one(size, dtype):
    flat, gradient = gradient_of(*size, dtype)
    dense = gradient.to_dense()
    tidy = sparse.tidy(gradient, flat)
    rows = tidy.indices()[0]
    assert torch.equal(rows, rows.unique())
    assert same_bits(tidy.to_dense(), dense)
    assert same_bits(sparse.tidy(tidy, flat).to_dense(), dense)
    assert not (tidy.values().signbit() & (tidy.values() == 0)).any(), "to_dense begins at +0.0"


def test_what_does_not_consist_of_rows_is_made_dense():
    flat, gradient = gradient_of(5, 3, 40, torch.float32)
    dense = gradient.to_dense()
    assert sparse.tidy(dense, flat) is dense
    assert sparse.tidy(dense.to_sparse(2), flat).layout == torch.strided
    assert sparse.tidy(gradient, flat_of(nn.Linear(5, 3))).layout == torch.strided


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_stretch_survives_a_message(size, dtype):
    """Cut rows and padding too; from a sparse gradient and from a dense one; and into the type of the sums."""
    flat, gradient = gradient_of(*size, dtype)
    tidy, dense = sparse.tidy(gradient, flat), gradient.to_dense()
    dense[::3] = -0.0
    wire = torch.promote_types(dtype, torch.float32)
    edges = torch.randint(0, flat.layout.length + 1, (40, 2), generator=torch.Generator().manual_seed(1))
    for low, high in [*edges.sort(dim=1).values.tolist(), (0, flat.layout.length)]:
        for found in (tidy, dense):
            whole = torch.zeros(flat.layout.length, dtype=dtype)
            Leaf(flat.layout, [found], torch.device("cpu")).parts((0, flat.layout.length)).copy_to(whole)
            for sent in (dtype, wire):
                band = sparse.Band((low, high), size[1])
                message = band.pack(found, sent)
                if message is None:
                    continue
                arrived = torch.cat([torch.empty(1, dtype=sent), *message.tensors])[1:]
                assert len(arrived) == band.length(message.count, sent) < high - low
                assert same_bits(band.unpack(arrived, message.count), whole[low:high].to(sent))


def test_a_message_of_rows_is_taken_just_where_it_is_smaller():
    for dtype, number in ((torch.float32, 1), (torch.bfloat16, 2), (torch.float64, 1)):
        values = torch.ones(40, 6, dtype=dtype)
        most = 40 * 6 // (6 + number)
        for used in (0, 1, most - 1, most, most + 1, 40):
            values.zero_()[:used] = 1
            message = sparse.Band((0, 240), 6).pack(values, dtype)
            if used * (6 + number) < 240:
                assert message is not None
                assert message.count == used
            else:
                assert message is None


def test_a_row_of_negative_zeros_is_sent():
    values = torch.zeros(9, 4)
    values[[2, 7]] = -0.0
    values[5, 3] = -0.0
    message = sparse.Band((0, 36), 4).pack(values, torch.float32)
    assert message is not None
    assert message.tensors[0].view(torch.int32).tolist() == [2, 5, 7]


def test_only_flats_of_sparse_embeddings_are_cut_into_blocks():
    flat = flat_of(nn.Embedding(1 << 17, 20, sparse=True))
    blocks = sparse.blocks(flat)
    assert len(blocks) == 3
    assert (blocks[0][0], blocks[-1][1]) == (0, flat.layout.length)
    assert all(a[1] == b[0] for a, b in pairwise(blocks))
    flat = flat_of(nn.Linear(1 << 17, 20))
    assert sparse.blocks(flat) == [(0, flat.layout.length)]
