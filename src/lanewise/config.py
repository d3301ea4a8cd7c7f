"""The settings of a run: one frozen object, made once, before torch is touched."""

import difflib
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from numbers import Real
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from lanewise.errors import SettingsError

Strategy = Literal["ddp", "zero1", "zero2", "zero3"]
Reduction = Literal["exact", "native"]
Precision = Literal["model", "fp32", "bf16", "fp16"]
Moments = Literal["fp32", "bf16"]
NonFinite = Literal["raise", "skip", "ignore"]
ExchangeKind = Literal["auto", "shared", "gloo", "nccl"]


def check_hosting(value: object) -> object:
    """Refuse what is neither the word nor a list of numbers, in one sentence."""
    is_word = isinstance(value, str)
    is_list = not is_word and isinstance(value, Collection) and all(isinstance(item, Real) for item in value)
    if not is_list and value != "even":
        raise ValueError(f"must be 'even' or a list with a weight for each rank, found {value!r}")
    return value


Positive = Annotated[int, Field(ge=1, strict=True)]

STRATEGIES: tuple[Strategy, ...] = ("ddp", "zero1", "zero2", "zero3")


@dataclass(frozen=True)
class Settings:
    """What a run is told. `lanes`, `seed`, `precision`, `moments`, `micro_batches` are part of its
    identity; the others never change a bit of an exact run.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    lanes: Positive = 8
    strategy: Strategy = "ddp"
    seed: Annotated[int, Field(ge=0, lt=2**63, strict=True)] = 0
    reduction: Reduction = "exact"
    precision: Precision = "model"
    moments: Moments = "fp32"
    micro_batches: Positive = 1
    nonfinite: NonFinite = "raise"
    exchange: ExchangeKind = "auto"
    hosting: Annotated[Literal["even"] | tuple[float, ...], BeforeValidator(check_hosting)] = "even"
    threads: Annotated[int, Field(ge=1, le=1024, strict=True)] = 1
    timeout: Annotated[timedelta, Field(gt=timedelta(0))] = timedelta(seconds=30)
    allow_mixed: bool = False

    def __post_init__(self) -> None:
        if self.reduction == "native" and self.exchange == "shared":
            raise ValueError(
                "reduction='native' is the backend's own sum and needs a backend: use exchange='gloo' or 'nccl'"
            )


_T = TypeVar("_T")


def parse(kind: type[_T], values: Mapping[str, Any], where: str) -> _T:
    """Make a settings object from untrusted values, reporting every problem at once."""
    try:
        return TypeAdapter(kind).validate_python(dict(values))
    except ValidationError as error:
        problems = [_problem(kind, item) for item in error.errors()]
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise SettingsError(f"{where}: {len(problems)} problem(s):\n{lines}") from error


def settings(script: Mapping[str, Any], launcher: Mapping[str, Any]) -> tuple[Settings, tuple[str, ...]]:
    """The script's settings with the launcher's over them, and a notice for each that the launcher changed."""
    parse(Settings, script, "lw.start")
    chosen = parse(Settings, {**script, **launcher}, "the launcher's settings over lw.start's")
    before = asdict(parse(Settings, script, "lw.start"))
    after = asdict(chosen)
    notices = tuple(
        f"{name}={after[name]!r} from the launcher replaces the script's {before[name]!r}"
        for name in launcher
        if after[name] != before[name]
    )
    return chosen, notices


def _problem(kind: type, item: Any) -> str:
    path = ".".join(
        str(part) for part in item["loc"] if not str(part).startswith(("literal", "tuple", "function"))
    )
    if item["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        owner = _owner_of(kind, item["loc"])
        names = [f.name for f in fields(owner)] if owner else []
        close = difflib.get_close_matches(str(item["loc"][-1]), names, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(sorted(names))}."
        return f"{path}: unknown key; {hint}"
    message = _WORDS.get(item["type"], item["msg"])
    message = message.removeprefix("Value error, ").replace("Input should", "must")
    found = item["input"]
    said = f"{found.total_seconds():g} s" if isinstance(found, timedelta) else repr(found)
    message += "" if item["type"] in ("missing", "value_error") else f", found {said}"
    if item["type"] == "literal_error":
        known = re.findall("'([^']*)'", item["ctx"]["expected"])
        close = difflib.get_close_matches(str(item["input"]), known, n=1)
        message += f"; did you mean {close[0]!r}?" if close else ""
    return f"{path}: {message}" if path else message


_WORDS = {
    "missing": "is missing",
    "dataclass_type": "must be a section of keys and values",
    "tuple_type": "must be a list",
    "too_short": "has too few items",
    "too_long": "has too many items",
}
"""Words of our own where pydantic speaks of Python's types."""


def _owner_of(kind: type, location: tuple[Any, ...]) -> Any:
    """The dataclass that should have had the key at `location`."""
    owner: Any = kind
    for part in location[:-1]:
        member = next((f for f in fields(owner) if f.name == part), None)
        if member is None or not hasattr(member.type, "__dataclass_fields__"):
            continue
        owner = member.type
    return owner
