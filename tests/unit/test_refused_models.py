"""Which models `prepare` refuses, with the name of what is wrong in them; and which units it finds or is given."""

import re

import pytest
import torch
from torch import nn

import lanewise as lw
from lanewise.engine.find import find_units
from lanewise.errors import ModelError


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x)


class Stack(nn.Module):
    def __init__(self, inside=None):
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        if inside is not None:
            self.blocks[1].inner = inside


def with_parameter(values, **options):
    model = Stack()
    model.blocks[2].odd = nn.Parameter(values, **options)
    return model


def overlapping():
    model = Stack()
    whole = torch.zeros(40)
    model.left, model.right = nn.Parameter(whole[:20]), nn.Parameter(whole[19:])
    return model


def inside_another():
    model = Stack()
    whole = torch.zeros(4, 10)
    model.whole, model.row = nn.Parameter(whole), nn.Parameter(whole[2])
    return model


def frozen():
    return Stack().requires_grad_(False)


class DTensor(torch.Tensor):
    """Has the name by which such tensors are known; a real one needs a group of processes."""


def as_dtensor():
    return with_parameter(torch.zeros(4).as_subclass(DTensor))


REFUSED = [
    (lambda: [nn.Linear(2, 2)], "prepare needs a torch.nn.Module, found list."),
    (frozen, "Stack has no parameter that requires a gradient, so there is nothing to train."),
    (lambda: nn.ReLU(), "ReLU has no parameter that requires a gradient"),
    (
        lambda: Stack(nn.SyncBatchNorm(4)),
        "module 'blocks.1.inner' is a SyncBatchNorm: it mixes samples across ranks inside a forward, so its bits "
        "depend on the number of ranks. Use BatchNorm (statistics per lane, averaged once a step) or GroupNorm.",
    ),
    (
        lambda: Stack(nn.LazyLinear(4)),
        "module 'blocks.1.inner' is lazy and has no shape yet. Run one forward before prepare.",
    ),
    (
        as_dtensor,
        "parameter 'blocks.2.odd' is a DTensor. Give prepare a plain model; Lanewise shards it.",
    ),
    (
        lambda: with_parameter(torch.zeros(3, dtype=torch.complex64)),
        "parameter 'blocks.2.odd' is complex. Keep it as real numbers with torch.view_as_real.",
    ),
    (
        lambda: with_parameter(torch.zeros(3, 2).t()),
        "parameter 'blocks.2.odd' is not contiguous (shape (2, 3), strides (1, 2)). Make it so before prepare: p.data "
        "= p.data.contiguous().",
    ),
    (lambda: with_parameter(torch.zeros(1).expand(5)), "parameter 'blocks.2.odd' is not contiguous (shape (5,), str"),
    (
        overlapping,
        "parameters 'left' and 'right' overlap in memory. Tie parameters by giving two modules the same Parameter; "
        "make views into separate ones with .clone().",
    ),
    (inside_another, "parameters 'whole' and 'row' overlap in memory."),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=range(len(REFUSED)))
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_model_that_cannot_be_prepared(make, message):
    run = lw.start(sinks=[])
    model = make()
    parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
    where = [p.data_ptr() for p in parameters if not nn.parameter.is_lazy(p)]
    optimizer = torch.optim.SGD(parameters or [nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(ModelError) as caught:
        run.prepare(model, optimizer)
    assert message in str(caught.value)
    assert [p.data_ptr() for p in parameters if not nn.parameter.is_lazy(p)] == where
    assert not any(
        m._forward_pre_hooks for m in getattr(model, "modules", list)() if not hasattr(m, "cls_to_become")
    )
    run.close()


def test_neighbours_and_ties_do_not_overlap():
    model = Stack()
    whole = torch.zeros(40)
    model.left, model.right = nn.Parameter(whole[:20]), nn.Parameter(whole[20:])
    model.empty = nn.Parameter(whole[20:20])
    model.stem.bias = model.blocks[0].inner.bias
    run = lw.start(sinks=[])
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    run.close()


def names(units):
    return [unit.name for unit in units]


def test_units_that_are_chosen():
    model = Stack()
    blocks = ["", "blocks.0", "blocks.1", "blocks.2"]
    assert names(find_units(model)) == blocks
    assert names(find_units(model, [Block])) == blocks
    assert names(find_units(model, model.blocks)) == blocks
    assert names(find_units(model, ["stem", model.blocks[1]])) == ["", "stem", "blocks.1"]
    assert names(find_units(model, [nn.Linear])) == ["", "stem", *(f"{name}.inner" for name in blocks[1:])]
    assert names(find_units(model, [])) == [""]
    for units in (None, [], ["stem"], [Block]):
        members = [name for unit in find_units(model, units) for name, _ in unit.parameters]
        assert sorted(members) == sorted(name for name, _ in model.named_parameters())


@pytest.mark.parametrize(
    ("units", "message"),
    [
        (["block.0"], "units: 'block.0' selects no module of Stack below its root. Give names from model.named_mod"),
        ([nn.Conv2d], "units: <class 'torch.nn.modules.conv.Conv2d'> selects no module of Stack below its root."),
        ([nn.ReLU()], "units: ReLU() selects no module of Stack below its root."),
        ([""], "units: '' selects no module of Stack below its root."),
        ([Stack], "selects no module of Stack below its root."),
        ([3], "units: 3 selects no module of Stack below its root."),
        (
            ["blocks", Block],
            "units: 'blocks.0' lies inside 'blocks'. Units cannot be nested; select one of the two.",
        ),
        ([nn.Linear, "blocks.1"], "units: 'blocks.1.inner' lies inside 'blocks.1'. Units cannot be nested"),
        ("blocks", "units must be a list of names, modules or classes of modules, found 'blocks'."),
        (Block, "units must be a list of names, modules or classes of modules, found a type."),
        (Block(), "units must be a list of names, modules or classes of modules, found a Block."),
    ],
)  # fmt: skip
def test_units_that_cannot_be(units, message):
    run = lw.start(sinks=[])
    model = Stack()
    with pytest.raises(ModelError, match=re.escape(message)):
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), units=units)
    run.close()


def test_small_elements_stay_at_the_root():
    model = nn.Sequential(nn.Linear(40, 40), nn.LayerNorm(4), nn.Linear(40, 40))
    assert names(find_units(model)) == ["", "0", "2"]
    assert [name for name, _ in find_units(model)[0].parameters] == ["1.weight", "1.bias"]


def test_blocks_beside_something_huge_are_units_where_the_root_would_become_larger_still():
    def model(num_blocks):
        blocks = nn.ModuleList(nn.Linear(10, 10) for _ in range(num_blocks))
        parts = nn.ModuleDict({"table": nn.Embedding(200, 10), "blocks": blocks, "norm": nn.LayerNorm(2)})
        return nn.ModuleList([parts])

    few, many = find_units(model(18)), find_units(model(19))
    assert names(few) == ["", "0.table"]
    assert names(many) == ["", "0.table", *(f"0.blocks.{n}" for n in range(19))]
    assert [name for name, _ in many[0].parameters] == ["0.norm.weight", "0.norm.bias"]
