"""The Llama-like models of the GPU benchmark: the same code for every engine."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Rotary = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Size:
    width: int
    layers: int
    heads: int
    batch: int
    length: int
    vocabulary: int = 32000
    is_checkpointed: bool = False

    @property
    def inner(self) -> int:
        """Width inside SwiGLU: 8/3 of the model's, rounded up to what matrix units like."""
        return -(-8 * self.width // 3 // 256) * 256


SIZES = {
    "tiny": Size(64, 3, 2, 2, 32, vocabulary=128),
    "tiny checkpointed": Size(64, 3, 2, 2, 32, vocabulary=128, is_checkpointed=True),
    "50M": Size(512, 12, 8, 2, 256, vocabulary=8192),
    "350M": Size(1024, 24, 16, 8, 1024),
    "1.3B": Size(2048, 24, 16, 4, 2048),
    "7B": Size(4096, 32, 32, 2, 4096, is_checkpointed=True),
}


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, 1e-5)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part(x).view(batch, length, self.heads, -1).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(_turn(q, rotary), _turn(k, rotary), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


def _turn(x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    cos, sin = rotary
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm1 = Norm(size.width)
        self.attention = Attention(size.width, size.heads)
        self.norm2 = Norm(size.width)
        self.gate = nn.Linear(size.width, size.inner, bias=False)
        self.up = nn.Linear(size.width, size.inner, bias=False)
        self.down = nn.Linear(size.inner, size.width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), (cos, sin))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = Norm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self._rotary: dict[torch.dtype, Rotary] = {}

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        cos, sin = self._turns(x)
        for block in self.blocks:
            if self.size.is_checkpointed:
                x = checkpoint(block, x, cos, sin, use_reentrant=False)
            else:
                x = block(x, cos, sin)
        return self.head(self.norm(x))

    def _turns(self, x: torch.Tensor) -> Rotary:
        """Angles are made once and are no buffer, so that a model on the meta device has nothing to restore."""
        if x.dtype not in self._rotary:
            half = self.size.width // self.size.heads // 2
            rates = 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
            angles = torch.outer(torch.arange(x.shape[1], device=x.device, dtype=torch.float32), rates)
            whole = torch.cat((angles, angles), dim=-1)
            self._rotary[x.dtype] = (whole.cos().to(x.dtype), whole.sin().to(x.dtype))
        return self._rotary[x.dtype]


@torch.no_grad()
def fill(name: str, tensor: torch.Tensor) -> None:
    """First values."""
    if tensor.dim() > 1:
        tensor.normal_(std=0.02)
    else:
        tensor.fill_(1.0)


def on_meta(size: Size) -> Llama:
    """Shapes without values, in fp32."""
    with torch.device("meta"):
        return Llama(size)


def build(size: Size, device: torch.device, dtype: torch.dtype) -> Llama:
    """Made where it is used: on a CPU the larger ones would take minutes."""
    torch.manual_seed(0)
    model = on_meta(size).to(dtype).to_empty(device=device)
    for name, parameter in model.named_parameters():
        fill(name, parameter)
    return model


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def data(size: Size, samples: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, size.vocabulary, (samples, size.length + 1), generator=generator)
