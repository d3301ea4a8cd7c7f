"""Following a forward and its backward from unit to unit.

Autograd numbers its nodes as they are made and runs ready ones from the last to the first. So when
backward reaches a node, it is done with every node of a higher number: the gradients of all units whose
first call began later are complete, and their values may go. That needs a hook on a unit's outputs only,
none on a parameter. Where backward comes to a unit in another way (a loss kept aside, an output that is
no plain tensor), `saved` brings the values back and the gradients are complete when all of backward is.

Looking at everything that is saved costs as much Python as the rest together. Where to read values that are away is
an error by itself (on a GPU), it is done once for each shape of a graph: if nothing had to be brought back then,
nothing will.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from lanewise.engine.homes import Home, ShardedHome
from lanewise.engine.hooks import After, Before
from lanewise.engine.saved import SavedValues
from lanewise.engine.unit import Unit
from lanewise.errors import ModelError

_next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number that the next node of this thread will get."""
_current_node: Callable[[], Any] = torch._C._current_autograd_node
_current_task: Callable[[], int] = torch._C._current_graph_task_id
"""Which backward is running: one inside another (reentrant checkpointing) has an id of its own."""

_Shape = tuple[tuple[int, int, int, bool], ...]
"""The calls of a lane: the unit, the nodes at which it began and ended, and whether backward announces it."""
_MOST_SHAPES = 1024
"""Shapes to remember: a model whose graph is ever another must not fill the memory."""
_NO_DATA = ("data is not allocated yet", "out of bounds for storage of size 0")
"""What torch says when it is to read values that are away."""
_PAST_OUTPUTS = (
    "backward came to a unit past its outputs (by a tensor that its forward left somewhere, in an attribute, say), for "
    "the first time in a graph of this shape, and its parameters are with their owners. Return such tensors from the "
    "unit's forward, or choose units with run.prepare(..., units=[...]) that contain their use."
)


@dataclass(eq=False)
class _Call:
    """One call of a unit in a forward, and the numbers of the next nodes when it began and ended."""

    unit: Unit
    began: int
    ended: int = -1
    enters: bool = False
    """Whether backward will announce that it comes to this call."""


class Passes:
    """Installs the hooks of all units and turns them into events of the home and of the sums."""

    def __init__(self, units: tuple[Unit, ...], home: Home, on_complete: Callable[[Unit], None]) -> None:
        self._units = units
        self._home = home
        self._on_complete = on_complete
        self._saved = SavedValues(units, home)
        if isinstance(home, ShardedHome):
            home.recall = self._recall_root
        self._handles: list[Any] = []
        self._calls: list[_Call] = []
        """The calls of this lane that backward has not passed yet, by when they began."""
        self._open: list[_Call] = []
        self._num_left: dict[int, int] = {}
        """How many calls of each unit are in `_calls`."""
        self._called: list[int] = []
        self._order: list[int] = []
        """The units as they were called the last time, and as they are prefetched."""
        self._in_backward = False
        self._task = -1
        self._lingering: Unit | None = None
        self._lent: set[int] = set()
        """Units whose values somebody may use for good, because a view of them was given away."""
        self._num_holds = 0
        self._is_training = False
        self.observer: Callable[[], None] | None = None
        """Called wherever a unit begins or ends."""
        self._first_node = 0
        self._known_graphs: set[_Shape] = set()
        """The shapes of graphs in which every unit was entered by its outputs."""
        self._is_known = False
        """Whether the last graph had such a shape."""

    @property
    def is_training(self) -> bool:
        """Whether a lane is being computed, so that forwards will be followed by a backward."""
        return self._is_training

    @property
    def is_held(self) -> bool:
        """Whether values stay here whatever is called."""
        return self._num_holds > 0

    def install(self) -> None:
        """Hook every unit."""
        for unit in self._units:
            before, after = Before(unit, self.before_forward), After(unit, self.after_forward)
            self._handles.append(unit.module.register_forward_pre_hook(before, prepend=True))
            self._handles.append(unit.module.register_forward_hook(after))

    def remove(self) -> None:
        """Unhook every unit."""
        self._saved.leave()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def begin_lane(self) -> None:
        """Forwards and a backward come next. The root's values are here from now on, whatever is called.

        Where to read values that are away is an error by itself, they go when the model's own forward is over, since
        that is when most memory is in use, and come back with backward, or when the loss touches them.
        """
        self.reset()
        self._is_training = True
        self._first_node = _next_node()
        if self._home.frees:
            if not (self._is_known and self._home.is_safe):
                self._saved.enter()
            self._home.need(self._units[0])

    def end_lane(self) -> None:
        """No more backward will come."""
        self._is_training = False
        self._saved.leave()
        self.reset()

    def abandon_lane(self) -> None:
        """The user's loop was left in mid-lane. Exchange nothing: other ranks may not be there any more."""
        self._is_training = False
        self._saved.leave()

    def _recall_root(self) -> bool:
        """A loss may use what belongs to no other unit after the model's forward has let it go."""
        if self._is_training:
            self._home.need(self._units[0])
        return self._is_training

    def hold(self) -> None:
        """Have all values here, whatever is called, until `let_go`. Collective."""
        for unit in self._units:
            self._home.need(unit)
        self._num_holds += 1

    def let_go(self) -> None:
        """Undo one `hold`. Whatever was taken of the values meanwhile stays good."""
        self._num_holds -= 1
        self._lent.update(unit.number for unit in self._units)
        self.reset()

    def forget_order(self) -> None:
        """Prefetch nothing until all ranks have seen the same order again."""
        self._order = []

    def run_backward(self, loss: torch.Tensor, gradient: torch.Tensor | None, records: bool) -> None:
        """Run a backward, and let values go when it is over. `records` keeps the order for prefetching.

        The root stays, for the next forward of the lane.
        """
        shape = self._shape() if self._home.is_safe and self._home.frees else ()
        self._in_backward = True
        handle = loss.register_hook(self._begin_task)
        try:
            torch.autograd.backward(loss, gradient)
        except RuntimeError as error:
            if any(words in str(error) for words in _NO_DATA):
                raise ModelError(_PAST_OUTPUTS) from error
            raise
        finally:
            handle.remove()
            self._in_backward = False
        if self._saved.is_listening and not self._saved.has_brought_back:
            if len(self._known_graphs) >= _MOST_SHAPES:
                self._known_graphs.clear()
            self._known_graphs.add(shape)
        self._is_known = shape in self._known_graphs
        if records:
            self._order = self._called
        self.reset()

    def _shape(self) -> _Shape:
        first = self._first_node
        return tuple((c.unit.number, c.began - first, c.ended - first, c.enters) for c in self._calls)

    def reset(self) -> None:
        """Forget what was called, and let everything go but what is held."""
        self._calls, self._open, self._called, self._num_left = [], [], [], {}
        self._lingering = None
        for unit in self._units[1:] if self._is_training else self._units:
            self._release(unit)

    def before_forward(self, unit: Unit) -> None:
        """A unit is called."""
        if self.observer is not None:
            self.observer()
        if self._in_backward:
            self._recomputed(unit)
            return
        if unit.number == 0 and not self._is_training:
            self._open.clear()
        self._linger(None, but_for=unit)
        self._home.need(unit)
        call = _Call(unit, _next_node())
        self._open.append(call)
        if self._is_training:
            self._calls.append(call)
            self._called.append(unit.number)
            self._num_left[unit.number] = self._num_left.get(unit.number, 0) + 1
            if self._home.frees:
                self._prefetch_after(len(self._called))

    def after_forward(self, unit: Unit, output: Any) -> None:
        """A call of a unit has ended."""
        if self._in_backward or not self._open or self._open[-1].unit is not unit:
            return
        call = self._open.pop()
        call.ended = _next_node()
        for tensor in tree_leaves(output):
            if not isinstance(tensor, torch.Tensor):
                continue
            if _was_made_in(tensor, call):
                tensor.register_hook(_Entering(self, call))
                call.enters = True
            if self._home.frees and any(_shares_memory(tensor, flat.storage) for flat in unit.flats):
                self._lent.add(unit.number)
        if unit.number != 0:
            self._linger(unit)
        elif not self._is_training or self._home.is_safe:
            self._linger(None)
            self._release(unit)

    def entered(self, call: _Call) -> None:
        """A backward has come to the end of a call."""
        if self.observer is not None:
            self.observer()
        if not self._is_outer_backward():
            if not self._in_backward and call.unit.number:
                self._linger(call.unit)
            self._home.need(call.unit)
            return
        self._leave(call.ended, but_for=call.unit)
        self._home.need(call.unit)
        if self._home.frees:
            earlier = [c for c in self._calls if c.enters and c.unit.number and c.ended <= call.began]
            if earlier and earlier[-1] is not call:
                self._home.prefetch(earlier[-1].unit)

    def _recomputed(self, unit: Unit) -> None:
        """A checkpoint calls a unit again in backward.

        A reentrant one is itself a node, made just before the calls that it hides from autograd. So what
        began right after the node may still be to come.
        """
        if self._is_outer_backward():
            self._leave(_current_node()._sequence_nr() + 2, but_for=unit)
        self._home.need(unit)

    def _begin_task(self, gradient: torch.Tensor) -> None:
        self._task = _current_task()

    def _is_outer_backward(self) -> bool:
        """Whether the node that runs belongs to the lane's own backward, whose order tells what is done."""
        return self._in_backward and _current_task() == self._task and _current_node() is not None

    def _leave(self, moment: int, but_for: Unit) -> None:
        """Backward is done with all calls that began at this moment or later."""
        while self._calls and self._calls[-1].began >= moment:
            unit = self._calls.pop().unit
            self._num_left[unit.number] -= 1
            if self._num_left[unit.number] == 0:
                self._on_complete(unit)
            if unit is not but_for:
                self._release(unit)

    def _linger(self, unit: Unit | None, but_for: Unit | None = None) -> None:
        """Let the unit go that was used last, and keep another in its place, in case it is the next used too."""
        last, self._lingering = self._lingering, unit
        if last is None or last is unit or last is but_for or any(call.unit is last for call in self._open):
            return
        self._release(last)

    def _prefetch_after(self, position: int) -> None:
        """Start to bring the unit that was called next the last time."""
        if self._called == self._order[:position] and position < len(self._order):
            self._home.prefetch(self._units[self._order[position]])

    def _release(self, unit: Unit) -> None:
        if not self._home.frees or self._num_holds:
            return
        if unit.number in self._lent:
            self._lent.remove(unit.number)
            self._home.give_away(unit)
            self._saved.refresh()
        else:
            self._home.spare(unit)


def _was_made_in(tensor: torch.Tensor, call: _Call) -> bool:
    """Whether a node of this call made the tensor. One that was passed through says nothing about the call."""
    node = tensor.grad_fn
    return node is not None and call.began <= node._sequence_nr() < call.ended


def _shares_memory(tensor: torch.Tensor, storage: torch.Tensor) -> bool:
    if tensor.layout != torch.strided:
        return False
    return bool(tensor.untyped_storage()._cdata == storage.untyped_storage()._cdata)


class _Entering:
    """The hook on an output of a call."""

    def __init__(self, passes: Passes, call: _Call) -> None:
        self._passes, self._call = passes, call

    def __call__(self, gradient: torch.Tensor) -> None:
        self._passes.entered(self._call)
