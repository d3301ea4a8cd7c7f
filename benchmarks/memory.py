"""Peak memory of a rank on CPU: measured by the kernel, counted by the engine, and what the formula says.

python -m benchmarks.memory --size 110M --micro-batch 4

Measured is the proportional set size (memory that ranks share counts in equal parts), less that of a process
that has trained next to nothing, at its peak over some steps, as the mean over ranks. Each engine has the
machine to itself. What forward and backward need is measured on plain PyTorch, once with all gradients kept
until the step and once with each dropped when it is made; the formula adds what the strategy keeps.
"""

import argparse
import multiprocessing as mp
import re
import threading
import traceback
from pathlib import Path

from benchmarks import models
from benchmarks.case import Case
from benchmarks.engines import ENGINES
from benchmarks.harness import free_port, place

MB = 1e6
_KINDS = re.compile(r"^Pss_(?:Anon|Shmem):\s+(\d+) kB$", re.MULTILINE)
_PERIOD_S = 0.02
KEEPING, DROPPING = "floor", "floor, gradients dropped"


def _proportional_bytes() -> int:
    return sum(map(int, _KINDS.findall(Path("/proc/self/smaps_rollup").read_text()))) * 1024


class _Peak(threading.Thread):
    """Looks at the memory of this process again and again."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes = 0
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(_PERIOD_S):
            self.bytes = max(self.bytes, _proportional_bytes())

    def stop(self) -> int:
        self._over.set()
        self.join()
        return self.bytes


def _measure(engine: str, case: Case, rank: int, port: int, steps: int, pipe) -> None:
    place(rank, case.world, port)
    import warnings

    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    try:
        _train_next_to_nothing()
        before = _proportional_bytes()
        step = _dropping(case) if engine == DROPPING else ENGINES[engine](case, rank)
        for _ in range(2):
            step()
        peak = _Peak()
        peak.start()
        for _ in range(steps):
            step()
        found = {"measured": peak.stop() - before}
        if hasattr(step, "run"):
            found["counted"] = sum(step.run.memory().values())
            found["largest unit"] = max(
                sum(f.num_bytes for f in unit.flats) for unit in step.run.engine.units[1:]
            )
            found["root"] = sum(f.num_bytes for f in step.run.engine.units[0].flats)
            found["padded"] = sum(f.num_bytes for f in step.run.engine.flats)
        pipe.send(found)
        pipe.recv()
    except BaseException:
        pipe.send(traceback.format_exc())
    import os

    os._exit(0)


def _train_next_to_nothing() -> None:
    import torch

    block = torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    optimizer = torch.optim.AdamW(block.parameters(), fused=True)
    block(torch.zeros(1, 2, 8)).sum().backward()
    optimizer.step()


def _dropping(case: Case):
    from benchmarks.peers import batches

    model = models.build(case.size)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    next_batch = batches(case, 0)

    def step() -> float:
        for _ in range(case.lanes_per_rank):
            x, y = next_batch()
            models.loss_of(model(x), y).backward()
        return 0.0

    return step


def measure(engine: str, case: Case, steps: int) -> dict[str, float]:
    """The mean over ranks of everything that a rank found."""
    context = mp.get_context("spawn")
    port = free_port()
    pipes, processes = [], []
    for rank in range(case.world):
        ours, theirs = context.Pipe()
        processes.append(
            context.Process(target=_measure, args=(engine, case, rank, port, steps, theirs), daemon=True)
        )
        processes[-1].start()
        pipes.append(ours)
    found = [pipe.recv() for pipe in pipes]
    for pipe in pipes:
        pipe.send(None)
    for process in processes:
        process.join(30)
    for rank, answer in enumerate(found):
        if isinstance(answer, str):
            raise RuntimeError(f"{engine}, rank {rank}:\n{answer}")
    return {key: sum(answer[key] for answer in found) / len(found) for key in found[0]}


def formula(
    engine: str, case: Case, found: dict[str, float], keeping: float, dropping: float
) -> tuple[float, float]:
    """What a rank keeps and what a pass needs on top, in bytes, from sizes alone.

    `keeping` is what forward and backward need with all gradients kept, `dropping` without. See
    docs/strategies.md for the words behind the sums.
    """
    from lanewise.lanes.schedule import eager, late, local_program, owner_program_eager

    _, strategy, exchange = re.split(r",? ", engine)[:3]
    is_shared, is_late = exchange == "shared", strategy in ("ddp", "zero1")
    world, shares = case.world, [case.lanes_per_rank] * case.world
    whole, unit, root = found["padded"], found["largest unit"], found["root"]
    optimizer = 2 * whole / (1 if strategy == "ddp" else world)
    piece = min(max(unit, root), 4 * (1 << 21 if is_shared else 1 << 23)) * (world - 1) / world
    if is_late:
        working = keeping if case.lanes_per_rank == 1 else dropping + max(unit, root)
        gradients = max(local_program(late(shares), 0).num_registers, 1) * whole
        if not is_shared and strategy == "zero1":
            gradients /= world if case.lanes_per_rank == 1 else 1
    else:
        working = dropping + max(unit, root)
        gradients = owner_program_eager(eager(shares)).num_registers * whole / world
    received = (0 if is_late else 3 * piece) if is_shared else 2 * piece
    parameters = whole / world if strategy == "zero3" or (is_shared and strategy != "ddp") else whole
    gathered = root + 2 * unit if strategy == "zero3" and not is_shared else 0
    return parameters + gathered + gradients + received + optimizer, working


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", default="110M")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--lanes-per-rank", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--engines", default="", help="names separated by semicolons; all without it")
    options = parser.parse_args()
    case = Case(options.size, options.micro_batch, options.world, options.lanes_per_rank)
    wanted = [name.strip() for name in options.engines.split(";") if name.strip()] or list(ENGINES)
    engines = [name for name in wanted if name != KEEPING and not name.endswith("native")]
    stored = 4 * sum(p.numel() for p in models.build(case.size).parameters())
    keeping = measure(KEEPING, case, options.steps)["measured"] - 3 * stored
    dropping = measure(DROPPING, case, options.steps)["measured"] - stored
    print(f"{case}: MB a rank at the peak; parameters {stored / MB:.0f}")
    print(f"  forward and backward need {dropping / MB:.0f}, or {keeping / MB:.0f} with all gradients kept")
    print(
        f"  {'engine':40s} {'measured':>9s} {'formula':>9s} {'ratio':>7s} {'counted':>9s} {'kept':>9s} {'ratio':>7s}"
    )
    for engine in engines:
        found = measure(engine, case, options.steps)
        row = f"  {engine:40s} {found['measured'] / MB:9.0f}"
        if "counted" in found:
            kept, working = formula(engine, case, found, keeping, dropping)
            row += f" {(kept + working) / MB:9.0f} {found['measured'] / (kept + working):7.3f}"
            row += f" {found['counted'] / MB:9.0f} {kept / MB:9.0f} {found['counted'] / kept:7.3f}"
        print(row, flush=True)


if __name__ == "__main__":
    main()
