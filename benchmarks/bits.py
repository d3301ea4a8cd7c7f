"""One digest in every cell: worlds 1 to 8, four strategies, two transports; straight, uneven, rehosted, resized.

python -m benchmarks.bits
python -m benchmarks.bits --worlds 1,3,5

Each run trains a small transformer with dropout, tied weights, weighted losses, clipping and two optimizer
groups, and is compared with one rank under DDP after every step. Exits with 1 if a cell differs.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.helpers.cases import STRATEGIES, TRANSPORTS, Cell, Recipe, same_on_ranks, train

RECIPE = Recipe(steps=4, dropout=0.1, clip=0.05, weighted=True)
KINDS = ("straight", "uneven hosting", "rehosted in mid-run", "ranks resized in mid-run")


def cells_of(kind: str, world: int, strategy: str, transport: str, folder: Path) -> list[Cell]:
    """The runs that one cell of the table consists of, one after the other."""
    uneven = tuple(float(world - rank) for rank in range(world))
    if kind == "uneven hosting":
        return [Cell(world, strategy, transport, hosting=uneven)]
    if kind == "rehosted in mid-run":
        return [Cell(world, strategy, transport, rehost={1: uneven[::-1], 3: "even"})]
    if kind == "ranks resized in mid-run":
        left = folder / f"{world}-{strategy}-{transport}"
        other = 1 if world == 8 else world + 1
        first = Cell(other, strategy, transport, until=2, leaves=left)
        return [first, Cell(world, strategy, transport, follows=left)]
    return [Cell(world, strategy, transport)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--worlds", default="1,2,3,4,5,6,7,8")
    options = parser.parse_args()
    worlds = [int(world) for world in options.worlds.split(",")]
    (straight,) = same_on_ranks([Cell(1, "ddp")], train, RECIPE)
    print(f"digest of one rank under ddp after {RECIPE.steps} steps: {straight[-1]}")
    num_same = num_cells = 0
    for kind in KINDS:
        print(f"\n{kind:26s}" + "".join(f"{f'{s}, {t}':>16s}" for s in STRATEGIES for t in TRANSPORTS))
        for world in worlds:
            row = ""
            with tempfile.TemporaryDirectory() as folder:
                ways = [(s, t) for s in STRATEGIES for t in TRANSPORTS]
                chains = [cells_of(kind, world, s, t, Path(folder)) for s, t in ways]
                found = iter(same_on_ranks([cell for chain in chains for cell in chain], train, RECIPE))
                for chain in chains:
                    digests = [digest for _ in chain for digest in next(found)]
                    num_same += digests == straight
                    num_cells += 1
                    row += f"{'same' if digests == straight else 'DIFFERENT':>16s}"
            print(f"  {world} rank(s)".ljust(26) + row, flush=True)
    print(f"\n{num_same} of {num_cells} cells have the bits of one rank under ddp, after every step.")
    sys.exit(0 if num_same == num_cells else 1)


if __name__ == "__main__":
    main()
