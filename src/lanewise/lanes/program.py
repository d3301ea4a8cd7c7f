"""Sums as programs: the additions of one rank, planned before any number exists.

A program says, round by round, what to do with the subtrees that arrive: load one into a register, fold
one into a register, add two arrivals, merge two registers. Because the planner only ever joins siblings
(`lanes.tree`), every program computes the canonical sum; and because it runs on integers, the number of
buffers a rank needs is known before it allocates one. Executing a program is `engine.sum`'s work.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from lanewise.lanes.tree import Node, parent, root, sibling


class Action(Enum):
    """What an instruction does to its register."""

    LOAD = "load"
    """register = arrival"""
    FOLD = "fold"
    """register += arrival"""
    PAIR = "pair"
    """register = arrival + other arrival"""
    MERGE = "merge"
    """register += other register, which becomes free"""


@dataclass(frozen=True)
class Instruction:
    """One step of a sum. `register` then holds the sum over the lanes of `result`."""

    action: Action
    register: int
    result: Node
    arrival: Node | None = None
    second: Node | None = None
    source: int | None = None


@dataclass(frozen=True)
class Program:
    """The instructions of every round, and what the registers hold at the end."""

    rounds: tuple[tuple[Instruction, ...], ...]
    num_registers: int
    outputs: tuple[tuple[Node, int], ...]

    @property
    def root_register(self) -> int:
        """The register of a program that has summed everything."""
        ((_, register),) = self.outputs
        return register


def plan(lanes: int, rounds: Sequence[Sequence[Node]], resident: Mapping[Node, int] | None = None) -> Program:
    """Plan the canonical sum of the nodes that arrive in each round.

    `resident` names nodes that lie in registers already. Siblings are joined as soon as both are there.
    A merge keeps the lower register, so that a complete sum ends in the lowest one that was ever used.
    """
    pending: dict[Node, int] = dict(resident or {})
    in_use = set(pending.values())
    num_registers = max(in_use, default=-1) + 1
    free: list[int] = [r for r in range(num_registers) if r not in in_use]
    heapq.heapify(free)
    planned: list[tuple[Instruction, ...]] = []

    def take_register() -> int:
        nonlocal num_registers
        if free:
            return heapq.heappop(free)
        num_registers += 1
        return num_registers - 1

    def settle(node: Node, register: int, instructions: list[Instruction]) -> None:
        while node != root(lanes) and (other := sibling(node, lanes)) in pending:
            other_register = pending.pop(other)
            kept, freed = sorted((register, other_register))
            node, register = parent(node, lanes), kept
            instructions.append(Instruction(Action.MERGE, kept, node, source=freed))
            heapq.heappush(free, freed)
        pending[node] = register

    settled = list(pending.items())
    pending.clear()
    opening: list[Instruction] = []
    for node, register in sorted(settled):
        settle(node, register, opening)

    for arrivals in rounds or ((),):
        instructions, opening = opening, []
        waiting = sorted(set(arrivals))
        if len(waiting) != len(arrivals):
            raise ValueError(f"a node arrives twice in one round: {list(arrivals)}")
        done: set[Node] = set()
        for node in waiting:
            if node in done:
                continue
            other = sibling(node, lanes) if node != root(lanes) else None
            if other in pending:
                register = pending.pop(other)
                above = parent(node, lanes)
                instructions.append(Instruction(Action.FOLD, register, above, arrival=node))
                settle(above, register, instructions)
            elif other in waiting and other not in done:
                done.add(other)
                register = take_register()
                above = parent(node, lanes)
                instructions.append(Instruction(Action.PAIR, register, above, arrival=node, second=other))
                settle(above, register, instructions)
            else:
                register = take_register()
                instructions.append(Instruction(Action.LOAD, register, node, arrival=node))
                settle(node, register, instructions)
        planned.append(tuple(instructions))
    return Program(tuple(planned), num_registers, tuple(sorted(pending.items())))
