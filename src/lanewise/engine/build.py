"""From a model to units: which flat each parameter stands in."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from lanewise.config import Precision
from lanewise.engine import precision as precisions
from lanewise.engine.find import Found
from lanewise.engine.unit import Flat, Unit, all_flats
from lanewise.errors import OptimizerError
from lanewise.lanes.layout import lay_out


def group_of_each(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """The optimizer group of each trainable parameter, by identity. Refuses foreign parameters."""
    named = {id(p): name for name, p in model.named_parameters()}
    groups: dict[int, int] = {}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in named:
                raise OptimizerError(
                    f"parameter {place} of optimizer group {number} (shape {tuple(parameter.shape)}) is not one of "
                    f"{type(model).__name__}'s. Make the optimizer on the parameters of the model you prepare, and "
                    "after the last change to that model."
                )
            if parameter.requires_grad:
                groups[id(parameter)] = number
    if not groups:
        raise OptimizerError(
            "no parameter of the optimizer requires a gradient, so there is nothing to train."
        )
    return groups


def build_units(
    found: Sequence[Found], groups: Mapping[int, int], precision: Precision, lanes: int
) -> tuple[Unit, ...]:
    """Lay every unit's parameters out in flats: one for each stored type, trainable and frozen apart."""
    number = 0
    units = []
    for unit_number, unit in enumerate(found):
        rows = _sparse_rows(unit.module)
        kept = precisions.beside_statistics(unit.module, precision)
        kinds: dict[tuple[torch.dtype, bool, int], list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in unit.parameters:
            columns = rows.get(id(parameter), 0) if id(parameter) in groups else 0
            stored = kept.get(id(parameter)) or precisions.stored_dtype(parameter, precision)
            kind = (stored, id(parameter) in groups, columns and id(parameter))
            kinds.setdefault(kind, []).append((name, parameter))
        flats = []
        for (dtype, is_trainable, is_sparse), members in kinds.items():
            flats.append(
                Flat(
                    number=number,
                    unit_name=unit.name or "root",
                    layout=lay_out([(name, p.numel()) for name, p in members], lanes),
                    dtype=dtype,
                    trainable=is_trainable,
                    parameters=tuple(p for _, p in members),
                    groups=tuple(groups.get(id(p), -1) for _, p in members),
                    sparse_columns=rows[id(members[0][1])] if is_sparse else 0,
                )
            )
            number += 1
        units.append(Unit(unit_number, unit.name or "root", unit.module, tuple(flats)))
    return tuple(units)


def layout_words(units: Sequence[Unit]) -> list[str]:
    """The layout in words, for ranks to compare."""
    words, slots = [], []
    for flat in all_flats(units):
        for place, parameter, group in zip(flat.layout.fields, flat.parameters, flat.groups, strict=True):
            trained = f"in optimizer group {group}" if flat.trainable else "frozen"
            words.append(
                f"parameter {place.name!r} of shape {tuple(parameter.shape)} and {flat.dtype} in unit "
                f"{flat.unit_name!r}, {trained}"
            )
        rows = f", sparse in rows of {flat.sparse_columns}" if flat.sparse_columns else ""
        slots.append(
            f"{flat.layout.lanes} slots of {flat.layout.slot} elements in unit {flat.unit_name!r}{rows}"
        )
    return words + slots


def _sparse_rows(module: nn.Module) -> dict[int, int]:
    """The parameters whose gradients come as rows, with the elements in a row."""
    return {
        id(child.weight): child.weight.shape[1]
        for child in module.modules()
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse
    }
