"""Options that several commands have. Their values are checked by `lanewise.config`, all at once."""

from typing import Annotated

import typer

Script = Annotated[str, typer.Argument(metavar="SCRIPT.py", help="Your training script.", show_default=False)]
Lanes = Annotated[
    int | None, typer.Option(help="Lanes of a step. Part of the run's identity.", show_default=False)
]
Seed = Annotated[int | None, typer.Option(help="What all randomness starts from.", show_default=False)]
Precision = Annotated[
    str | None, typer.Option(metavar="model|fp32|bf16|fp16", help="What is computed in.", show_default=False)
]
Moments = Annotated[
    str | None,
    typer.Option(metavar="fp32|bf16", help="What the optimizer's state is kept in.", show_default=False),
]
Reduction = Annotated[
    str | None, typer.Option(metavar="exact|native", help="Whose sum of gradients.", show_default=False)
]
MicroBatches = Annotated[
    int | None, typer.Option(help="Parts that a lane computes its batch in.", show_default=False)
]
NonFinite = Annotated[
    str | None,
    typer.Option(metavar="raise|skip|ignore", help="What to do with NaN gradients.", show_default=False),
]
Exchange = Annotated[
    str | None,
    typer.Option(metavar="auto|shared|gloo|nccl", help="How ranks exchange.", show_default=False),
]
Threads = Annotated[int | None, typer.Option(help="CPU threads of each rank.", show_default=False)]
Timeout = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="How long to wait for a rank.", show_default=False)
]


def given(**values: object) -> dict[str, object]:
    """The settings that were given on the command line."""
    return {name: value for name, value in values.items() if value is not None}
