"""How far a fit is, for the person before the screen: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SECONDS_BETWEEN_LINES = 10.0

Advance = Callable[[int, float], None]
"""Called after every step with the number of steps done and the last loss that is known."""


@contextmanager
def progress(first: int, total: int, is_shown: bool) -> Iterator[Advance]:
    """Show the steps from `first` to `total`."""
    if not is_shown or first >= total:
        yield _say_nothing
    elif sys.stderr.isatty():
        with _bar(first, total) as advance:
            yield advance
    else:
        yield _Lines(total)


@contextmanager
def _bar(first: int, total: int) -> Iterator[Advance]:
    from rich import progress as rich  # here, because most ranks never show a bar
    from rich.console import Console

    columns = (
        rich.TextColumn("steps"),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TextColumn("loss {task.fields[loss]:.4f}"),
        rich.TimeElapsedColumn(),
        rich.TimeRemainingColumn(),
    )
    with rich.Progress(*columns, console=Console(file=sys.stderr)) as bar:
        task = bar.add_task("", total=total, completed=first, loss=float("nan"))
        yield lambda done, loss: bar.update(task, completed=done, loss=loss)


class _Lines:
    """Writes a line for the first step, the last, and one in a while between."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._due = 0.0

    def __call__(self, done: int, loss: float) -> None:
        now = time.monotonic()
        if now >= self._due or done == self._total:
            self._due = now + _SECONDS_BETWEEN_LINES
            print(f"lanewise: step {done}/{self._total}  loss {loss:.4f}", file=sys.stderr, flush=True)


def _say_nothing(done: int, loss: float) -> None:
    pass
