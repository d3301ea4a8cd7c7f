"""Parameters whose values are elsewhere: touching one raises an error that names it.

While a parameter's storage is freed, the parameter (one object, not its class's other instances) carries
a class whose every use but the harmless ones raises. Where freed memory could still be read, a single NaN
stretched to its shape lies beneath it, for code that gets past the class; elsewhere (on a GPU) a storage
without memory has no address, and reading it is an error.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from lanewise.errors import ShardedParameterError

_LABEL = "_lanewise_label"
_recalls: Any = WeakIdKeyDictionary()
"""What brings a parameter back when it is touched, by a weak reference, since it knows the parameter itself.

Not kept in the parameter, which may be pickled.
"""
_ORIGINAL = "_lanewise_class"

_HARMLESS_PROPERTIES = (
    "device", "dtype", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_mkldnn", "is_mps",
    "is_nested", "is_quantized", "is_sparse", "is_sparse_csr", "is_xpu", "itemsize", "layout", "name", "names",
    "ndim", "output_nr", "requires_grad", "retains_grad", "shape", "_version",
)  # fmt: skip
_HARMLESS_METHODS = (
    "dim", "element_size", "get_device", "is_complex", "is_contiguous", "is_floating_point", "is_inference",
    "is_signed", "ndimension", "nelement", "numel", "register_hook",
    "register_post_accumulate_grad_hook", "requires_grad_", "size", "stride",
)  # fmt: skip


@cache
def _harmless() -> frozenset[Any]:
    tensor = torch.Tensor
    properties = [getattr(tensor, name).__get__ for name in _HARMLESS_PROPERTIES if hasattr(tensor, name)]
    methods = [getattr(tensor, name) for name in _HARMLESS_METHODS]
    grad: Any = tensor.grad
    requires_grad: Any = tensor.requires_grad
    return frozenset([*properties, *methods, grad.__get__, grad.__set__, requires_grad.__set__])


def _refuse(parameter: Any) -> NoReturn:
    name, unit = parameter.__dict__[_LABEL]
    raise ShardedParameterError(
        f"parameter {name!r} was touched while its values are with their owners: zero3 keeps them here only "
        f"while unit {unit!r} runs. Touch it inside `with run.gathered(model):`, or, if another module's forward "
        "uses it, put both into one unit with run.prepare(..., units=[...])."
    )


class _Away:
    """What a parameter is while its values are elsewhere."""

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function in _harmless():
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        parameter = _find(cls, [args, kwargs])
        recall = _recalls.get(parameter, lambda: None)()
        if recall is not None and recall():
            return function(*args, **(kwargs or {}))
        _refuse(parameter)

    def __repr__(self) -> str:
        name, unit = self.__dict__[_LABEL]
        return f"<parameter {name!r}: its values are with their owners while unit {unit!r} does not run>"

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __deepcopy__(self, memo: object) -> NoReturn:
        _refuse(self)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        _refuse(self)


@cache
def _away_class(original: type[nn.Parameter]) -> type[nn.Parameter]:
    return type(f"{original.__name__}", (_Away, original), {"__module__": original.__module__})


def _find(cls: type, values: object) -> Any:
    """The first parameter in nested arguments that is away."""
    if isinstance(values, _Away):
        return values
    items: Any = values.values() if isinstance(values, Mapping) else values
    if isinstance(items, (list, tuple)) or isinstance(values, Mapping):
        for item in items:
            found = _find(cls, item)
            if found is not None:
                return found
    return None


@cache
def _nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((), torch.nan if dtype.is_floating_point else 0, dtype=dtype, device=device)


def label(parameter: nn.Parameter, name: str, unit: str, recall: Callable[[], bool] | None = None) -> None:
    """Give a parameter the names that its error message uses.

    `recall`, a method of an object, brings it back, or says that it may not.
    """
    parameter.__dict__[_LABEL] = (name, unit or "the root")
    if recall is not None:
        _recalls[parameter] = weakref.WeakMethod(recall)
    parameter.__dict__[_ORIGINAL] = type(parameter)


def send_away(parameter: nn.Parameter) -> None:
    """Make every use of the values an error."""
    parameter.__class__ = _away_class(parameter.__dict__[_ORIGINAL])


def blank(parameter: nn.Parameter) -> None:
    """Lay a NaN beneath a parameter that is about to be sent away."""
    parameter.data = _nothing(parameter.dtype, parameter.device).expand(parameter.shape)


def bring_back(parameter: nn.Parameter) -> None:
    """Make the parameter itself again."""
    parameter.__class__ = parameter.__dict__[_ORIGINAL]


def is_away(parameter: nn.Parameter) -> bool:
    """Whether the values are elsewhere."""
    return isinstance(parameter, _Away)


def unguarded() -> Any:
    """Inside, what is harmless is asked of parameters without a look at what it is."""
    return torch._C.DisableTorchFunctionSubclass()
