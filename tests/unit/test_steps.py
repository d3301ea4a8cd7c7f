"""Every message of a run and its steps, on one rank: calls in the wrong order, and losses that are none."""

import pytest
import torch
from torch import nn

import lanewise as lw
from lanewise.config import Settings
from lanewise.errors import ModelError, OptimizerError, SettingsError, StepError
from lanewise.events import Notice, Reporter
from lanewise.run.session import Run

LANES = 3
DATA = torch.arange(48.0).reshape(12, 4).sin()


def begin(**settings):
    """A run with a prepared model, and its loader."""
    run = lw.start(**{"lanes": LANES, "sinks": [], **settings})
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return run, model, run.loader(DATA, batch_size=2 * LANES)


@pytest.fixture(params=["shared", "gloo"])
def started(request):
    """Values that are always here, and values that come when they are needed."""
    run, model, loader = begin(strategy="zero3", exchange=request.param)
    yield run, model, loader
    run.close()


def mean(model, x):
    return model(x).square().mean()


def whole(step, model):
    for x in step:
        step.backward(mean(model, x))


def go(started, *acts, updates=True):
    """Do one after the other, each in a step of its own."""
    run, model, loader = started
    for act, step in zip(acts, run.steps(loader, total=run.position + len(acts)), strict=False):
        act(step, model)
        if updates:
            step.update()


def refused(act, started):
    """What the second step says when this is done in it. The parameters are then as they were."""
    go(started, whole)
    run, before = started[0], started[0].digest()
    with pytest.raises(StepError) as caught:
        go(started, act)
    assert run.digest() == before
    assert run.position == 1
    return str(caught.value)


def iterate_twice(step, model):
    whole(step, model)
    whole(step, model)


def without_backward(number):
    """Leave out the batch of this number."""

    def act(step, model):
        for place, x in enumerate(step):
            if place != number:
                step.backward(mean(model, x))

    return act


go_on_without_backward = without_backward(1)


def update_twice(step, model):
    whole(step, model)
    step.update()
    step.update()


def backward_before(step, model):
    step.backward(mean(model, DATA[:2]))


def backward_after(step, model):
    whole(step, model)
    step.backward(mean(model, DATA[:2]))


def backward_after_a_break(step, model):
    for _ in step:
        break
    step.backward(mean(model, DATA[:2]))


def backward_twice(step, model):
    for x in step:
        step.backward(mean(model, x))
        step.backward(mean(model, x))


def lane_outside(step, model):
    whole(step, model)
    _ = step.lane


def update_early(step, model):
    for x in step:
        step.backward(mean(model, x))
        step.update()


def update_without_lanes(step, model):
    pass


def update_after_a_break(step, model):
    for x in step:
        step.backward(mean(model, x))
        if step.lane == 1:
            break


def read(name):
    def act(step, model):
        whole(step, model)
        getattr(step, name)

    return act


def clip_by(**limits):
    def act(step, model):
        whole(step, model)
        step.update(**limits)

    return act


def evaluate_inside(step, model):
    for _ in step:
        step._run.check_between_steps("run.evaluate")


ORDER = [
    (iterate_twice, "step 1: its lanes were iterated already. Each step can be iterated once."),
    (
        go_on_without_backward,
        "step 1: the loop went on without step.backward(loss) for lane 1. Call it once for each batch; a loss of 0 is "
        "a loss too.",
    ),
    (backward_before, "step 1: call step.backward inside `for batch in step:`."),
    (backward_after, "step 1: call step.backward inside `for batch in step:`."),
    (backward_after_a_break, "step 1: call step.backward inside `for batch in step:`."),
    (backward_twice, "step 1: step.backward was called twice for lane 0. Add losses first."),
    (lane_outside, "step 1: step.lane is known inside `for batch in step:` only."),
    (
        update_early,
        "step 1: step.update was called before every lane had its backward; this rank hosts lanes [0, 1, 2] and still "
        "lacks [0, 1, 2]. Run `for batch in step:` to its end first.",
    ),
    (update_without_lanes, "this rank hosts lanes [0, 1, 2] and still lacks [0, 1, 2]."),
    (update_after_a_break, "this rank hosts lanes [0, 1, 2] and still lacks [1, 2]."),
    (read("loss"), "step 1: step.loss is known after step.update()."),
    (read("grad_norm"), "step 1: step.grad_norm is known after step.update()."),
    (read("skipped"), "step 1: step.skipped is known after step.update()."),
    (clip_by(clip=0.0), "step 1: clip must be positive, found 0.0."),
    (clip_by(clip=float("nan")), "step 1: clip must be positive, found nan."),
    (clip_by(clip_value=-1), "step 1: clip_value must be positive, found -1."),
    (evaluate_inside, "step 1: run.evaluate was called inside the step. Call it after step.update(), or before"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("act", "message"), [pytest.param(*c, id=f"{n}-{c[0].__name__}") for n, c in enumerate(ORDER)]
)
def test_calls_in_the_wrong_order(started, act, message):
    assert message in refused(act, started)


def give(make, **keywords):
    def act(step, model):
        for x in step:
            step.backward(make(model, x), **{k: v() if callable(v) else v for k, v in keywords.items()})

    return act


def unlike(make):
    """In lane 1 only."""

    def act(step, model):
        for x in step:
            loss, weight = make(model, x) if step.lane == 1 else (mean(model, x), None)
            step.backward(loss, weight)

    return act


def detached(model, x):
    with torch.no_grad():
        return mean(model, x)


LOSSES = [
    (give(lambda m, x: 3.0), "step 1, lane 0: the loss must be a tensor, found float."),
    (give(lambda m, x: None), "step 1, lane 0: the loss must be a tensor, found NoneType."),
    (
        give(lambda m, x: m(x).squeeze(1)),
        "step 1, lane 0: the loss must be a single number, found shape (2,). Reduce it: loss.mean(), or loss.sum() "
        "with weight=.",
    ),
    (give(lambda m, x: m(x[:1])), "the loss must be a single number, found shape (1, 1)."),
    (give(lambda m, x: torch.tensor(3)), "lane 0: the loss must be a floating-point number, found torch.int64."),
    (give(lambda m, x: mean(m, x) * 1j), "the loss must be a floating-point number, found torch.complex64."),
    (
        give(lambda m, x: torch.tensor(3.0)),
        "step 1, lane 0: the loss does not depend on any parameter that is trained (it has no grad_fn). Compute it "
        "with the prepared model, outside torch.no_grad().",
    ),
    (give(detached), "step 1, lane 0: the loss does not depend on any parameter that is trained"),
    (
        give(mean, weight=0),
        "step 1, lane 0: weight must be a positive, finite number, found 0. It is the count that the loss is a sum "
        "over.",
    ),
    (give(mean, weight=-2.5), "weight must be a positive, finite number, found -2.5."),
    (give(mean, weight=float("nan")), "weight must be a positive, finite number, found nan."),
    (give(mean, weight=float("inf")), "weight must be a positive, finite number, found inf."),
    (give(mean, weight=lambda: torch.tensor(-1)), "weight must be a positive, finite number, found -1."),
    (give(mean, weight=lambda: torch.ones(2)), "a positive, finite number, found a Tensor of shape (2,)."),
    (give(mean, weight="many"), "weight must be a positive, finite number, found a str."),
    (
        unlike(lambda m, x: (mean(m, x), 2.0)),
        "step 1: step.backward got a weight in lane(s) [1] and none in lane(s) [0, 2], so sums would be added to means."
        " Give a weight in every lane, or in none. Nothing was updated.",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("act", "message"), LOSSES, ids=range(len(LOSSES)))
def test_losses_and_weights_that_are_none(started, act, message):
    assert message in refused(act, started)


@pytest.mark.parametrize(
    "weight", [2, 2.0, torch.tensor(2), torch.tensor([2.0]), torch.tensor(2.0, requires_grad=True)]
)
def test_weights_of_any_number_type(started, weight):
    run, model, loader = started
    for step in run.steps(loader):
        for x in step:
            step.backward(model(x).square().sum().reshape(1), weight)
        step.update()
        assert step.loss == pytest.approx(float(model_loss(step, loader).detach()), rel=1e-6)
        break


def model_loss(step, loader):
    """The mean over the whole batch, with the first values."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    samples = [s for lane in range(LANES) for p in loader.portions(step.index, lane) for s in p.samples]
    return mean(model, DATA[samples])


def every_other_weighted(step, model):
    for number, x in enumerate(step):
        step.backward(mean(model, x), None if number % 2 else 1.0)


def test_micro_batches_are_told_apart():
    started = begin(micro_batches=2)
    with pytest.raises(StepError, match=r"without step\.backward\(loss\) for lane 0, micro-batch 1\. Call"):
        go(started, without_backward(1))
    rule = r"got a weight in lane\(s\) \[0, 1, 2\] and none in lane\(s\) \[0, 1, 2\]"
    with pytest.raises(StepError, match=rule):
        go(started, every_other_weighted)
    started[0].close()


def test_an_update_comes_once_in_every_step(started):
    with pytest.raises(StepError, match=r"step 0: step\.update was called twice\."):
        go(started, update_twice)
    with pytest.raises(StepError, match=r"step 1: the loop went on without step\.update\(\)\."):
        go(started, whole, whole, updates=False)
    assert started[0].position == 1


def test_a_step_that_outlived_its_loop(started):
    run, model, loader = started
    step = next(run.steps(loader))
    with pytest.raises(
        StepError, match=r"step 0: its batches are gone, because the iterator that run\.steps returned"
    ):
        whole(step, model)


def leave_in_a_lane(step, model):
    for x in step:
        step.backward(mean(model, x))
        break


LEFT = [go_on_without_backward, backward_twice, update_early, update_after_a_break, backward_after_a_break]


def test_a_run_goes_on_after_a_step_that_was_left(started):
    """Whatever is caught outside the loop, the next loop begins with the same step and comes to the same bits."""
    run, *_ = started
    for act in LEFT:
        with pytest.raises(StepError):
            go(started, act)
    go(started, leave_in_a_lane, updates=False)
    go(started, whole, updates=False)
    assert run.position == 0
    other = begin(strategy="ddp")
    for each in (started, other):
        go(each, whole, whole)
    assert run.digest() == other[0].digest()
    other[0].close()


def test_a_run_is_prepared_once_and_first():
    run = lw.start(lanes=LANES, sinks=[])
    loader = run.loader(DATA, batch_size=LANES)
    for call in (lambda: next(run.steps(loader)), run.digest, run.memory, lambda: run.gathered()):
        with pytest.raises(StepError, match=r"^call run\.prepare\(model, optimizer\) first\.$"):
            call()
    model = nn.Linear(4, 1)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(
        StepError, match=r"run\.prepare was called twice; a run trains one model with one optimizer"
    ):
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    run.close()
    run.close()


def test_an_optimizer_without_anything_to_train():
    run = lw.start(lanes=LANES, sinks=[])
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    with pytest.raises(
        OptimizerError, match=r"no parameter of the optimizer requires a gradient, so there is noth"
    ):
        run.prepare(model, torch.optim.SGD(model[0].parameters(), lr=0.1))
    run.close()


def test_parameters_without_a_group_are_frozen_and_said():
    told = []
    run = lw.start(lanes=LANES, sinks=[told.append])
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    run.prepare(model, torch.optim.SGD(model[3].parameters(), lr=0.1))
    texts = [event.text for event in told if isinstance(event, Notice)]
    assert texts[-1] == (
        "6 parameter(s) are in no optimizer group and are treated as frozen: 0.weight, 0.bias, 1.weight, 1.bias, "
        "2.weight ..."
    )
    assert [p.requires_grad for p in model.parameters()] == [False] * 6 + [True] * 2
    run.close()


class MadeAtOnce(torch.optim.SGD):
    """Makes state in its constructor."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"step": torch.zeros((), device="cpu"), "memory": torch.zeros_like(p)}


def test_state_that_was_made_without_values():
    run = lw.start(lanes=LANES, sinks=[])
    with torch.device("meta"):
        model = nn.Linear(4, 1)
    rule = (
        r"the constructor of MadeAtOnce made state 'memory' of parameter 'weight' on the meta device, where it has no "
        r"values\. Build the model on a real device"
    )
    with pytest.raises(OptimizerError, match=rule):
        run.prepare(model, MadeAtOnce(model.parameters()))
    run.close()


class Penalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        penalty = self.blocks[1].weight.square().sum()
        for block in self.blocks:
            x = block(x)
        return x.square().mean() + penalty


def own_loss(step, model):
    for x in step:
        step.backward(model(x))


def prepared(model, **settings):
    run = lw.start(lanes=LANES, sinks=[])
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), **settings)
    return run, model, run.loader(DATA, batch_size=LANES)


def test_a_unit_that_is_used_before_its_forward():
    started = prepared(Penalised())
    rule = (
        r"parameter 'blocks\.1\.weight' got a gradient after backward had left its unit 'blocks\.1': it was also used "
        r"outside that unit, before the unit's own forward\. .* units=\[\] makes the whole model one\."
    )
    with pytest.raises(ModelError, match=rule):
        go(started, own_loss)
    started[0].close()
    started = prepared(Penalised(), units=[])
    go(started, own_loss)
    started[0].close()


def changed_in_place(step, model):
    for x in step:
        y = model(x).exp()
        loss = y.sum()
        with torch.no_grad():
            y.add_(1)
        step.backward(loss)


def test_a_tensor_that_was_changed_before_backward_read_it():
    """Where values come and go, autograd's own check is made again."""
    started = begin(strategy="zero3", exchange="gloo")
    rule = r"a tensor of shape \(2, 1\) that is needed for the gradient was modified by an inplace operation: it is"
    with pytest.raises(RuntimeError, match=rule):
        go(started, changed_in_place)
    started[0].close()


def test_a_buffer_that_was_removed():
    model = nn.Sequential(nn.Linear(4, 1))
    model[0].register_buffer("scale", torch.ones(1))
    started = prepared(model)
    model[0].scale = None
    with pytest.raises(
        ModelError, match=r"buffer '0\.scale' has been removed since prepare\. Keep the model's buffers\."
    ):
        go(started, whole)
    started[0].close()


class OtherRanks:
    """A transport of which nothing is asked."""

    def __init__(self, size):
        self.rank, self.size = 0, size

    def close(self, failure):
        pass


@pytest.mark.parametrize(
    ("lanes", "size", "notice"),
    [
        (3, 3, None),
        (3, 4, "4 ranks share 3 lanes: rank 3 hosts none and "),
        (3, 7, "7 ranks share 3 lanes: ranks 3 to 6 host none and "),
    ],
)  # fmt: skip
def test_more_ranks_than_lanes(lanes, size, notice):
    told = []
    run = Run(Settings(lanes=lanes), OtherRanks(size), torch.device("cpu"), Reporter([told.append]))
    assert run.shares == (1,) * lanes + (0,) * (size - lanes)
    assert [notice in event.text for event in told] == ([] if notice is None else [True])
    run.close()


@pytest.mark.parametrize(
    ("hosting", "message"),
    [
        ("evn", r"run\.rehost: hosting must be 'even' or a list with a weight for each rank, found 'evn'\."),
        (3, r"run\.rehost: hosting must be 'even' or a list .* found 3\."),
        ([1, "2", 1], r"run\.rehost: hosting must be 'even' or a list .* found \[1, '2', 1\]\."),
        ([1, 2], r"hosting names 2 weights for 3 ranks; give one for each rank\."),
        ([1, -2, 1], r"hosting: weights must be finite, not negative and not all 0: \[1, -2, 1\]\."),
        ([0, 0, 0], r"hosting: weights must be finite, not negative and not all 0"),
        ([1, float("nan"), 1], r"hosting: weights must be finite, not negative and not all 0"),
    ],
)
def test_hosting_that_is_none(hosting, message):
    run = Run(Settings(lanes=8), OtherRanks(3), torch.device("cpu"), Reporter())
    run.rehost([1, 2, 1])
    with pytest.raises(SettingsError, match=message):
        run.rehost(hosting)
    assert run.shares == (2, 4, 2)
    run.rehost("even")
    assert run.shares == (3, 3, 2)
    run.close()
