"""What a rank keeps, as `run.memory()` counts it: the formulas of docs/strategies.md, and their order."""

import itertools

import torch
from torch import nn

from tests.helpers.cases import STRATEGIES, Cell, grid, on_ranks

WIDTH, BLOCKS, LANES = 96, 8, 6
BLOCK = 4 * WIDTH * WIDTH
ALL = BLOCKS * BLOCK
"""Bytes of all parameters: a block is one matrix, six slots of 24 times 64 elements, without padding."""


def kept(cell):
    run = cell.start(lanes=LANES)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)))
    wrapped = nn.ModuleDict({"blocks": model})
    run.prepare(wrapped, torch.optim.AdamW(wrapped.parameters(), lr=1e-3))
    loader = run.loader(
        torch.randn(LANES, WIDTH, generator=torch.Generator().manual_seed(1)), batch_size=LANES
    )
    for step in run.steps(loader, epochs=2):
        for x in step:
            step.backward(model(x).square().mean())
        step.update(clip=1.0)
    memory = run.memory()
    run.close()
    return memory


def by_cell(cells):
    """The mean over ranks of every kind of memory."""
    found = {}
    for cell, by_rank in zip(cells, on_ranks(cells, kept), strict=True):
        found[cell.strategy, cell.exchange] = {
            kind: sum(memory[kind] for memory in by_rank) / len(by_rank) for kind in by_rank[0]
        }
    return found


def test_each_strategy_keeps_less_than_the_one_before():
    found = by_cell(grid([3]))
    totals = {cell: sum(memory.values()) for cell, memory in found.items()}
    for smaller, larger in itertools.pairwise(reversed(STRATEGIES)):
        assert totals[smaller, "gloo"] < totals[larger, "gloo"], totals
        if (smaller, larger) != ("zero3", "zero2"):
            assert totals[smaller, "shared"] < totals[larger, "shared"], totals
    assert totals["zero3", "shared"] == totals["zero2", "shared"], (
        "one copy for all ranks of a host is zero3 already"
    )


def test_what_is_kept_is_what_the_formulas_say():
    found = by_cell(grid([3]))
    for (strategy, exchange), memory in found.items():
        where = (strategy, exchange, memory)
        own = ALL / 3
        copies = strategy == "ddp" or (exchange == "gloo" and strategy != "zero3")
        assert memory["parameters"] == (ALL if copies else own), where
        moments = 2 * (ALL if strategy == "ddp" else ALL / 3)
        assert moments <= memory["optimizer"] <= moments + 4 * 3 * BLOCKS, where
        if strategy in ("zero2", "zero3"):
            assert memory["gradients"] == 2 * own, (
                where
            )  # rounds of three lanes: (0+1), 2 wait for the second
        else:
            assert memory["gradients"] <= 2 * ALL, where
        if (strategy, exchange) == ("zero3", "gloo"):
            assert 0 < memory["gathered"] <= 2 * BLOCK, where
        assert memory["exchange"] <= 3 * BLOCK, where


def test_world_one_needs_no_exchange():
    ((memory,),) = on_ranks([Cell(1, "zero3")], kept)
    assert memory["exchange"] == 0
