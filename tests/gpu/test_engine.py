"""The engine on a real GPU: bits over ranks, strategies and compiled blocks, what a step waits for, and memory."""

import gc
import warnings

import pytest
import torch
from torch import nn

import lanewise as lw
from tests.helpers.cases import STRATEGIES, Cell, one_value
from tests.helpers.models import Gpt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
    pytest.mark.filterwarnings("ignore"),
]
LENGTH = 256
"""Long enough for attention's own kernels."""


class Wide(nn.Module):
    """A small GPT whose heads are as wide as those that attention's own kernels take."""

    def __init__(self, width: int = 128, layers: int = 3) -> None:
        super().__init__()
        self.tokens = nn.Embedding(96, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, 96)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.tokens(tokens))
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device, x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


def data(samples: int) -> torch.Tensor:
    return torch.randint(0, 96, (samples, LENGTH + 1), generator=torch.Generator().manual_seed(3))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def train(cell: Cell, precision: str, compiles: bool) -> list[str]:
    warnings.simplefilter("ignore")  # the compiler's own
    run = cell.start(lanes=6, precision=precision)
    torch.manual_seed(0)
    model = Wide()
    if compiles:
        for block in model.blocks:
            block.compile()
    run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    loader = run.loader(data(24), batch_size=12, shuffle=True)
    digests = []
    for step in run.steps(loader, total=3):
        for tokens in step:
            step.backward(loss_of(model, tokens))
        step.update(clip=0.5)
        digests.append(run.digest())
    run.close()
    return digests


CELLS = [Cell(1, "ddp"), Cell(1, "zero3"), *(Cell(3, strategy) for strategy in STRATEGIES), Cell(2, "zero3")]


@pytest.mark.parametrize("precision", ["model", "bf16"])
def test_one_digest_over_ranks_and_strategies(precision):
    one_value(CELLS, train, precision, False)


def test_one_digest_with_compiled_blocks():
    one_value([Cell(1, "ddp"), Cell(2, "zero3"), Cell(3, "zero2")], train, "bf16", True)


def alone(strategy: str, **settings):
    run = lw.start(lanes=2, strategy=strategy, precision="bf16", sinks=[], **settings)
    torch.manual_seed(0)
    model = Gpt(width=256, length=16)
    run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    tokens = torch.randint(
        0, model.tokens.num_embeddings, (64, 17), generator=torch.Generator().manual_seed(3)
    )
    return run, model, run.loader(tokens, batch_size=4)


def steps(run, model, loader, until: int, clip: float | None = None) -> None:
    for step in run.steps(loader, total=until):
        for batch in step:
            logits = model(batch[:, :-1])
            step.backward(nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten()))
        step.update(clip=clip)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_waits_for_nothing(strategy):
    run, model, loader = alone(strategy)
    steps(run, model, loader, 4, clip=1.0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        steps(run, model, loader, 8, clip=1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    run.close()


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_memory_does_not_grow_and_is_accounted_for(strategy):
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run, model, loader = alone(strategy)
    steps(run, model, loader, 20)
    torch.cuda.synchronize()
    first = torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
    memory = run.memory()
    assert (
        abs(sum(memory.values()) - torch.cuda.max_memory_reserved())
        <= 0.02 * torch.cuda.max_memory_reserved()
    )
    kept = sum(v for k, v in memory.items() if k not in ("activations", "unused"))
    assert 0 < kept <= torch.cuda.max_memory_allocated() - before
    steps(run, model, loader, 220)
    torch.cuda.synchronize()
    assert (torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()) == first
    run.close()
