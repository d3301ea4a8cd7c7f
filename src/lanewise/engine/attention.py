"""Attention on GPUs: deterministic, and yet about as fast as torch's attention that is not.

While deterministic algorithms are asked for, scaled_dot_product_attention takes torch's flash kernels. Their forward
and their backward are operators, and this file gives both other CUDA kernels, through torch's dispatcher: user code,
autograd and torch.compile reach them as they reach torch's. Forward is cuDNN's, which torch leaves out since cuDNN's
backward would not be deterministic; backward is ours. What they do not cover goes on to torch's kernels, as everything
does once the last user has released them.
"""

import importlib.util
import math
import threading
import warnings
from enum import Enum, auto
from functools import cache
from typing import Any

import torch
from torch import Tensor

Output = tuple[Tensor, Tensor, Tensor | None, Tensor | None, int, int, Tensor, Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor]

OPERATOR = "_scaled_dot_product_flash_attention"
HEAD_DIMS = (64, 128)
SHORTEST = 256
"""Shorter sequences are left to torch: starting kernels from Python would cost more than it saves."""

_lock = threading.Lock()
_num_users = 0
_library: torch.library.Library | None = None


class _Way(Enum):
    """What becomes of an attention."""

    OURS = auto()
    COPY = auto()
    """Ours, but some tensors can only be read after they have been copied."""
    TORCH = auto()


_MOST_LAYOUTS = 4096
_forwards: dict[object, _Way] = {}
_backwards: dict[object, Any] = {}
"""What was decided for each layout, which is all but the numbers in the tensors and where they lie: a `_Way`, or in
the place of OURS what carries it out."""


def install() -> None:
    """Use these kernels where they apply, until released as often as installed. Nothing where there is no GPU."""
    global _num_users, _library
    with _lock:
        _num_users += 1
        if _library is None and torch.cuda.is_available() and importlib.util.find_spec("triton"):
            # Imported here rather than in one of autograd's threads.
            importlib.import_module("lanewise.engine.kernels.attention")
            library = torch.library.Library("aten", "IMPL")
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*[Oo]verrid.*")  # which is what is wanted
                library.impl(OPERATOR, torch.compiler.disable(_forward), "CUDA", allow_override=True)
                library.impl(
                    OPERATOR + "_backward", torch.compiler.disable(_backward), "CUDA", allow_override=True
                )
            _library = library


def release() -> None:
    """Undo one install(); the last one gives torch its kernels back."""
    global _num_users, _library
    with _lock:
        assert _num_users > 0, "released more often than installed"
        _num_users -= 1
        if _num_users == 0 and _library is not None:
            _library._destroy()
            _library = None


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Output:
    """What the dispatcher calls; the arguments are the operator's, heads before rows."""
    # Who has switched cuDNN's attention off keeps the flash kernel.
    plain = dropout_p == 0.0 and not return_debug_mask and torch._C._get_cudnn_sdp_enabled()
    length_q, length_k = query.shape[2], key.shape[2]
    if plain and _asked_for():
        found = _our_forward(query, key, value, is_causal, scale)
        if found is not None:
            return *found, None, None, length_q, length_k, *_unused(query)
    # What torch's own kernel of this operator does: rows before heads, and the general forward.
    turned = (tensor.transpose(1, 2) for tensor in (query, key, value))
    out, logsumexp, seed, offset, debug_mask = torch.ops.aten._flash_attention_forward(
        *turned, None, None, length_q, length_k, dropout_p, is_causal, return_debug_mask, scale=scale
    )
    return out.transpose(1, 2), logsumexp, None, None, length_q, length_k, seed, offset, debug_mask


def _our_forward(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor] | None:
    """The output and logsumexp by cuDNN; None for layouts that we do not cover, or that it refuses."""
    layout = (is_causal, *_layout(query, key, value))
    way = _forwards.get(layout)
    if way is None:
        way = _note(_forwards, layout, _way((query, key, value), is_causal))
    if way is _Way.TORCH:
        return None
    if way is _Way.COPY or not _are_aligned(query, key, value):
        return _our_forward(_readable(query), _readable(key), _readable(value), is_causal, scale)
    try:
        out, logsumexp, *_ = torch._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, is_causal, False, scale=scale
        )
    except RuntimeError as error:
        # Anything else, such as memory that has run out, must not choose between kernels.
        if not any(words in str(error) for words in ("cuDNN Frontend error", "not compiled with cuDNN")):
            raise
        # A refusal depends on nothing but the layout.
        _note(_forwards, layout, _Way.TORCH)
        return None
    return out, logsumexp.squeeze(3).contiguous()


def _unused(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The seed and offset of dropout, which backward is handed and does not read, and no debug mask.

    Made anew: CUDA graphs of torch.compile want the outputs of an operator in memory of their own.
    """
    seed = query.new_empty_strided((2,), (1,), dtype=torch.uint64)
    offset = query.new_empty_strided((), (), dtype=torch.uint64)
    return seed, offset, query.new_empty_strided((0,), (1,))


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> Gradients:
    """What the dispatcher calls; the arguments are the operator's, heads before rows."""
    if cum_seq_q is None and cum_seq_k is None and dropout_p == 0.0 and _asked_for():
        found = _our_backward(query, key, value, grad_out, out, logsumexp.contiguous(), is_causal, scale)
        if found is not None:
            return found
    # What torch's own kernel of this operator does: rows before heads, and the general backward.
    turned = (tensor.transpose(1, 2) for tensor in (grad_out, query, key, value, out))
    grad_query, grad_key, grad_value = torch.ops.aten._flash_attention_backward(
        *turned,
        logsumexp,
        cum_seq_q,
        cum_seq_k,
        max_q,
        max_k,
        dropout_p,
        is_causal,
        philox_seed,
        philox_offset,
        scale=scale,
    )
    return grad_query.transpose(1, 2), grad_key.transpose(1, 2), grad_value.transpose(1, 2)


def _our_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_out: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    scale: float | None,
) -> Gradients | None:
    """The gradients of query, key and value; None for layouts that we do not cover."""
    layout = (is_causal, scale, logsumexp.dtype, *_layout(query, key, value, grad_out, out))
    way = _backwards.get(layout)
    if way is None:
        tensors = (query, key, value, grad_out, out)
        way = _way(tensors, is_causal)
        if way is _Way.OURS:
            from lanewise.engine.kernels.attention import Backward

            way = Backward(*tensors, is_causal, 1.0 / math.sqrt(query.shape[3]) if scale is None else scale)
        _note(_backwards, layout, way)
    if way is _Way.TORCH:
        return None
    if way is _Way.COPY or not _are_aligned(query, key, value, grad_out, out):
        query, key, value = _readable(query), _readable(key), _readable(value)
        grad_out, out = _readable(grad_out), _readable(out)
        return _our_backward(query, key, value, grad_out, out, logsumexp, is_causal, scale)
    # Triton starts kernels on the current device.
    if query.get_device() == torch.cuda.current_device():
        return way(query, key, value, grad_out, out, logsumexp)
    with torch.cuda.device_of(query):
        return way(query, key, value, grad_out, out, logsumexp)


def _asked_for() -> bool:
    """Without determinism, torch's kernels are faster than these."""
    return (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )


def _layout(*tensors: Tensor) -> list[object]:
    return [tensors[0].get_device(), *[(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]]


def _note(decided: dict[object, Any], layout: object, way: Any) -> Any:
    # Sequences of ever other lengths must not fill the memory.
    if len(decided) >= _MOST_LAYOUTS:
        decided.clear()
    decided[layout] = way
    return way


def _way(tensors: tuple[Tensor, ...], causal: bool) -> _Way:
    if not _covers(tensors, causal):
        return _Way.TORCH
    return _Way.OURS if all(map(_has_rows, tensors)) else _Way.COPY


def _covers(tensors: tuple[Tensor, ...], causal: bool) -> bool:
    """Whether our backward computes this attention, and on a GPU for which its tiles were chosen."""
    query, key, value, *_ = tensors
    length_q, length_k = query.shape[2], key.shape[2]
    return (
        query.shape[3] in HEAD_DIMS
        and all(tensor.dtype == torch.bfloat16 and tensor.shape[3] == query.shape[3] for tensor in tensors)
        and key.shape == value.shape
        and query.shape[1] % key.shape[1] == 0
        and min(length_q, length_k) >= SHORTEST
        and (length_q == length_k or not causal)
        # Within a head, places are numbers of 32 bits.
        and all(tensor.shape[2] * max(tensor.stride(2), tensor.shape[3]) < 2**31 for tensor in tensors)
        and query.numel() > 0
        and _is_hopper(query.device)
    )


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


def _has_rows(tensor: Tensor) -> bool:
    """Whether rows are dense, and start where a tensor that is aligned has them aligned."""
    *others, last = tensor.stride()
    return last == 1 and all(stride > 0 and stride % 16 == 0 for stride in others)


def _are_aligned(*tensors: Tensor) -> bool:
    bits = 0
    for tensor in tensors:
        bits |= tensor.data_ptr()
    return bits % 16 == 0


def _readable(tensor: Tensor) -> Tensor:
    """The tensor itself where it can be read, else a copy, in the same order of dimensions where that helps."""
    if _has_rows(tensor) and _are_aligned(tensor):
        return tensor
    copy = tensor.clone()
    return copy if _has_rows(copy) else tensor.clone(memory_format=torch.contiguous_format)
