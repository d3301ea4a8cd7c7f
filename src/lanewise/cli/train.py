"""`lanewise train`: train what a recipe says, without a line of Python."""

from typing import Annotated

import typer

from lanewise.cli import options
from lanewise.cli.show import fail


def train(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE.toml", help="What to train.", show_default=False)],
    ranks: Annotated[
        int | None, typer.Option(help="Processes to start.", show_default="one a GPU, or 1")
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(metavar="ddp|zero1|zero2|zero3", help="What each rank keeps.", show_default=False),
    ] = None,
    lanes: options.Lanes = None,
    precision: options.Precision = None,
    moments: options.Moments = None,
    exchange: options.Exchange = None,
    seed: options.Seed = None,
    threads: options.Threads = None,
    timeout: options.Timeout = None,
) -> None:
    """Train what a recipe says on ranks of this host. Settings given here replace those of its run section."""
    from pathlib import Path

    from lanewise.recipes import launched
    from lanewise.recipes.recipe import read
    from lanewise.run import launch

    read(Path(recipe))
    overrides = options.given(
        strategy=strategy,
        lanes=lanes,
        precision=precision,
        moments=moments,
        exchange=exchange,
        seed=seed,
        threads=threads,
        timeout=timeout,
    )
    job = launch.Job(*launched.script(recipe), ranks=ranks, overrides=overrides)
    launch.check(job, "lanewise train")
    from lanewise import errors
    from lanewise.run import elastic

    outcome = elastic.run(job)
    if outcome.interrupted_by:
        fail(f"stopped by {outcome.interrupted_by}; all ranks have ended.")
    elif outcome.first is not None and outcome.first.kind in vars(errors):
        fail(outcome.first.message)
    elif not outcome.is_good:
        typer.echo(outcome.first.traceback if outcome.first is not None else "", err=True, nl=False)
        fail(outcome.describe())
    raise typer.Exit(outcome.exit_code)
