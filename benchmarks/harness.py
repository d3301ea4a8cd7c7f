"""Runs engines side by side: every engine lives in its own ranks, and they take turns, a few steps at a time."""

import contextlib
import multiprocessing as mp
import os
import socket
import statistics
import sys
import time
import traceback


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def place(rank: int, world: int, port: int) -> None:
    """Tell this process its place, as a launcher does."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )  # fmt: skip


def _serve(engine: str, case, rank: int, port: int, pipe) -> None:
    place(rank, case.world, port)
    import warnings

    import torch

    warnings.simplefilter("ignore")
    from benchmarks.engines import ENGINES
    from lanewise.engine import device

    torch.set_num_threads(1)
    device.keep_freed_memory()
    try:
        step = ENGINES[engine](case, rank)
        pipe.send("ready")
        while (command := pipe.recv()) is not None:
            times = []
            for _ in range(command):
                start = time.perf_counter()
                step()
                times.append(time.perf_counter() - start)
            pipe.send(times)
        if hasattr(step, "run"):
            step.run.close()
    except BaseException:
        pipe.send(traceback.format_exc())
    os._exit(0)


class Contestant:
    """The ranks of one engine."""

    def __init__(self, engine: str, case) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(
            ["torch", "torch.distributed", "benchmarks.engines", "lanewise.run.start"]
        )
        port = free_port()
        self.engine = engine
        self.pipes = []
        self.processes = []
        for rank in range(case.world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(engine, case, rank, port, theirs), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
        self._hear()

    def _hear(self) -> list:
        said = [pipe.recv() for pipe in self.pipes]
        for rank, answer in enumerate(said):
            if isinstance(answer, str) and answer != "ready":
                raise RuntimeError(f"{self.engine}, rank {rank}:\n{answer}")
        return said

    def steps(self, count: int) -> list[float]:
        """Seconds of each step, those of the slowest rank."""
        for pipe in self.pipes:
            pipe.send(count)
        return [max(times) for times in zip(*self._hear(), strict=True)]

    def stop(self) -> None:
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()


def race(engines: list[str], case, rounds: int, steps: int, warm_up: int = 3) -> dict[str, dict[str, float]]:
    """The median step of every engine in ms, and the median over rounds of its ratio to the first engine."""
    contestants = [Contestant(engine, case) for engine in engines]
    try:
        for contestant in contestants:
            contestant.steps(warm_up)
        medians: dict[str, list[float]] = {engine: [] for engine in engines}
        for number in range(rounds):
            order = contestants if number % 2 == 0 else contestants[::-1]
            for contestant in order:
                contestant.steps(1)
                medians[contestant.engine].append(statistics.median(contestant.steps(steps)))
            print(".", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
    finally:
        for contestant in contestants:
            contestant.stop()
    base = medians[engines[0]]
    return {
        engine: {
            "ms": statistics.median(values) * 1e3,
            "ratio": statistics.median(v / b for v, b in zip(values, base, strict=True)),
        }
        for engine, values in medians.items()
    }
