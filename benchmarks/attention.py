"""Attention on a GPU: torch's kernels and our deterministic backward.

python -m benchmarks.attention            times and errors, for three shapes
python -m benchmarks.attention --sweep    and many ways of cutting each pass, for two of them
python -m benchmarks.attention --specialised    warp-specialised kernels only; a wrong one may never end

Times are medians of 20, by CUDA events. TFLOP/s count two products forward and five backward, half of each where
attention is causal, whatever a kernel really computes.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lanewise.engine import attention


@dataclass(frozen=True)
class Shape:
    """A causal attention."""

    name: str
    batch: int
    heads: int
    length: int
    dim: int

    def flop(self, num_products: int) -> float:
        return num_products * 2 * self.batch * self.heads * self.length**2 * self.dim / 2

    def tensors(self) -> list[Tensor]:
        """Query, key, value and the gradient of the output, transposed as projections leave them."""
        sizes = (self.batch, self.length, self.heads, self.dim)
        generator = torch.Generator("cuda").manual_seed(0)
        return [
            torch.randn(sizes, generator=generator, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
            for _ in range(4)
        ]

    def __str__(self) -> str:
        return f"{self.name}: batch {self.batch}, {self.heads} heads x {self.dim}, {self.length} long, causal"


SHAPES = (
    Shape("1.3B", 4, 16, 2048, 128),
    Shape("350M", 8, 16, 1024, 64),
    Shape("long", 2, 32, 4096, 128),
)


def median_ms(work: Callable[[], object], times: int = 20) -> float:
    for _ in range(3):
        work()
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(times)
    ]
    for start, end in events:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in events)[times // 2]


@contextmanager
def kind(backend: SDPBackend | None, deterministic: bool, ours: bool) -> Iterator[None]:
    """Attention as one line of the table has it."""
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False
    if ours:
        attention.install()
    try:
        if backend is None:
            yield
        else:
            with sdpa_kernel(backend):
                yield
    finally:
        if ours:
            attention.release()
        torch.use_deterministic_algorithms(False)


KINDS = (
    ("default", None, False, False),
    ("cuDNN", SDPBackend.CUDNN_ATTENTION, False, False),
    ("flash", SDPBackend.FLASH_ATTENTION, False, False),
    ("flash, deterministic", SDPBackend.FLASH_ATTENTION, True, False),
    ("mem-efficient, deterministic", SDPBackend.EFFICIENT_ATTENTION, True, False),
    ("ours, deterministic", None, True, True),
)


def largest_error(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    pairs = zip(found, wanted, strict=True)
    return max(((f.float() - w.float()).abs().max() / w.float().abs().max()).item() for f, w in pairs)


def reference(shape: Shape) -> list[Tensor]:
    """Gradients in 32 bits, one head at a time."""
    query, key, value, grad = shape.tensors()
    found = [torch.empty_like(tensor, dtype=torch.float32) for tensor in (query, key, value)]
    seen = torch.ones(shape.length, shape.length, dtype=torch.bool, device="cuda").tril()
    for batch in range(shape.batch):
        for head in range(shape.heads):
            leaves = [t[batch, head].float().requires_grad_() for t in (query, key, value)]
            scores = (leaves[0] @ leaves[1].T / math.sqrt(shape.dim)).masked_fill(~seen, -math.inf)
            out = scores.softmax(1) @ leaves[2]
            for into, gradient in zip(
                found, torch.autograd.grad(out, leaves, grad[batch, head].float()), strict=True
            ):
                into[batch, head] = gradient
    return found


def compare(shape: Shape) -> None:
    print(f"\n{shape}")
    print(f"  {'':30s}{'both ms':>9s}{'TFLOP/s':>9s}{'backward':>9s}{'TFLOP/s':>9s}{'error':>10s}  repeats")
    query, key, value, grad = shape.tensors()
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    wanted = reference(shape)
    for name, backend, deterministic, ours in KINDS:
        try:
            with kind(backend, deterministic, ours):
                out = scaled_dot_product_attention(*leaves, is_causal=True)

                def backward(out: Tensor = out) -> tuple[Tensor, ...]:
                    return torch.autograd.grad(out, leaves, grad, retain_graph=True)

                def both() -> tuple[Tensor, ...]:
                    return torch.autograd.grad(
                        scaled_dot_product_attention(*leaves, is_causal=True), leaves, grad
                    )

                first = backward()
                same = all(
                    torch.equal(a, b) for _ in range(4) for a, b in zip(backward(), first, strict=True)
                )
                both_ms, backward_ms = median_ms(both), median_ms(backward)
        except RuntimeError as error:
            print(f"  {name:30s}{str(error).splitlines()[0][:70]}")
            continue
        rates = [shape.flop(n) / ms / 1e9 for n, ms in ((7, both_ms), (5, backward_ms))]
        print(
            f"  {name:30s}{both_ms:9.3f}{rates[0]:9.0f}{backward_ms:9.3f}{rates[1]:9.0f}"
            f"{largest_error(first, wanted):10.1e}  {'equal' if same else 'differ'}",
            flush=True,
        )


def tiles_to_try(dim: int, specialised: bool) -> dict[str, list[Any]]:
    """Ways of cutting each pass; "kept" is the pass of keys where it keeps ds, and "from kept" what follows it."""
    from lanewise.engine.kernels.attention import Tiles

    def described(*numbers: int, **choices: Any) -> Any:
        return Tiles(*numbers, described=True, **choices)

    if specialised:
        return {
            "keys": [described(64, 128, 4, stages, specialised=True) for stages in (2, 3)],
            "kept": [described(64, 128, 4, 2, specialised=True)],
        }
    if dim == 128:
        return {
            "keys": [
                Tiles(64, 128, 8, 2),
                Tiles(64, 128, 8, 2, loops=2),
                Tiles(64, 64, 4, 2),
                described(64, 128, 8, 2),
                described(64, 128, 8, 3),
                described(64, 64, 4, 2),
                described(32, 64, 4, 3),
            ],
            "kept": [
                Tiles(64, 128, 8, 2),
                Tiles(64, 128, 8, 3),
                Tiles(64, 128, 8, 2, loops=2),
                Tiles(64, 128, 8, 2, bundle=8),
                Tiles(64, 128, 8, 2, bundle=64),
                described(64, 128, 8, 2),
                described(64, 128, 8, 3),
                described(32, 128, 8, 3),
                described(64, 128, 8, 2, bundle=64),
            ],
            "queries": [
                Tiles(128, 64, 8, 3),
                Tiles(128, 128, 8, 2),
                Tiles(64, 64, 4, 2),
                described(128, 64, 8, 3),
                described(128, 64, 8, 3, loops=2),
                described(128, 64, 8, 3, bundle=64),
                described(128, 128, 8, 2),
                described(64, 64, 4, 2),
                described(64, 128, 4, 2),
            ],
            "from kept": [
                Tiles(128, 64, 8, 3),
                Tiles(128, 64, 8, 3, bundle=64),
                Tiles(128, 64, 4, 3),
                Tiles(128, 32, 8, 4),
                Tiles(128, 128, 8, 2),
                Tiles(128, 128, 8, 3),
            ],
        }
    return {
        "keys": [
            Tiles(64, 128, 8, 3),
            Tiles(64, 64, 4, 3),
            described(64, 128, 8, 3),
            described(64, 128, 8, 2, loops=2),
            described(64, 64, 4, 3),
            described(128, 64, 4, 2),
        ],
        "kept": [
            Tiles(64, 128, 8, 3),
            Tiles(64, 128, 8, 2, bundle=64),
            Tiles(128, 128, 8, 2),
            Tiles(32, 128, 4, 3),
            described(64, 128, 8, 3),
            described(64, 128, 8, 2, loops=2),
            described(32, 128, 4, 3),
        ],
        "queries": [
            Tiles(128, 64, 8, 3),
            Tiles(128, 128, 8, 2),
            Tiles(64, 64, 4, 3),
            described(128, 64, 8, 3),
            described(128, 64, 8, 3, loops=2),
            described(128, 128, 8, 2),
            described(64, 128, 4, 2),
            described(64, 64, 4, 3),
        ],
        "from kept": [
            Tiles(128, 64, 8, 3),
            Tiles(128, 64, 8, 3, bundle=64),
            Tiles(128, 64, 4, 3),
            Tiles(128, 128, 4, 2),
            Tiles(128, 128, 8, 3),
        ],
    }


def sweep(shape: Shape, specialised: bool) -> None:
    """Try ways of cutting each pass, the best first, and then whole backwards of the best with and without ds kept."""
    from lanewise.engine.kernels.attention import CHOSEN, Passes, Problem, Tiles

    began = time.monotonic()
    query, key, value, grad = shape.tensors()
    out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)[:2]
    problem = Problem(grad, query, key, value, out, logsumexp, True, 1 / math.sqrt(shape.dim))
    wanted = reference(shape)
    numbers = problem.numbers()
    kept, num_heads = problem.room_for_kept(1 << 40)
    heads = range(num_heads)
    into = (torch.empty_like(key), torch.empty_like(value))
    grad_query = torch.empty_like(query)
    print(
        f"\n{shape}\n  numbers of each query: {median_ms(problem.numbers):.3f} ms; ds: {kept.nbytes >> 20} MiB"
    )
    kinds: dict[str, tuple[Callable[[Tiles], Sequence[Tensor]], list[Tensor], int]] = {
        "keys": (lambda tiles: problem.of_keys(numbers, tiles), wanted[1:], 4),
        "queries": (lambda tiles: (problem.of_queries(numbers, tiles),), wanted[:1], 3),
        "kept": (lambda tiles: problem.of_keys(numbers, tiles, into, kept, heads), wanted[1:], 4),
        "from kept": (lambda tiles: (problem.of_kept(kept, tiles, grad_query, heads),), wanted[:1], 1),
    }
    best: dict[str, Tiles] = {}
    for name, ways in tiles_to_try(shape.dim, specialised).items():
        print(f"  {name}")
        work, gradients, num_products = kinds[name]
        # What is kept has to be right before it is read, and wrong tiles may have written it.
        problem.of_keys(numbers, CHOSEN[shape.dim, True].keys, into, kept, heads)
        found = sorted((attempt(work, tiles, gradients) for tiles in ways), key=lambda result: result.ms)
        for result in found[:10]:
            print(f"    {result.line(shape.flop(num_products))}", flush=True)
        if found[0].good:
            best[name] = found[0].tiles
    print("  whole backwards")
    tries = []
    if {"keys", "queries"} <= best.keys():
        tries.append(Passes(best["keys"], best["queries"]))
    if {"kept", "from kept"} <= best.keys():
        tries += [Passes(best["kept"], best["from kept"], bytes_ << 20) for bytes_ in (64, 160, 320, 1280)]
    for passes in tries:
        ms = median_ms(lambda passes=passes: problem.backward(passes))
        error = largest_error(problem.backward(passes), wanted)
        print(
            f"    {ms:7.3f} ms {shape.flop(5) / ms / 1e9:5.0f} TFLOP/s  error {error:.1e}  {passes}",
            flush=True,
        )
    print(f"  ({time.monotonic() - began:.0f} s)")


@dataclass(frozen=True)
class Attempt:
    """What became of one way of cutting."""

    tiles: Any
    ms: float = math.inf
    remark: str = ""

    @property
    def good(self) -> bool:
        return self.ms < math.inf

    def line(self, flop: float) -> str:
        rate = f"{self.ms:7.3f} ms {flop / self.ms / 1e9:5.0f} TFLOP/s" if self.good else " " * 25
        tiles = self.tiles
        words = [f"queries {tiles.queries:3d} keys {tiles.keys:3d} warps {tiles.warps} stages {tiles.stages}"]
        words += ["two loops"] * (tiles.loops == 2) + ["described"] * tiles.described
        words += [f"bundle {tiles.bundle}"] + ["specialised"] * tiles.specialised
        return f"{rate}  {', '.join(words)}  {self.remark}"


def attempt(work: Callable[[Any], Sequence[Tensor]], tiles: Any, wanted: Sequence[Tensor]) -> Attempt:
    try:
        first = [gradient.clone() for gradient in work(tiles)]
        for _ in range(3):
            if not all(torch.equal(a, b) for a, b in zip(work(tiles), first, strict=True)):
                return Attempt(tiles, remark="DIFFERS from itself")
        error = largest_error(first, wanted)
        # Written so that NaN counts as wrong.
        if not error < 2e-2:
            return Attempt(tiles, remark=f"WRONG: error {error:.1e}")
        return Attempt(tiles, median_ms(lambda: work(tiles)), f"error {error:.1e}")
    except Exception as problem:  # a compiler or driver that cannot have these tiles
        return Attempt(tiles, remark=f"{type(problem).__name__}: {' '.join(str(problem).split())[:110]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument(
        "--specialised", action="store_true", help="the sweep of warp-specialised kernels alone"
    )
    options = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__)
    if not options.specialised:
        for shape in SHAPES:
            compare(shape)
    if options.sweep or options.specialised:
        for shape in SHAPES[:2]:
            sweep(shape, options.specialised)


if __name__ == "__main__":
    main()
