"""A step in plain PyTorch, as short as it can be said: teacher and oracle of the engine.

An ordinary model, whole parameters, an optimizer that knows nothing of ranks. The engine must reach the
same bits with any number of ranks and any strategy. It uses nothing of the engine, only `lanes`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import nn

from lanewise.lanes.layout import lay_out
from lanewise.lanes.seeds import derive
from lanewise.lanes.tree import Node, aligned_left, root

Losses = Callable[[int], Iterable[tuple[torch.Tensor, float, float]]]
"""Of the number of a lane: the loss of each of its micro-batches, the weight that it counts with, and the
factor of its gradient (0 for a lane that is computed for its shape alone)."""

_SQUARES_BLOCK = 1 << 16
_T = TypeVar("_T")


@dataclass
class Reference:
    """A model, an optimizer of its parameters (or of the masters), and what decides the bits of a step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    lanes: int
    seed: int = 0
    flats: Sequence[Sequence[str]] = ()
    """The names that are laid out together, in the order of their exchange; needed to clip by norm."""
    masters: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """What the optimizer updates in the place of parameters that are stored in 16 bits."""
    scale: float = 1.0
    """The factor of an fp16 loss."""
    grad_norm: float | None = None

    def step(
        self, step: int, losses: Losses, clip: float | None = None, clip_value: float | None = None
    ) -> float:
        """One step; returns the mean loss. `grad_norm` is then the norm before clipping."""
        leaves, sums, weights = [], [], []
        for lane in range(self.lanes):
            torch.manual_seed(derive(self.seed, "lane", step, lane))
            loss_sum = weight_sum = 0.0
            for loss, weight, factor in losses(lane):
                loss.backward(torch.full_like(loss, factor * self.scale))
                loss_sum += float(loss.detach()) * factor
                weight_sum += weight
            leaves.append(self._take_gradients(is_padding=weight_sum == 0.0))
            sums.append(loss_sum)
            weights.append(weight_sum)
        total = _tree(sums, lambda a, b: a + b)
        weight = _tree(weights, lambda a, b: a + b)
        gradients = self._sum(leaves)
        divisor = weight * self.scale
        if clip is not None:
            self.grad_norm = self._norm(gradients) / divisor
            divisor /= min(clip / (self.grad_norm + 1e-6), 1.0)
        for name, gradient in gradients.items():
            gradient /= torch.tensor(divisor, dtype=gradient.dtype)
            if clip_value is not None:
                gradient.clamp_(-clip_value, clip_value)
            self.updated(name).grad = gradient
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for name, master in self.masters.items():
                self.model.get_parameter(name).copy_(master)
        return total / weight

    def updated(self, name: str) -> torch.Tensor:
        """What the optimizer updates of a parameter: the parameter itself, or its master."""
        return self.masters.get(name, self.model.get_parameter(name))

    def _take_gradients(self, is_padding: bool) -> dict[str, torch.Tensor | None]:
        """A lane's leaf of every parameter."""
        leaves = {}
        for name, parameter in self.model.named_parameters():
            gradient, parameter.grad = parameter.grad, None
            leaves[name] = None if is_padding or gradient is None else gradient.to_dense()
        return leaves

    def _sum(self, leaves: Sequence[Mapping[str, torch.Tensor | None]]) -> dict[str, torch.Tensor]:
        """Every parameter's sum over the lanes, in fp32 or wider; none where no lane used it."""
        sums = {}
        for name, parameter in self.model.named_parameters():
            wide = torch.promote_types(parameter.dtype, torch.float32)
            found = [lane[name] for lane in leaves]
            if any(gradient is not None for gradient in found):
                zero = torch.zeros_like(parameter, dtype=wide)
                addends = [zero if gradient is None else gradient.to(wide) for gradient in found]
                sums[name] = _tree(addends, torch.add).clone()
        return sums

    def _norm(self, gradients: Mapping[str, torch.Tensor]) -> float:
        """The square root of the tree's sum, over slots, of each slot's squares in fp64."""
        squares = [torch.zeros((), dtype=torch.float64) for _ in range(self.lanes)]
        for names in self.flats:
            layout = lay_out([(name, self.model.get_parameter(name).numel()) for name in names], self.lanes)
            flat = torch.zeros(layout.length, dtype=torch.float64)
            for place in layout.fields:
                if place.name in gradients:
                    flat[place.start : place.stop] = gradients[place.name].flatten()
            for slot, values in enumerate(flat.split(layout.slot)):
                of_slot = torch.zeros((), dtype=torch.float64)
                for block in values.split(_SQUARES_BLOCK):
                    of_slot += torch.dot(block, block)
                squares[slot] += of_slot
        return math.sqrt(_tree([float(value) for value in squares], lambda a, b: a + b))


def _tree(leaves: Sequence[_T], add: Callable[[_T, _T], _T]) -> _T:
    """The canonical sum, straight from its definition in `lanes.tree`."""

    def of(node: Node) -> _T:
        if node[1] - node[0] == 1:
            return leaves[node[0]]
        middle = aligned_left(node)
        return add(of((node[0], middle)), of((middle, node[1])))

    return of(root(len(leaves)))
