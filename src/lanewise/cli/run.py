"""`lanewise run`: launch a script on several ranks of this host."""

from typing import Annotated

import typer

from lanewise.cli import options
from lanewise.cli.show import fail


def run(
    script: options.Script,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ARGS]...", help="What your script is given.", show_default=False),
    ] = None,
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
    reduction: options.Reduction = None,
    exchange: options.Exchange = None,
    micro_batches: options.MicroBatches = None,
    seed: options.Seed = None,
    nonfinite: options.NonFinite = None,
    hosting: Annotated[
        str | None,
        typer.Option(
            metavar="even|WEIGHTS",
            help="Lanes of each rank: 'even', or a weight a rank such as 2,1,1.",
            show_default=False,
        ),
    ] = None,
    threads: options.Threads = None,
    timeout: options.Timeout = None,
    port: Annotated[
        int | None, typer.Option(help="Where ranks meet on this host.", show_default="a free one")
    ] = None,
) -> None:
    """Run a script on several ranks of this host.

    Settings given here replace those in the script's lw.start(...), with a notice, so that one script runs in
    every way without an edit. Options for the script itself stand after its name.
    """
    from lanewise.run import launch

    overrides = options.given(
        strategy=strategy,
        lanes=lanes,
        precision=precision,
        moments=moments,
        reduction=reduction,
        exchange=exchange,
        micro_batches=micro_batches,
        seed=seed,
        nonfinite=nonfinite,
        hosting=launch.parse_hosting(hosting),
        threads=threads,
        timeout=timeout,
    )
    job = launch.Job(script, tuple(arguments or ()), ranks, overrides, port)
    launch.check(job, "lanewise run")
    from lanewise.run import elastic

    outcome = elastic.run(job)
    if outcome.interrupted_by:
        fail(f"stopped by {outcome.interrupted_by}; all ranks have ended.")
    elif not outcome.is_good:
        if outcome.first is not None:
            typer.echo(outcome.first.traceback, err=True, nl=False)
        fail(outcome.describe())
    raise typer.Exit(outcome.exit_code)
