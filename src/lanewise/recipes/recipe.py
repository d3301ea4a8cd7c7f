"""What stands in a recipe: one frozen dataclass for each section, read from TOML. Imports no torch.

Every key that is unknown and every value that is wrong is reported, all of them at once, before anything
is started. Whether the data is as the recipe says is found out by those who read it.
"""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import ConfigDict, Field

from lanewise.config import Settings, parse
from lanewise.errors import SettingsError

Task = Literal["gpt", "table", "images"]
TASKS: tuple[Task, ...] = get_args(Task)

Count = Annotated[int, Field(ge=1, strict=True)]
CountOrNone = Annotated[int, Field(ge=0, strict=True)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Portion = Annotated[float, Field(ge=0, lt=1, strict=True)]
Names = tuple[Annotated[str, Field(min_length=1)], ...]
Text = Annotated[str, Field(min_length=1)]


class _Section:
    """A section of a recipe takes only the keys that it knows."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class Gpt(_Section):
    """A decoder-only transformer over bytes."""

    width: Count = 256
    layers: Count = 4
    heads: Count = 4
    length: Count = 128
    """How many bytes it sees at a time."""
    dropout: Portion = 0.0

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width={self.width} must be a multiple of heads={self.heads}")


@dataclass(frozen=True)
class TextFiles(_Section):
    """The bytes of text files, one after the other in the order of their names."""

    files: Annotated[Names, Field(min_length=1)]
    """Paths or patterns, such as "texts/**/*.txt"."""
    valid: Portion = 0.05
    """The last part of the bytes, which is evaluated and not trained on."""


@dataclass(frozen=True)
class Perceptron(_Section):
    """Layers that connect everything with everything."""

    width: Count = 64
    layers: Count = 2
    dropout: Portion = 0.0


@dataclass(frozen=True)
class Table(_Section):
    """A csv file with a header. Columns are numbers unless they are named here."""

    file: Text
    label: Text
    """The column to predict; its values are classes."""
    categorical: Names = ()
    ignore: Names = ()
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = ","
    missing: Literal["refuse", "mean"] = "refuse"
    """What to do with an empty cell of a column of numbers."""
    valid: Portion = 0.2
    """The part of the rows that is evaluated and not trained on."""


@dataclass(frozen=True)
class ConvNet(_Section):
    """Stages of convolutions, each with half the resolution and twice the channels of the one before."""

    width: Count = 16
    """Channels of the first stage."""
    stages: Count = 3
    dropout: Portion = 0.0


@dataclass(frozen=True)
class ImageFolder(_Section):
    """A folder with one sub-folder of images for each class."""

    folder: Text
    size: Count = 32
    """Images are scaled and cut to squares of so many pixels."""
    flip: Annotated[bool, Field(strict=True)] = False
    """Show training images mirrored, at random."""
    workers: CountOrNone = 0
    """Processes that load images ahead, on each rank."""
    valid: Portion = 0.2
    """The part of the images that is evaluated and not trained on."""


@dataclass(frozen=True)
class Optimizer(_Section):
    """Weights decay in matrices only, not in norms and biases."""

    kind: Literal["adamw", "adam", "sgd"] = "adamw"
    lr: Positive = 1e-3
    weight_decay: Amount = 0.0
    betas: tuple[Portion, Portion] | None = None
    momentum: Portion | None = None

    def __post_init__(self) -> None:
        if self.betas is not None and self.kind == "sgd":
            raise ValueError(
                "betas belong to adam and adamw, and kind is 'sgd'; use momentum, or leave them out"
            )
        if self.momentum is not None and self.kind != "sgd":
            raise ValueError(
                f"momentum belongs to sgd, and kind is {self.kind!r}; use betas, or leave it out"
            )


@dataclass(frozen=True)
class Schedule(_Section):
    """How the learning rate goes: up to `lr` in the first steps, then down to a fraction of it."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup: CountOrNone = 0
    """Steps on the way up."""
    end: Portion = 0.0
    """The fraction of the learning rate at the last step, for linear and cosine."""


@dataclass(frozen=True)
class Training(_Section):
    """How long, in which batches, and when to look."""

    batch_size: Count
    """Samples in a step, over all ranks."""
    steps: Count | None = None
    epochs: Count | None = None
    clip: Positive | None = None
    """The largest norm of a gradient."""
    evaluate_every: Count | None = None
    """Steps between evaluations; an epoch if nothing is said."""
    patience: Count | None = None
    """Stop after so many evaluations without a lower loss."""

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            found = "neither" if self.steps is None else "both"
            raise ValueError(f"give steps or epochs, one of them; found {found}")


@dataclass(frozen=True)
class Output(_Section):
    """What is left behind."""

    weights: Text | None = None
    """A safetensors file for the trained weights."""


@dataclass(frozen=True, kw_only=True)
class Recipe(_Section):
    """What recipes of all tasks have in common."""

    task: Task
    train: Training
    run: Settings = field(default_factory=Settings)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    output: Output = field(default_factory=Output)

    def check_together(self, valid: float) -> None:
        """Refuse sections that do not go together."""
        steps, warmup = self.train.steps, self.schedule.warmup
        if not valid and (self.train.patience is not None or self.train.evaluate_every is not None):
            key = "patience" if self.train.patience is not None else "evaluate_every"
            raise ValueError(f"train.{key} needs something to evaluate, and data.valid is 0")
        if steps is not None and warmup >= steps:
            raise ValueError(f"schedule.warmup={warmup} must be less than train.steps={steps}")


@dataclass(frozen=True, kw_only=True)
class GptRecipe(Recipe):
    """A GPT on the bytes of text files."""

    data: TextFiles
    model: Gpt = field(default_factory=Gpt)

    def __post_init__(self) -> None:
        self.check_together(self.data.valid)


@dataclass(frozen=True, kw_only=True)
class TableRecipe(Recipe):
    """A classifier on the rows of a csv file."""

    data: Table
    model: Perceptron = field(default_factory=Perceptron)

    def __post_init__(self) -> None:
        self.check_together(self.data.valid)


@dataclass(frozen=True, kw_only=True)
class ImageRecipe(Recipe):
    """A classifier on a folder of images."""

    data: ImageFolder
    model: ConvNet = field(default_factory=ConvNet)

    def __post_init__(self) -> None:
        self.check_together(self.data.valid)


@dataclass(frozen=True, kw_only=True)
class _AnyTask(Recipe):
    """A recipe whose task is not known, so that at least its other sections can be checked."""

    data: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)


KINDS: dict[Task, type[Recipe]] = {"gpt": GptRecipe, "table": TableRecipe, "images": ImageRecipe}


def read(path: Path) -> Recipe:
    """Read a recipe file. Every problem in it is reported at once."""
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError as error:
        raise SettingsError(f"there is no recipe {path}.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"the recipe {path} cannot be read as text: {error}.") from error
    return parse_text(text, str(path))


def parse_text(text: str, where: str) -> Recipe:
    """Make a recipe of TOML text; `where` is how messages call it."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{where} is not TOML: {error}.") from error
    task = values.get("task")
    return parse(KINDS[task] if task in TASKS else _AnyTask, values, where)
