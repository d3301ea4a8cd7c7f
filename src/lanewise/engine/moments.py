"""Optimizer state that is kept in bf16 between steps and rounded at random, so that small changes are not lost.

A step widens it to fp32, chunk by chunk, lets the user's optimizer work, and rounds the new state to one of the two
nearest bf16 numbers, the nearer one more often, so that the mean is right. The random bits of an element follow from
the seed, the step, the name of the state, and the element's place in the layout: ranks and chunks do not meet them.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lanewise.engine import device as devices
from lanewise.engine.accept import ELEMENTWISE
from lanewise.lanes.seeds import derive

if TYPE_CHECKING:
    from lanewise.engine.optimizer import Slice

CHUNK = 1 << 24
"""Elements that are fp32 at a time. Stretches begin on multiples of it, so no kernel's bits change."""

Key = tuple[int, int]
"""Two words of 32 bits."""
Rounder = Callable[[torch.Tensor, torch.Tensor, Key, int], None]

_BLOCK = 1 << 17
"""Elements to round at a time on a CPU: few enough for a cache."""
_WORD = 0xFFFFFFFF
_MIXING = ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1))
"""Shifts and factors of a well-known mixing of 32 bits ("lowbias32")."""
_LARGEST = 0x7F7F0000
"""The bits of the largest finite bf16 number, as an fp32."""
_INFINITY = 0x7F800000
_MAX = torch.finfo(torch.bfloat16).max


class Moments:
    """Steps an optimizer whose state is kept in bf16."""

    def __init__(self, seed: int, device: torch.device, chunk: int = CHUNK) -> None:
        self._seed = seed
        self._chunk = chunk
        self._round = rounder(device)
        self._new: dict[torch.Tensor, dict[str, Any]] = {}
        """The state of slices whose last stretch is still to come."""

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Narrow what the optimizer's constructor made."""
        for tensor, state in optimizer.state.items():
            for name, value in state.items():
                if _is_moment(value, tensor):
                    state[name] = value.bfloat16()

    def step(self, optimizer: torch.optim.Optimizer, slices: Sequence["Slice"], number: int) -> None:
        """Step the slices that have a gradient.

        To the user's hooks and schedulers it is one call of `optimizer.step()`, on whole slices and bf16 state:
        between the last hook before it and the first one after it, chunk follows chunk.
        """
        live = [piece for piece in slices if piece.tensor.grad is not None]
        chunks = list(_chunks(live, self._chunk)) if _may_repeat(optimizer) else [_whole(live)]
        *first, last = chunks or [[]]
        with ExitStack() as wide, ExitStack() as hooks:
            depth = 0

            def before(*_: Any) -> None:
                nonlocal depth
                depth += 1
                if depth > 1:
                    return
                for chunk in first:
                    with self._widened(optimizer, chunk, number):
                        _step_without_hooks(optimizer)
                wide.enter_context(self._widened(optimizer, last, number))

            def after(*_: Any) -> None:
                nonlocal depth
                depth -= 1
                if depth == 0:
                    wide.close()

            hooks.callback(optimizer.register_step_pre_hook(before).remove)
            handle = optimizer.register_step_post_hook(after)
            hooks.callback(handle.remove)
            of_all: Any = optimizer._optimizer_step_post_hooks
            of_all.move_to_end(handle.id, last=False)
            optimizer.step()

    @contextmanager
    def _widened(
        self, optimizer: torch.optim.Optimizer, chunk: Sequence["_Stretch"], number: int
    ) -> Iterator[None]:
        """Have the optimizer hold nothing but a chunk, with fp32 state, and keep what comes of it."""
        kept = optimizer.state
        params = [list(group["params"]) for group in optimizer.param_groups]
        views = [stretch.view() for stretch in chunk]
        state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for stretch, view in zip(chunk, views, strict=True):
            state[view] = stretch.widen(kept.get(stretch.piece.tensor, {}))
        try:
            optimizer.state = state
            for group_number, group in enumerate(optimizer.param_groups):
                group["params"][:] = [
                    v for s, v in zip(chunk, views, strict=True) if s.piece.group == group_number
                ]
            yield
            for stretch, view in zip(chunk, views, strict=True):
                self._keep(stretch, view, state[view], kept[stretch.piece.tensor], number)
        finally:
            optimizer.state = kept
            for group, tensors in zip(optimizer.param_groups, params, strict=True):
                group["params"][:] = tensors

    def _keep(
        self, stretch: "_Stretch", view: torch.Tensor, new: dict[str, Any], kept: dict[str, Any], number: int
    ) -> None:
        """Round the new state of a stretch to its place, and give it to the slice with the last stretch."""
        tensor = stretch.piece.tensor
        found = self._new.setdefault(tensor, {})
        for name, value in new.items():
            if not _is_moment(value, view):
                found[name] = value
                continue
            old = found.get(name, kept.get(name))
            whole = torch.empty_like(tensor, dtype=torch.bfloat16) if old is None else old.bfloat16()
            key = key_of(self._seed, number, stretch.piece.flat.number, name)
            self._round(value, whole[stretch.low : stretch.high], key, stretch.place)
            found[name] = whole
        if stretch.is_last:
            kept.update(self._new.pop(tensor))


@dataclass(frozen=True)
class _Stretch:
    """Elements `low` to `high - 1` of a slice."""

    piece: "Slice"
    low: int
    high: int

    @property
    def is_last(self) -> bool:
        """Whether the slice ends here."""
        return self.high == self.piece.tensor.numel()

    @property
    def place(self) -> int:
        """Where the stretch begins in its flat, which is the same for any number of ranks."""
        part = self.piece.part
        return self.piece.flat.layout.fields[part.field].start + part.start + self.low

    def view(self) -> torch.Tensor:
        """What the optimizer steps: the slice itself where the stretch is all of it."""
        tensor = self.piece.tensor
        if self.high - self.low == tensor.numel():
            return tensor
        view = tensor[self.low : self.high]
        view.grad = None if tensor.grad is None else tensor.grad[self.low : self.high]
        return view

    def widen(self, kept: dict[str, Any]) -> dict[str, Any]:
        """The state of the stretch in fp32. Single numbers are stepped once, by the slice's last stretch."""
        tensor = self.piece.tensor
        found: dict[str, Any] = {}
        for name, value in kept.items():
            if not isinstance(value, torch.Tensor):
                found[name] = value
            elif value.dtype == torch.bfloat16 and value.shape == tensor.shape:
                found[name] = value[self.low : self.high].float()
            else:
                found[name] = value if self.is_last else value.clone()
        return found


def _whole(slices: Sequence["Slice"]) -> list[_Stretch]:
    return [_Stretch(piece, 0, piece.tensor.numel()) for piece in slices]


def _chunks(slices: Sequence["Slice"], limit: int) -> Iterator[list[_Stretch]]:
    """Neighbouring stretches of at most `limit` elements together. What is not narrowed is not cut."""
    chunk: list[_Stretch] = []
    room = limit
    for piece in slices:
        numel = piece.tensor.numel()
        length = limit if piece.tensor.dtype == torch.float32 else numel
        for low in range(0, numel, length):
            stretch = _Stretch(piece, low, min(low + length, numel))
            if chunk and stretch.high - stretch.low > room:
                yield chunk
                chunk, room = [], limit
            chunk.append(stretch)
            room -= stretch.high - stretch.low
    if chunk:
        yield chunk


def _is_moment(value: Any, tensor: torch.Tensor) -> bool:
    """Whether a state value is kept in bf16: an fp32 number for each element."""
    return (
        isinstance(value, torch.Tensor)
        and value.dtype == tensor.dtype == torch.float32
        and value.shape == tensor.shape
    )


def _may_repeat(optimizer: torch.optim.Optimizer) -> bool:
    """Whether stepping twice, on other tensors, is one step. An optimizer we do not know may count its calls."""
    return type(optimizer) in {getattr(torch.optim, name) for name in ELEMENTWISE}


def _step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    step: Any = type(optimizer).step
    step.__wrapped__(optimizer)


def key_of(seed: int, step: int, flat: int, name: str) -> Key:
    """What the random bits of one state of a flat follow from, at one step."""
    whole = derive(seed, "moments", step, flat, name)
    return whole >> 32, whole & _WORD


def rounder(device: torch.device) -> Rounder:
    """The rounding for a device: one kernel on a GPU, to the same bits."""
    if devices.has_kernels(device):
        from lanewise.engine.kernels import rounding

        return rounding.round_to_bf16
    return round_to_bf16


def round_to_bf16(wide: torch.Tensor, narrow: torch.Tensor, key: Key, place: int) -> None:
    """Write fp32 numbers to a bf16 tensor, each rounded away from zero as often as it is nearer to there.

    `place` is that of the first element in its flat: an even number. Exact numbers, infinity and NaN stay; what lies
    beyond the largest bf16 number is rounded to nearest, so that nothing becomes infinite by chance.
    """
    assert place % 2 == 0
    out = narrow.view(torch.int16)
    low = 0
    while low < len(wide):
        high = min(low + _BLOCK - (place + low) % _BLOCK, len(wide))
        noise = _random_bits(place + low, high - low, key, wide.device)
        out[low:high] = _add_and_cut(wide[low:high], noise)
        low = high


def _add_and_cut(wide: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """The upper 16 bits of the sum: noise that carries makes the magnitude one bf16 step larger."""
    bits = wide.view(torch.int32)
    least, most = (float(end) for end in wide.aminmax())
    if least > -_MAX and most < _MAX:
        return noise.add_(bits).bitwise_right_shift_(16)
    size = bits & 0x7FFFFFFF
    noise = torch.where(size < _LARGEST, noise, (size < _INFINITY).int() << 15)
    quiet = (size > _INFINITY).int() << 6
    return noise.add_(bits).bitwise_right_shift_(16).bitwise_or_(quiet)


def _random_bits(place: int, count: int, key: Key, device: torch.device) -> torch.Tensor:
    """16 random bits for each element of a stretch that lies in one block. Two neighbours share a hash."""
    base = place // _BLOCK * (_BLOCK // 2)
    start = place % _BLOCK // 2
    words = torch.arange(start, start + (count + 1) // 2, dtype=torch.int32, device=device)
    words ^= _signed(base ^ key[0])
    _mix(words)
    words ^= _signed(key[1] + (base >> 32))
    _mix(words)
    return words.view(torch.int16)[:count].int().bitwise_and_(0xFFFF)


def _mix(words: torch.Tensor) -> None:
    """A one-to-one map of 32 bits in which each bit of the result depends on all bits."""
    for shift, factor in _MIXING:
        words ^= (words >> shift).bitwise_and_(_WORD >> shift)
        words *= _signed(factor)


def _signed(word: int) -> int:
    """The lower 32 bits as the number that an int32 makes of them."""
    return (word + 0x80000000 & _WORD) - 0x80000000
