"""Deterministic attention: right, equal in all repeats, and out of the way where it is not wanted."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from lanewise.engine import attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),  # in a thread of autograd's that is new
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
    """Installed, with deterministic algorithms on; holds what our backward was given."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("its tiles are chosen for Hopper; other GPUs keep torch's kernel")
    from lanewise.engine.kernels.attention import Backward

    given: list[Any] = []
    theirs = Backward.__call__

    def backward(self, *arguments):
        given.append(arguments)
        return theirs(self, *arguments)

    monkeypatch.setattr(Backward, "__call__", backward)
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


FLASH = (SDPBackend.FLASH_ATTENTION,)
WITH_CUDNN = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
"""In deterministic mode torch takes flash attention all the same, whose forward is then cuDNN's."""


def forward(inputs, causal, backends=WITH_CUDNN, dropout=0.0):
    query, key, value = inputs[:3]
    with sdpa_kernel(list(backends)):
        return scaled_dot_product_attention(
            query, key, value, is_causal=causal, dropout_p=dropout, enable_gqa=query.shape[1] != key.shape[1]
        )


def gradients(inputs, causal, backends=FLASH, dropout=0.0):
    leaves = [tensor.detach().requires_grad_() for tensor in inputs[:3]]
    return torch.autograd.grad(forward(leaves, causal, backends, dropout), leaves, inputs[3])


def expected(inputs, causal):
    """Gradients, output and logsumexp in 64 bits, by the formula.

    Without torch's deterministic mode, which asks for a setting of cuBLAS.
    """
    query, key, value, grad = (tensor.double() for tensor in inputs)
    query, key, value = (tensor.detach().requires_grad_() for tensor in (query, key, value))
    group = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(group, 1).transpose(2, 3) / query.shape[3] ** 0.5
    if causal:
        seen = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    out = scores.softmax(3) @ value.repeat_interleave(group, 1)
    return torch.autograd.grad(out, (query, key, value), grad), out.detach(), scores.logsumexp(3).detach()


def largest_error(found, wanted):
    return max(
        ((f.double() - w).abs().max() / w.abs().max()).item() for f, w in zip(found, wanted, strict=True)
    )


@pytest.fixture
def cudnn(monkeypatch):
    """For each time that cuDNN was asked, whether it could."""
    asked: list[bool] = []
    theirs = torch._scaled_dot_product_cudnn_attention

    def asking(*arguments, **named):
        asked.append(False)
        found = theirs(*arguments, **named)
        asked[-1] = True
        return found

    monkeypatch.setattr(torch, "_scaled_dot_product_cudnn_attention", asking)
    return asked


@pytest.mark.parametrize("layout", ["rows first", "heads first", "packed"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients(shape, layout, calls):
    inputs, causal = tensors(shape, layout=layout), shape[-1]
    found = gradients(inputs, causal)
    after_cudnn = gradients(inputs, causal, WITH_CUDNN)
    assert len(calls) == 2
    torch.use_deterministic_algorithms(False)
    wanted, _, _ = expected(inputs, causal)
    theirs = gradients(inputs, causal)
    assert len(calls) == 2
    bound = max(1.5 * largest_error(theirs, wanted), 5e-3)
    assert largest_error(found, wanted) < bound
    assert largest_error(after_cudnn, wanted) < bound
    assert [gradient.stride() for gradient in found] == [gradient.stride() for gradient in theirs]


@pytest.mark.parametrize("layout", ["rows first", "heads first", "packed"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward(shape, layout, calls, cudnn):
    inputs, causal = tensors(shape, layout=layout), shape[-1]
    found = forward(inputs, causal)
    flash = forward(inputs, causal, FLASH)
    assert len(cudnn) == 1
    # The operator's other outputs, as torch's own kernel gives them.
    operator = torch.ops.aten._scaled_dot_product_flash_attention
    whole = operator(*inputs[:3], 0.0, causal)
    attention.release()
    theirs = operator(*inputs[:3], 0.0, causal)
    attention.install()
    assert torch.equal(whole[0], found)
    assert torch.equal(theirs[0], flash)
    for ours, other in zip(whole, theirs, strict=True):
        if isinstance(ours, torch.Tensor):
            assert (ours.shape, ours.stride(), ours.dtype, ours.device) == (
                other.shape,
                other.stride(),
                other.dtype,
                other.device,
            )
        else:
            assert ours == other
    torch.use_deterministic_algorithms(False)
    _, out, logsumexp = expected(inputs, causal)
    assert largest_error([found], [out]) < max(1.5 * largest_error([flash], [out]), 5e-3)
    assert largest_error(whole[1:2], [logsumexp]) < 1e-4


def test_cudnn_has_the_usual_shapes(calls, cudnn):
    for dim in attention.HEAD_DIMS:
        forward(tensors((2, 4, 4, 512, 512, dim, True)), True)
    assert cudnn == [True, True]


@pytest.mark.parametrize("backends", [FLASH, WITH_CUDNN], ids=["flash", "cuDNN"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_repeats_are_bit_equal(shape, backends, calls):
    inputs, causal = tensors(shape), shape[-1]
    first = forward(inputs, causal, backends), *gradients(inputs, causal, backends)
    for other in [*SHAPES[:4], None]:
        if other is not None:
            gradients(tensors(other), other[-1], backends)
        again = forward(inputs, causal, backends), *gradients(inputs, causal, backends)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
    assert len(calls) == 10


def test_checkpointing_computes_the_same_forward_again(calls, cudnn):
    """In one of autograd's threads, each of which has plans of cuDNN of its own."""
    inputs = tensors(SHAPES[0])
    plain = gradients(inputs, True, WITH_CUDNN)
    leaves = [tensor.detach().requires_grad_() for tensor in inputs[:3]]
    with sdpa_kernel(list(WITH_CUDNN)):
        out = checkpoint(
            lambda *given: scaled_dot_product_attention(*given, is_causal=True), *leaves, use_reentrant=False
        )
        found = torch.autograd.grad(out, leaves, inputs[3])
    assert cudnn == [True] * 3
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


def test_what_cudnn_refuses_is_left_to_flash_for_good(calls, cudnn, monkeypatch):
    inputs = tensors(SHAPES[0])
    flash = forward(inputs, True, FLASH)
    num_asked = 0

    def refuse(*arguments, **named):
        nonlocal num_asked
        num_asked += 1
        raise RuntimeError("cuDNN Frontend error: no kernel for this")

    monkeypatch.setattr(attention, "_forwards", {})
    with monkeypatch.context() as patch:
        patch.setattr(torch, "_scaled_dot_product_cudnn_attention", refuse)
        assert torch.equal(forward(inputs, True), flash)
    assert torch.equal(forward(inputs, True), flash)
    assert num_asked == 1
    assert not cudnn


def test_other_errors_of_cudnn_are_not_hidden(calls, monkeypatch):
    def fail(*arguments, **named):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(attention, "_forwards", {})
    monkeypatch.setattr(torch, "_scaled_dot_product_cudnn_attention", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        forward(tensors(SHAPES[0]), True)
    assert attention._Way.TORCH not in attention._forwards.values()


def test_an_expanded_gradient(calls):
    query, key, value, _ = tensors(SHAPES[0])
    one = torch.ones((), device="cuda", dtype=torch.bfloat16).expand(query.shape)
    found = gradients((query, key, value, one), True)
    dense = gradients((query, key, value, one.contiguous()), True)
    assert len(calls) == 2
    assert all(torch.equal(a, b) for a, b in zip(found, dense, strict=True))


def test_tensors_that_are_not_aligned(calls, cudnn):
    """After, before and between such as are, since Triton compiles a kernel for either."""
    inputs = tensors(SHAPES[0])
    plain = gradients(inputs, True, WITH_CUDNN)

    def moved(tensor):
        batch, heads, length, dim = tensor.shape
        memory = torch.empty(tensor.numel() + 1, device="cuda", dtype=tensor.dtype)[1:]
        return memory.view(batch, length, heads, dim).transpose(1, 2).copy_(tensor)

    for which in ([0], [1, 2], [3], [], [0, 1, 2, 3], []):
        given = [moved(tensor) if number in which else tensor for number, tensor in enumerate(inputs)]
        found = gradients(given, True, WITH_CUDNN)
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert len(calls) == len(cudnn) == 7


def test_a_kernel_is_started_alike_whether_tensors_are_aligned_or_not(calls):
    from lanewise.engine.kernels.attention import Backward

    query, key, value, grad = tensors((1, 2, 2, 256, 256, 64, True))
    operator = torch.ops.aten._scaled_dot_product_flash_attention
    out, logsumexp = operator(query, key, value, 0.0, True)[:2]
    apart = torch.empty(logsumexp.numel() + 1, device="cuda")[1:].view_as(logsumexp).copy_(logsumexp)
    backward = Backward(query, key, value, grad, out, True, 0.125)
    first, *others = [
        backward(query, key, value, grad, out, sums)
        for sums in (apart, logsumexp, logsumexp, apart, logsumexp)
    ]
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(other, first, strict=True))


def test_the_choice_of_scaled_dot_product_attention(calls, cudnn):
    """In deterministic mode it takes the flash kernels by itself, which is what ours stand behind."""
    query, key, value, grad = tensors(SHAPES[0])
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    torch.autograd.grad(scaled_dot_product_attention(*leaves, is_causal=True), leaves, grad)
    assert len(calls) == 1
    assert cudnn == [True]


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
def test_what_is_left_to_torch(shape, dtype, dropout, calls, cudnn):
    inputs = tensors(shape, dtype=dtype)

    def both():
        torch.manual_seed(3)
        out = forward(inputs, True, dropout=dropout)
        return out, *gradients(inputs, True, WITH_CUDNN, dropout)

    found = both()
    assert not calls
    assert not cudnn
    attention.release()
    theirs = both()
    attention.install()
    assert all(torch.equal(a, b) for a, b in zip(found, theirs, strict=True))


def test_release_gives_torch_its_kernels_back(calls, cudnn):
    inputs = tensors(SHAPES[0])
    attention.install()
    attention.release()
    gradients(inputs, True, WITH_CUDNN)
    assert len(calls) == len(cudnn) == 1
    attention.release()
    gradients(inputs, True, WITH_CUDNN)
    assert len(calls) == len(cudnn) == 1
    attention.install()
    gradients(inputs, True, WITH_CUDNN)
    assert len(calls) == len(cudnn) == 2


@pytest.mark.filterwarnings("ignore")  # of torch's own, when it imports its compiler
def test_under_compile(calls, cudnn):
    inputs = tensors(SHAPES[0])
    plain = gradients(inputs, True, WITH_CUDNN)
    query, key, value, grad = inputs
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]

    @torch.compile
    def function(query, key, value):
        return scaled_dot_product_attention(query, key, value, is_causal=True)

    found = torch.autograd.grad(function(*leaves), leaves, grad)
    assert len(calls) == len(cudnn) == 2
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
