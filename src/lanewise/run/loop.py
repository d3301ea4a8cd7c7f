"""A step as the user's loop sees it: the lanes this rank hosts, then one update."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from lanewise.data.loader import Portion
from lanewise.engine import randomness
from lanewise.engine.commit import Outcome
from lanewise.engine.report import PLAIN, WEIGHTED
from lanewise.engine.result import Result
from lanewise.errors import StepError

if TYPE_CHECKING:
    from lanewise.run.session import Run


class Step:
    """One step of a run. Iterate it for the batches of this rank's lanes, then call `update`.

    >>> for x, y in step:                                # doctest: +SKIP
    ...     step.backward(loss_fn(model(x), y))
    >>> step.update(clip=1.0)                            # doctest: +SKIP
    """

    def __init__(
        self, run: "Run", index: int, batches: Iterator[tuple[Portion, Any]], micro_batches: int
    ) -> None:
        self._run = run
        self._engine = run.engine
        self.index = index
        """The number of this step, counted from the beginning of the run."""
        self._batches = batches
        self._micro_batches = micro_batches
        self._schedule = self._engine.begin_step(index, run.shares)
        self._portion: Portion | None = None
        self._is_awaiting_backward = False
        self._has_iterated = False
        self._is_complete = False
        self._result: Result | None = None

    @property
    def lane(self) -> int:
        """The lane whose batch the loop has in hand."""
        if self._portion is None:
            raise StepError(f"step {self.index}: step.lane is known inside `for batch in step:` only.")
        return self._portion.lane

    @property
    def lanes(self) -> tuple[int, ...]:
        """The lanes that this rank hosts at this step."""
        return self._schedule.lanes_of(self._run.rank)

    def __iter__(self) -> Iterator[Any]:
        """The batches of this rank's lanes, one by one."""
        if self._has_iterated:
            raise StepError(
                f"step {self.index}: its lanes were iterated already. Each step can be iterated once."
            )
        self._has_iterated = True
        try:
            with randomness.untouched(self._run.device):
                for number, row in enumerate(self._schedule.table):
                    lane = row[self._run.rank]
                    if lane is None:
                        self._engine.idle_round(number)
                    else:
                        yield from self._lane(lane)
        finally:
            self._portion = None
        self._is_complete = True

    def _lane(self, lane: int) -> Iterator[Any]:
        with self._engine.lane(lane):
            randomness.seed_lane(self._run.settings.seed, self.index, lane)
            yield from self._micro_batches_of(lane)

    def _micro_batches_of(self, lane: int) -> Iterator[Any]:
        for micro in range(self._micro_batches):
            loaded = next(self._batches, None)
            if loaded is None:
                raise StepError(
                    f"step {self.index}: its batches are gone, because the iterator that run.steps returned was closed "
                    "or dropped. Use a step inside `for step in run.steps(...):`, or keep that iterator as long."
                )
            self._portion, batch = loaded
            assert (self._portion.step, self._portion.lane) == (self.index, lane)
            self._is_awaiting_backward = True
            self._run._before_batch(lane, micro, batch)
            yield batch
            if self._is_awaiting_backward:
                raise StepError(
                    f"step {self.index}: the loop went on without step.backward(loss) for lane {lane}"
                    + (f", micro-batch {micro}" if self._micro_batches > 1 else "")
                    + ". Call it once for each batch; a loss of 0 is a loss too."
                )

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None) -> None:
        """Backpropagate the loss of the batch in hand.

        Without `weight`, `loss` is the mean over the batch, and the step's gradient is that of the mean of
        all batches. With it, `loss` is a sum (over tokens, say) and `weight` its count; the step's gradient
        is then that of the sum of losses over the sum of weights.
        """
        if self._portion is None:
            raise StepError(f"step {self.index}: call step.backward inside `for batch in step:`.")
        lane = self._portion.lane
        if not self._is_awaiting_backward:
            raise StepError(
                f"step {self.index}: step.backward was called twice for lane {lane}. Add losses first."
            )
        share = self._portion.share
        value = _check_loss(loss, self.index, lane)
        lane_weight: float | torch.Tensor
        if weight is None:
            way, lane_weight, factor = PLAIN, share, share
        else:
            number: float | torch.Tensor
            on_device = (
                isinstance(weight, torch.Tensor) and weight.numel() == 1 and weight.device == loss.device
            )
            stays = self._engine.runs_ahead and on_device
            number = weight if stays else _check_weight(weight, self.index, lane)
            way, lane_weight, factor = (WEIGHTED, number, 1.0) if share else (WEIGHTED, 0.0, 0.0)
        self._is_awaiting_backward = False
        is_last = self._portion.micro == self._micro_batches - 1
        self._engine.backward(value, lane_weight, factor, way, is_last)

    def update(self, clip: float | None = None, clip_value: float | None = None) -> None:
        """Exchange gradients, clip them by their global norm or by value, and step the optimizer.

        Where a gradient is not finite, nothing is updated, this step is over, and NonFiniteError says whose it
        was, on every rank alike. Catch it to go on with the next step. On a GPU the host does not wait for the
        device to find out, so the error comes from the update of the next step (which is made all the same), at the
        end of the loop, or from the next call of the run.
        """
        if self._result is not None:
            raise StepError(f"step {self.index}: step.update was called twice.")
        if not self._is_complete:
            done = [lane for lane in self._engine.lanes_done if lane in self.lanes]
            missing = [lane for lane in self.lanes if lane not in done]
            raise StepError(
                f"step {self.index}: step.update was called before every lane had its backward; this rank hosts lanes "
                f"{list(self.lanes)} and still lacks {missing}. Run `for batch in step:` to its end first."
            )
        for name, value in (("clip", clip), ("clip_value", clip_value)):
            if value is not None and not value > 0:
                raise StepError(f"step {self.index}: {name} must be positive, found {value}.")
        self._result = self._engine.update(clip, clip_value)
        self._run._after_update(self)

    @property
    def is_updated(self) -> bool:
        """Whether `update` has been called."""
        return self._result is not None

    @property
    def is_open(self) -> bool:
        """Whether its lanes are being computed, or wait for `update`."""
        return self._has_iterated and not self.is_updated

    @property
    def loss(self) -> float:
        """The mean loss over all lanes of all ranks, the same on each."""
        return self._known("loss").loss

    @property
    def grad_norm(self) -> float | None:
        """The norm of the gradient before clipping, where `update` was told to clip by it."""
        return self._known("grad_norm").grad_norm

    @property
    def skipped(self) -> bool:
        """Whether the step was left out because its gradient was not finite."""
        return self._known("skipped").skipped

    @property
    def is_known(self) -> bool:
        """Whether its outcome can be read without waiting for the device."""
        return self._result is not None and self._result.is_known

    def settle(self) -> Outcome:
        """The outcome. Waits for the device where it has to, and raises what makes the step an error."""
        return self._known("outcome")

    def _known(self, what: str) -> Outcome:
        if self._result is None:
            raise StepError(f"step {self.index}: step.{what} is known after step.update().")
        return self._result.outcome()


def _check_weight(weight: Any, step: int, lane: int) -> float:
    try:
        number = float(weight.detach() if isinstance(weight, torch.Tensor) else weight)
    except (TypeError, ValueError, RuntimeError):
        number = None
    if number is None or not 0 < number < math.inf:
        shape = f" of shape {tuple(weight.shape)}" if isinstance(weight, torch.Tensor) else ""
        found = f"{number:g}" if number is not None else f"a {type(weight).__name__}{shape}"
        raise StepError(
            f"step {step}, lane {lane}: weight must be a positive, finite number, found {found}. It is the count that "
            "the loss is a sum over."
        )
    return number


def _check_loss(loss: torch.Tensor, step: int, lane: int) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor):
        raise StepError(f"step {step}, lane {lane}: the loss must be a tensor, found {type(loss).__name__}.")
    if loss.numel() != 1 or loss.dim() > 1:
        raise StepError(
            f"step {step}, lane {lane}: the loss must be a single number, found shape {tuple(loss.shape)}. Reduce it: "
            "loss.mean(), or loss.sum() with weight=."
        )
    if not loss.is_floating_point():
        raise StepError(
            f"step {step}, lane {lane}: the loss must be a floating-point number, found {loss.dtype}."
        )
    if not loss.requires_grad:
        raise StepError(
            f"step {step}, lane {lane}: the loss does not depend on any parameter that is trained (it has no grad_fn). "
            "Compute it with the prepared model, outside torch.no_grad()."
        )
    return loss
