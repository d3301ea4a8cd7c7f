"""Everything reportable, as frozen dataclasses, and the chain of callables that receives them."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Notice:
    """Something the user should know, once."""

    text: str


@dataclass(frozen=True)
class Table:
    """Rows for a person to read, with a title."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class StepDone:
    """A step was committed (or skipped, because its gradient was not finite)."""

    step: int
    loss: float
    grad_norm: float | None
    skipped: bool


@dataclass(frozen=True)
class Scalars:
    """The user's own values, given to `run.log`."""

    step: int
    values: dict[str, float]


Event = Notice | Table | StepDone | Scalars
Sink = Callable[[Event], None]


@dataclass
class Reporter:
    """Hands each event to every sink. A rank that does not speak has no sinks."""

    sinks: list[Sink] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        """Hand on one event."""
        for sink in self.sinks:
            sink(event)


def console(event: Event) -> None:
    """Write notices, tables and the user's scalars to stderr, as plain lines."""
    if isinstance(event, Notice):
        lines = [f"lanewise: {event.text}"]
    elif isinstance(event, Scalars):
        lines = [f"step {event.step}  " + "  ".join(f"{k}={v:.6g}" for k, v in event.values.items())]
    elif isinstance(event, Table):
        widths = [max(len(row[n]) for row in (event.columns, *event.rows)) for n in range(len(event.columns))]
        lines = [f"lanewise: {event.title}"]
        for row in (event.columns, *event.rows):
            lines.append(
                "  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
            )
    else:
        return
    print("\n".join(lines), file=sys.stderr, flush=True)
