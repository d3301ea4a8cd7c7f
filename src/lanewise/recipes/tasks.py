"""From a recipe to what is trained: a model, its data, and what counts as good."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from lanewise.engine.first_values import Init
from lanewise.metrics import F1, Accuracy, Perplexity
from lanewise.recipes import images, models, table, text
from lanewise.recipes.recipe import GptRecipe, ImageRecipe, Recipe, TableRecipe

Forward = Callable[[nn.Module, Any], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Task:
    """What a recipe asks for."""

    model: nn.Module
    train: Dataset[Any]
    valid: Dataset[Any] | None
    forward: Forward
    """From the model and a batch to scores of classes and the true ones."""
    metrics: Mapping[str, Any]
    """What is evaluated beside the loss."""
    facts: Mapping[str, Any]
    """What the weights mean nothing without, such as the names of the classes."""
    init: Init | None = None
    workers: int = 0


def make(recipe: Recipe, folder: Path, seed: int) -> Task:
    """Read the data of a recipe and build its model. Paths are relative to `folder`."""
    if isinstance(recipe, GptRecipe):
        return _gpt(recipe, folder)
    if isinstance(recipe, TableRecipe):
        return _table(recipe, folder, seed)
    assert isinstance(recipe, ImageRecipe)
    return _images(recipe, folder, seed)


def _gpt(recipe: GptRecipe, folder: Path) -> Task:
    size = recipe.model
    train, valid = text.windows(recipe.data.files, folder, size.length, recipe.data.valid)
    with torch.device("meta"):
        model = models.Gpt(size.width, size.layers, size.heads, size.length, size.dropout)

    def forward(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return model(batch[0]).flatten(0, 1).float(), batch[1].flatten()

    return Task(model, train, valid, forward, {"perplexity": Perplexity()}, {}, model.init)


def _table(recipe: TableRecipe, folder: Path, seed: int) -> Task:
    rows = table.read(recipe.data, folder, seed)
    size = recipe.model
    counts = [len(values) + 1 for values in rows.categories.values()]
    model = models.Perceptron(
        rows.mean, rows.deviation, counts, len(rows.classes), size.width, size.layers, size.dropout
    )
    facts = {"classes": rows.classes, "numbers": rows.numbers, "categories": rows.categories}
    return Task(model, rows.train, rows.valid, _classify, _class_metrics(len(rows.classes)), facts)


def _images(recipe: ImageRecipe, folder: Path, seed: int) -> Task:
    train, valid, classes = images.find(recipe.data, folder, seed)
    size = recipe.model
    model = models.ConvNet(size.width, size.stages, len(classes), size.dropout)
    metrics, facts = _class_metrics(len(classes)), {"classes": classes, "size": recipe.data.size}
    return Task(model, train, valid, _classify, metrics, facts, workers=recipe.data.workers)


def _classify(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *inputs, targets = batch
    return model(*inputs).float(), targets


def _class_metrics(classes: int) -> dict[str, Any]:
    return {"accuracy": Accuracy(), "f1": F1(average="macro", num_classes=classes)}
