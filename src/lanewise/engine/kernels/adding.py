"""One kernel for each sum program: every leaf is read once, every partial sum stays in a register.

The program of a round (`lanes.program`) is written out as a kernel without a loop, one line an addition, so its
order is the program's own. Where the result is not finite, which is rare, a second look tells which leaves were not.
"""

import linecache
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from lanewise.engine.kernels.launch import Launch
from lanewise.engine.report import NOTHING
from lanewise.lanes.program import Action, Instruction

_ACCUMULATED = {torch.float32: "tl.float32", torch.float64: "tl.float64"}
_BLOCK, _WARPS = 512, 4
_AHEAD = 16
"""Leaves that are on their way from memory while another is added."""

Code = tuple[tuple[Action, int, int, int, int], ...]
"""Instructions with arrivals counted from the first lane of the round; -1 for what an instruction has not."""


def code(instructions: Sequence[Instruction], first_lane: int) -> Code:
    """Instructions in a form that is the same for every round that does the same."""

    def row(node: tuple[int, int] | None) -> int:
        return -1 if node is None else node[0] - first_lane

    return tuple(
        (
            step.action,
            step.register,
            row(step.arrival),
            row(step.second),
            -1 if step.source is None else step.source,
        )
        for step in instructions
    )


class Round:
    """Carries out a round. See `streamed.Adding`."""

    def __init__(
        self, instructions: Sequence[Instruction], first_lane: int, arriving: torch.dtype, kept: torch.dtype
    ) -> None:
        program = code(instructions, first_lane)
        self._first_lane = first_lane
        read, written = _kept(program)
        self._used = sorted(read | written)
        self._kernels = [_kernel(program, arriving, kept, checks) for checks in (False, True)]
        self._launches: dict[tuple[int, bool, bool], Launch] = {}

    def __call__(
        self, registers: Sequence[torch.Tensor], rows: torch.Tensor, flags: torch.Tensor | None, position: int
    ) -> None:
        """`rows` has one arrival after the other, each as long as a register."""
        length = registers[0].numel() if registers else 0
        if not self._used or not length:
            return
        used = [registers[number] for number in self._used]
        checks = flags is not None
        # Positions are not looked into, but for their type.
        alike = (length, checks, position >= 2**31)
        launch = self._launches.get(alike)
        if launch is None:
            grid = (-(-length // _BLOCK),)
            launch = Launch(self._kernels[checks], grid, {"BLOCK": _BLOCK, "num_warps": _WARPS})
            self._launches[alike] = launch
        noted = rows if flags is None else flags
        launch((rows, *used, noted), (length, position, self._first_lane))


@triton.jit(do_not_specialize=["position"])
def _note(values, flag, length, position, NOTHING: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(values + at, mask=at < length, other=0.0)
    bad = (tl.abs(x) < float("inf")) == 0
    if tl.max(bad.to(tl.int32), axis=0) > 0:
        tl.atomic_min(flag, tl.min(tl.where(bad, at + position, NOTHING), axis=0))


def note(values: torch.Tensor, flag: torch.Tensor, position: int) -> None:
    """Lower a flag to the position of the first value that is not finite, if there is one."""
    length = values.numel()
    launch = _note_launch(values.device, values.dtype, length, position >= 2**31)
    launch((values, flag), (length, position))


@cache
def _note_launch(device: torch.device, dtype: torch.dtype, length: int, is_far: bool) -> Launch:
    grid = (triton.cdiv(length, 4096),)
    return Launch(_note, grid, {"NOTHING": NOTHING, "BLOCK": 4096, "num_warps": 8})


def _kept(program: Code) -> tuple[set[int], set[int]]:
    """The registers that a round reads before it writes them, and those that hold something new after it.

    All others are never in memory.
    """
    read: set[int] = set()
    written: set[int] = set()
    for action, register, _, _, source in program:
        if action in (Action.FOLD, Action.MERGE):
            read |= {register} - written
        if source >= 0:
            read |= {source} - written
            written.discard(source)
        written.add(register)
    return read, written


@cache
def _kernel(program: Code, arriving: torch.dtype, kept: torch.dtype, checks: bool) -> Any:
    text = source(program, _ACCUMULATED[kept], checks)
    name = f"<sum {abs(hash((program, arriving, kept, checks)))}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    scope: dict[str, Any] = {"__name__": __name__}
    exec(compile(text, name, "exec"), scope)
    return scope["kernel"]


def source(program: Code, accumulated: str, checks: bool) -> str:
    """The text of a kernel."""
    read_first, written = _kept(program)
    names = ", ".join(f"R{number}" for number in sorted(read_first | written))
    lines = [
        "import triton",
        "import triton.language as tl",
        "",
        '@triton.jit(do_not_specialize=["position", "first_lane"])',
        f"def kernel(rows, {names}, flags, length, position, first_lane, BLOCK: tl.constexpr):",
        "    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)",
        "    inside = at < length",
    ]
    live: set[int] = set()
    uses = [row for step in program for row in step[2:4] if row >= 0]
    waiting = list(uses)

    def leaf(row: int) -> str:
        """A leaf that is there, after the loads of those that come next have been started."""
        while waiting and len(uses) - len(waiting) <= uses.index(row) + _AHEAD:
            lines.append(f"    x{waiting[0]} = {_load(str(waiting.pop(0)))}")
        return f"x{row}.to({accumulated})"

    def read(register: int) -> str:
        if register not in live:
            lines.append(f"    r{register} = tl.load(R{register} + at, mask=inside, other=0.0)")
            live.add(register)
        return f"r{register}"

    for action, register, arrival, second, other in program:
        if action is Action.LOAD:
            value = leaf(arrival)
        elif action is Action.PAIR:
            value = f"{leaf(arrival)} + {leaf(second)}"
        elif action is Action.FOLD:
            value = f"{read(register)} + {leaf(arrival)}"
        else:
            value = f"{read(register)} + {read(other)}"
        lines.append(f"    r{register} = {value}")
        live.add(register)
    results = sorted(written)
    lines += [f"    tl.store(R{number} + at, r{number}, mask=inside)" for number in results]
    if checks:
        lines += [
            f"    bad = ({' | '.join(_is_bad(f'r{number}') for number in results)}) & inside",
            "    if tl.max(bad.to(tl.int32), axis=0) > 0:",
            "        place = at + position",
            f"        {_lower('flags', 'bad')}",
            f"        for row in range({min(uses, default=0)}, {max(uses, default=-1) + 1}):",
            f"            x = {_load('row')}.to({accumulated})",
            f"            {_lower('flags + 1 + first_lane + row', _is_bad('x') + ' & inside')}",
        ]
    return "\n".join(lines) + "\n"


def _load(row: str) -> str:
    return f"tl.load(rows + {row} * length.to(tl.int64) + at, mask=inside, other=0.0)"


def _is_bad(value: str) -> str:
    return f'((tl.abs({value}) < float("inf")) == 0)'


def _lower(flag: str, bad: str) -> str:
    return f"tl.atomic_min({flag}, tl.min(tl.where({bad}, place, {NOTHING}), axis=0))"
