"""The plain training loop, for those who do not want to write it. Everything in it is public API."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, nan
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lanewise.data.loader import Loader
from lanewise.errors import SettingsError, StepError
from lanewise.run import agree, checkpoint
from lanewise.run.loop import Step
from lanewise.run.progress import progress as show_progress

if TYPE_CHECKING:
    from lanewise.run.session import Run

Loss = Callable[[nn.Module, Any], torch.Tensor | tuple[torch.Tensor, float | torch.Tensor]]
"""From the model and a batch to the mean loss, or to a sum of losses and its weight."""
Better = Literal["lower", "higher"]


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation came to."""

    step: int
    """Steps committed since the beginning of the run."""
    values: Mapping[str, float]


@dataclass(frozen=True)
class Fit:
    """What a fit came to. The same on all ranks."""

    steps: int
    """Steps committed since the beginning of the run."""
    losses: tuple[float, ...]
    """The loss of every step of this fit."""
    evaluations: tuple[Evaluation, ...]
    best: Evaluation | None
    """The evaluation with the best watched value, the first one where several are equal."""
    stopped_early: bool


def fit(
    run: "Run",
    loader: Loader,
    loss: Loss,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    clip: float | None = None,
    clip_value: float | None = None,
    schedulers: LRScheduler | Sequence[LRScheduler] = (),
    evaluate: Callable[[], Mapping[str, float]] | None = None,
    every: int | None = None,
    watch: str | None = None,
    better: Better = "lower",
    patience: int | None = None,
    progress: bool = True,
) -> Fit:
    """Train until the run has made `steps` steps or `epochs` epochs, counted from its beginning.

    So a run that was restored goes on from there. Schedulers step after every step; `ReduceLROnPlateau`
    gets the watched value after each evaluation. `evaluate` is called every `every` steps (an epoch if
    nothing is said) and at the end. With `patience`, training stops after so many evaluations in a row in
    which the value `watch` has not got `better`.

    >>> result = run.fit(                                                   # doctest: +SKIP
    ...     loader, lambda model, batch: loss_fn(model(batch[0]), batch[1]), epochs=10,
    ...     evaluate=lambda: run.evaluate(valid, {"accuracy": Accuracy()}),
    ...     watch="accuracy", better="higher", patience=3,
    ... )
    """
    model = run.engine.model
    total = _total(loader, steps, epochs)
    every = len(loader) if every is None else every
    listed = checkpoint.listed(schedulers)
    on_plateau = [scheduler for scheduler in listed if isinstance(scheduler, ReduceLROnPlateau)]
    _check(evaluate is not None, every, watch, better, patience, bool(on_plateau))
    observed = _Observed(watch, better)
    losses: list[float] = []
    unread: deque[Step] = deque()
    is_over = False

    def read(left: int) -> None:
        """Note the losses of all steps but the last ones, so that a GPU's are not waited for."""
        while len(unread) > left:
            losses.append(unread.popleft().loss)

    def look() -> None:
        assert evaluate is not None
        values = observed.take(run, evaluate())
        for scheduler in on_plateau:
            scheduler.step(values[watch or ""])

    with show_progress(run.position, total, progress and run.rank == 0) as advance:
        for step in run.steps(loader, total=total):
            for batch in step:
                step.backward(*_loss_and_weight(loss(model, batch)))
            step.update(clip=clip, clip_value=clip_value)
            for scheduler in listed:
                if scheduler not in on_plateau:
                    scheduler.step()
            unread.append(step)
            read(0 if step.is_known or run.position == total else 1)
            advance(run.position, losses[-1] if losses else nan)
            if evaluate is not None and run.position % every == 0:
                look()
                is_over = patience is not None and observed.num_worse >= patience
            if is_over:
                break
    read(0)
    if evaluate is not None and observed.last_step != run.position:
        look()
    return Fit(run.position, tuple(losses), tuple(observed.evaluations), observed.best, is_over)


class _Observed:
    """The evaluations so far, and the best of them."""

    def __init__(self, watch: str | None, better: Better) -> None:
        self._watch = watch
        self._sign = 1.0 if better == "lower" else -1.0
        self._lowest = inf
        self.evaluations: list[Evaluation] = []
        self.best: Evaluation | None = None
        self.num_worse = 0
        """Evaluations since the best one."""

    @property
    def last_step(self) -> int:
        return self.evaluations[-1].step if self.evaluations else -1

    def take(self, run: "Run", values: Mapping[str, float]) -> dict[str, float]:
        """Note an evaluation, once all ranks are known to have the same."""
        numbers = {name: float(value) for name, value in values.items()}
        if self._watch is not None and self._watch not in numbers:
            raise SettingsError(
                f"run.fit: watch={self._watch!r} is not among what evaluate gave: {', '.join(numbers) or 'nothing'}."
            )
        agree.on_values(numbers, run.engine.world.transport)
        self.evaluations.append(Evaluation(run.position, numbers))
        run.log(**numbers)
        if self._watch is not None:
            watched = self._sign * numbers[self._watch]
            if watched < self._lowest:
                self._lowest, self.best, self.num_worse = watched, self.evaluations[-1], 0
            else:
                self.num_worse += 1
        return numbers


def _total(loader: Loader, steps: int | None, epochs: int | None) -> int:
    if (steps is None) == (epochs is None):
        raise SettingsError("run.fit needs steps= or epochs=, and not both.")
    for name, value in (("steps", steps), ("epochs", epochs)):
        if value is not None and value < 1:
            raise SettingsError(f"run.fit: {name} must be 1 or more, found {value}.")
    return steps if steps is not None else (epochs or 0) * len(loader)


def _check(
    evaluates: bool, every: int, watch: str | None, better: str, patience: int | None, needs_watch: bool
) -> None:
    if every < 1:
        raise SettingsError(f"run.fit: every must be 1 or more, found {every}.")
    if better not in ("lower", "higher"):
        raise SettingsError(f"run.fit: better must be 'lower' or 'higher', found {better!r}.")
    if patience is not None and patience < 1:
        raise SettingsError(f"run.fit: patience must be 1 or more, found {patience}.")
    if watch is not None and not evaluates:
        raise SettingsError(f"run.fit: watch={watch!r} is a value of evaluate=, which was not given.")
    if watch is None and (patience is not None or needs_watch):
        what = "patience" if patience is not None else "ReduceLROnPlateau"
        raise SettingsError(
            f"run.fit: {what} needs watch=, the name of the value of evaluate= that it follows."
        )


def _loss_and_weight(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, tuple):
        return (value,)
    if len(value) != 2:
        raise StepError(
            f"run.fit: the loss function must give a loss or a pair (sum, weight), found a tuple of {len(value)}."
        )
    return value
