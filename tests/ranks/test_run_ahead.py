"""The path on which the device decides and the host looks later: same bits, same errors, one step late."""

from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from torch import nn

from lanewise.engine import device
from lanewise.engine.transport.ledger import WRITTEN
from lanewise.engine.transport.messages import MessageTransport
from lanewise.errors import DivergedError, ExchangeError, ModelError, NonFiniteError, StepError
from tests.helpers.ahead import running_ahead
from tests.helpers.cases import STRATEGIES, Cell, Recipe, grid, one_value, train


@dataclass(frozen=True)
class Way:
    """A cell on one of the two paths."""

    cell: Cell
    is_ahead: bool

    @property
    def world(self) -> int:
        return self.cell.world


def train_on(way: Way, recipe: Recipe) -> list[str]:
    with running_ahead(way.is_ahead):
        return train(way.cell, recipe)


UNEVEN = [Cell(3, s, "gloo", hosting=(3.0, 1.0, 2.0), rehost={2: "even"}) for s in STRATEGIES]
CELLS = [
    Way(Cell(1, "ddp"), False),
    *(Way(cell, True) for cell in [*grid([1, 2, 3, 5], transports=["gloo"]), *UNEVEN]),
]


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(steps=4, fused=True, clip=0.05, dropout=0.1),
        Recipe(steps=4, fused=True, precision="bf16", weighted=True, micro_batches=2),
    ],
    ids=["fp32, clipped", "bf16, weighted, two micro-batches"],
)
def test_both_paths_have_the_same_bits(recipe):
    one_value(CELLS, train_on, recipe)


class Twig(nn.Module):
    """Three blocks, the second of which may be left out, and a buffer that may be counted up."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(40, 40) for _ in range(3))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor, skips: bool = False, counts: bool = False) -> torch.Tensor:
        x = self.blocks[0](x).relu()
        if not skips:
            x = self.blocks[1](x).relu()
        if counts:
            self.seen += 1
        return self.blocks[2](x)


class Aside(nn.Module):
    """A block that leaves a second result in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.other = nn.Linear(40, 40), nn.Linear(40, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.aside = self.other(self.inner(x)).square().mean()
        return x.detach()


def begin(way: Way, build, lanes: int = 6, **settings):
    run = way.cell.start(lanes=lanes, **settings)
    torch.manual_seed(1)
    model = build()
    model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))
    loader = run.loader(
        torch.randn(lanes * 8, 40, generator=torch.Generator().manual_seed(2)), batch_size=lanes * 2
    )
    return run, model, optimizer, loader


def poison(way: Way, nonfinite: str) -> list[str]:
    """NaN in lane 4 at step 1, and more than fp32 holds at step 3."""
    with running_ahead(way.is_ahead):
        run, model, _, loader = begin(way, Twig, nonfinite=nonfinite)
        found = []
        for step in run.steps(loader, total=6):
            for x in step:
                loss = model(x).square().mean()
                if step.index == 1 and step.lane == 4:
                    loss = loss * float("nan")
                if step.index == 3:
                    loss = model(x).square().sum() * 3e38
                step.backward(loss)
            try:
                step.update(clip=1.0)
            except NonFiniteError as error:
                found.append(str(error).split(": ", 1)[0])
        found.append(run.digest())
        run.close()
    return found


TWO_WAYS = [
    Way(Cell(1, "ddp"), False),
    Way(Cell(3, "zero3", "gloo"), True),
    Way(Cell(2, "zero1", "gloo"), True),
]


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_what_is_not_finite_is_left_out_on_both_paths(nonfinite):
    found = one_value(TWO_WAYS, poison, nonfinite)
    assert found[:-1] == (["step 1", "step 3"] if nonfinite == "raise" else [])


def name_lane(way: Way) -> str:
    with running_ahead(way.is_ahead):
        run, model, _, loader = begin(way, Twig)
        words = ""
        try:
            for step in run.steps(loader, total=3):
                for x in step:
                    loss = model(x).square().mean()
                    step.backward(loss * float("inf") if (step.index, step.lane) == (2, 3) else loss)
                step.update()
        except NonFiniteError as error:
            words = str(error)
        run.close()
    return words


def test_the_last_step_of_a_loop_is_looked_at_too_and_the_lane_is_named():
    words = one_value([Way(Cell(3, "zero2", "gloo"), True)], name_lane)
    assert words.startswith(
        "step 2: the gradient of parameter 'blocks.2.weight' of unit 'blocks.2' is not finite in lane 3."
    )


def skip_blocks(way: Way) -> list[str]:
    """Block 1 is used by lanes of odd numbers only, and at step 2 by none."""
    with running_ahead(way.is_ahead):
        run, model, _, loader = begin(way, Twig)
        digests = []
        for step in run.steps(loader, total=4):
            for x in step:
                step.backward(model(x, skips=step.lane % 2 == 0 or step.index == 2).square().mean())
            step.update()
            digests.append(run.digest())
        run.close()
    return digests


def test_parameters_that_some_lanes_or_all_leave_out():
    ways = [
        Way(Cell(1, "ddp"), False),
        *(Way(Cell(w, s, "gloo"), True) for w, s in ((1, "zero3"), (3, "zero2"), (2, "ddp"))),
    ]
    one_value(ways, skip_blocks)


def lead_past_outputs(way: Way) -> list[str]:
    with running_ahead(way.is_ahead):
        run, model, _, loader = begin(
            way, lambda: nn.ModuleDict({"blocks": nn.ModuleList(Aside() for _ in range(3))})
        )
        digests = []
        for step in run.steps(loader, total=3):
            for x in step:
                for block in model["blocks"]:
                    x = block(x)
                step.backward(sum(block.aside for block in model["blocks"]))
            step.update()
            digests.append(run.digest())
        run.close()
    return digests


def test_a_loss_that_leads_past_the_outputs_of_units():
    one_value([Way(Cell(1, "ddp"), False), Way(Cell(3, "zero3", "gloo"), True)], lead_past_outputs)


def refuse(way: Way, what: str) -> list[object]:
    """What a mistake at step 2 is called, and whether it changed anything."""
    with running_ahead(way.is_ahead):
        run, model, optimizer, loader = begin(way, Twig)
        before, found = "", ["", ""]
        try:
            for step in run.steps(loader, total=4):
                if step.index == 2:
                    before = run.digest()
                    if what == "lr":
                        optimizer.param_groups[0]["lr"] = 1e-2 + run.rank
                for x in step:
                    is_late = step.index == 2
                    loss = model(x, counts=is_late and what == "buffer").square().mean()
                    if is_late and what == "ways" and step.lane == 3:
                        step.backward(loss * 5, weight=torch.tensor(5.0))
                    elif what == "weight":
                        step.backward(loss, weight=torch.tensor(0.0 if is_late else 2.0))
                    else:
                        step.backward(loss)
                step.update()
                if step.index == 2:
                    _ = step.loss
        except (StepError, DivergedError, ModelError) as error:
            found = [type(error).__name__, str(error)]
        same = run.digest() == before
        run.close()
    return [*found, same]


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("ways", "StepError", "step 2: step.backward got a weight in lane(s) [3]"),
        ("lr", "DivergedError", "step 2: rank(s) [1, 2] have other values of optimizer group 0"),
        ("buffer", "ModelError", "step 2: buffer 'seen' was changed by a forward for the first time"),
        ("weight", "StepError", "step 2, lane 0: weight must be a positive, finite number, found 0"),
    ],
)
def test_mistakes_are_told_late_and_change_nothing(what, kind, words):
    found = one_value([Way(Cell(3, "zero3", "gloo"), True)], refuse, what)
    assert found[0] == kind
    assert found[1].startswith(words)
    assert "Nothing was updated" in found[1]
    assert found[2], "something was updated"


class Tied(nn.Module):
    """The loss uses the root's parameters after the model's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(40, 40)
        self.blocks = nn.ModuleList(nn.Linear(40, 40) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x).relu()
        return x


def penalise(way: Way) -> list[str]:
    with running_ahead(way.is_ahead):
        run, model, _, loader = begin(way, Tied)
        digests = []
        for step in run.steps(loader, total=4):
            for x in step:
                y = model(x)
                penalty = model.scale.square().sum() if step.index % 2 else model.first.weight.abs().mean()
                step.backward((y * model.scale).square().mean() + 0.1 * penalty)
            step.update()
            digests.append(run.digest())
        run.close()
    return digests


def test_a_loss_may_use_the_root_after_the_forward():
    one_value(
        [
            Way(Cell(1, "ddp"), False),
            Way(Cell(3, "zero3", "gloo"), True),
            Way(Cell(1, "zero3", "gloo"), True),
        ],
        penalise,
    )


def leave_early(way: Way, how: str) -> str:
    """The loop is left right after the update of a step whose gradient is not finite."""
    with running_ahead(way.is_ahead):
        run, model, _, loader = begin(way, Twig)
        for step in run.steps(loader, total=5):
            for x in step:
                step.backward(model(x).square().mean() * (float("nan") if step.index == 2 else 1.0))
            if step.index == 2:
                break
            step.update()
        step.update()
        words = ""
        try:
            if how == "digest":
                run.digest()
            elif how == "steps":
                next(iter(run.steps(loader, total=5)))
            else:
                run.close()
        except NonFiniteError as error:
            words = str(error).split(":")[0]
        run.close()
    return words


@pytest.mark.parametrize("how", ["digest", "steps", "close"])
def test_an_error_is_told_even_if_the_loop_is_left(how):
    assert one_value([Way(Cell(2, "zero2", "gloo"), True)], leave_early, how) == "step 2"


def train_quietly(way: Way, recipe: Recipe) -> list[str]:
    """As on GPUs that exchange by NCCL: a ledger in place of headers."""

    def hush(transport: MessageTransport, is_quiet: bool) -> None:
        transport._is_quiet = is_quiet

    with running_ahead(way.is_ahead), mock.patch.object(MessageTransport, "hush", hush):
        return train(way.cell, recipe)


def test_a_ledger_in_place_of_headers_changes_no_bits():
    cells = grid([1, 3], transports=["gloo"])
    one_value(
        [CELLS[0], *(Way(cell, True) for cell in cells)], train_quietly, Recipe(steps=4, fused=True, clip=0.1)
    )


def stray(way: Way) -> list[str]:
    """Rank 1 announces something that the others do not, at step 2."""
    with running_ahead(way.is_ahead):
        run, model, _, loader = begin(way, Twig)
        transport = run.engine.world.transport
        transport._may_hush = True
        found = []
        try:
            for step in run.steps(loader, total=5):
                for x in step:
                    step.backward(model(x).square().mean())
                if step.index == 2 and run.rank == 1:
                    assert transport.announce("a stroll") == WRITTEN
                step.update()
        except DivergedError as error:
            found = [str(error).split(". ")[0]]
        run.close()
    return found


def test_ranks_whose_ledgers_differ_are_refused():
    (words,) = one_value([Way(Cell(3, "zero3", "gloo"), True)], stray)
    assert words == "step 2: rank(s) [1] have exchanged other things than rank 0, or in another order"


def never_come(way: Way) -> list[str]:
    """The device does not get to the end of step 2."""
    with running_ahead(way.is_ahead):
        run, model, _, loader = begin(way, Twig, timeout=1.0)
        words = ""
        for step in run.steps(loader, total=3):
            for x in step:
                step.backward(model(x).square().mean())
            step.update()
            if step.index == 2:
                with mock.patch.object(device.Mark, "is_reached", return_value=False):
                    try:
                        _ = step.loss
                    except ExchangeError as error:
                        words = str(error)
        run.close()
    return [words]


def test_a_device_that_does_not_get_on_is_an_error_with_words():
    (words,) = one_value([Way(Cell(1, "zero2", "gloo"), True)], never_come)
    assert words == "rank 0: the device did not get to the report of a step in time."


def be_odd(way: Way, what: str) -> list[str]:
    """Things that are done seldom, and that both paths must do alike."""
    with running_ahead(way.is_ahead):
        lanes = 3 if what == "more ranks than lanes" else 8
        torch.manual_seed(1)
        run = way.cell.start(lanes=lanes, nonfinite="skip")
        torch.manual_seed(1)
        model: nn.Module = Twig()
        if what == "batch norm":
            model = nn.Sequential(nn.Linear(40, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        if what == "fp64 beside fp32":
            model.aside = nn.Parameter(torch.ones(1, dtype=torch.float64))
        if what == "momentum":
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        run.prepare(model, optimizer)
        loader = run.loader(
            torch.randn(48, 40, generator=torch.Generator().manual_seed(2)), batch_size=lanes * 2
        )
        weight = torch.zeros((), dtype=torch.float64)
        digests = []
        abandons = what == "abandoned and rehosted"
        while run.position < 5:
            try:
                for step in run.steps(loader, total=5):
                    for x in step:
                        if abandons and step.index == 2 and step.lane == step.lanes[-1]:
                            raise KeyError("enough")
                        loss = model(x).square().mean()
                        if what == "fp64 beside fp32":
                            loss = loss * model.aside.float().mean()
                        if step.index < 2 and what in ("momentum", "batch norm") and step.lane == 1:
                            loss = loss * float("nan")
                        if what == "a weight that is used again":
                            step.backward(loss * 3, weight.fill_(1 + step.lane))
                        else:
                            step.backward(loss)
                    step.update(clip=0.5)
                    digests.append(run.digest())
            except KeyError:
                abandons = False
                run.rehost((7.0, 1.0) if run.world_size == 2 else "even")
        run.close()
    return digests


ODD = ["abandoned and rehosted", "momentum", "batch norm", "fp64 beside fp32", "a weight that is used again"]


@pytest.mark.parametrize("what", ODD)
def test_odd_things_have_the_same_bits(what):
    worlds = [2] if what == ODD[0] else [1, 3]
    ways = [Way(cell, True) for cell in grid(worlds, ["zero2", "zero3"], ["gloo"])]
    one_value([Way(Cell(1, "ddp"), False), *ways], be_odd, what)


def test_more_ranks_than_lanes():
    ways = [Way(Cell(5, strategy, "gloo"), True) for strategy in ("ddp", "zero2", "zero3")]
    one_value([Way(Cell(1, "ddp"), False), *ways], be_odd, "more ranks than lanes")


def clip_hard(way: Way) -> list[str]:
    with running_ahead(way.is_ahead):
        run, model, _, loader = begin(way, Twig)
        words = ""
        try:
            for step in run.steps(loader, total=2):
                for x in step:
                    step.backward(model(x).square().mean() * 1e30)
                step.update(clip=1e-12)
        except StepError as error:
            words = str(error).split(", which")[0]
        run.close()
    return [words]


def test_a_divisor_beyond_fp32_is_an_error_and_no_step_of_nothing():
    (words,) = one_value([Way(Cell(2, "zero2", "gloo"), True)], clip_hard)
    assert words.startswith("step 1: gradients would have to be divided by")


class Leaving(nn.Module):
    """A block that leaves a second product in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = (nn.Parameter(torch.randn(40, 40) * 0.1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.aside = x @ self.other
        return x @ self.weight


def lead_astray_late(way: Way) -> list[str]:
    """From step 2 on the loss leads into a block past its outputs, in a graph of another shape."""
    with running_ahead(way.is_ahead):
        run, model, _, loader = begin(
            way, lambda: nn.ModuleDict({"blocks": nn.ModuleList(Leaving() for _ in range(3))})
        )
        words = ""
        try:
            for step in run.steps(loader, total=4):
                for x in step:
                    for block in model["blocks"]:
                        x = block(x)
                    astray = model["blocks"][1].aside
                    step.backward(x.square().mean() if step.index < 2 else astray.sin().square().mean())
                step.update()
        except ModelError as error:
            words = str(error)
        run.close()
    return [words]


def test_a_graph_that_leads_past_outputs_all_of_a_sudden_is_told_in_words():
    (words,) = one_value([Way(Cell(1, "zero3", "gloo"), True)], lead_astray_late)
    assert words.startswith("backward came to a unit past its outputs")
