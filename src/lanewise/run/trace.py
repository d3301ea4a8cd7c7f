"""What a recorded run has left in its folder, read back. Imports no torch; `record` writes it."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEPS = "steps.jsonl"
LANES = "lanes-"
"""What the names of the files begin with in which each rank describes its lanes."""


@dataclass(frozen=True)
class Point:
    """The state of a run after so many steps."""

    steps: int
    digest: str
    parameters: Mapping[str, str]
    """A hash of each parameter with its optimizer state, and of each buffer."""


@dataclass(frozen=True)
class Lane:
    """One lane of one step, as the rank that computed it saw it."""

    rank: int
    batch: str
    loss: str
    gradients: Mapping[str, str]
    """A hash and the norm of each parameter's gradient."""


@dataclass(frozen=True)
class Trace:
    """What a run went through."""

    points: tuple[Point, ...]
    units: Mapping[str, str]
    """The unit of each parameter, in the order of the model."""
    lanes: Mapping[tuple[int, int], Lane]
    """By step and lane, where details were recorded."""

    @property
    def steps(self) -> int:
        """How many steps it made."""
        return len(self.points) - 1


def num_steps(folder: Path) -> int:
    """How many steps a run has recorded up to now; -1 before it came to its first."""
    path = folder / STEPS
    return path.read_bytes().count(b"\n") - 1 if path.exists() else -1


def has_started(folder: Path) -> bool:
    """Whether the script has called lw.start."""
    return (folder / STEPS).exists()


def read(folder: Path) -> Trace:
    """What was recorded in a folder."""
    lines = list(_lines(folder / STEPS))
    points = tuple(Point(line["step"], line["digest"], line["parameters"]) for line in lines)
    units = lines[0]["units"] if lines else {}
    lanes = {}
    for path in folder.glob(f"{LANES}*"):
        for line in _lines(path):
            lanes[line["step"], line["lane"]] = Lane(
                line["rank"], line["batch"], line["loss"], line["gradients"]
            )
    return Trace(points, units, lanes)


def _lines(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)
