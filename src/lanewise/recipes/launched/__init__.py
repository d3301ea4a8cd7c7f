"""The script that ranks run for a recipe. A folder of its own, because a script's folder leads its import path."""

from pathlib import Path


def script(recipe: str) -> tuple[str, tuple[str, ...]]:
    """A script and its arguments that train a recipe, for everything that launches scripts."""
    return str(Path(__file__).with_name("train_recipe.py")), (str(Path(recipe).resolve()),)
