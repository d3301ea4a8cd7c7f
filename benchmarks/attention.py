"""Attention on a GPU: torch's kernels and the deterministic ones that lanewise puts in their place.

python -m benchmarks.attention            times and errors, for three shapes
python -m benchmarks.attention --sweep    and some ways of cutting each pass of our backward, for two of them

Times are medians of 20, by CUDA events, with the GPU kept waiting until the host has started everything: what the
host needs is a column of its own. TFLOP/s count two products forward and five backward, half of each where attention
is causal, whatever a kernel really computes.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
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


WAIT = 60_000_000
"""Clocks of the GPU: about 30 ms, in which the host starts what is timed."""


def median_ms(work: Callable[[], object], times: int = 20) -> float:
    for _ in range(3):
        work()
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(times)
    ]
    torch.cuda.synchronize()
    torch.cuda._sleep(WAIT)
    for start, end in events:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in events)[times // 2]


def host_us(work: Callable[[], object], times: int = 50) -> float:
    """What the host needs to start the work, without waiting for the GPU."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    took = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    torch.cuda.synchronize()
    return sorted(took)[times // 2] * 1e6


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
    ("ours after flash forward", SDPBackend.FLASH_ATTENTION, True, True),
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


def same(work: Callable[[], Sequence[Tensor]], times: int = 4) -> bool:
    """Whether all repeats give the same bits."""
    first = [tensor.clone() for tensor in work()]
    return all(torch.equal(a, b) for _ in range(times) for a, b in zip(work(), first, strict=True))


def compare(shape: Shape) -> None:
    columns = ("forward ms", "TFLOP/s", "host us", "backward ms", "TFLOP/s", "host us", "error")
    print(f"\n{shape}\n  {'':30s}{''.join(f'{column:>12s}' for column in columns)}  repeats")
    query, key, value, grad = shape.tensors()
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    wanted = reference(shape)
    for name, backend, deterministic, ours in KINDS:
        try:
            with kind(backend, deterministic, ours):

                def forward() -> tuple[Tensor, ...]:
                    return (scaled_dot_product_attention(*leaves, is_causal=True),)

                (out,) = forward()

                def backward(out: Tensor = out) -> tuple[Tensor, ...]:
                    return torch.autograd.grad(out, leaves, grad, retain_graph=True)

                equal = same(forward), same(backward)
                forward_ms, backward_ms = median_ms(forward), median_ms(backward)
                forward_us, backward_us = host_us(forward), host_us(backward)
                error = largest_error(backward(), wanted)
        except RuntimeError as problem:
            print(f"  {name:30s}{str(problem).splitlines()[0][:70]}")
            continue
        numbers = [forward_ms, shape.flop(2) / forward_ms / 1e9, forward_us]
        numbers += [backward_ms, shape.flop(5) / backward_ms / 1e9, backward_us]
        cells = (f"{n:12.{digits}f}" for n, digits in zip(numbers, (3, 0, 0, 3, 0, 0), strict=True))
        words = " ".join("equal" if one else "DIFFER" for one in equal)
        print(f"  {name:30s}{''.join(cells)}{error:12.1e}  {words}", flush=True)
    refused = [layout for layout, way in attention._forwards.items() if way is not attention._Way.OURS]
    if refused:
        print(f"  not by cuDNN: {refused}")


def tiles_to_try(dim: int) -> dict[str, list[Any]]:
    """Ways of cutting each pass, around the best of a wider search; none has registers spilled much."""
    from lanewise.engine.kernels.attention import Tiles

    def described(*numbers: int) -> Any:
        return Tiles(*numbers, described=True)

    if dim == 128:
        return {
            "queries": [
                Tiles(128, 64, 8, 3),
                Tiles(128, 64, 8, 3, bundle=16),
                Tiles(128, 64, 8, 3, bundle=1),
                Tiles(128, 64, 8, 2),
                Tiles(128, 64, 8, 4),
                Tiles(128, 32, 8, 4),
                Tiles(64, 64, 4, 2),
                described(128, 64, 8, 3),
                described(64, 64, 4, 2),
            ],
            "keys": [
                Tiles(64, 64, 4, 2),
                Tiles(64, 64, 4, 2, bundle=16),
                Tiles(64, 64, 4, 2, bundle=1),
                Tiles(64, 64, 4, 3),
                Tiles(32, 64, 4, 3),
                Tiles(32, 128, 8, 3),
                described(64, 64, 4, 2),
                described(64, 64, 4, 3),
                described(32, 64, 4, 4),
                described(64, 128, 8, 3),
            ],
        }
    return {
        "queries": [
            Tiles(64, 64, 4, 2),
            Tiles(64, 64, 4, 3),
            Tiles(64, 64, 4, 3, bundle=16),
            Tiles(64, 64, 4, 3, bundle=1),
            Tiles(64, 64, 4, 4),
            Tiles(128, 64, 8, 3),
            Tiles(128, 64, 4, 3),
            Tiles(128, 32, 4, 3),
            Tiles(64, 128, 4, 2),
            described(64, 64, 4, 3),
        ],
        "keys": [
            Tiles(64, 64, 4, 2),
            Tiles(64, 64, 4, 3),
            Tiles(64, 64, 4, 3, bundle=16),
            Tiles(64, 64, 4, 3, bundle=1),
            Tiles(64, 64, 4, 4),
            Tiles(64, 128, 8, 2),
            Tiles(64, 128, 8, 3),
            Tiles(128, 64, 8, 2),
            Tiles(32, 64, 4, 3),
            described(64, 64, 4, 2),
        ],
    }


def sweep(shape: Shape) -> None:
    """Try ways of cutting each pass, the best first, and then whole backwards of what was chosen and of the best."""
    from lanewise.engine.kernels.attention import CHOSEN, Backward, Passes, Tiles

    began = time.monotonic()
    query, key, value, grad = shape.tensors()
    out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)[:2]
    sources = (query, key, value, grad)
    wanted = reference(shape)
    chosen = CHOSEN[shape.dim]

    def plan(passes: Passes) -> Backward:
        return Backward(*sources, out, True, 1 / math.sqrt(shape.dim), passes)

    def of_queries(tiles: Tiles) -> Callable[[], Sequence[Tensor]]:
        backward = plan(Passes(tiles, chosen.keys))
        return lambda: backward.of_queries(sources, out, logsumexp)[:1]

    def of_keys(tiles: Tiles) -> Callable[[], Sequence[Tensor]]:
        backward = plan(Passes(chosen.queries, tiles))
        return lambda: backward.of_keys(sources, numbers)

    _, numbers = plan(chosen).of_queries(sources, out, logsumexp)
    kinds: dict[str, tuple[Callable[[Tiles], Callable[[], Sequence[Tensor]]], list[Tensor], int]] = {
        "queries": (of_queries, wanted[:1], 3),
        "keys": (of_keys, wanted[1:], 4),
    }
    print(f"\n{shape}")
    good: dict[str, list[Tiles]] = {}
    for name, ways in tiles_to_try(shape.dim).items():
        print(f"  {name}")
        prepare, gradients, num_products = kinds[name]
        found = sorted((attempt(prepare, tiles, gradients) for tiles in ways), key=lambda result: result.ms)
        for result in found:
            print(f"    {result.line(shape.flop(num_products))}", flush=True)
        good[name] = [result.tiles for result in found if result.good]
    print("  whole backwards: chosen; the best of each; the best without descriptors")
    tries = [chosen]
    if good["queries"] and good["keys"]:
        tries.append(Passes(good["queries"][0], good["keys"][0]))
    plain = {name: [tiles for tiles in found if not tiles.described] for name, found in good.items()}
    if plain["queries"] and plain["keys"]:
        tries.append(Passes(plain["queries"][0], plain["keys"][0]))
    for passes in tries:
        whole = partial(plan(passes), *sources, out, logsumexp)
        ms, error = median_ms(whole), largest_error(whole(), wanted)
        rate = f"{ms:7.3f} ms {shape.flop(5) / ms / 1e9:5.0f} TFLOP/s  host {host_us(whole):4.0f} us"
        print(f"    {rate}  error {error:.1e}  {passes}", flush=True)
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
        words += [f"bundle {tiles.bundle}"] + ["described"] * tiles.described
        return f"{rate}  {', '.join(words)}  {self.remark}"


def attempt(
    prepare: Callable[[Any], Callable[[], Sequence[Tensor]]], tiles: Any, wanted: Sequence[Tensor]
) -> Attempt:
    try:
        work = prepare(tiles)
        if not same(work, 3):
            return Attempt(tiles, remark="DIFFERS from itself")
        error = largest_error(work(), wanted)
        # Written so that NaN counts as wrong.
        if not error < 2e-2:
            return Attempt(tiles, remark=f"WRONG: error {error:.1e}")
        return Attempt(tiles, median_ms(work), f"host {host_us(work):.0f} us, error {error:.1e}")
    except Exception as problem:  # a compiler or driver that cannot have these tiles
        return Attempt(tiles, remark=f"{type(problem).__name__}: {' '.join(str(problem).split())[:110]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__, "cuDNN", torch.backends.cudnn.version())
    for shape in SHAPES:
        compare(shape)
    if options.sweep:
        for shape in SHAPES[:2]:
            sweep(shape)


if __name__ == "__main__":
    main()
