"""Train a small GPT on the bytes of text files. A plain script, for any number of ranks and any strategy:

    python examples/gpt.py
    lanewise run --ranks 3 --strategy zero3 examples/gpt.py
    torchrun --nproc-per-node 3 examples/gpt.py
    lanewise prove examples/gpt.py --worlds 1,3 --steps 5

Without --text it reads the sources of Python's standard library, which are on every machine.
"""

import argparse
import json
import os
from pathlib import Path

import torch
from measure import Memory
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import lanewise as lw


class Windows(Dataset):
    """Stretches of a text, each with the byte that follows every byte."""

    def __init__(self, text: bytes, length: int) -> None:
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.length = length

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self.length
        window = self.bytes[start : start + self.length + 1].long()
        return window[:-1], window[1:]


class Gpt(nn.Module):
    """A decoder-only transformer over bytes."""

    def __init__(self, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.tokens.weight
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=0.02)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        return self.head(self.norm(x))


def read_text(files: list[Path] | None, most: int = 4_000_000) -> bytes:
    """The bytes of all files, in the order of their names."""
    if not files:
        files = list(Path(os.__file__).parent.glob("*.py"))
    return b"".join(file.read_bytes() for file in sorted(files))[:most]


def train(options: argparse.Namespace) -> None:
    run = lw.start(lanes=8, strategy=options.strategy, seed=0)
    memory = Memory() if options.report else None
    model = Gpt(options.width, options.layers, options.heads, options.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    model, optimizer = run.prepare(model, optimizer)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=options.steps)
    dataset = Windows(read_text(options.text), options.length)
    loader = run.loader(dataset, batch_size=options.batch, shuffle=True, drop_last=True)

    for step in run.steps(loader, total=options.steps):
        for tokens, following in step:
            logits = model(tokens)
            step.backward(F.cross_entropy(logits.flatten(0, 1), following.flatten()))
        step.update(clip=1.0)
        scheduler.step()
        number = step.index + 1
        if run.rank == 0 and (number == 1 or number % 10 == 0 or number == options.steps):
            print(f"step {number:4}  loss {step.loss:.3f}", flush=True)

    grown = memory.grown_bytes() if memory else 0  # while all ranks still share what they share
    digest = run.digest()
    if run.rank == 0:
        print(f"digest {digest}", flush=True)
    if memory:
        facts = {"digest": digest, "counted": run.memory(), "measured": grown}
        Path(options.report, f"rank{run.rank}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small GPT on bytes.")
    parser.add_argument("--text", type=Path, nargs="+", metavar="FILE", help="files to read")
    parser.add_argument("--strategy", default="ddp", choices=["ddp", "zero1", "zero2", "zero3"])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16, help="sequences in a step, over all ranks")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--report", help="a folder in which every rank writes its digest and its memory")
    train(parser.parse_args())
