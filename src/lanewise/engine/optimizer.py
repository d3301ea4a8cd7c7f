"""The user's optimizer, working on slices.

The optimizer object stays the user's own, so schedulers that hold on to it keep working; only the tensors
in its groups are replaced, in place, by the slices of parameters that this rank updates. A slice is what
one owner has of one parameter, so an unused parameter is skipped and counts its own steps, as in PyTorch,
and padding never meets the optimizer.
"""

import copy
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lanewise.engine.unit import Flat
from lanewise.errors import OptimizerError
from lanewise.lanes.layout import Part

ELEMENTWISE = (
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
)  # fmt: skip

REFUSED = {
    "Adafactor": "its second moments are sums over rows and columns of whole tensors; use AdamW",
    "LBFGS": "it searches along the gradient of all parameters at once; use SGD with momentum or AdamW",
    "Muon": "it orthogonalises whole matrices; use AdamW",
    "SparseAdam": "it wants sparse gradients on whole tensors; use Adam or Adagrad, which take the rows of "
    "sparse=True embeddings here",
}


@dataclass(frozen=True)
class Slice:
    """What this rank updates of one parameter."""

    flat: Flat
    part: Part
    """The parameter's elements, and where they begin in the owner's span."""
    owner: int
    tensor: torch.Tensor
    """What the optimizer holds: the parameter itself, or its master copy."""

    @property
    def name(self) -> str:
        """The parameter's name."""
        return self.flat.names[self.part.field]

    @property
    def group(self) -> int:
        """The optimizer group of the parameter."""
        return self.flat.groups[self.part.field]


def check(optimizer: Any) -> None:
    """Refuse what cannot be split into slices, before anything is touched."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptimizerError(
            f"prepare needs an optimizer made on the model's parameters, found {type(optimizer).__name__}. "
            "Pass for example torch.optim.AdamW(model.parameters())."
        )
    kind = type(optimizer)
    name = kind.__name__
    is_torch = kind.__module__.startswith("torch.optim")
    if is_torch and name in REFUSED:
        raise OptimizerError(f"torch.optim.{name} cannot work on slices of parameters: {REFUSED[name]}.")
    if not is_torch or name not in ELEMENTWISE:
        _probe(optimizer)
    if any(state and _num_steps(state) != 0 for state in optimizer.state.values()):
        raise OptimizerError(
            f"the {name} given to prepare has already stepped: its state belongs to whole parameters. Call "
            "prepare before the first optimizer.step()."
        )


def _num_steps(state: dict[str, Any]) -> float | None:
    """How often a parameter was stepped; None where its state does not count."""
    step = state.get("step")
    return step.item() if isinstance(step, torch.Tensor) else step


def _probe(optimizer: torch.optim.Optimizer) -> None:
    """Accept an optimizer we do not know only if two halves of a tensor step to the bits of the whole."""
    name = type(optimizer).__name__
    advice = (
        "Lanewise splits parameters between ranks, so it needs an optimizer that treats every element by "
        "itself, such as AdamW."
    )
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(16, 16, generator=generator)
    gradients = [torch.randn(16, 16, generator=generator) for _ in range(3)]
    try:
        whole = _try_steps(optimizer, [start], [[g] for g in gradients])[0]
        halves = _try_steps(optimizer, start.flatten().chunk(2), [g.flatten().chunk(2) for g in gradients])
    except Exception as error:
        raise OptimizerError(
            f"{name} is not an optimizer Lanewise knows, and a trial on slices of a tensor failed with "
            f"{type(error).__name__}: {error}. {advice}"
        ) from error
    if not torch.equal(whole.flatten(), torch.cat(list(halves))):
        raise OptimizerError(
            f"{name} gives other values when a tensor is split in two, so it cannot work on slices. {advice}"
        )


def _try_steps(
    optimizer: torch.optim.Optimizer,
    starts: Iterable[torch.Tensor],
    gradients: Iterable[Iterable[torch.Tensor]],
) -> list[torch.Tensor]:
    """Three steps of a copy of the optimizer on other tensors."""
    trial = copy.copy(optimizer)
    tensors = [torch.nn.Parameter(start.clone()) for start in starts]
    options = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    trial.param_groups = [{**copy.deepcopy(options), "params": tensors}]
    trial.state = defaultdict(dict)
    for row in gradients:
        for tensor, gradient in zip(tensors, row, strict=True):
            tensor.grad = gradient.clone()
        type(trial).step(trial)
    return [tensor.detach() for tensor in tensors]


class SlicedOptimizer:
    """The user's optimizer after its parameters have been replaced by slices."""

    def __init__(self, optimizer: torch.optim.Optimizer, slices: Sequence[Slice]) -> None:
        self.optimizer = optimizer
        self.slices = tuple(slices)
        self._takes_scale = bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and all(
            group.get("fused") for group in optimizer.param_groups
        )
        made_by_constructor = dict(optimizer.state)
        optimizer.state.clear()
        for number, group in enumerate(optimizer.param_groups):
            group["params"][:] = [s.tensor for s in slices if s.group == number]
        for piece in slices:
            whole = made_by_constructor.get(piece.flat.parameters[piece.part.field], {})
            for key, value in whole.items():
                optimizer.state[piece.tensor][key] = _cut(value, piece)

    def step(self, gradients: Sequence[torch.Tensor | None], divisor: float) -> None:
        """One step on sums of gradients, each divided by `divisor` first; None leaves a slice alone.

        A fused optimizer divides within its own pass over memory, to the same bits.
        """
        optimizer: Any = self.optimizer
        passed_on = self._takes_scale and divisor != 1.0
        if not passed_on:
            for gradient in gradients:
                if gradient is not None:
                    divide(gradient, divisor)
        for piece, gradient in zip(self.slices, gradients, strict=True):
            piece.tensor.grad = gradient
        try:
            if passed_on:
                device = self.slices[0].tensor.device if self.slices else "cpu"
                optimizer.grad_scale = torch.tensor(divisor, dtype=torch.float32, device=device)
                optimizer.found_inf = torch.zeros((), dtype=torch.float32, device=device)
            optimizer.step()
        finally:
            if passed_on:
                del optimizer.grad_scale, optimizer.found_inf
            for piece in self.slices:
                piece.tensor.grad = None

    def state_of(self, piece: Slice) -> dict[str, torch.Tensor]:
        """The optimizer's state of a slice, by name; single numbers as tensors without dimensions."""
        state = self.optimizer.state.get(piece.tensor, {})
        return {key: value for key, value in sorted(state.items()) if isinstance(value, torch.Tensor)}

    @property
    def num_bytes(self) -> int:
        """Memory of the state."""
        return sum(t.nbytes for piece in self.slices for t in self.state_of(piece).values())


def divide(gradient: torch.Tensor, divisor: float) -> None:
    """Divide in place by a number rounded to the gradient's own precision."""
    if divisor != 1.0:
        gradient.div_(torch.tensor(divisor, dtype=gradient.dtype, device=gradient.device))


def _cut(value: Any, piece: Slice) -> Any:
    """The part of a state value that belongs to a slice."""
    parameter = piece.flat.parameters[piece.part.field]
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    if value.numel() == parameter.numel() and value.shape == parameter.shape:
        return value.reshape(-1)[piece.part.start : piece.part.stop].to(piece.tensor.dtype).clone()
    return value.clone()
