"""`lanewise ckpt`: what is in the generations of a folder, and whether it is whole."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

ckpt = typer.Typer(
    help="Look at saved generations: list, show, verify, compare, prune, export.", no_args_is_help=True
)
Folder = Annotated[
    Path, typer.Argument(help="A folder of generations, or one generation.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _generations(folder: Path) -> list[Path]:
    from lanewise.errors import StateError
    from lanewise.state import load, manifest

    if manifest.is_generation(folder.name):
        return [folder]
    found = [folder / name for name in load.generations(folder)]
    if not found:
        raise StateError(f"{folder} has no generation (a folder such as step-000000012).")
    return found


def _print(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))


@ckpt.command("ls")
def ls(folder: Folder, as_json: Json = False) -> None:
    """List generations, the newest first. Damaged ones are listed with what is wrong with their manifest."""
    from lanewise.errors import StateError
    from lanewise.state.inspect import Generation

    rows: list[dict[str, Any]] = []
    for path in _generations(folder):
        try:
            found = Generation(path).manifest
            size = sum(file.num_bytes for file in found.files.values())
            rows.append({"name": path.name, "bytes": size, "digest": found.digest})
        except StateError as error:
            rows.append({"name": path.name, "damaged": str(error)})
    _print(rows, as_json)


@ckpt.command("show")
def show(folder: Folder, as_json: Json = False) -> None:
    """Show what the newest generation (or the one named) says of itself, and its tensors."""
    from lanewise.state.inspect import Generation

    generation = Generation(_generations(folder)[0])
    found = generation.manifest
    facts: dict[str, Any] = {
        "step": found.step, "lanes": found.lanes, "settings": found.settings, "optimizer": found.optimizer,
        "groups": list(found.groups), "versions": found.versions, "digest": found.digest, "extra": found.extra["user"],
    }  # fmt: skip
    tensors = [
        {"tensor": name, "type": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        for name, tensor in generation.tensors()
    ]
    if as_json:
        print(json.dumps({**facts, "tensors": tensors}, indent=1))
        return
    for key, value in facts.items():
        print(f"{key:10s} {value}")
    _print(tensors, as_json=False)


@ckpt.command("verify")
def verify(folder: Folder, as_json: Json = False) -> None:
    """Read every byte, compare all hashes, and compute the digests again. Exits with 1 if one differs."""
    from lanewise.errors import StateError
    from lanewise.state.inspect import Generation

    rows: list[dict[str, Any]] = []
    for path in _generations(folder):
        try:
            generation = Generation(path)
            generation.verify()
            rows.append({"name": path.name, "is": "whole", "digest": generation.manifest.digest})
        except StateError as error:
            rows.append({"name": path.name, "is": "damaged", "why": str(error)})
    _print(rows, as_json)
    if any(row["is"] == "damaged" for row in rows):
        raise typer.Exit(1)


@ckpt.command("diff")
def diff(one: Folder, other: Folder, as_json: Json = False) -> None:
    """Name the tensors that two generations have otherwise, with how much. Exits with 1 if there are any."""
    from dataclasses import asdict

    from lanewise.state.inspect import Generation, differences

    pair = [Generation(_generations(folder)[0]) for folder in (one, other)]
    rows = [asdict(found) for found in differences(*pair)]
    _print(rows, as_json)
    if rows:
        raise typer.Exit(1)
    if not as_json:
        print("all tensors are the same, bit for bit but for the sign of zeros and the kind of NaN")


@ckpt.command("prune")
def prune(
    folder: Folder,
    keep_last: Annotated[int, typer.Option(help="How many of the newest stay.")],
    keep_every: Annotated[
        int | None, typer.Option(help="Of older ones, those of every so many steps stay.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Remove older generations. Nothing goes unless the newest is whole; damaged ones are left alone."""
    from lanewise.state import load, retain

    gone = retain.prune(folder, load.generations(folder), keep_last, keep_every)
    _print([{"removed": name} for name in gone], as_json)


@ckpt.command("export")
def export(
    generation: Folder, target: Annotated[Path, typer.Argument(help="A new folder.")], as_json: Json = False
) -> None:
    """Write parameters and buffers as safetensors with an index, as Hugging Face's from_pretrained reads them."""
    from lanewise.state.export import export as write
    from lanewise.state.inspect import Generation

    paths = write(Generation(_generations(generation)[0]), target)
    _print([{"written": str(path)} for path in paths], as_json)
