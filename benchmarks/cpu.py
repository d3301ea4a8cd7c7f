"""Step time on CPU ranks of one host, over the same ranks without communication.

python -m benchmarks.cpu --size 25M --micro-batch 1
python -m benchmarks.cpu --base "lanewise ddp, gloo, native" --engines "lanewise ddp, gloo" --world 3
"""

import argparse

from benchmarks.case import Case
from benchmarks.engines import ENGINES
from benchmarks.harness import race


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", default="25M")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--lanes-per-rank", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--base", default="floor", help="what the others are measured over")
    parser.add_argument("--engines", default="", help="names separated by semicolons; all without it")
    options = parser.parse_args()
    case = Case(options.size, options.micro_batch, options.world, options.lanes_per_rank)
    wanted = [name.strip() for name in options.engines.split(";") if name.strip()] or list(ENGINES)
    if unknown := sorted({*wanted, options.base} - set(ENGINES)):
        parser.error(f"unknown engines {unknown}; known are {list(ENGINES)}")
    engines = [options.base, *(name for name in wanted if name != options.base)]
    results = race(engines, case, options.rounds, options.steps)
    print(f"{case}; medians of {options.rounds} rounds, ratios to {options.base!r} in the same round")
    for engine, values in results.items():
        print(f"  {engine:40s} {values['ms']:9.1f} ms   {values['ratio']:.3f}")


if __name__ == "__main__":
    main()
