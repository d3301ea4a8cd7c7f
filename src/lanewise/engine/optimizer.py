"""The user's optimizer, working on slices.

The optimizer object stays the user's own, so schedulers that hold on to it keep working; only the tensors
in its groups are replaced, in place, by the slices of parameters that this rank updates. A slice is what
one owner has of one parameter, so an unused parameter is skipped and counts its own steps, as in PyTorch,
and padding never meets the optimizer.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from lanewise.engine import hashing
from lanewise.engine.moments import Moments
from lanewise.engine.unit import Flat
from lanewise.engine.verdict import Verdict
from lanewise.errors import OptimizerError, StepError
from lanewise.lanes.layout import Part

_WIDE_BLOCK = 1 << 16
"""Elements to widen at a time."""


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


class SlicedOptimizer:
    """The user's optimizer after its parameters have been replaced by slices."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, slices: Sequence[Slice], is_fp32: bool | None = None
    ) -> None:
        """`is_fp32` says whether all ranks' slices are, where this rank has only some of them."""
        self.optimizer = optimizer
        self.slices = tuple(slices)
        here = all(piece.tensor.dtype == torch.float32 for piece in slices)
        self._is_fp32 = here if is_fp32 is None else is_fp32
        made_by_constructor = dict(optimizer.state)
        optimizer.state.clear()
        for number, group in enumerate(optimizer.param_groups):
            group["params"][:] = [s.tensor for s in slices if s.group == number]
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        for piece in slices:
            whole = made_by_constructor.get(piece.flat.parameters[piece.part.field], {})
            for key, value in whole.items():
                optimizer.state[piece.tensor][key] = _cut(optimizer, key, value, piece)
        self.number = 0
        """The step that is under way."""
        self._moments: Moments | None = None
        self._is_stepping = False
        self._handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._check_step),
            optimizer.register_state_dict_pre_hook(_refuse_state_dict),
            optimizer.register_load_state_dict_pre_hook(_refuse_load),
        ]

    def keep_narrow(self, moments: Moments) -> None:
        """Keep the state in bf16 between steps."""
        moments.adopt(self.optimizer)
        self._moments = moments

    def release(self) -> None:
        """Let go of the user's optimizer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def check_groups(self) -> None:
        """The user may change any option of a group between steps, but not what is in it."""
        groups = self.optimizer.param_groups
        if len(groups) != len(self._groups):
            raise OptimizerError(
                f"the optimizer has {len(groups)} groups, and had {len(self._groups)} at prepare. Parameters cannot "
                "join a run that has begun: give the optimizer all of them before prepare, those that wait with lr=0."
            )
        for number, (group, ours) in enumerate(zip(groups, self._groups, strict=True)):
            now = group["params"]
            if len(now) != len(ours) or any(a is not b for a, b in zip(now, ours, strict=True)):
                raise OptimizerError(
                    f"the parameters of optimizer group {number} were replaced after prepare. They are this rank's "
                    "slices, and only they are updated; change the other entries of a group, such as lr, as you like."
                )

    def options(self) -> dict[str, int]:
        """A hash of the options of each group, for ranks to compare. What is no plain value is left out."""
        found = {}
        for number, group in enumerate(self.optimizer.param_groups):
            words = [f"{key}={_plain(value)}" for key, value in sorted(group.items()) if key != "params"]
            found[f"optimizer group {number}"] = hashing.short(words)
        return found

    def step(
        self, gradients: Sequence[torch.Tensor | None], divisor: float, verdict: Verdict | None = None
    ) -> None:
        """One step on sums of gradients, each divided by `divisor` first; None leaves a slice alone.

        A fused optimizer divides within its own pass over memory, to the same bits, and as the device decided where
        there is a `verdict`.
        """
        optimizer: Any = self.optimizer
        passed_on = verdict is not None or (divisor != 1.0 and self.divides_by(divisor))
        if not passed_on:
            for gradient in gradients:
                if gradient is not None:
                    divide(gradient, divisor)
        for piece, gradient in zip(self.slices, gradients, strict=True):
            piece.tensor.grad = gradient
        self._is_stepping = True
        try:
            if verdict is not None:
                optimizer.grad_scale, optimizer.found_inf = verdict.divisor, verdict.refused
            elif passed_on:
                device = self.slices[0].tensor.device if self.slices else "cpu"
                optimizer.grad_scale = torch.tensor(divisor, dtype=torch.float32, device=device)
                optimizer.found_inf = torch.zeros((), dtype=torch.float32, device=device)
            if self._moments is None:
                optimizer.step()
            else:
                self._moments.step(optimizer, self.slices, self.number)
        finally:
            self._is_stepping = False
            if passed_on:
                del optimizer.grad_scale, optimizer.found_inf
            for piece in self.slices:
                piece.tensor.grad = None

    def divides_by(self, divisor: float) -> bool:
        """Whether the optimizer's own kernel divides by just this number: it takes an fp32."""
        return self.takes_verdicts and _fits(divisor, torch.float32)

    @property
    def takes_verdicts(self) -> bool:
        """Whether the optimizer's own kernel divides, and leaves everything alone where it is told to."""
        is_fused = all(group.get("fused") for group in self.optimizer.param_groups)
        return (
            is_fused and self._is_fp32 and bool(getattr(self.optimizer, "_step_supports_amp_scaling", False))
        )

    def is_new_to(self, present: Sequence[bool]) -> bool:
        """Whether a step would make state out of a gradient, even where the step is refused: torch's SGD does."""
        if not isinstance(self.optimizer, torch.optim.SGD):
            return False
        return any(
            has_gradient
            and self.optimizer.param_groups[piece.group]["momentum"] != 0
            and self.optimizer.state.get(piece.tensor, {}).get("momentum_buffer") is None
            for piece, has_gradient in zip(self.slices, present, strict=True)
        )

    def state_of(self, piece: Slice) -> dict[str, torch.Tensor]:
        """The optimizer's state of a slice, by name; single numbers as tensors without dimensions."""
        found = {}
        for key, value in sorted(self.optimizer.state.get(piece.tensor, {}).items()):
            if isinstance(value, torch.Tensor):
                found[key] = value
            elif isinstance(value, (int, float)):
                found[key] = torch.tensor(value, dtype=torch.float64)
        return found

    @property
    def num_bytes(self) -> int:
        """Memory of the state."""
        return sum(t.nbytes for piece in self.slices for t in self.state_of(piece).values())

    def _check_step(self, optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
        if not self._is_stepping:
            raise StepError(
                f"{type(optimizer).__name__}.step was called by the script. In a run step.update() steps the "
                "optimizer, after gradients have been summed over lanes and ranks. Remove the call; zero_grad is not "
                "needed either."
            )


def _plain(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return repr(value.tolist()) if value.numel() == 1 and value.device.type == "cpu" else ""
    items = value if isinstance(value, (tuple, list)) else (value,)
    return repr(value) if all(isinstance(item, (bool, int, float, str, type(None))) for item in items) else ""


def divide(gradient: torch.Tensor, divisor: float) -> None:
    """Divide in place by a number rounded to the gradient's own precision, or in fp64 where it does not fit."""
    if divisor == 1.0:
        return
    if _fits(divisor, gradient.dtype):
        gradient.div_(torch.tensor(divisor, dtype=gradient.dtype, device=gradient.device))
        return
    for block in gradient.view(-1).split(_WIDE_BLOCK):
        block.copy_(block.double().div_(divisor))


def _fits(number: float, dtype: torch.dtype) -> bool:
    """Whether a number keeps its value in a type, up to rounding. Infinity and NaN do."""
    limits = torch.finfo(dtype)
    return not math.isfinite(number) or limits.tiny <= abs(number) <= limits.max


def _cut(optimizer: torch.optim.Optimizer, key: str, value: Any, piece: Slice) -> Any:
    """The part of a state value that belongs to a slice."""
    parameter = piece.flat.parameters[piece.part.field]
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    if key == "step" or value.shape != parameter.shape:
        return torch.zeros((), dtype=value.dtype) if value.is_meta and key == "step" else value.clone()
    if not value.is_meta:
        return value.reshape(-1)[piece.part.start : piece.part.stop].to(piece.tensor, copy=True)
    if isinstance(optimizer, torch.optim.Adagrad):
        first = optimizer.param_groups[piece.group]["initial_accumulator_value"]
        return torch.full_like(piece.tensor, first)
    raise OptimizerError(
        f"the constructor of {type(optimizer).__name__} made state {key!r} of parameter {piece.name!r} on the meta "
        "device, where it has no values. Build the model on a real device, or use an optimizer whose state is made "
        "in its first step."
    )


def _refuse_state_dict(optimizer: torch.optim.Optimizer) -> None:
    raise OptimizerError(
        f"{type(optimizer).__name__}.state_dict after prepare would hold this rank's slices only, and no other run "
        "could load it. run.digest() compares the whole state; run.gathered() gives whole parameters."
    )


def _refuse_load(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    raise OptimizerError(
        f"{type(optimizer).__name__}.load_state_dict after prepare: the state is that of whole parameters, and the "
        "optimizer now holds this rank's slices of them."
    )
