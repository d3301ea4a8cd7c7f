"""`lanewise prove`: run a script in every way and compare bits."""

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from lanewise.cli import options


def prove(
    script: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT.py|RECIPE.toml", help="Your training script, or a recipe.", show_default=False
        ),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- ARGS]...",
            help="What your script is given. Its own options go after --.",
            show_default=False,
        ),
    ] = None,
    worlds: Annotated[str, typer.Option(metavar="NUMBERS", help="Numbers of ranks.")] = "1,2,3,5",
    strategies: Annotated[str, typer.Option(metavar="NAMES", help="Strategies.")] = "ddp,zero1,zero2,zero3",
    steps: Annotated[int, typer.Option(help="Steps to compare.")] = 20,
    lanes: options.Lanes = None,
    precision: options.Precision = None,
    moments: options.Moments = None,
    reduction: options.Reduction = None,
    exchange: options.Exchange = None,
    micro_batches: options.MicroBatches = None,
    seed: options.Seed = None,
    nonfinite: options.NonFinite = None,
    threads: options.Threads = None,
    timeout: options.Timeout = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Run a script or recipe with every number of ranks and every strategy, and compare bits after every step.

    Ends with 0 if they are the same everywhere, else with 1 and the first step, unit, parameter and lane that
    differ. The script is ended after the last step that is compared.
    """
    from rich.console import Console
    from rich.text import Text

    from lanewise.errors import ProofError
    from lanewise.recipes import launched
    from lanewise.recipes.recipe import read
    from lanewise.run import launch
    from lanewise.run import prove as proof

    settings = options.given(
        lanes=lanes,
        precision=precision,
        moments=moments,
        reduction=reduction,
        exchange=exchange,
        micro_batches=micro_batches,
        seed=seed,
        nonfinite=nonfinite,
        threads=threads,
        timeout=timeout,
    )
    is_recipe = script.endswith(".toml")
    if is_recipe:
        read(Path(script))
    runs, given = launched.script(script) if is_recipe else (script, tuple(arguments or ()))
    job = launch.Job(runs, given, overrides=settings)
    launch.check(job, "lanewise prove")
    cells = proof.plan(worlds, strategies, steps)
    from lanewise.cli.proof_view import ProofView, verdict
    from lanewise.run.cells import Cells

    view = ProofView(cells, steps)
    try:
        with view, Cells(view.progress, threads or 1) as running:
            report = proof.prove(cells, steps, partial(running.run, job), view.tell)
    except ProofError as error:
        if not as_json:
            raise
        print(json.dumps({"verdict": "failed", "error": str(error)}))
        raise typer.Exit(1) from error
    if as_json:
        print(json.dumps({"verdict": "same" if report.is_same else "different", **asdict(report)}))
    else:
        Console().print(view.table(), Text(verdict(report)), soft_wrap=True)
    raise typer.Exit(0 if report.is_same else 1)
