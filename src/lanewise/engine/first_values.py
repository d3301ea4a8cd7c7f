"""The first values of parameters: from the model, from a file, or made unit by unit for a meta model.

A model on the meta device has shapes and no values. Its units are filled one after the other, so no rank
ever holds more than its own slots and one unit. The values depend on the run's seed and on names only,
never on the number of ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from lanewise.engine.randomness import seed_all, untouched
from lanewise.engine.unit import Unit
from lanewise.errors import ModelError, StateError
from lanewise.lanes.seeds import derive

Init = Callable[[str, torch.Tensor], None]
"""Fills an empty parameter or buffer of the given name in place."""


class FirstValues:
    """Gives a unit's parameters their first values."""

    def __init__(
        self, model: nn.Module, device: torch.device, seed: int, init: Init | None, weights: str | Path | None
    ) -> None:
        self._device = device
        self._seed = seed
        self._init = init
        self._aliases: dict[int, list[str]] = {}
        self._owners: dict[int, list[tuple[str, nn.Module]]] = {}
        for prefix, module in model.named_modules():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    self._aliases.setdefault(id(parameter), []).append(_join(prefix, key))
                    self._owners.setdefault(id(parameter), []).append((prefix, module))
        self._file = _open(Path(weights)) if weights is not None else None
        self._in_file = set(self._file.keys()) if self._file is not None else set()
        self._check(model)
        with torch.no_grad():
            self._fill_buffers(model)

    def fill(self, unit: Unit) -> None:
        """Give every parameter of a unit real values on the device of the run."""
        with torch.no_grad(), untouched(self._device):
            for flat in unit.flats:
                for name, parameter in zip(flat.names, flat.parameters, strict=True):
                    if parameter.is_meta and self._init is not None and not self._stored_name(parameter):
                        _make_real(parameter, self._device)
                        seed_all(derive(self._seed, "init", name))
                        self._init(name, parameter)
                    elif parameter.is_meta and not self._stored_name(parameter):
                        self._reset(parameter, [p for f in unit.flats for p in f.parameters])
                    elif parameter.is_meta:
                        _make_real(parameter, self._device)
                    elif parameter.device != self._device:
                        parameter.data = parameter.data.to(self._device)
                    stored = self._stored_name(parameter)
                    if stored is not None and self._file is not None:
                        parameter.copy_(self._file.get_tensor(stored))

    def _check(self, model: nn.Module) -> None:
        """Name everything that no source can fill, before anything is touched."""
        problems = []
        for name, parameter in model.named_parameters():
            stored = self._stored_name(parameter)
            if self._file is not None and stored is None:
                problems.append(f"{name} is not in the file")
            elif self._file is not None and stored is not None:
                shape = tuple(self._file.get_slice(stored).get_shape())
                if shape != tuple(parameter.shape):
                    problems.append(f"{name} has shape {tuple(parameter.shape)}, in the file {shape}")
            elif parameter.is_meta and self._init is None:
                owner, module = self._owners[id(parameter)][0]
                if not callable(getattr(module, "reset_parameters", None)):
                    problems.append(f"{name}: {type(module).__name__} {owner!r} has no reset_parameters")
        if problems:
            listed = "".join(f"\n  - {problem}" for problem in problems)
            raise ModelError(
                f"{len(problems)} parameter(s) would get no first value:{listed}\nGive a complete weights= file, or "
                "init=, a function (name, tensor) that fills a tensor in place."
            )

    def _fill_buffers(self, model: nn.Module) -> None:
        nameless = []
        for prefix, module in model.named_modules():
            for key, buffer in module._buffers.items():
                if buffer is None:
                    continue
                name = _join(prefix, key)
                is_lost = buffer.is_meta
                value = torch.zeros_like(buffer, device=self._device) if is_lost else buffer.to(self._device)
                module._buffers[key] = value
                if self._file is not None and name in self._in_file:
                    value.copy_(self._file.get_tensor(name))
                elif is_lost and self._init is not None:
                    with untouched(self._device):
                        seed_all(derive(self._seed, "init", name))
                        self._init(name, value)
                elif is_lost and isinstance(module, nn.modules.batchnorm._NormBase):
                    module.reset_running_stats()
                elif is_lost:
                    nameless.append(name)
        if nameless:
            raise ModelError(
                f"the model is on the meta device and the values of these buffers were lost there: "
                f"{', '.join(nameless)}. Give init=, a function (name, tensor) that fills them, or make them on a "
                "real device in the constructor."
            )

    def _reset(self, parameter: nn.Parameter, members: Sequence[nn.Parameter]) -> None:
        """Fill a parameter by its module's own rule, and others of that module that are due with it.

        The rule works on stand-ins: parameters of other units may be filled already, and be elsewhere.
        """
        prefix, module = self._owners[id(parameter)][0]
        due = {id(member) for member in members}
        with _stand_ins(module, self._device) as made:
            seed_all(derive(self._seed, "init", prefix))
            module.reset_parameters()  # type: ignore[operator]
        for key, other in module._parameters.items():
            if other is None or not other.is_meta or id(other) not in due:
                continue
            if self._owners[id(other)][0][1] is module:
                _make_real(other, self._device)
                other.copy_(made[key])

    def _stored_name(self, parameter: nn.Parameter) -> str | None:
        return next((name for name in self._aliases[id(parameter)] if name in self._in_file), None)


def _make_real(parameter: nn.Parameter, device: torch.device) -> None:
    """Give a meta parameter memory, keeping the object that modules and the optimizer hold."""
    real = nn.Parameter(torch.zeros_like(parameter, device=device), requires_grad=parameter.requires_grad)
    torch.utils.swap_tensors(parameter, real)


@contextmanager
def _stand_ins(module: nn.Module, device: torch.device) -> Iterator[dict[str, nn.Parameter]]:
    """Give a module other parameters for a while: real ones for its own, meta ones for those below it."""
    kept = [(m, key, p) for m in module.modules() for key, p in m._parameters.items() if p is not None]
    made = {}
    for owner, key, parameter in kept:
        where = device if owner is module else torch.device("meta")
        values = torch.zeros(parameter.shape, dtype=parameter.dtype, device=where)
        stand_in = nn.Parameter(values, requires_grad=parameter.requires_grad)
        owner._parameters[key] = stand_in
        if owner is module:
            made[key] = stand_in
    try:
        yield made
    finally:
        for owner, key, parameter in kept:
            owner._parameters[key] = parameter


def _join(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError as error:
        raise StateError(f"weights: there is no file {path}.") from error
    except (SafetensorError, OSError) as error:
        raise StateError(f"weights: {path} is not a safetensors file that can be read: {error}.") from error
