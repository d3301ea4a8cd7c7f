"""Gradients of which few rows are not zero: those of embeddings with sparse=True.

A sparse gradient stands for the dense one that torch makes of it. What is done here only leaves out rows
that are +0.0 in every bit, and puts them back, so it never changes a sum: not that of a lane that used no
row, nor of one whose gradient is dense because the weight is also used otherwise, nor the sign of a zero.
"""

from dataclasses import dataclass

import torch

from lanewise.engine.unit import Flat
from lanewise.lanes.hosting import Span
from lanewise.lanes.layout import pieces

_DENSE_AT_ONCE = 1 << 20
"""Elements that are made dense at a time: few enough to be added while they are in a cache."""
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def tidy(gradient: torch.Tensor, flat: Flat) -> torch.Tensor:
    """A sparse gradient with each row once, in rising order; dense where it does not consist of rows.

    The values are those of `to_dense`, which adds what a row got in the order of its use, from +0.0 on.
    `coalesce` adds in the order of a sort that is not stable, and keeps a lone -0.0.
    """
    if not flat.sparse_columns or gradient.layout != torch.sparse_coo or gradient.sparse_dim() != 1:
        return gradient.to_dense()
    rows, places = gradient._indices()[0].unique(return_inverse=True)
    values = _sparse(places, gradient._values(), torch.Size((len(rows), flat.sparse_columns))).to_dense()
    return _sparse(rows, values, gradient.shape, is_coalesced=True)


def stretch(gradient: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """The elements `start` to `stop - 1` of a tidy gradient, dense."""
    band = Band((start, stop), gradient.shape[1])
    rows, values = band.cut(gradient)
    return band.spread(rows, values)


def blocks(flat: Flat) -> list[Span]:
    """What of a flat is added at once: all, or as much as is made dense at a time."""
    length = flat.layout.length
    return [piece[0] for piece in pieces([(0, length)], _DENSE_AT_ONCE if flat.sparse_columns else length)]


@dataclass(frozen=True)
class Message:
    """The rows of a stretch, and the tensors that are sent: their numbers, seen as values, and their values."""

    count: int
    tensors: list[torch.Tensor]


@dataclass(frozen=True)
class Band:
    """The rows that a stretch of a parameter touches. The first and the last may be cut, or lie in padding."""

    span: Span
    columns: int

    @property
    def first(self) -> int:
        """The first of the rows; those of a message are counted from here."""
        return self.span[0] // self.columns

    @property
    def stop(self) -> int:
        """One past the last row."""
        return -(-self.span[1] // self.columns)

    def cut(self, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of a tidy gradient that lie here, and their values."""
        rows = gradient._indices()[0]
        low, high = torch.searchsorted(rows, rows.new_tensor([self.first, self.stop])).tolist()
        return rows[low:high] - self.first, gradient._values()[low:high]

    def spread(self, rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The stretch with these rows, and +0.0 elsewhere."""
        whole = values.new_zeros((self.stop - self.first) * self.columns)
        whole.view(-1, self.columns).index_copy_(0, rows, values)
        start = self.span[0] - self.first * self.columns
        return whole[start : start + self.span[1] - self.span[0]]

    def pack(self, gradient: torch.Tensor, dtype: torch.dtype) -> Message | None:
        """The rows of a gradient that are not zero, as a message of `dtype`; None where that is not smaller.

        The gradient is tidy, or dense and shaped as rows. Cut rows are sent whole, with whatever lies beyond the
        stretch: `unpack` leaves that out.
        """
        if gradient.layout != torch.strided:
            rows, values = self.cut(gradient)
        else:
            values = gradient[self.first : self.stop]
            rows = _not_zero(values)
        if self.length(len(rows), dtype) >= self.span[1] - self.span[0]:
            return None
        if len(values) > len(rows):
            values = values[rows]
        numbers = rows.to(_number_type(dtype)).view(dtype)
        return Message(len(rows), [numbers, values.to(dtype).reshape(-1)])

    def unpack(self, tensor: torch.Tensor, count: int) -> torch.Tensor:
        """The stretch that was packed into a message of so many rows."""
        values = self.segments(count, tensor.dtype)[1]
        numbers = tensor[: values[0]].clone().view(_number_type(tensor.dtype))
        return self.spread(numbers.long(), tensor[slice(*values)].view(count, self.columns))

    def length(self, count: int, dtype: torch.dtype) -> int:
        """The elements of a message of so many rows."""
        return self.segments(count, dtype)[1][1]

    def segments(self, count: int, dtype: torch.dtype) -> tuple[Span, Span]:
        """Where the numbers of so many rows and their values lie in a message."""
        numbers = count * _number_type(dtype).itemsize // dtype.itemsize
        return (0, numbers), (numbers, numbers + count * self.columns)


def _sparse(
    rows: torch.Tensor, values: torch.Tensor, shape: torch.Size, is_coalesced: bool = False
) -> torch.Tensor:
    with torch.sparse.check_sparse_tensor_invariants(False):  # the keyword of that kind warns in torch 2.11
        return torch.sparse_coo_tensor(rows[None], values, shape, is_coalesced=is_coalesced)


def _number_type(dtype: torch.dtype) -> torch.dtype:
    """What a row's number is sent as: the rows of a piece are few enough for 32 bits."""
    return torch.int64 if dtype.itemsize == 8 else torch.int32


def _not_zero(block: torch.Tensor) -> torch.Tensor:
    """The rows with a bit set; a row of -0.0 is one of them."""
    bits = block.view(_BITS[block.dtype.itemsize])
    return ((bits.amax(dim=1) != 0) | (bits.amin(dim=1) != 0)).nonzero()[:, 0]
