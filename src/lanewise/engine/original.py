"""Whether a model is still the one that was prepared: the same parameters, in the same memory, left alone.

A parameter that was moved, replaced or thawed would go on to exist and never be trained. One that was
changed in place may be shared with other ranks or have a wider master, so the change would be lost or
made twice. Both are errors, found before the next step.
"""

from collections.abc import Sequence

from torch import nn

from lanewise.engine import guard
from lanewise.engine.unit import Flat
from lanewise.errors import ModelError


class Original:
    """Remembers a model as it was left, and compares."""

    def __init__(self, model: nn.Module, flats: Sequence[Flat], frees: bool) -> None:
        """`frees` says that values go away between uses, and whatever is done to them with them."""
        self._all = [(flat, index, p) for flat in flats for index, p in enumerate(flat.parameters)]
        self._frees = frees
        self._versions: list[int] = []
        self._entries = [
            (f"{prefix}.{key}" if prefix else key, module, key, parameter)
            for prefix, module in model.named_modules()
            for key, parameter in module._parameters.items()
            if parameter is not None
        ]

    def remember(self) -> None:
        """The model is now as it should be."""
        if not self._frees:
            self._versions = self.versions()

    def check(self) -> None:
        """Raise if somebody else has changed the model since."""
        for name, module, key, parameter in self._entries:
            if module._parameters.get(key) is not parameter:
                raise ModelError(
                    f"parameter {name!r} was replaced by another object or removed since prepare, and the new one "
                    "would not be trained. Make such changes before prepare."
                )
        with guard.unguarded():
            self._check_all()
        if not self._frees:
            self.check_values("since the last step, outside the optimizer", self._versions)

    def _check_all(self) -> None:
        for flat, index, parameter in self._all:
            if not flat.trainable and parameter.requires_grad:
                raise ModelError(
                    f"parameter {flat.names[index]!r} requires a gradient, but was frozen or in no optimizer group "
                    "when the model was prepared, so it has no place in the exchange. Prepare the model with "
                    "everything trainable that ever will be, and freeze it after prepare with requires_grad_(False)."
                )
            if not self._frees and parameter.numel() and not _is_bound(flat, index):
                raise ModelError(
                    f"parameter {flat.names[index]!r} was moved to other memory since prepare (model.to(), .half() or "
                    "p.data = ...), and would not be trained there. Move and convert the model before prepare; "
                    "precision= sets the type that parameters are stored in."
                )

    def check_values(self, when: str, versions: Sequence[int]) -> None:
        """Raise if a parameter was changed in place."""
        changed = [
            flat.names[index]
            for (flat, index, _), old, now in zip(self._all, versions, self.versions(), strict=True)
            if old != now
        ]
        if changed:
            raise ModelError(
                f"parameter {changed[0]!r} ({len(changed)} in all) was changed in place {when}. Ranks may share its "
                "memory and the optimizer may hold a wider copy, so the change would be lost or made twice. Change "
                "parameters inside `with run.gathered(model, write=True):`."
            )

    def versions(self) -> list[int]:
        """How often each parameter has been written to, but for the optimizer."""
        with guard.unguarded():
            return [parameter._version for _, _, parameter in self._all]


def _is_bound(flat: Flat, index: int) -> bool:
    """Whether a parameter lies in its place in its flat."""
    start = flat.layout.fields[index].start * flat.dtype.itemsize
    return flat.parameters[index].data_ptr() == flat.storage.data_ptr() + start
