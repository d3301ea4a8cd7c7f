"""The `lanewise` command: its subcommands, and how an error leaves it.

Imports neither torch nor pydantic; a command imports what it needs when it runs.
"""

import sys
from typing import Annotated

import typer

from lanewise.cli.ckpt import ckpt
from lanewise.cli.prove import prove
from lanewise.cli.run import run
from lanewise.cli.show import fail
from lanewise.cli.train import train
from lanewise.errors import LanewiseError, SettingsError
from lanewise.version import __version__

app = typer.Typer(
    name="lanewise",
    help="Train one PyTorch model on any number of ranks, with any strategy, to the same bits.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"lanewise {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


app.command(context_settings={"allow_interspersed_args": False})(run)
app.command()(train)
app.command()(prove)
app.add_typer(ckpt, name="ckpt")


def main() -> None:
    """Run the command line. A user's mistake is one red message: exit 2 for a wrong setting, else 1."""
    try:
        app()
    except LanewiseError as error:
        fail(str(error))
        sys.exit(2 if isinstance(error, SettingsError) else 1)
