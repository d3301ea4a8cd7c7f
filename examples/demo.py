"""The main job, started by `make demo`: one GPT, trained twice, with the same bits both times.

Three ranks with ZeRO-3 train examples/gpt.py on the sources of Python's standard library. Then one rank
with DDP trains it again from the beginning, and both must come to the same digest.
"""

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GPT = Path(__file__).with_name("gpt.py")
SIZE = ["--width", "384", "--layers", "4", "--length", "64", "--batch", "8"]
MB = 1e6


def main(steps: int, size: list[str]) -> int:
    began = time.monotonic()
    print("Lanewise trains one small GPT twice, on the sources of Python's standard library.")

    print("\n1. On three ranks with ZeRO-3: each keeps about a third of everything.\n")
    sharded = train(3, "zero3", steps, size)

    print("\n2. What that saves: for a few steps, three ranks with DDP, where each keeps everything.\n")
    replicated = train(3, "ddp", 3, size, quiet=True)
    compare_memory(sharded, replicated)

    print("\n3. On one rank with DDP, from the beginning: the same model, the same text, one process.\n")
    alone = train(1, "ddp", steps, size)

    same = sharded[0]["digest"] == alone[0]["digest"]
    print("\nThe digest is a hash of every parameter and of all that the optimizer remembers:\n")
    print(f"   3 ranks, ZeRO-3   {sharded[0]['digest']}")
    print(f"   1 rank, DDP       {alone[0]['digest']}")
    verdict = "The same bits." if same else "THE BITS DIFFER, and they must not."
    print(f"\n{verdict} {time.monotonic() - began:.0f} seconds in all.")
    return 0 if same else 1


def train(ranks: int, strategy: str, steps: int, size: list[str], quiet: bool = False) -> list[dict]:
    """Run examples/gpt.py, show its loss, and return what every rank reports."""
    launch = ["run", "--ranks", str(ranks), "--strategy", strategy]
    if not quiet:
        print(f"   $ lanewise {' '.join(launch)} examples/gpt.py --steps {steps} ...\n")
    with tempfile.TemporaryDirectory() as folder, Path(folder, "stderr").open("w+") as said:
        script = [str(GPT), *size, "--steps", str(steps), "--report", folder]
        command = [sys.executable, "-m", "lanewise", *launch, *script]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True)
        try:
            for line in process.stdout:
                if (found := re.match(r"step +(\d+) +loss (\S+)", line)) and not quiet:
                    bar = "\u2588" * round(float(found[2]) * 8)
                    print(f"   step {found[1]:>3}   loss {found[2]}   {bar}", flush=True)
            if process.wait() != 0:
                said.seek(0)
                sys.exit(f"{said.read()}\ndemo: lanewise {' '.join([*launch, *script])} failed.")
        finally:
            process.terminate()
            process.wait()
        return [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(ranks)]


def compare_memory(sharded: list[dict], replicated: list[dict]) -> None:
    """One row for each thing that memory is for: the mean of the ranks."""

    def show(title: str, of) -> float:
        mean = [sum(map(of, ranks)) / len(ranks) / MB for ranks in (sharded, replicated)]
        print(f"   {title:42} {mean[0]:8.1f} {mean[1]:8.1f}")
        return mean[1] / mean[0]

    print(f"   {'memory of a rank, in MB':42} {'ZeRO-3':>8} {'DDP':>8}")
    for kind in ("parameters", "gradients", "optimizer", "exchange"):
        show(f"  {kind}", lambda rank, kind=kind: rank["counted"][kind])
    counted = show("counted by Lanewise (run.memory())", lambda rank: sum(rank["counted"].values()))
    measured = show("measured by the kernel, with activations", lambda rank: rank["measured"])
    print(
        f"\n   DDP needs {counted:.2f} times as much as counted, {measured:.2f} times as measured (PSS, less that of"
    )
    print("   a process that has trained next to nothing; memory that ranks share counts in equal parts).")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--size", nargs=argparse.REMAINDER, default=SIZE, help="options of examples/gpt.py")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        sys.exit(main(options.steps, options.size))
    except KeyboardInterrupt:
        sys.exit("\ndemo: stopped; all ranks have ended.")
