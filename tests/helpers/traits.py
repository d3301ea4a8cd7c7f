"""Small models, each with one trait that an engine may trip over, and how each is trained."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lanewise.errors import DivergedError, ModelError, ShardedParameterError

WIDTH = 8


@dataclass(frozen=True)
class Trait:
    """A model and its loss. The model may look at `model.lane`."""

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda model, x: model(x).square().mean()
    still: tuple[str, ...] = ()
    """Prefixes of parameters that must not move; all others must."""
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None
    before_step: Callable[[nn.Module, int], None] = lambda model, step: None
    units: Any = None
    refused: type[Exception] | None = None
    """What zero3 raises where ranks exchange messages."""
    always: bool = False
    """Whether it is raised everywhere."""


TRAITS: dict[str, Trait] = {}


def trait(**settings: Any) -> Callable[[type], type]:
    """Register a model class as a trait of its own name."""

    def register(kind: type) -> type:
        TRAITS[kind.__name__] = Trait(build=kind, **settings)
        return kind

    return register


class Stack(nn.Module):
    """A stem, three blocks and a head; subclasses change one thing."""

    def __init__(self) -> None:
        super().__init__()
        self.lane = 0
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.through(self.stem(x)))


class Module(nn.Module):
    """A block made of a function, for the shortest of definitions."""

    def __init__(self, function: Callable[["Module", torch.Tensor], Any], **members: Any) -> None:
        super().__init__()
        self.function = function
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, *arguments: Any) -> Any:
        return self.function(self, *arguments)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, dtype=dtype))


# Parameters


@trait(still=("blocks.0.base", "blocks.1.base", "blocks.2.base", "stem", "head"))
class LowRank(Stack):
    def __init__(self):
        super().__init__()
        self.stem.requires_grad_(False)
        self.head.requires_grad_(False)

    def block(self):
        base = linear().requires_grad_(False)
        return Module(
            lambda m, x: m.base(x) + m.up(m.down(x)),
            base=base,
            down=nn.Linear(WIDTH, 2, bias=False),
            up=nn.Linear(2, WIDTH, bias=False),
        )


@trait(
    still=("stem", "blocks.1"),
    optimizer=lambda model: torch.optim.SGD(
        [p for n, p in model.named_parameters() if not n.startswith(("stem", "blocks.1"))], lr=0.1
    ),
)
class InNoGroup(Stack):
    pass


@trait(
    still=("blocks.1",),
    before_step=lambda model, step: model.blocks[1].requires_grad_(False) and None,
)
class FrozenAfterPrepare(Stack):
    pass


@trait()
class TiedAcrossUnits(Stack):
    def __init__(self):
        super().__init__()
        self.blocks[2][0].weight = self.blocks[0][0].weight
        self.head.weight = self.stem.weight


@trait()
class TiedInOneUnit(Stack):
    def block(self):
        module = Module(lambda m, x: m.b(torch.tanh(m.a(x))), a=linear(), b=linear())
        module.b.weight = module.a.weight
        return module


@trait()
class SharedModule(Stack):
    def __init__(self):
        super().__init__()
        self.first = self.blocks[0]
        self.others = nn.ModuleList([self.blocks[1], linear(), self.blocks[1]])

    def forward(self, x):
        x = self.first(self.stem(x))
        for block in self.others:
            x = block(x)
        return self.head(self.through(x))


@trait(still=("blocks.1", "spare"))
class Unused(Stack):
    def __init__(self):
        super().__init__()
        self.spare = linear()

    def through(self, x):
        return self.blocks[2](self.blocks[0](x))


@trait(
    still=("blocks.1.unused",),
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False),
)
class UsedBySomeLanes(Stack):
    """Within a unit: a scale of the first lanes only, one of every second step's, and one of none."""

    def __init__(self):
        super().__init__()
        self.step = 0
        for block in self.blocks:
            block.early = parameter(WIDTH)
            block.unused = parameter(WIDTH)
            block.function = self.run_block
        self.blocks[0].unused = self.blocks[2].unused = None

    def block(self):
        return Module(None, inner=linear())

    def run_block(self, block, x):
        x = block.inner(x)
        return torch.tanh(x * block.early) if self.lane < 2 else torch.tanh(x)


@trait(refused=DivergedError)
class Experts(Stack):
    """Whole units by lane."""

    def through(self, x):
        for number in [(0, 1, 2), (0, 2), (1,)][self.lane % 3]:
            x = self.blocks[number](x)
        return x


@trait(refused=DivergedError)
class OtherOrder(Stack):
    def through(self, x):
        for block in self.blocks if self.lane % 2 else reversed(self.blocks):
            x = block(x)
        return x


@trait(still=("blocks.0.table", "blocks.1.table", "blocks.2.table"))
class MixedTypes(Stack):
    def block(self):
        return Module(
            lambda m, x: torch.tanh(m.single(x) * m.low.float() + m.wide(x.double()).float()),
            single=linear(),
            low=parameter(WIDTH, dtype=torch.bfloat16),
            wide=linear().double(),
            table=nn.Parameter(torch.arange(5, dtype=torch.int8), requires_grad=False),
        )


@trait(still=("empty", "lonely", "blocks.0.empty", "blocks.1.empty", "blocks.2.empty"))
class Shapes(Stack):
    """Scalars, one element, five dimensions, nothing at all, and a type of which there is nothing."""

    def __init__(self):
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.one = parameter(1)
        self.five = parameter(2, 1, 2, 1, 2)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.lonely = nn.Parameter(torch.zeros(0, dtype=torch.float64))

    def block(self):
        return Module(
            lambda m, x: torch.tanh(m.inner(x) * m.scalar + m.empty.sum()),
            inner=linear(),
            empty=nn.Parameter(torch.zeros(3, 0)),
            scalar=nn.Parameter(torch.tensor(1.3)),
        )

    def forward(self, x):
        x = super().forward(x) * self.scalar + self.five.reshape(-1) + self.empty.sum() + self.lonely.sum()
        return x * self.one


@trait()
class OneLinear(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)


@trait(units=[])
class NoUnits(Stack):
    pass


@trait()
class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleDict(
            {
                "down": nn.ModuleList([linear(), nn.ModuleList([linear(), linear()])]),
                "up": nn.ModuleDict({"a": linear(), "b": nn.Sequential(linear(), nn.Tanh(), linear())}),
            }
        )
        self.free = nn.ParameterList([parameter(WIDTH), parameter(WIDTH)])

    def forward(self, x):
        x = self.stages["down"][1][1](self.stages["down"][1][0](self.stages["down"][0](x)))
        x = self.stages["up"]["b"](self.stages["up"]["a"](x * self.free[0]))
        return x + self.free[1]


@trait()
class HugeAndTiny(Stack):
    def __init__(self):
        super().__init__()
        self.blocks[1] = nn.Sequential(nn.Linear(WIDTH, 2048), nn.Linear(2048, WIDTH))
        self.tiny = nn.ParameterList(parameter(1 + n % 3) for n in range(40))

    def forward(self, x):
        return super().forward(x) + sum(p.sum() for p in self.tiny)


# Calls


@trait()
class CalledTwice(Stack):
    def through(self, x):
        return super().through(torch.tanh(super().through(x)))


@trait()
class Recursive(Stack):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.after = linear(), linear()

        def forward(self, x, depth=2):
            x = torch.tanh(self.before(x))
            if depth:
                x = self(x, depth - 1)
            return self.after(x)

    def block(self):
        return self.Block()


@dataclass
class Output:
    hidden: torch.Tensor
    name: str = "output"


@trait()
class OtherOutputs(Stack):
    """A tuple, a dictionary, and an object in which no hook finds a tensor."""

    def __init__(self):
        super().__init__()
        outputs = [lambda y: (y, None, y.shape), lambda y: {"a": [y]}, lambda y: Output(y)]
        for block, output in zip(self.blocks, outputs, strict=True):
            block.output = output

    def block(self):
        return Module(lambda m, x: m.output(torch.tanh(m.inner(x))), inner=linear())

    def through(self, x):
        return self.blocks[2](self.blocks[1](self.blocks[0](x)[0])["a"][0]).hidden


@trait()
class KeptAside(Stack):
    """Each block keeps a loss of its own, which backward enters past the block's output."""

    def block(self):
        def run(module, x):
            hidden = torch.tanh(module.inner(x) @ module.mix.t())
            module.extra = (hidden @ module.mix).square().mean()
            return module.inner(hidden)

        return Module(run, inner=linear(), mix=parameter(WIDTH, WIDTH))

    def forward(self, x):
        x = super().forward(x)
        return x.sum() * 0.01 + sum(block.extra for block in self.blocks)


@trait(refused=ShardedParameterError)
class ReturnsItsParameter(Stack):
    """Used last, though its unit is called first; and a block that passes its input through."""

    def block(self):
        return Module(
            lambda m, x=None: m.scale if x is None else (x, m.inner(x)), scale=parameter(8), inner=linear()
        )

    def forward(self, x):
        scale = self.blocks[0]()
        x = self.stem(x)
        for block in self.blocks:
            same, x = block(x)
            x = torch.tanh(x) + same
        return self.head(x) * scale * self.blocks[1]() * self.blocks[2]()


@trait()
class ReturnsAView(Stack):
    """A slice of its parameter, which is used when another unit runs."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(
            Module(lambda m, n: m.values[n:], values=nn.Parameter(torch.randn(5, WIDTH))) for _ in range(2)
        )

    def through(self, x):
        first, second = self.tables[0](1), self.tables[1](1)
        return super().through(x + first) * second


def penalty(model: nn.Module) -> torch.Tensor:
    return 0.1 * sum(p.square().sum() for p in model.parameters())


@trait(loss=lambda model, x: model(x).square().mean() + penalty(model), refused=ShardedParameterError)
class Penalised(Stack):
    """A penalty on all parameters, some of which are elsewhere."""


@trait(loss=lambda model, x: penalty(model) + model(x).square().mean(), refused=ModelError, always=True)
class PenalisedBefore(Stack):
    """The same before the forward, where no unit's gradient is complete when backward has left it."""


@trait(loss=lambda model, x: penalty(model) + model(x).square().mean(), units=[])
class PenalisedBeforeInOneUnit(Stack):
    """The same where the whole model is one unit, which is here as long as a lane."""


@trait()
class InPlace(Stack):
    def through(self, x):
        for block in self.blocks:
            x = block[0](x)
            x += 1
            x.view(-1)[:4].mul_(2.0)
            x.relu_()
        return x


@trait(still=("stem",))
class NoGradient(Stack):
    """A unit's forward without gradient, a teacher's forward, and inputs that require none."""

    def forward(self, x):
        with torch.no_grad():
            target = super().forward(x)
            x = self.blocks[1](self.stem(x))
        return super().through(x) + self.head(self.blocks[0](x)) - target


@trait(loss=lambda model, x: (model(x) - model(x.flip(-1)).detach() + model(x * 2)).square().mean())
class ManyForwards(Stack):
    pass


@trait()
class InnerGradient(Stack):
    """A force: minus the gradient of an energy, without a graph and with one."""

    def forward(self, x):
        x = x.clone().requires_grad_()
        energy = super().forward(x).square().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        (plain,) = torch.autograd.grad(super().forward(x).sum(), x)
        return force + plain + super().forward(x)


def penalised(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    out = model(x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.square().mean() + (gradient.norm() - 1).square()


@trait(loss=penalised)
class GradientPenalty(Stack):
    pass


@trait(loss=lambda model, x: model.encode(x).square().mean())
class NotByForward(Stack):
    """The user calls another method of the model; blocks are still called as modules."""

    def encode(self, x):
        return self.head(self.through(self.stem(x)))


# Checkpoints


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = linear(), linear()

    def forward(self, x):
        return self.b(F.dropout(torch.tanh(self.a(x)), 0.3, self.training))


class Checkpointed(Stack):
    settings: Mapping[str, Any] = MappingProxyType({"use_reentrant": False})

    def block(self):
        return Dropping()


class Around(Checkpointed):
    def through(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, **self.settings)
        return x


class AroundSeveral(Checkpointed):
    """Over two units and glue; then over one unit that the first region uses too."""

    def through(self, x):
        x = checkpoint(lambda x: self.blocks[1](torch.sin(self.blocks[0](x))), x, **self.settings)
        x = checkpoint(lambda x: self.blocks[2](self.blocks[0](x)), x, **self.settings)
        return checkpoint(self.blocks[2], x, **self.settings)


class Inside(Checkpointed):
    def block(self):
        return Module(lambda m, x: m.a(checkpoint(m.inner, x, **self.settings)), inner=Dropping(), a=linear())


class AroundAll(Checkpointed):
    def forward(self, x):
        return checkpoint(super().forward, x, **self.settings)


class InsideOther(Checkpointed):
    """A checkpoint within a checkpoint, which cannot be a reentrant one: that hides its inside from others."""

    def through(self, x):
        return checkpoint(
            lambda x: self.blocks[2](checkpoint(self.blocks[1], self.blocks[0](x), **self.settings)),
            x,
            use_reentrant=False,
        )


for _shape in (Around, AroundSeveral, Inside, AroundAll, InsideOther):
    for _name, _settings in (
        ("Reentrant", {"use_reentrant": True}),
        ("", {"use_reentrant": False}),
        ("ToTheEnd", {"use_reentrant": False, "early_stop": False}),
    ):
        if _name == "Reentrant" and _shape is AroundAll:
            continue  # a reentrant checkpoint whose inputs require no gradient has none, in PyTorch too
        _kind = type(_shape.__name__ + _name, (_shape,), {"settings": _settings})
        TRAITS[_kind.__name__] = Trait(_kind)


# Buffers and compilers


@trait(still=())
class BatchNorm(Stack):
    def block(self):
        return nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), nn.Tanh())

    def __init__(self):
        super().__init__()
        self.blocks[2][1] = nn.BatchNorm1d(WIDTH, momentum=None)
        self.blocks[1][1].eval()
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        self.calls += 1
        x = super().forward(x)
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        return x * (1 + self.flags[0].float())


class Compiled(Stack):
    """Blocks by torch.compile, with a backend that needs no compiler. Dynamo's own warnings are not ours."""

    def forward(self, x):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return super().forward(x)


@trait()
class CompiledBlocks(Compiled):
    def block(self):
        return torch.compile(super().block(), backend="aot_eager")


@trait()
class CompiledInPlace(Compiled):
    def block(self):
        block = Module(lambda m, x: torch.tanh(m.inner(x)), inner=linear())
        block.compile(backend="aot_eager")
        return block
