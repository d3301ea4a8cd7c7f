"""A plain PyTorch loop to compare with: one process, no flats, no hooks; lanes added by the tree."""

from collections.abc import Callable

import torch
from torch import nn

from lanewise.engine.randomness import seed_lane

Gradients = list[torch.Tensor | None]


def tree(values):
    """Neighbours pair from the left; an odd last one moves up."""
    while len(values) > 1:
        values = [
            values[n] + values[n + 1] if n + 1 < len(values) else values[n] for n in range(0, len(values), 2)
        ]
    return values[0]


def train(
    model: nn.Module,
    optimizer_of: Callable,
    loss_of: Callable[[nn.Module, torch.Tensor, int], torch.Tensor],
    data: torch.Tensor,
    lanes: int,
    steps: int,
    seed: int = 0,
    before_step: Callable[[nn.Module, int], None] = lambda model, step: None,
) -> None:
    """Train a model in place, one sample a lane after the other."""
    wide = {
        id(p): nn.Parameter(p.detach().float()) if p.dtype in (torch.bfloat16, torch.float16) else p
        for p in model.parameters()
    }
    optimizer = optimizer_of(model)
    for group in optimizer.param_groups:
        group["params"][:] = [wide[id(p)] for p in group["params"]]
    each = len(data) // (lanes * steps)
    for step in range(steps):
        before_step(model, step)
        parameters = list(model.parameters())
        leaves = []
        buffers = _Buffers(model)
        for lane in range(lanes):
            seed_lane(seed, step, lane)
            start = (step * lanes + lane) * each
            for p in parameters:
                p.grad = None
            loss_of(model, data[start : start + each], lane).backward()
            leaves.append([None if p.grad is None else p.grad.to_dense() for p in parameters])
            buffers.end_lane()
        buffers.commit(lanes)
        for place, p in enumerate(parameters):
            p.grad = None
            own = [row[place] for row in leaves]
            if p.requires_grad and any(g is not None for g in own):
                total = tree([(torch.zeros_like(p) if g is None else g).to(wide[id(p)].dtype) for g in own])
                wide[id(p)].grad = total / torch.tensor(float(lanes), dtype=total.dtype)
        optimizer.step()
        with torch.no_grad():
            for p in parameters:
                wide[id(p)].grad = None
                if wide[id(p)] is not p:
                    p.copy_(wide[id(p)])


class _Buffers:
    """Every lane starts from the step's buffers; differences are averaged, counters agree."""

    def __init__(self, model: nn.Module) -> None:
        self.places = [(m, key) for m in model.modules() for key in m._buffers]
        self.kept = [module._buffers[key].clone() for module, key in self.places]
        self.lanes: list[list[torch.Tensor]] = []

    def end_lane(self) -> None:
        self.lanes.append([module._buffers[key] for module, key in self.places])
        self.put(self.kept)

    def put(self, values: list[torch.Tensor]) -> None:
        for (module, key), value in zip(self.places, values, strict=True):
            module._buffers[key] = value.clone()

    def commit(self, lanes: int) -> None:
        new = []
        for place, kept in enumerate(self.kept):
            values = [row[place] for row in self.lanes]
            if kept.is_floating_point() and any(not torch.equal(value, kept) for value in values):
                mean = tree([(value - kept).double() for value in values]) / lanes
                new.append((kept.double() + mean).to(kept.dtype))
            else:
                assert all(torch.equal(value, values[0]) for value in values)
                new.append(values[0])
        self.put(new)
