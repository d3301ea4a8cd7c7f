"""Units and flats: which parameters are gathered and exchanged together, and where their values lie.

A parameter is a view into its flat's storage, put there with `p.data = view`, which keeps the identity of
the parameter, its ties and its place in a graph. A flat holds one dtype, and either trainable parameters
or frozen ones, so that frozen ones cost no gradient and no optimizer state.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from lanewise.lanes.layout import FlatLayout


@dataclass(eq=False)
class Flat:
    """Parameters of one unit and one dtype, one after the other. See `lanes.layout`."""

    number: int
    unit_name: str
    layout: FlatLayout
    dtype: torch.dtype
    trainable: bool
    parameters: tuple[nn.Parameter, ...]
    groups: tuple[int, ...]
    """The optimizer group of each parameter, -1 for a frozen one."""
    sparse_columns: int = 0
    """Elements in a row, where the one parameter of this flat gets its gradient as rows; else 0."""
    storage: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """All values, where this rank has them."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters in the model."""
        return tuple(f.name for f in self.layout.fields)

    @property
    def sum_dtype(self) -> torch.dtype:
        """What gradients are summed in: fp32, or fp64 for fp64 parameters."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def has_master(self) -> bool:
        """Whether the optimizer works on a wider copy of the stored values."""
        return self.trainable and self.dtype in (torch.bfloat16, torch.float16)

    @property
    def update_dtype(self) -> torch.dtype:
        """What the optimizer works in."""
        return torch.float32 if self.has_master else self.dtype

    @property
    def num_bytes(self) -> int:
        """The size of all values with padding."""
        return self.layout.length * self.dtype.itemsize

    def view(self, index: int) -> torch.Tensor:
        """The values of one parameter, in its shape."""
        place = self.layout.fields[index]
        return self.storage[place.start : place.stop].view(self.parameters[index].shape)

    def bind(self) -> None:
        """Make every parameter a view of the storage."""
        for index, parameter in enumerate(self.parameters):
            parameter.data = self.view(index)


@dataclass(eq=False)
class Unit:
    """What is gathered and exchanged together: a module, or the root with what is left over."""

    number: int
    name: str
    module: nn.Module
    flats: tuple[Flat, ...]

    @property
    def trainable(self) -> tuple[Flat, ...]:
        """The flats that have gradients."""
        return tuple(flat for flat in self.flats if flat.trainable)


def all_flats(units: Sequence[Unit]) -> tuple[Flat, ...]:
    """The flats of all units in the order of their numbers."""
    return tuple(flat for unit in units for flat in unit.flats)
