"""Which numbers have which type, said out loud, and the scale of an fp16 loss.

The peers' quietest bug is a master copy that is not there. So every run prints what is stored, computed,
sent, summed and kept by the optimizer, and a parameter trained in 16 bits always has an fp32 master.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from lanewise.config import Moments, Precision
from lanewise.engine.unit import Flat

STORED: dict[Precision, torch.dtype | None] = {
    "model": None,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""What each setting stores floating-point parameters in; None keeps the model's own types."""


def stored_dtype(parameter: torch.Tensor, precision: Precision) -> torch.dtype:
    """The type a parameter is stored and computed in."""
    chosen = STORED[precision]
    return chosen if chosen is not None and parameter.is_floating_point() else parameter.dtype


def beside_statistics(module: nn.Module, precision: Precision) -> dict[int, torch.dtype]:
    """The parameters that stay in the type of the running statistics beside them, by identity.

    Torch's batch norm takes a 16-bit input with fp32 statistics, but only with fp32 parameters.
    """
    if precision not in ("bf16", "fp16"):
        return {}
    return {
        id(parameter): child.running_mean.dtype
        for child in module.modules()
        if isinstance(child, nn.modules.batchnorm._NormBase) and child.running_mean is not None
        for parameter in child.parameters(recurse=False)
    }


def short(dtype: torch.dtype) -> str:
    """A type as people say it: fp32, bf16."""
    text = str(dtype).removeprefix("torch.")
    return {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(text, text)


COLUMNS = ("parameters", "elements", "stored", "computed", "sent", "summed", "master", "moments")


def truth_table(flats: Sequence[Flat], sends_leaves: bool, moments: Moments) -> tuple[tuple[str, ...], ...]:
    """One row for each kind of parameter: how many elements, and every type they meet."""
    rows = []
    for trainable in (True, False):
        for dtype in dict.fromkeys(flat.dtype for flat in flats if flat.trainable is trainable):
            members = [f for f in flats if f.trainable is trainable and f.dtype == dtype]
            numel = sum(place.numel for f in members for place in f.layout.fields)
            stored = short(dtype)
            if trainable:
                summed = short(members[0].sum_dtype)
                wide = short(members[0].update_dtype)
                sent = stored if sends_leaves else summed
                master = wide if members[0].has_master else "the stored values"
                kept = moments if wide == "fp32" else wide
                rows.append(("trainable", f"{numel:,}", stored, stored, sent, summed, master, kept))
            else:
                rows.append(("frozen", f"{numel:,}", stored, stored, "-", "-", "-", "-"))
    return tuple(rows)


@dataclass
class LossScale:
    """The factor of an fp16 loss: halved after an overflow, doubled after a long run without one.

    Its decision comes from the canonical sum, so it is the same on every rank and for any number of them.
    """

    value: float = 65536.0
    good_steps: int = 0
    growth_interval: int = 2000
    is_active: bool = False

    @property
    def can_shrink(self) -> bool:
        """Whether an overflow may be the scale's own doing."""
        return self.is_active and self.value > 1.0

    def update(self, overflowed: bool) -> None:
        """Learn from one step."""
        if not self.is_active:
            return
        if overflowed:
            self.value = max(self.value / 2, 1.0)
            self.good_steps = 0
        else:
            self.good_steps += 1
            if self.good_steps == self.growth_interval:
                self.value *= 2
                self.good_steps = 0


def loss_scale(flats: Sequence[Flat]) -> LossScale:
    """A scale where anything is computed in fp16, frozen parameters included; else none."""
    uses_fp16 = any(flat.dtype == torch.float16 for flat in flats)
    return LossScale(is_active=True) if uses_fp16 else LossScale(value=1.0)


def cast_inputs(model: nn.Module, dtype: torch.dtype) -> RemovableHandle:
    """Have the floating-point tensors that a model is called with arrive in the type it is stored in."""

    def narrow(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def before(module: nn.Module, arguments: Any, keywords: Any) -> Any:
        return tree_map_only(torch.Tensor, narrow, (arguments, keywords))

    hook: Any = before
    hook._torchdynamo_disable = True
    return model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
