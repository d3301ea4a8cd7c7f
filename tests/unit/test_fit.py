"""`run.fit` on one rank: it is the loop that one would write by hand."""

import io

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau, StepLR

import lanewise as lw
from lanewise.errors import DataError, SettingsError, StepError
from lanewise.events import Scalars
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


def fit(run, loader, **options):
    return run.fit(loader, loss, **{"steps": 6, "progress": False, **options})


def test_it_goes_on_from_where_the_run_is():
    run, _, _, loader = begin()
    whole = run.fit(loader, loss, epochs=2, progress=False)
    digest = run.digest()
    run.close()
    run, model, _, loader = begin()
    for step in run.steps(loader, total=3):
        for batch in step:
            step.backward(loss(model, batch))
        step.update()
    rest = run.fit(loader, loss, epochs=2, progress=False)
    assert (whole.steps, rest.steps) == (8, 8)
    assert whole.losses[3:] == rest.losses
    assert run.digest() == digest
    again = run.fit(loader, loss, epochs=2, evaluate=lambda: {"x": 1.0}, progress=False)
    assert (again.steps, again.losses, again.evaluations[0].step) == (8, (), 8)
    run.close()


def test_it_evaluates_every_so_often_and_at_the_end():
    run, _, _, loader = begin()
    seen = fit(run, loader, steps=7, evaluate=lambda: {"x": run.position}, every=3).evaluations
    assert [(e.step, e.values) for e in seen] == [(3, {"x": 3.0}), (6, {"x": 6.0}), (7, {"x": 7.0})]
    seen = fit(run, loader, steps=16, evaluate=lambda: {"x": run.position}).evaluations
    assert [e.step for e in seen] == [8, 12, 16]
    run.close()


@pytest.mark.parametrize(
    ("better", "values", "steps", "best"),
    [
        ("lower", [3.0, 2.0, 2.0, 2.5, 1.0], 4, 2),
        ("higher", [1.0, 2.0, 2.0, 1.5, 9.0], 4, 2),
        ("lower", [3.0, 4.0, 2.0, 3.0, 1.0, 0.5], 6, 6),
        ("higher", [float("nan"), float("nan"), 1.0], 2, None),
        ("higher", [1.0, float("nan"), float("nan")], 3, 1),
    ],
)
def test_it_stops_when_the_watched_value_gets_no_better(better, values, steps, best):
    run, _, _, loader = begin()
    options = {"every": 1, "watch": "x", "better": better, "patience": 2}
    result = fit(run, loader, evaluate=values_of(run, *values), **options)
    assert (result.steps, run.position, len(result.evaluations)) == (steps, steps, steps)
    assert result.stopped_early == (steps < 6)
    assert (result.best and result.best.step) == best
    for step in run.steps(loader, total=steps + 1):
        for batch in step:
            step.backward(loss(run.engine.model, batch))
        step.update()
    run.close()


def test_schedulers_follow_steps_or_the_watched_value():
    run, _, optimizer, loader = begin()
    plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    steps = StepLR(optimizer, step_size=2, gamma=0.1)
    evaluate = values_of(run, 1.0, 2.0, 0.5)
    fit(run, loader, schedulers=[plateau, steps], evaluate=evaluate, every=2, watch="x")
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.5 * 0.1**3)
    assert plateau.best == 0.5
    run.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": None}, r"run\.fit needs steps= or epochs=, and not both\."),
        ({"epochs": 1}, r"run\.fit needs steps= or epochs=, and not both\."),
        ({"steps": 0}, r"run\.fit: steps must be 1 or more, found 0\."),
        ({"steps": None, "epochs": -1}, r"run\.fit: epochs must be 1 or more, found -1\."),
        ({"every": 0}, r"run\.fit: every must be 1 or more, found 0\."),
        ({"better": "up"}, r"run\.fit: better must be 'lower' or 'higher', found 'up'\."),
        ({"patience": 0}, r"run\.fit: patience must be 1 or more, found 0\."),
        ({"watch": "x"}, r"run\.fit: watch='x' is a value of evaluate=, which was not given\."),
        ({"patience": 2, "evaluate": dict}, r"run\.fit: patience needs watch=, the name of the value"),
        ({"plateau": True, "evaluate": dict}, r"run\.fit: ReduceLROnPlateau needs watch=, the name"),
        (
            {"watch": "y", "evaluate": lambda: {"x": 1.0, "z": 2.0}},
            r"run\.fit: watch='y' is not among what evaluate gave: x, z\.",
        ),
    ],
)
def test_settings_that_cannot_be_met(options, message):
    run, _, optimizer, loader = begin()
    if options.pop("plateau", False):
        options["schedulers"] = ReduceLROnPlateau(optimizer)
    with pytest.raises(SettingsError, match=message):
        fit(run, loader, **options)
    run.close()


def test_a_loss_that_is_none():
    run, _, _, loader = begin()
    with pytest.raises(
        StepError, match=r"run\.fit: the loss function must give a loss or a pair .* tuple of 3\."
    ):
        run.fit(loader, lambda model, batch: (1, 2, 3), steps=1)
    run.close()


class Screen(io.StringIO):
    def __init__(self, is_terminal):
        super().__init__()
        self.isatty = lambda: is_terminal


def test_a_bar_on_a_terminal_and_lines_elsewhere(monkeypatch):
    run, _, _, loader = begin()
    shown = {}
    for number, (is_terminal, progress) in enumerate(
        [(False, True), (True, True), (True, False), (False, False)]
    ):
        screen = Screen(is_terminal)
        monkeypatch.setattr("sys.stderr", screen)
        run.fit(loader, loss, steps=3 * (number + 1), progress=progress)
        shown[is_terminal, progress] = screen.getvalue()
    lines = shown[False, True].splitlines()
    assert [line.split("  ")[0] for line in lines] == ["lanewise: step 1/3", "lanewise: step 3/3"]
    assert lines[0].split("loss ")[1].replace(".", "").isdecimal()
    assert "6/6" in shown[True, True]
    assert "\x1b[" in shown[True, True]
    assert shown[True, False] == shown[False, False] == ""
    run.close()


def test_log_takes_numbers():
    events = []
    run = lw.start(lanes=4, sinks=[events.append])
    run.log(a=1, b=torch.tensor([[2.5]]), c=torch.ones((), requires_grad=True) * 3, d=np.float32(0.5))
    assert events[-1] == Scalars(0, {"a": 1.0, "b": 2.5, "c": 3.0, "d": 0.5})
    with pytest.raises(
        DataError, match=r"run\.log: x must be one number, found a tensor of shape \(2,\)\. Reduce it"
    ):
        run.log(x=torch.ones(2))
    for value, found in ((None, "NoneType"), ("loss", "str"), (np.ones(2), "ndarray"), ([1.0], "list")):
        with pytest.raises(DataError, match=rf"run\.log: x must be one number, found {found}\."):
            run.log(x=value)
    run.close()
