"""Ranks that do different things: found within seconds, on both transports, with the ranks and what each does."""

import time

import pytest
import torch
from torch import nn

import lanewise as lw
from tests.helpers.spawn import Ranks

EXCHANGES = ("shared", "gloo")
TIMEOUT = 30.0
SOON = 10.0


class Experts(nn.Module):
    """Every lane may use other blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, used):
        x = self.stem(x)
        for number in used:
            x = torch.tanh(self.blocks[number](x))
        return x.square().mean()


def start(strategy, exchange, **settings):
    run = lw.start(
        lanes=settings.pop("lanes", 6),
        strategy=strategy,
        exchange=exchange,
        timeout=TIMEOUT,
        sinks=[],
        **settings,
    )
    torch.manual_seed(5)
    model = Experts()
    run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    loader = run.loader(torch.arange(96.0).reshape(12, 8).sin(), batch_size=6)
    return run, model, loader


def used_by(lane):
    return [(0, 1, 2), (0, 2), (1,)][lane % 3]


def lanes_use_other_units(strategy, exchange):
    run, model, loader = start(strategy, exchange)
    for step in run.steps(loader, total=3):
        for x in step:
            step.backward(model(x, used_by(step.lane)))
        step.update()
    return run.digest()


def one_digests_while_others_update(exchange):
    run, model, loader = start("ddp", exchange)
    for step in run.steps(loader, total=2):
        for x in step:
            step.backward(model(x, (0, 1, 2)))
        if run.rank == 1 and step.index == 1:
            run.digest()
        step.update()
    run.digest()


def ask_for_other_digests(exchange):
    run, _, _ = start("zero1", exchange)
    if run.rank == 2:
        run._transport.barrier("a barrier of its own")
    run.digest()


def outcomes(world, function, *arguments):
    began = time.monotonic()
    results = Ranks(world, function, *arguments).join(60)
    assert time.monotonic() - began < SOON + 8, results
    return results


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_rank_that_digests_while_others_update(exchange):
    results = outcomes(3, one_digests_while_others_update, exchange)
    print(results)
    diverged = [result for result in results.values() if result[1] == "DivergedError"]
    assert diverged, results
