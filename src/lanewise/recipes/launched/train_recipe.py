"""The script that `lanewise train` runs on every rank, with the path of a recipe as its argument."""

import sys
from functools import partial
from pathlib import Path

from lanewise.recipes.recipe import read
from lanewise.recipes.train import train

if __name__ == "__main__":
    path = Path(sys.argv[1])
    train(read(path), path.resolve().parent, partial(print, flush=True))
