"""`run.fit` on one rank: it is the loop that one would write by hand."""

import pytest
import torch
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR

import lanewise as lw
from lanewise.metrics import Accuracy
from tests.helpers.models import Gpt, token_data, token_loss


def begin(samples=32, **settings):
    run = lw.start(lanes=4, sinks=[], **settings)
    model = Gpt(layers=1, dropout=0.1)
    model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    return run, model, optimizer, run.loader(token_data(samples), batch_size=8, shuffle=True)


def loss(model, batch):
    tokens, targets = batch
    return token_loss(model(tokens), targets)


def weighted_loss(model, batch):
    tokens, targets = batch
    losses = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="none")
    counts = (targets.flatten() % 3 != 0).float()
    return (losses * counts).sum(), counts.sum()


def values_of(run, *values):
    """An `evaluate` that gives these values of "x", one after the other."""
    left = iter(values)
    return lambda: {"x": next(left)}


@pytest.mark.parametrize("function", [loss, weighted_loss])
def test_it_has_the_bits_of_the_loop_written_by_hand(function):
    run, model, optimizer, loader = begin()
    scheduler = CosineAnnealingLR(optimizer, 10)
    losses = []
    for step in run.steps(loader, total=6):
        for batch in step:
            value = function(model, batch)
            step.backward(*(value if isinstance(value, tuple) else (value,)))
        step.update(clip=0.1)
        scheduler.step()
        losses.append(step.loss)
    by_hand = run.digest()
    run.close()

    run, model, optimizer, loader = begin()
    result = run.fit(
        loader,
        function,
        steps=6,
        clip=0.1,
        schedulers=CosineAnnealingLR(optimizer, 10),
        evaluate=lambda: run.evaluate(token_data(9), {"accuracy": Accuracy()}),
        every=2,
        progress=False,
    )
    assert run.digest() == by_hand
    assert result.losses == tuple(losses)
    run.close()
