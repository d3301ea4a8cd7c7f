"""Everything but the wire, on one GPU: step time and memory of rank 0 of a pretended world of 64.

Compute, memory and engine work are real; every collective is called, and none leaves the GPU. The floor is `bare`:
forward and backward in bf16 and nothing else; or `bare deterministic`: the same with kernels whose bits are stable,
which exact runs need. Engines live in processes of their own and take turns, a few steps at a time.

python -m benchmarks.gpu --model 350M,1.3B
python -m benchmarks.gpu --model 1.3B --engines "=lanewise zero3,FSDP2" --out table.txt
python -m benchmarks.gpu --model 350M --profile "lanewise zero3"
python -m benchmarks.gpu --bits --compiled
python -m benchmarks.gpu --list

`--engines` takes parts of names, or whole names after `=`; `all` adds the compiled ones to those that run by default.
Both floors run in every group. Try the command without a GPU with `--device cpu --model tiny`.
"""

import argparse
import contextlib
import multiprocessing as mp
import os
import statistics
import sys
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.gpu_engines import BARE, COMPILED, ENGINES, OWN, STABLE, Case, is_here, is_stable

_GIB = 1 << 30
_GROUPS = {"350M": 9, "1.3B": 5, "7B": 3}
"""Processes at a time, so that they fit into 120 GiB."""
_START_S, _STEPS_S = 300.0, 180.0


class EngineError(RuntimeError):
    """An engine could not run."""


def _settle_process() -> None:
    """What has to be known before CUDA starts."""
    import warnings

    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)


def _synchronize(case: Case) -> None:
    import torch

    if case.device == "cuda":
        torch.cuda.synchronize()


def _timed(prepared: Any, case: Case, count: int) -> float:
    """Milliseconds a step. Steps are not waited for one by one, so that the host may run ahead."""
    _synchronize(case)
    start = time.perf_counter()
    for _ in range(count):
        prepared.step()
    _synchronize(case)
    return (time.perf_counter() - start) / count * 1e3


def _warm_up(prepared: Any, case: Case, count: int) -> None:
    import torch

    from benchmarks.pretend import Silent

    for _ in range(count):
        prepared.step()
    _synchronize(case)
    prepared.end_warm_up()
    if Silent.last is not None:
        Silent.last.warmed_up()
    prepared.step()
    _synchronize(case)
    if case.device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def _facts(prepared: Any, case: Case) -> dict[str, Any]:
    import torch

    from benchmarks.pretend import Silent

    found: dict[str, Any] = {"filled": Silent.last.filled if Silent.last is not None else 0}
    if case.device == "cuda":
        found["allocated"] = torch.cuda.max_memory_allocated() / _GIB
        found["reserved"] = torch.cuda.max_memory_reserved() / _GIB
    if prepared.run is not None:
        found["kept"] = prepared.run.memory()
    return found


def _serve(engine: str, case: Case, pipe: Connection) -> None:
    try:
        _settle_process()
        import torch

        if case.device == "cuda":
            torch.cuda.set_device(0)
        prepared = ENGINES[engine](case)
        pipe.send(("ready", None))
        while (command := pipe.recv()) is not None:
            name, count = command
            if name == "warm up":
                pipe.send(("ok", _warm_up(prepared, case, count)))
            elif name == "steps":
                prepared.step()
                pipe.send(("ok", _timed(prepared, case, count)))
            else:
                pipe.send(("ok", _facts(prepared, case)))
    except BaseException as error:
        with contextlib.suppress(OSError):
            said = str(error).strip().split("\n")[0]
            pipe.send(("failed", f"{type(error).__name__}: {said}", traceback.format_exc()))
    sys.stdout.flush()
    os._exit(0)


@dataclass
class Row:
    """What is known of an engine."""

    engine: str
    ms: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    failure: str | None = None
    over: dict[str, list[float]] = field(default_factory=dict)

    @property
    def median(self) -> float:
        return statistics.median(self.ms)


class Contestant:
    """The process of one engine."""

    def __init__(self, context: Any, engine: str, case: Case) -> None:
        self.engine = engine
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(engine, case, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, command: tuple[str, int] | None, timeout_s: float) -> Any:
        """Have something done. None: hear of something that was begun before."""
        try:
            if command is not None:
                self._pipe.send(command)
            if not self._pipe.poll(timeout_s):
                raise EngineError(f"no answer within {timeout_s:g} s")
            answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            self._process.join(5)
            raise EngineError(f"its process ended with {self._process.exitcode}") from error
        if answer[0] == "failed":
            print(f"{self.engine}:\n{answer[2]}", file=sys.stderr, flush=True)
            raise EngineError(answer[1])
        return answer[1]

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(3)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(10)


def race(engines: list[str], case: Case, rounds: int, steps: int) -> dict[str, Row]:
    """Run engines in turns; what became of each."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.gpu_engines", "torch.distributed.fsdp", "torch._dynamo"])
    rows = {engine: Row(engine) for engine in engines}
    racing = {engine: Contestant(context, engine, case) for engine in engines}
    everyone = list(racing.values())

    def ask(engine: str, command: tuple[str, int] | None, timeout_s: float) -> Any:
        try:
            return racing[engine].ask(command, timeout_s)
        except EngineError as error:
            rows[engine].failure = f"failed: {error}"
            racing.pop(engine).stop()
            return None

    try:
        for engine in engines:
            ask(engine, None, _START_S)
        for engine in [*racing]:
            ask(engine, ("warm up", 8 if COMPILED in engine else 4), _START_S)
        for number in range(rounds):
            order = [*racing] if number % 2 == 0 else [*racing][::-1]
            found = {engine: ask(engine, ("steps", steps), _STEPS_S) for engine in order}
            _note_round(rows, {engine: ms for engine, ms in found.items() if ms is not None})
            print(".", end="", file=sys.stderr, flush=True)
        for engine in [*racing]:
            rows[engine].facts = ask(engine, ("facts", 0), _STEPS_S) or {}
    finally:
        print(file=sys.stderr)
        for contestant in everyone:
            contestant.stop()
    return rows


def _note_round(rows: dict[str, Row], found: dict[str, float]) -> None:
    for engine, ms in found.items():
        rows[engine].ms.append(ms)
        for floor in (BARE, STABLE, OWN):
            for base in (floor, floor + COMPILED):
                if base in found and (COMPILED in base) == (COMPILED in engine):
                    rows[engine].over.setdefault(floor, []).append(ms / found[base])


def groups(engines: list[str], size: int) -> list[list[str]]:
    """Engines a few at a time; each group with the floors that its ratios need."""
    out = []
    for is_compiled in (False, True):
        here = [engine for engine in engines if (COMPILED in engine) == is_compiled]
        ending = COMPILED if is_compiled else ""
        floors = [f + ending for f in (BARE, STABLE, OWN) if f + ending in here]
        if here and BARE + ending not in floors:
            floors.insert(0, BARE + ending)
        if STABLE + ending not in floors and OWN + ending not in floors and any(map(is_stable, here)):
            floors.append(STABLE + ending)
        others = [engine for engine in here if engine not in floors]
        room = max(size - len(floors), 1)
        parts = [others[n : n + room] for n in range(0, len(others), room)]
        out += [[*floors, *part] for part in (parts or ([[]] if floors else []))]
    return out


def table(case: Case, rows: list[Row], options: argparse.Namespace) -> str:
    """The rows as text."""
    shape = case.shape
    has_own = any(OWN in row.over for row in rows)
    bases = [BARE, STABLE, *([OWN] if has_own else [])]
    titles = {BARE: "over bare", STABLE: "over stable", OWN: "over own"}
    lines = [
        f"{case.size}: {shape.width} wide, {shape.layers} layers, {shape.batch} x {shape.length} tokens"
        f"{', checkpointed' if shape.is_checkpointed else ''}; backend {case.backend}, world 64; "
        f"{options.rounds} rounds of {options.steps} steps{f', clip {case.clip:g}' if case.clip else ''}",
        f"  {'engine':34s} {'ms/step':>8s}" + "".join(f" {titles[base]:>12s}" for base in bases)
        + f" {'allocated':>10s} {'reserved':>9s} {'fills/step':>11s}",
    ]  # fmt: skip
    for row in rows:
        if row.failure is not None:
            lines.append(f"  {row.engine:34s} {row.failure}")
            continue
        line = f"  {row.engine:34s} {row.median:8.1f}"
        wanted = OWN if has_own and OWN in row.over else STABLE
        due = wanted if is_stable(row.engine) else BARE
        for base in bases:
            ratio = f"{statistics.median(row.over[base]):.3f}" if base in row.over else ""
            line += f" {ratio + ('*' if base == due and ratio else ' '):>12s}"
        facts = row.facts
        for name in ("allocated", "reserved"):
            width = 10 if name == "allocated" else 9
            line += f" {facts[name]:{width}.1f}" if name in facts else " " * (width + 1)
        num_steps = max(options.rounds * (options.steps + 1), 1)
        lines.append(line + f" {facts.get('filled', 0) / num_steps:11.1f}")
    lines.append(
        "  * the floor of this engine. GiB at the peak. FSDP2 reduces in bf16; DDP has no fp32 master."
    )
    for row in rows:
        if "kept" in row.facts:
            kept = ", ".join(f"{name} {value / _GIB:.2f}" for name, value in row.facts["kept"].items())
            lines.append(f"  {row.engine} keeps, GiB: {kept}")
    return "\n".join(lines)


def _wanted(text: str) -> list[str]:
    """The engines that are named, in the order of the table."""
    here = [engine for engine in ENGINES if is_here(engine)]
    if text == "all":
        return here
    if not text:
        return [engine for engine in here if COMPILED not in engine]
    parts = [part.strip() for part in text.replace(";", ",").split(",") if part.strip()]
    chosen = [
        engine
        for engine in ENGINES
        if any(engine == part[1:] if part.startswith("=") else part in engine for part in parts)
    ]
    if not chosen:
        raise SystemExit(f"no engine has {text!r} in its name; known are {list(ENGINES)}")
    if away := [engine for engine in chosen if not is_here(engine)]:
        print(f"left out, since what they need cannot be imported: {', '.join(away)}", file=sys.stderr)
    return [engine for engine in chosen if is_here(engine)]


def profile(engine: str, case: Case, count: int) -> None:
    """Where the time of one engine goes: on the GPU, in torch's operators, and in Python."""
    import cProfile
    import io
    import pstats

    import torch
    from torch.profiler import ProfilerActivity

    _settle_process()
    prepared = ENGINES[engine](case)
    _warm_up(prepared, case, 8 if COMPILED in engine else 4)
    wall, ahead, cpu = [], [], []
    for _ in range(3):
        start, cpu_start = time.perf_counter(), time.thread_time()
        for _ in range(count):
            prepared.step()
        ahead.append((time.perf_counter() - start) / count * 1e3)
        cpu.append((time.thread_time() - cpu_start) / count * 1e3)
        _synchronize(case)
        wall.append((time.perf_counter() - start) / count * 1e3)
    print(f"{engine}, {case.size}: {statistics.median(wall):.2f} ms a step without a profiler", flush=True)
    print(f"  until Python has started all: {statistics.median(ahead):.2f} ms a step")
    print(
        f"  CPU time of the main thread: {statistics.median(cpu):.2f} ms a step (waiting for the GPU may spin)"
    )
    activities = [ProfilerActivity.CPU]
    if case.device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as trace:
        for _ in range(count):
            prepared.step()
        _synchronize(case)
    _print_gpu(trace, count)
    operators = sorted(trace.key_averages(), key=lambda e: -e.self_cpu_time_total)[:25]
    print(f"\n{'operators on the CPU':60s} {'self ms/step':>12s} {'total':>9s} {'calls/step':>11s}")
    for e in operators:
        self_ms, total_ms = e.self_cpu_time_total / 1e3 / count, e.cpu_time_total / 1e3 / count
        print(f"{e.key[:60]:60s} {self_ms:12.3f} {total_ms:9.3f} {e.count / count:11.1f}")
    python = cProfile.Profile()
    python.enable()
    for _ in range(count):
        prepared.step()
    _synchronize(case)
    python.disable()
    for title, order, restriction in (
        ("Python of lanewise, by cumulative time", "cumulative", r"lanewise[/\\]"),
        ("all Python, by own time", "tottime", ""),
    ):
        out = io.StringIO()
        stats = pstats.Stats(python, stream=out).sort_stats(order)
        stats.print_stats(*([restriction] if restriction else []), 40)
        lines = [line for line in out.getvalue().splitlines() if line.strip()]
        print(f"\n{title} ({count} steps)\n" + "\n".join(line[:150] for line in lines))


def _print_gpu(trace: Any, count: int) -> None:
    """Kernels by their time, and how long the GPU did anything at all."""
    from torch.autograd import DeviceType

    kernels: dict[str, list[float]] = {}
    spans = []
    for event in trace.events():
        if event.device_type != DeviceType.CUDA or getattr(event, "is_user_annotation", False):
            continue
        start, end = event.time_range.start, event.time_range.end
        kernels.setdefault(event.name, []).append((end - start) / 1e3)
        spans.append((start, end))
    if not spans:
        return
    busy, reached = 0.0, -1.0
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    first, last = min(s for s, _ in spans), max(e for _, e in spans)
    print(
        f"  the GPU is busy for {busy / 1e3 / count:.2f} ms a step, of {(last - first) / 1e3 / count:.2f}; "
        f"{len(spans) / count:.0f} kernels and copies a step"
    )
    print(f"\n{'on the GPU':110s} {'ms/step':>9s} {'calls/step':>11s}")
    for name, times in sorted(kernels.items(), key=lambda item: -sum(item[1]))[:25]:
        print(f"{name[:110]:110s} {sum(times) / count:9.3f} {len(times) / count:11.1f}")


def bits(size: str, worlds: list[int], steps: int, lanes: int, is_compiled: bool) -> bool:
    """Real ranks over Gloo, all on this GPU: is there one digest?"""
    from benchmarks.gpu_engines import STRATEGIES, train_for_bits
    from tests.helpers.cases import Cell, on_ranks

    cells = [Cell(world, strategy, "auto") for world in worlds for strategy in STRATEGIES]
    what = "compiled" if is_compiled else "eager"
    print(f"{size}, {lanes} lanes, {steps} steps, {what}; ranks of this host over Gloo", flush=True)
    digests: dict[str, set[str]] = {}
    start = time.perf_counter()
    num_failed = 0
    for world in worlds:
        mine = [cell for cell in cells if cell.world == world]
        try:
            found = on_ranks(mine, train_for_bits, size, steps, lanes, is_compiled, timeout=540)
        except AssertionError as error:
            num_failed += 1
            print(f"  {world} rank(s): FAILED: {error}", flush=True)
            continue
        for cell, by_rank in zip(mine, found, strict=True):
            for precision in by_rank[0]:
                values = {values[precision] for values in by_rank}
                digests.setdefault(precision, set()).update(values)
                name = (
                    f"{cell.world} rank(s), {cell.strategy}, {'fp32' if precision == 'model' else precision}"
                )
                print(f"  {name:28s} {' '.join(sorted(values))}")
        print(f"  ({time.perf_counter() - start:.0f} s)", flush=True)
    is_same = all(len(values) == 1 for values in digests.values())
    ending = f"; {num_failed} world(s) failed" if num_failed else ""
    print(("same bits in all cells that ran" if is_same else "DIFFERENT bits") + ending)
    return is_same and not num_failed


def _place(device: str) -> str:
    """The hardware and the release of torch."""
    import torch

    name = torch.cuda.get_device_name(0) if device == "cuda" else "CPU"
    return f"{name}, torch {torch.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="350M", help="350M, 1.3B, 7B; several with commas")
    parser.add_argument("--engines", default="", help="parts of names, or =names, with commas; or all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--group", type=int, default=0, help="processes at a time")
    parser.add_argument("--clip", type=float, nargs="?", const=1.0, default=None)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--backend", default="silent", choices=("silent", "fake"))
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--list", action="store_true", help="name the engines")
    parser.add_argument("--profile", default=None, metavar="ENGINE")
    parser.add_argument("--bits", action="store_true", help="real ranks over Gloo: one digest?")
    parser.add_argument("--compiled", action="store_true", help="with --bits: each block compiled")
    parser.add_argument("--worlds", default="1,2,3", help="with --bits")
    parser.add_argument("--lanes", type=int, default=6, help="with --bits")
    options = parser.parse_args()
    models = [name.strip() for name in options.model.split(",")]
    if options.list:
        print("\n".join(f"{name}{'' if is_here(name) else '   (not here)'}" for name in ENGINES))
        return
    if options.bits:
        size = "tiny" if options.device == "cpu" else "50M"
        steps = 4 if options.device == "cpu" else 20
        worlds = [int(world) for world in options.worlds.split(",")]
        sys.exit(0 if bits(size, worlds, steps, options.lanes, options.compiled) else 1)
    if options.profile is not None:
        profile(options.profile, Case(models[0], options.device, options.backend, options.clip), 3)
        sys.stdout.flush()
        os._exit(0)
    print(_place(options.device), flush=True)
    for name in models:
        case = Case(name, options.device, options.backend, options.clip)
        rows: dict[str, Row] = {}
        start = time.perf_counter()
        for group in groups(_wanted(options.engines), options.group or _GROUPS.get(name, 9)):
            for engine, row in race(group, case, options.rounds, options.steps).items():
                rows.setdefault(engine, row)
        text = table(case, [rows[engine] for engine in ENGINES if engine in rows], options)
        print(f"{text}\n  ({time.perf_counter() - start:.0f} s)\n", flush=True)
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(text + "\n\n")


if __name__ == "__main__":
    main()
