"""The models that recipes can name: a GPT over bytes, a perceptron for tables, a small network for images.

Each casts its inputs to the type of its parameters, so that any precision of a run works.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

BYTES = 256
_LARGEST_EMBEDDING = 16
_GROUP_CHANNELS = 8


class Gpt(nn.Module):
    """A decoder-only transformer with a tied head. Build it on the meta device; `init` gives first values."""

    def __init__(self, width: int, layers: int, heads: int, length: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(BYTES, width)
        self.places = nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(_GptBlock(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores of the byte that follows each byte."""
        x = self.dropout(self.tokens(tokens) + self.places.weight[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        scores: torch.Tensor = self.head(self.norm(x))
        return scores

    def init(self, name: str, values: torch.Tensor) -> None:
        """First values by name; what adds to the residual stream starts smaller the more blocks there are."""
        if name.endswith("bias"):
            nn.init.zeros_(values)
        elif "norm" in name:
            nn.init.ones_(values)
        else:
            narrow = name.endswith(("attention.out.weight", "down.weight"))
            nn.init.normal_(values, std=0.02 / (2 * len(self.blocks)) ** 0.5 if narrow else 0.02)


class _GptBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = _Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        result: torch.Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))
        return result


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return result


class Perceptron(nn.Module):
    """A classifier of rows. It scales the columns of numbers itself, by what it was told of them."""

    mean: torch.Tensor
    deviation: torch.Tensor

    def __init__(
        self,
        mean: torch.Tensor,
        deviation: torch.Tensor,
        categories: Sequence[int],
        classes: int,
        width: int,
        layers: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("deviation", deviation)
        sizes = [min(_LARGEST_EMBEDDING, number // 2 + 1) for number in categories]
        self.embeddings = nn.ModuleList(
            nn.Embedding(number, size) for number, size in zip(categories, sizes, strict=True)
        )
        widths = [mean.numel() + sum(sizes), *[width] * layers]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, classes)

    def forward(self, numbers: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
        """Scores of the classes."""
        scaled = (numbers - self.mean) / self.deviation
        parts = [scaled.nan_to_num(nan=0.0).to(self.head.weight.dtype)]
        parts += [embed(categories[:, place]) for place, embed in enumerate(self.embeddings)]
        x = torch.cat(parts, dim=1)
        for layer in self.layers:
            x = self.dropout(F.gelu(layer(x)))
        scores: torch.Tensor = self.head(x)
        return scores


class ConvNet(nn.Module):
    """A classifier of images: stages that halve the resolution and double the channels."""

    def __init__(self, width: int, stages: int, classes: int, dropout: float) -> None:
        super().__init__()
        channels = [3, *(width * 2**stage for stage in range(stages))]
        self.stages = nn.ModuleList(
            _Stage(a, b, shrinks=number > 0) for number, (a, b) in enumerate(pairwise(channels))
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(channels[-1], classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Scores of the classes."""
        x = images.to(self.head.weight.dtype)
        for stage in self.stages:
            x = stage(x)
        scores: torch.Tensor = self.head(self.dropout(x.mean(dim=(2, 3))))
        return scores


class _Stage(nn.Module):
    def __init__(self, before: int, after: int, shrinks: bool) -> None:
        super().__init__()
        groups = max(1, after // _GROUP_CHANNELS) if after % _GROUP_CHANNELS == 0 else 1
        self.enter = nn.Conv2d(before, after, 3, stride=2 if shrinks else 1, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(groups, after)
        self.refine = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(groups, after)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.silu(self.norm1(self.enter(x)))
        return x + F.silu(self.norm2(self.refine(x)))
