"""Which optimizers may be prepared: those that treat every element by itself.

Everything here looks at the user's optimizer before anything is touched, and leaves it as it was.
"""

import copy
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch

from lanewise.errors import OptimizerError

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

_PROBE_SHAPE = (96, 112)
_PROBE_CUTS = (0, 192, 5824, 96 * 112)
"""Slices begin on multiples of 64; these are multiples of no larger block that a kernel may work in."""


def check(optimizer: Any, device: torch.device) -> None:
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
    for number, group in enumerate(optimizer.param_groups):
        _check_options(name, number, group, device)
    if not is_torch or name not in ELEMENTWISE:
        _probe(optimizer)
    if any(state and _num_steps(state) != 0 for state in optimizer.state.values()):
        raise OptimizerError(
            f"the {name} given to prepare has already stepped: its state belongs to whole parameters. Call "
            "prepare before the first optimizer.step()."
        )


def _check_options(name: str, number: int, group: dict[str, Any], device: torch.device) -> None:
    if group.get("differentiable"):
        raise OptimizerError(
            f"group {number} of the {name} has differentiable=True, which lets autograd follow the optimizer's own "
            "step. What it steps here are slices that belong to no graph. Leave the option out."
        )
    if group.get("capturable") and device.type == "cpu":
        raise OptimizerError(
            f"group {number} of the {name} has capturable=True, which is for CUDA graphs, and this rank computes on a "
            "CPU. Leave the option out."
        )


def _num_steps(state: dict[str, Any]) -> float | None:
    """How often a parameter was stepped; None where its state does not count."""
    step = state.get("step")
    if isinstance(step, torch.Tensor) and step.is_meta:
        return 0
    return step.item() if isinstance(step, torch.Tensor) else step


def _probe(optimizer: torch.optim.Optimizer) -> None:
    """Accept an optimizer we do not know only if slices of a tensor step to the bits of the whole."""
    name = type(optimizer).__name__
    advice = (
        "Lanewise splits parameters between ranks, so it needs an optimizer that treats every element by "
        "itself, such as AdamW."
    )
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(_PROBE_SHAPE, generator=generator)
    gradients = [torch.randn(_PROBE_SHAPE, generator=generator) for _ in range(3)]
    try:
        whole = _try_steps(optimizer, [start], [[g] for g in gradients])[0]
        slices = _try_steps(optimizer, _probe_slices(start), [_probe_slices(g) for g in gradients])
    except Exception as error:
        raise OptimizerError(
            f"{name} is not an optimizer Lanewise knows, and a trial on slices of a tensor failed with "
            f"{type(error).__name__}: {error}. {advice}"
        ) from error
    if not torch.equal(whole.flatten(), torch.cat(slices)):
        raise OptimizerError(
            f"{name} gives other values when a tensor is cut into slices, so it cannot work on them. {advice}"
        )


def _probe_slices(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.flatten()[low:high] for low, high in pairwise(_PROBE_CUTS)]


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
