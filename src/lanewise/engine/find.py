"""Finding the units of a model: what is gathered and exchanged together."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from lanewise.errors import ModelError

Selector = str | type[nn.Module] | nn.Module
"""A unit chosen by the user: a module's name, the module, or the class of modules."""

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_SMALL = 16
"""A unit with less than this fraction of the largest one's parameters is not worth its own exchange."""


@dataclass(frozen=True)
class Found:
    """A unit to be: a module with the parameters that belong to it."""

    name: str
    module: nn.Module
    parameters: tuple[tuple[str, nn.Parameter], ...]


def find_units(model: nn.Module, selectors: Sequence[Selector] | None = None) -> tuple[Found, ...]:
    """Cut a model into units, the root first.

    Without `selectors` the units are the elements of the model's outermost lists of modules: usually its
    blocks. A parameter that several units use belongs to the root.
    """
    chosen = _elements_of(model) if selectors is None else _selected(model, selectors)
    users: dict[int, set[str]] = {}
    inside = {id(inner) for _, module in chosen for inner in module.modules()}
    for name, module in (*chosen, *(("", module) for module in model.modules() if id(module) not in inside)):
        for parameter in module.parameters(recurse=name != ""):
            users.setdefault(id(parameter), set()).add(name)
    members: dict[str, list[tuple[str, nn.Parameter]]] = {"": [], **{name: [] for name, _ in chosen}}
    for name, parameter in model.named_parameters():
        owners = users[id(parameter)]
        members[next(iter(owners)) if len(owners) == 1 else ""].append((name, parameter))
    units = [Found("", model, tuple(members[""]))]
    units += [Found(name, module, tuple(members[name])) for name, module in chosen if members[name]]
    return tuple(units)


def _elements_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The elements of the outermost containers, each module once, without small ones."""
    found: dict[int, tuple[str, nn.Module]] = {}
    for name, module in _elements("", model):
        found.setdefault(id(module), (name, module))
    return _without_small(_without_inner(list(found.values())))


def _elements(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The elements of the outermost containers below a module."""
    for key, child in module.named_children():
        name = f"{prefix}.{key}" if prefix else key
        if isinstance(module, _CONTAINERS) and not isinstance(child, _CONTAINERS):
            if any(True for _ in child.parameters()):
                yield name, child
        else:
            yield from _elements(name, child)


def _without_inner(units: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Leave out modules that are also a part of another one: units are not nested."""
    inner = {id(part) for _, module in units for part in module.modules() if part is not module}
    return [unit for unit in units if id(unit[1]) not in inner]


def _without_small(units: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Leave out units that are small beside the largest, but never more than that one has in all.

    The root, to which they go, is kept for a whole lane. So where one huge unit makes all others small, they
    are judged among themselves.
    """
    sizes = {name: sum(p.numel() for p in module.parameters()) for name, module in units}
    largest = max(sizes.values(), default=0)
    small = [unit for unit in units if sizes[unit[0]] * _SMALL < largest]
    if sum(sizes[name] for name, _ in small) <= largest:
        left_out = {name for name, _ in small}
    else:
        left_out = {name for name, _ in small} - {name for name, _ in _without_small(small)}
    return [unit for unit in units if unit[0] not in left_out]


def _selected(model: nn.Module, selectors: Sequence[Selector]) -> list[tuple[str, nn.Module]]:
    if isinstance(selectors, (str, type)) or not isinstance(selectors, Iterable):
        what = repr(selectors) if isinstance(selectors, str) else f"a {type(selectors).__name__}"
        raise ModelError(f"units must be a list of names, modules or classes of modules, found {what}.")
    chosen: dict[str, nn.Module] = {}
    names = dict(model.named_modules())
    for selector in selectors:
        if isinstance(selector, str):
            found = {selector: names[selector]} if selector in names else {}
        elif isinstance(selector, type):
            found = {name: module for name, module in names.items() if isinstance(module, selector)}
        else:
            found = {name: module for name, module in names.items() if module is selector}
        found.pop("", None)
        if not found:
            raise ModelError(
                f"units: {selector!r} selects no module of {type(model).__name__} below its root. Give names from "
                "model.named_modules(), modules, or classes of modules."
            )
        chosen |= found
    for name in chosen:
        outer = next((other for other in chosen if name.startswith(f"{other}.")), None)
        if outer is not None:
            raise ModelError(
                f"units: {name!r} lies inside {outer!r}. Units cannot be nested; select one of the two."
            )
    return [(name, module) for name, module in names.items() if name in chosen]


def check_model(model: nn.Module) -> None:
    """Refuse models that cannot be cut into flats, before anything is touched."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"prepare needs a torch.nn.Module, found {type(model).__name__}.")
    parameters = list(model.named_parameters())
    if not any(parameter.requires_grad for _, parameter in parameters):
        raise ModelError(
            f"{type(model).__name__} has no parameter that requires a gradient, so there is nothing to train."
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise ModelError(
                f"module {name!r} is a SyncBatchNorm: it mixes samples across ranks inside a forward, so its bits "
                "depend on the number of ranks. Use BatchNorm (statistics per lane, averaged once a step) or "
                "GroupNorm."
            )
        if any(nn.parameter.is_lazy(parameter) for parameter in module.parameters(recurse=False)):
            raise ModelError(f"module {name!r} is lazy and has no shape yet. Run one forward before prepare.")
    for name, parameter in parameters:
        if type(parameter.data).__name__ == "DTensor":
            raise ModelError(
                f"parameter {name!r} is a DTensor. Give prepare a plain model; Lanewise shards it."
            )
        if parameter.is_complex():
            raise ModelError(
                f"parameter {name!r} is complex. Keep it as real numbers with torch.view_as_real."
            )
        if not parameter.is_meta and not parameter.is_contiguous():
            raise ModelError(
                f"parameter {name!r} is not contiguous (shape {tuple(parameter.shape)}, strides "
                f"{parameter.stride()}). Make it so before prepare: p.data = p.data.contiguous()."
            )
    _check_overlap(parameters)


def _check_overlap(parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
    spans = sorted(
        (p.untyped_storage()._cdata, p.data_ptr(), p.data_ptr() + p.nbytes, name)
        for name, p in parameters
        if not p.is_meta and p.numel()
    )
    for left, right in itertools.pairwise(spans):
        if left[0] == right[0] and right[1] < left[2]:
            raise ModelError(
                f"parameters {left[3]!r} and {right[3]!r} overlap in memory. Tie parameters by giving two modules "
                "the same Parameter; make views into separate ones with .clone()."
            )
