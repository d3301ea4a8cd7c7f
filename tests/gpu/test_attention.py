"""Our backward of attention: right, equal in all repeats, and out of the way where it is not wanted."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lanewise.engine import attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES = [
    # batch, heads of queries, heads of keys, queries, keys, head dimension, causal
    (2, 4, 4, 512, 512, 128, True),
    (2, 4, 4, 512, 512, 64, True),
    (2, 3, 3, 384, 640, 128, False),
    (1, 2, 2, 300, 1111, 64, False),
    (2, 2, 2, 777, 777, 128, True),
    (1, 3, 3, 257, 257, 64, True),
    (2, 8, 2, 512, 512, 128, True),
    (1, 6, 3, 333, 333, 64, True),
    (1, 8, 1, 300, 450, 128, False),
]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Installed, with deterministic algorithms on; holds the problems that our kernels were given."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("its tiles are chosen for Hopper; other GPUs keep torch's kernel")
    from lanewise.engine.kernels.attention import Problem

    given: list[Any] = []
    theirs = Problem.backward

    def backward(self, *arguments):
        given.append(self)
        return theirs(self, *arguments)

    monkeypatch.setattr(Problem, "backward", backward)
    attention.install()
    torch.use_deterministic_algorithms(True)
    yield given
    torch.use_deterministic_algorithms(False)
    attention.release()


def tensors(shape, dtype=torch.bfloat16, layout="rows first"):
    """Query, key, value and the gradient of the output."""
    batch, heads_q, heads_k, length_q, length_k, dim, _ = shape
    generator = torch.Generator("cuda").manual_seed(1)

    def one(heads, length):
        if layout == "heads first":
            sizes = (batch, heads, length, dim)
            return torch.randn(sizes, generator=generator, device="cuda", dtype=dtype)
        if layout == "packed":
            sizes = (batch, length, 3, heads, dim)
            return torch.randn(sizes, generator=generator, device="cuda", dtype=dtype)[:, :, 1].transpose(
                1, 2
            )
        sizes = (batch, length, heads, dim)
        return torch.randn(sizes, generator=generator, device="cuda", dtype=dtype).transpose(1, 2)

    return one(heads_q, length_q), one(heads_k, length_k), one(heads_k, length_k), one(heads_q, length_q)


def gradients(inputs, causal, backend=SDPBackend.FLASH_ATTENTION, dropout=0.0):
    query, key, value, grad = inputs
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    with sdpa_kernel(backend):
        out = scaled_dot_product_attention(
            *leaves, is_causal=causal, dropout_p=dropout, enable_gqa=query.shape[1] != key.shape[1]
        )
    return torch.autograd.grad(out, leaves, grad)


def expected(inputs, causal):
    """In 64 bits, by the formula; without torch's deterministic mode, which asks for a setting of cuBLAS."""
    query, key, value, grad = (tensor.double() for tensor in inputs)
    query, key, value = (tensor.detach().requires_grad_() for tensor in (query, key, value))
    group = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(group, 1).transpose(2, 3) / query.shape[3] ** 0.5
    if causal:
        seen = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    out = scores.softmax(3) @ value.repeat_interleave(group, 1)
    return torch.autograd.grad(out, (query, key, value), grad)


def largest_error(found, wanted):
    return max(
        ((f.double() - w).abs().max() / w.abs().max()).item() for f, w in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize("layout", ["rows first", "heads first", "packed"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients(shape, layout, calls):
    inputs, causal = tensors(shape, layout=layout), shape[-1]
    found = gradients(inputs, causal)
    assert len(calls) == 1
    torch.use_deterministic_algorithms(False)
    wanted = expected(inputs, causal)
    theirs = gradients(inputs, causal)
    assert len(calls) == 1
    assert largest_error(found, wanted) < max(1.5 * largest_error(theirs, wanted), 5e-3)
    assert [gradient.stride() for gradient in found] == [gradient.stride() for gradient in theirs]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_repeats_are_bit_equal(shape, calls):
    inputs, causal = tensors(shape), shape[-1]
    first = gradients(inputs, causal)
    for _ in range(4):
        assert all(torch.equal(a, b) for a, b in zip(gradients(inputs, causal), first, strict=True))
    assert len(calls) == 5


def test_an_expanded_gradient(calls):
    query, key, value, _ = tensors(SHAPES[0])
    one = torch.ones((), device="cuda", dtype=torch.bfloat16).expand(query.shape)
    found = gradients((query, key, value, one), True)
    dense = gradients((query, key, value, one.contiguous()), True)
    assert len(calls) == 2
    assert all(torch.equal(a, b) for a, b in zip(found, dense, strict=True))


def test_the_choice_of_scaled_dot_product_attention(calls):
    """In deterministic mode it takes the flash kernel by itself, which is what ours stands behind."""
    query, key, value, grad = tensors(SHAPES[0])
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    torch.autograd.grad(scaled_dot_product_attention(*leaves, is_causal=True), leaves, grad)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("shape", "dtype", "dropout"),
    [
        (SHAPES[0], torch.bfloat16, 0.1),
        (SHAPES[0], torch.float16, 0.0),
        ((2, 4, 4, 512, 512, 96, True), torch.bfloat16, 0.0),
        ((2, 4, 4, 64, 64, 128, True), torch.bfloat16, 0.0),
    ],
    ids=["dropout", "half precision", "another head dimension", "short"],
)
def test_what_is_left_to_torch(shape, dtype, dropout, calls):
    inputs = tensors(shape, dtype=dtype)
    torch.manual_seed(3)
    found = gradients(inputs, True, dropout=dropout)
    assert not calls
    attention.release()
    torch.manual_seed(3)
    theirs = gradients(inputs, True, dropout=dropout)
    attention.install()
    assert all(torch.equal(a, b) for a, b in zip(found, theirs, strict=True))


def test_release_gives_torch_its_kernel_back(calls):
    inputs = tensors(SHAPES[0])
    attention.install()
    attention.release()
    gradients(inputs, True)
    assert len(calls) == 1
    attention.release()
    gradients(inputs, True)
    assert len(calls) == 1
    attention.install()
    gradients(inputs, True)
    assert len(calls) == 2


def test_under_compile(calls):
    inputs = tensors(SHAPES[0])
    plain = gradients(inputs, True)
    query, key, value, grad = inputs
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]

    @torch.compile
    def function(query, key, value):
        return scaled_dot_product_attention(query, key, value, is_causal=True)

    found = torch.autograd.grad(function(*leaves), leaves, grad)
    assert len(calls) == 2
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
