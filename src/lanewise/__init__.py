"""Lanewise: the same bits on any number of ranks, with any strategy.

Names are imported when they are used, so that ``import lanewise`` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lanewise import errors
from lanewise.version import __version__

if TYPE_CHECKING:
    from lanewise import metrics
    from lanewise.run.session import Run
    from lanewise.run.start import start

_WHERE = {"Run": "lanewise.run.session", "start": "lanewise.run.start"}
_MODULES = ("metrics",)

__all__ = ["Run", "__version__", "errors", "metrics", "start"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"lanewise.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module 'lanewise' has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
