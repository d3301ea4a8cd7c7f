"""The main job, started by `make demo`: one GPT, trained twice, with the same bits both times.

Three ranks with ZeRO-3 train examples/gpt.py on the sources of Python's standard library. Then one rank
with DDP trains it again from the beginning, and both must come to the same digest.
"""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TextIO

GPT = Path(__file__).with_name("gpt.py")
SIZE = ["--width", "384", "--layers", "4", "--heads", "4", "--length", "64", "--batch", "8"]
MB = 1e6


def main() -> int:
    began = time.monotonic()
    print("Lanewise: one GPT of 7 million parameters, trained twice on the sources of Python.\n")

    print(
        "1. Three ranks with ZeRO-3: each keeps about a third of the parameters, gradients and optimizer state.\n"
    )
    sharded = train(3, "zero3", steps=75)

    print("\n2. Three ranks with DDP, for a few steps: each keeps everything. Memory of a rank, in MB:\n")
    replicated = train(3, "ddp", steps=3, quiet=True)
    compare_memory(sharded, replicated)

    print("\n3. One rank with DDP, from the beginning: what a single process comes to.\n")
    alone = train(1, "ddp", steps=75)

    same = sharded[0]["digest"] == alone[0]["digest"]
    print(f"\n   ZeRO-3 on 3 ranks  {sharded[0]['digest']}")
    print(f"   DDP on 1 rank      {alone[0]['digest']}")
    print(
        "\nThe same bits: every parameter, and all of the optimizer's state."
        if same
        else "\nTHE BITS DIFFER."
    )
    print(f"{time.monotonic() - began:.0f} seconds in all.")
    return 0 if same else 1


def train(ranks: int, strategy: str, steps: int, quiet: bool = False) -> list[dict]:
    """Run examples/gpt.py, show its loss, and return what every rank reports."""
    with tempfile.TemporaryDirectory() as folder, Path(folder, "stderr").open("w+") as said:
        options = [*SIZE, "--strategy", strategy, "--steps", str(steps), "--report", folder]
        processes = launch(ranks, [sys.executable, str(GPT), *options], said)
        try:
            for line in processes[0].stdout:
                if (found := re.search(r"step +(\d+) +loss (\S+)", line)) and not quiet:
                    bar = "\u2588" * round(float(found[2]) * 8)
                    print(f"   step {found[1]:>3}   loss {found[2]}   {bar}", flush=True)
            if any(process.wait() for process in processes):
                said.seek(0)
                sys.exit(
                    f"{said.read()}\ndemo: examples/gpt.py {' '.join(options)} failed on {ranks} rank(s)."
                )
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(ranks)]


def launch(ranks: int, command: list[str], said: TextIO) -> list[subprocess.Popen]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        subprocess.Popen(
            command, env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=said, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip


def compare_memory(sharded: list[dict], replicated: list[dict]) -> None:
    """One row for each thing that memory is for, of the rank that has most."""
    print(f"   {'':34} {'ZeRO-3':>8} {'DDP':>8}")
    for kind in ("parameters", "gradients", "optimizer", "exchange"):
        row = [max(rank["counted"].get(kind, 0) for rank in ranks) for ranks in (sharded, replicated)]
        print(f"   {kind:34} {row[0] / MB:8.1f} {row[1] / MB:8.1f}")
    for title, of in (
        ("all that Lanewise counts", lambda rank: sum(rank["counted"].values())),
        ("measured, with activations", lambda rank: rank["measured"]),
    ):
        row = [max(map(of, ranks)) for ranks in (sharded, replicated)]
        print(f"   {title:34} {row[0] / MB:8.1f} {row[1] / MB:8.1f}   {row[1] / row[0]:.2f} times")


if __name__ == "__main__":
    sys.exit(main())
