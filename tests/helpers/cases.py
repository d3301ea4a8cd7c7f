"""Cells of a grid: one job run under many worlds, strategies and transports, in one spawn of processes.

The processes of the largest world stay up for the whole grid; a smaller world is their first few. Every
cell is a run of its own, with a session name of its own in one store that rank 0 serves throughout.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore
from torch.nn import functional as F

import lanewise as lw
from lanewise.engine import exchange
from tests.helpers import handoff
from tests.helpers.models import Gpt, token_data
from tests.helpers.spawn import run_ranks

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
TRANSPORTS = ("shared", "gloo")


@dataclass(frozen=True)
class Cell:
    """One run of a grid. None of this may change a bit."""

    world: int
    strategy: str
    exchange: str = "auto"
    hosting: str | tuple[float, ...] = "even"
    rehost: Mapping[int, str | tuple[float, ...]] = field(default_factory=dict)
    """New hosting from the step of this number on."""
    until: int | None = None
    """The step before which this run leaves its state in `leaves`; None for the end."""
    leaves: Path | None = None
    follows: Path | None = None
    """Where another run has left the state that this one begins with."""

    def start(self, **settings: Any) -> lw.Run:
        """A run of this cell."""
        return lw.start(
            **{
                "strategy": self.strategy,
                "exchange": self.exchange,
                "hosting": self.hosting,
                "timeout": 60.0,
                "sinks": [],
                **settings,
            }
        )


def grid(
    worlds: Sequence[int], strategies: Sequence[str] = STRATEGIES, transports: Sequence[str] = TRANSPORTS
) -> list[Cell]:
    """Every combination."""
    return [Cell(w, s, t) for w in worlds for s in strategies for t in transports]


def on_ranks(
    cells: Sequence[Cell], job: Callable[..., Any], *arguments: Any, timeout: float = 240
) -> list[list[Any]]:
    """What `job(cell, *arguments)` returned for every cell, by rank."""
    world = max(cell.world for cell in cells)
    by_rank = run_ranks(world, _all_cells, tuple(cells), job, arguments, timeout=timeout)
    return [[by_rank[rank][n] for rank in range(cell.world)] for n, cell in enumerate(cells)]


def same_on_ranks(cells: Sequence[Cell], job: Callable[..., Any], *arguments: Any) -> list[Any]:
    """As `on_ranks`, where all ranks of a cell must return the same: one value for every cell."""
    values = []
    for cell, by_rank in zip(cells, on_ranks(cells, job, *arguments), strict=True):
        assert all(value == by_rank[0] for value in by_rank), f"ranks of {cell} differ: {by_rank}"
        values.append(by_rank[0])
    return values


def one_value(cells: Sequence[Cell], job: Callable[..., Any], *arguments: Any) -> Any:
    """The value that every rank of every cell must return."""
    values = same_on_ranks(cells, job, *arguments)
    others = [f"{cell}: {value}" for cell, value in zip(cells, values, strict=True) if value != values[0]]
    assert not others, f"{cells[0]}: {values[0]}, but\n" + "\n".join(others)
    return values[0]


def _all_cells(cells: Sequence[Cell], job: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Any]:
    """What this rank returned for every cell; None for those it has no part in."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port = int(os.environ["MASTER_PORT"])
    if rank == 0:
        store, _ = exchange.serve_store(port)
    else:
        store = TCPStore(os.environ["MASTER_ADDR"], port, wait_for_workers=False)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    values: list[Any] = []
    for number, cell in enumerate(cells):
        values.append(None)
        if rank < cell.world:
            if rank == 0:
                store.set(f"begin/{number}", "")
            store.wait([f"begin/{number}"], timedelta(seconds=240))
            os.environ.update(WORLD_SIZE=str(cell.world), TORCHELASTIC_RESTART_COUNT=str(number))
            values[-1] = _one_cell(cell, job, arguments)
    if rank == 0:
        for peer in range(1, world):
            store.wait([f"over/{peer}"], timedelta(seconds=240))
    else:
        store.set(f"over/{rank}", "")
    return values


def _one_cell(cell: Cell, job: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        return job(cell, *arguments)
    except Exception as error:
        error.add_note(f"in {cell}")
        raise


@dataclass(frozen=True)
class Recipe:
    """What a run trains. All of this decides bits."""

    lanes: int = 8
    steps: int = 3
    seed: int = 0
    micro_batches: int = 1
    weighted: bool = False
    dropout: float = 0.0
    clip: float | None = None
    precision: str = "model"
    moments: str = "fp32"
    fused: bool | None = None
    samples: int = 64


def train(cell: Cell, recipe: Recipe) -> list[str]:
    """Train a small transformer with tied weights; the digest after every step."""
    run = cell.start(
        lanes=recipe.lanes,
        seed=recipe.seed,
        micro_batches=recipe.micro_batches,
        precision=recipe.precision,
        moments=recipe.moments,
    )
    model = Gpt(dropout=recipe.dropout)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0, "lr": 2e-3}]
    model, optimizer = run.prepare(model, torch.optim.AdamW(groups, lr=1e-2, fused=recipe.fused))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    batch = recipe.lanes * recipe.micro_batches * 2
    loader = run.loader(token_data(recipe.samples), batch_size=batch, shuffle=True)
    digests: list[str] = []
    if cell.follows is not None:
        handoff.follow(run, cell.follows, scheduler)
    for step in run.steps(loader, total=recipe.steps if cell.until is None else cell.until):
        for tokens, targets in step:
            step.backward(*lane_loss(model(tokens), targets, recipe.weighted))
        step.update(clip=recipe.clip)
        scheduler.step()
        digests.append(run.digest())
        if step.index + 1 in cell.rehost:
            run.rehost(cell.rehost[step.index + 1])
    if cell.leaves is not None:
        handoff.leave(run, cell.leaves, scheduler)
    run.close()
    return digests


def lane_loss(logits: torch.Tensor, targets: torch.Tensor, weighted: bool) -> tuple[torch.Tensor, ...]:
    """The mean loss, or the sum over the targets that count, and how many do."""
    losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    if not weighted:
        return (losses.mean(),)
    counts = (targets.flatten() % 3 != 0).float()
    return (losses * counts).sum(), counts.sum()
