"""How a command speaks to a person: on stderr, with the one red word that means it failed."""

import typer


def fail(message: str) -> None:
    """Say what went wrong."""
    mark = typer.style("error:", fg=typer.colors.RED, bold=True)
    typer.echo(f"{mark} {message}", err=True)
