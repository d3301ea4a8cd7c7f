"""How a proof looks to a person: a table that fills while it runs, and what it came to in words."""

import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lanewise.run.prove import Cell, Difference, Report, Result

_DIGITS = 12
_UNREPEATABLE = "The same cell, run again, does not give the same bits. "


class ProofView:
    """The table of a proof. While it runs it is drawn on stderr, if that is a terminal."""

    def __init__(self, cells: Sequence[Cell], steps: int) -> None:
        self._cells = cells
        self._steps = steps
        self._results: dict[Cell, Result] = {}
        self._now: tuple[Cell, int] | None = None
        self._live = Live(
            console=Console(stderr=True), get_renderable=self.table, auto_refresh=False, transient=True
        )

    def __enter__(self) -> "ProofView":
        if self._live.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._now = None
        self._live.stop()

    def progress(self, cell: Cell, done: int) -> None:
        """A cell has made so many steps."""
        self._now = (cell, done)
        if self._live.is_started:
            self._live.refresh()

    def tell(self, result: Result) -> None:
        """A cell has come to its end."""
        self._results[result.cell] = result
        self._now = None

    def table(self) -> Table:
        """Worlds down, strategies across, the digest of each cell."""
        worlds = list(dict.fromkeys(cell.world for cell in self._cells))
        strategies = list(dict.fromkeys(cell.strategy for cell in self._cells))
        table = Table("ranks", *strategies)
        for world in worlds:
            table.add_row(str(world), *(self._entry(Cell(world, strategy)) for strategy in strategies))
        return table

    def _entry(self, cell: Cell) -> Text:
        if self._now is not None and self._now[0] == cell:
            return Text(f"{self._now[1]}/{self._steps} …", style="dim")
        result = self._results.get(cell)
        if result is None:
            return Text("")
        style = "green" if result.differs_at is None else "red"
        return Text(result.digest[:_DIGITS], style=style)


def verdict(report: Report) -> str:
    """What a proof came to, in words."""
    num = len(report.results)
    if report.difference is None:
        return f"same bits: {num} cells, {report.steps} steps, one digest after each step."
    differing = [result for result in report.results if result.differs_at is not None]
    lines = [f"different bits: {len(differing)} of {num} cells differ from {report.results[0].cell}."]
    return "\n".join([*lines, *_describe(report.difference)])


def _describe(found: Difference) -> list[str]:
    when = "before the first step" if found.step is None else f"step {found.step}"
    unit = f"unit {found.unit!r}, " if found.unit else ""
    lane = "" if found.lane is None else f", lane {found.lane}"
    more = f" ({found.num_parameters} parameters and buffers differ)" if found.num_parameters > 1 else ""
    rows = [("", *(side.name for side in found.sides))]
    rows += [(key, *(side.values[key] for side in found.sides)) for key in found.sides[0].values]
    left, middle = (max(len(row[column]) for row in rows) for column in (0, 1))
    return [
        f"first: {when}, {unit}parameter {found.parameter!r}{lane}{more}",
        *(f"  {row[0].ljust(left)}  {row[1].ljust(middle)}  {row[2]}" for row in rows),
        *textwrap.wrap(f"{'' if found.is_repeatable else _UNREPEATABLE}{found.explanation}", 100),
    ]
