"""A csv file as a data set of numbers, categories and classes. What does not fit is named by line and column."""

import csv
import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from lanewise.errors import DataError
from lanewise.recipes import recipe
from lanewise.recipes.split import split

UNKNOWN = 0
"""The number of a category that no training row has."""


@dataclass(frozen=True)
class Rows:
    """A table as tensors, and what its numbers mean."""

    train: TensorDataset
    valid: TensorDataset | None
    numbers: tuple[str, ...]
    """The columns of numbers."""
    mean: torch.Tensor
    deviation: torch.Tensor
    categories: dict[str, tuple[str, ...]]
    """The values of each categorical column; the first is number 1."""
    classes: tuple[str, ...]


def read(data: recipe.Table, folder: Path, seed: int) -> Rows:
    """Read a csv file and cut it in two. Statistics and categories come from the rows that are trained on."""
    file = folder / Path(data.file).expanduser()
    header, lines, rows = _cells(file, data.delimiter)
    _check_columns(file, header, data)
    left_out = {data.label, *data.categorical, *data.ignore}
    numbers = tuple(name for name in header if name not in left_out)
    if not numbers and not data.categorical:
        raise DataError(f"{file}: no column is left to learn from. Take some out of data.ignore.")
    values = torch.empty(len(rows), len(numbers), dtype=torch.float64)
    for place, name in enumerate(numbers):
        column = header.index(name)
        for row, (line, cells) in enumerate(zip(lines, rows, strict=True)):
            values[row, place] = _number(cells[column], file, line, name, data.missing)
    labels = [cells[header.index(data.label)] for cells in rows]
    for line, label in zip(lines, labels, strict=True):
        if not label:
            raise DataError(f"{file}, line {line}: the label column {data.label!r} is empty.")
    classes = tuple(sorted(set(labels)))
    if len(classes) < 2:
        raise DataError(
            f"{file}: the label column {data.label!r} has {len(classes)} class(es), {', '.join(classes)}; a classifier "
            "needs two or more."
        )
    chosen, held = split(len(rows), data.valid, seed, str(file))
    columns = {name: [cells[header.index(name)] for cells in rows] for name in data.categorical}
    known = {name: tuple(sorted({column[row] for row in chosen})) for name, column in columns.items()}
    codes = torch.zeros(len(rows), len(known), dtype=torch.int64)
    for place, name in enumerate(known):
        code_of = {value: number + 1 for number, value in enumerate(known[name])}
        codes[:, place] = torch.tensor([code_of.get(value, UNKNOWN) for value in columns[name]])
    targets = torch.tensor([classes.index(label) for label in labels])
    mean, deviation = _statistics(values[chosen], numbers, file)
    tensors = (values.float(), codes, targets)
    return Rows(
        train=TensorDataset(*(tensor[chosen] for tensor in tensors)),
        valid=TensorDataset(*(tensor[held] for tensor in tensors)) if held else None,
        numbers=numbers,
        mean=mean,
        deviation=deviation,
        categories=known,
        classes=classes,
    )


def _cells(file: Path, delimiter: str) -> tuple[list[str], list[int], list[list[str]]]:
    """The header, and the cells of each row with the line where the row ends."""
    lines: list[int] = []
    rows: list[list[str]] = []
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.reader(stream, delimiter=delimiter, strict=True)
            for cells in reader:
                if cells:
                    lines.append(reader.line_num)
                    rows.append([cell.strip() for cell in cells])
    except FileNotFoundError as error:
        raise DataError(
            f"data.file: there is no {file}. Paths are relative to the folder of the recipe."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"data.file: {file} cannot be read as UTF-8 text: {error}.") from error
    except csv.Error as error:
        raise DataError(f"{file}, line {reader.line_num}: not csv: {error}.") from error
    if len(rows) < 2:
        raise DataError(f"{file}: needs a header and at least one row, found {len(rows)} line(s) in all.")
    for line, cells in zip(lines, rows, strict=True):
        if len(cells) != len(rows[0]):
            raise DataError(
                f"{file}, line {line}: {len(cells)} cells, where the header has {len(rows[0])}. Every row needs one "
                f"cell a column; the delimiter is data.delimiter={delimiter!r}."
            )
    return rows[0], lines[1:], rows[1:]


def _check_columns(file: Path, header: Sequence[str], data: recipe.Table) -> None:
    """Report every name that does not fit, at once."""
    problems = [
        f"the header has two columns {name!r}" for name in sorted(set(header)) if header.count(name) > 1
    ]
    named = [("label", data.label)]
    named += [("categorical", name) for name in data.categorical]
    named += [("ignore", name) for name in data.ignore]
    for key, name in named:
        if name not in header:
            close = difflib.get_close_matches(name, header, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"the header has {', '.join(header)}."
            problems.append(f"data.{key}: there is no column {name!r}; {hint}")
        if [other for _, other in named].count(name) > 1 and (key, name) != named[0]:
            problems.append(
                f"data.{key}: column {name!r} is named more than once in label, categorical and ignore"
            )
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in dict.fromkeys(problems))
        raise DataError(f"{file}: the columns are not as the recipe says:{listed}")


def _number(cell: str, file: Path, line: int, column: str, missing: str) -> float:
    where = f"{file}, line {line}, column {column!r}"
    if not cell:
        if missing == "mean":
            return math.nan
        raise DataError(
            f"{where}: the cell is empty. Fill it in, or count it as the column's mean: data.missing='mean'."
        )
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or "_" in cell:
        raise DataError(
            f"{where}: must be a finite number, found {cell!r}. Name the column in data.categorical if its values are "
            "names, or in data.ignore to leave it out."
        )
    return value


def _statistics(values: torch.Tensor, names: Sequence[str], file: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of each column, without its empty cells."""
    for place, name in enumerate(names):
        if bool(values[:, place].isnan().all()):
            raise DataError(f"{file}: column {name!r} has no number in the rows that are trained on.")
    mean = values.nanmean(dim=0)
    deviation = (values - mean).square().nanmean(dim=0).sqrt()
    return mean.float(), torch.where(deviation > 0, deviation, torch.ones_like(deviation)).float()
