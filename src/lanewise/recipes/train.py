"""Training a recipe on this rank, through the same calls that a script would make."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from lanewise.config import Settings
from lanewise.errors import DataError
from lanewise.recipes import tasks
from lanewise.recipes.recipe import Optimizer, Recipe, Schedule
from lanewise.run.fit import Fit
from lanewise.run.session import Run
from lanewise.run.start import start


@dataclass(frozen=True)
class Result:
    """What a recipe came to. The same on every rank."""

    fit: Fit
    digest: str
    num_parameters: int
    weights: Path | None
    """Where the trained weights are."""


def train(recipe: Recipe, folder: Path, say: Callable[[str], None], **others: Any) -> Result:
    """Train a recipe whose paths are relative to `folder`. `others` replace settings of its [run]."""
    run = start(**{field.name: getattr(recipe.run, field.name) for field in fields(Settings)} | others)
    weights = _place_of(recipe.output.weights, folder)
    task = tasks.make(recipe, folder, run.settings.seed)
    num_parameters = sum(parameter.numel() for parameter in task.model.parameters())
    optimizer = make_optimizer(recipe.optimizer, task.model)
    model, optimizer = run.prepare(task.model, optimizer, init=task.init)
    batch_size = recipe.train.batch_size
    loader = run.loader(task.train, batch_size, shuffle=True, num_workers=task.workers)
    total = recipe.train.steps or (recipe.train.epochs or 0) * len(loader)

    def evaluate() -> Mapping[str, float]:
        assert task.valid is not None
        return run.evaluate(
            task.valid,
            {"loss": F.cross_entropy, **task.metrics},
            forward=task.forward,
            num_workers=task.workers,
        )

    fit = run.fit(
        loader,
        lambda model, batch: F.cross_entropy(*task.forward(model, batch)),
        steps=total,
        clip=recipe.train.clip,
        schedulers=make_schedule(recipe.schedule, optimizer, total),
        evaluate=evaluate if task.valid is not None else None,
        every=recipe.train.evaluate_every,
        watch="loss" if task.valid is not None else None,
        patience=recipe.train.patience,
    )
    digest = run.digest()
    if weights is not None:
        save_weights(run, model, weights, {"task": recipe.task, **task.facts})
    result = Result(fit, digest, num_parameters, weights)
    if run.rank == 0:
        say(summary(result))
    run.close()
    return result


def make_optimizer(chosen: Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a recipe, with weight decay on matrices only."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": chosen.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if chosen.kind == "sgd":
        return torch.optim.SGD(groups, lr=chosen.lr, momentum=chosen.momentum or 0.0)
    kind = torch.optim.AdamW if chosen.kind == "adamw" else torch.optim.Adam
    return kind(groups, lr=chosen.lr, betas=chosen.betas or (0.9, 0.999))


def make_schedule(chosen: Schedule, optimizer: torch.optim.Optimizer, total: int) -> LambdaLR:
    """The learning rate of every step as a fraction of the optimizer's."""

    def fraction(step: int) -> float:
        if step < chosen.warmup:
            return (step + 1) / (chosen.warmup + 1)
        if chosen.kind == "constant":
            return 1.0
        done = min(1.0, (step - chosen.warmup) / max(1, total - 1 - chosen.warmup))
        left = (1 + math.cos(math.pi * done)) / 2 if chosen.kind == "cosine" else 1 - done
        return chosen.end + (1 - chosen.end) * left

    return LambdaLR(optimizer, fraction)


def save_weights(run: Run, model: nn.Module, file: Path, facts: Mapping[str, Any]) -> None:
    """Write all parameters and buffers to a safetensors file, on rank 0. Call it on all ranks.

    The facts stand in the file as one entry, `recipe`, because several come in an order of chance.
    """
    with run.gathered(model):
        if run.rank == 0:
            values = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
            unfinished = file.with_name(f"{file.name}.part")
            save_file(values, unfinished, metadata={"recipe": json.dumps(facts)})
            unfinished.replace(file)


def summary(result: Result) -> str:
    """What a person wants to know at the end."""
    losses = result.fit.losses
    lines = [f"{result.num_parameters:,} parameters, {result.fit.steps} steps, loss {losses[0]:.4f} at first"]
    lines[0] += f" and {losses[-1]:.4f} at last" + (", stopped early" if result.fit.stopped_early else "")
    if result.fit.evaluations:
        values = result.fit.evaluations[-1].values
        lines.append("evaluated: " + "  ".join(f"{name} {value:.4f}" for name, value in values.items()))
    lines.append(f"digest {result.digest}")
    if result.weights is not None:
        lines.append(f"weights in {result.weights}")
    return "\n".join(lines)


def _place_of(weights: str | None, folder: Path) -> Path | None:
    """Where weights will go, found out before hours of training."""
    if weights is None:
        return None
    file = folder / Path(weights).expanduser()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"output.weights: the folder of {file} cannot be made: {error.strerror}.") from error
    if file.is_dir():
        raise DataError(
            f"output.weights: {file} is a folder. Name a file, such as {file / 'weights.safetensors'}."
        )
    return file
