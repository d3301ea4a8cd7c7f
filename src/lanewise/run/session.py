"""The run: what `lw.start` returns, and everything its user calls."""

import atexit
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from lanewise import config, env
from lanewise.data.loader import Loader, Portion, make_loader
from lanewise.data.partition import Partition
from lanewise.engine import gathered, randomness
from lanewise.engine.engine import Engine
from lanewise.engine.find import Selector
from lanewise.engine.first_values import Init
from lanewise.engine.precision import COLUMNS, truth_table
from lanewise.engine.prepare import prepare
from lanewise.engine.transport.protocol import Transport
from lanewise.engine.world import World
from lanewise.errors import DataError, ModelError, NonFiniteError, SettingsError, StepError
from lanewise.events import Notice, Reporter, Scalars, StepDone, Table
from lanewise.run import agree, record
from lanewise.run import digest as digests
from lanewise.run.checkpoint import Keeper
from lanewise.run.evaluate import evaluate
from lanewise.run.fit import fit
from lanewise.run.loop import Step


class Run:
    """A started run. Made by `lw.start`."""

    def __init__(
        self, settings: config.Settings, transport: Transport, device: torch.device, report: Reporter
    ) -> None:
        self.settings = settings
        self.device = device
        """Where batches are put and models are prepared."""
        self._transport = transport
        self._report = report
        self._engine: Engine | None = None
        self._step: Step | None = None
        self._unsettled: deque[Step] = deque()
        """Updated steps whose outcome nobody has looked at: at most one between two updates."""
        self._keeper = Keeper(self, lambda text: report(Notice(text)))
        self._is_in_loop = False
        self._is_closed = False
        self.position = 0
        """Steps committed since the beginning of the run."""
        self.shares: tuple[int, ...] = ()
        """Lanes that each rank hosts."""
        self.rehost(settings.hosting)
        self._recorder = record.make(env.record())
        if self._recorder is not None:
            self._recorder.started(self)
        spare = range(settings.lanes, self.world_size)
        if spare:
            who = f"rank {spare[0]} hosts" if len(spare) == 1 else f"ranks {spare[0]} to {spare[-1]} host"
            report(
                Notice(
                    f"{self.world_size} ranks share {settings.lanes} lanes: {who} none and only "
                    "wait. Use more lanes or fewer ranks."
                )
            )
        randomness.seed_all(settings.seed)
        atexit.register(self.close)

    @property
    def rank(self) -> int:
        """This process's number, from 0."""
        return self._transport.rank

    @property
    def world_size(self) -> int:
        """How many processes train together."""
        return self._transport.size

    @property
    def engine(self) -> Engine:
        """What `prepare` made."""
        if self._engine is None:
            raise StepError("call run.prepare(model, optimizer) first.")
        return self._engine

    def prepare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        units: Sequence[Selector] | None = None,
        init: Init | None = None,
        weights: str | Path | None = None,
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Take over a model and its optimizer; returns both, ready for `steps`. Call it once.

        `units` chooses what is gathered and exchanged together (names, modules, or classes of modules);
        without it the elements of the model's lists of blocks are taken. A model on the meta device gets its
        values unit by unit: from `weights` (a safetensors file), from `init` (a function of name and tensor),
        or from each module's own `reset_parameters`.

        >>> model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters()))   # doctest: +SKIP
        """
        if self._engine is not None:
            raise StepError("run.prepare was called twice; a run trains one model with one optimizer.")
        world = World(self._transport, self.settings.lanes, self.device)

        def notify(text: str) -> None:
            self._report(Notice(text))

        self._engine = prepare(model, optimizer, self.settings, world, units, init, weights, notify)
        rows = truth_table(self._engine.flats, self._engine.sends_leaves, self.settings.moments)
        self._report(Table("what is kept in which type", COLUMNS, rows))
        return model, optimizer

    def loader(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool = False,
        drop_last: bool = False,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        partition: Partition = "uniform",
        key: Callable[[int], Any] | None = None,
    ) -> Loader:
        """Load a map-style data set. `batch_size` is the global batch: every lane gets an equal part of it.

        >>> loader = run.loader(dataset, batch_size=64, shuffle=True)      # doctest: +SKIP
        """
        return make_loader(
            dataset, batch_size, self.settings.lanes, self.settings.seed, self.settings.micro_batches, shuffle,
            drop_last, num_workers, collate_fn, partition, key,
        )  # fmt: skip

    def steps(self, loader: Loader, total: int | None = None, epochs: int | None = None) -> Iterator[Step]:
        """The steps from where the run is: to the end of this epoch, of `epochs` more, or up to step `total`.

        >>> for step in run.steps(loader, total=1000):      # doctest: +SKIP
        ...     for x, y in step:
        ...         step.backward(loss_fn(model(x), y))
        ...     step.update()
        """
        if total is not None and epochs is not None:
            raise SettingsError("run.steps takes total= or epochs=, not both.")
        self._settle(0)
        agree.on_data(loader, self.engine.world.transport)
        if total is None:
            total = (self.position // len(loader) + (1 if epochs is None else epochs)) * len(loader)
        if self._recorder is not None:
            total = self._recorder.limit(total)
            self._recorder.before_steps(self)
        while self.position < total:
            shares = self.shares
            agree.on_hosting(shares, self._transport)
            with closing(loader.stream(self._portions(loader, self.position, total), self.device)) as batches:
                self._is_in_loop = True
                try:
                    while self.position < total and self.shares == shares:
                        self._step = step = Step(self, self.position, batches, self.settings.micro_batches)
                        yield step
                        if not step.is_updated:
                            raise StepError(f"step {step.index}: the loop went on without step.update().")
                finally:
                    self._is_in_loop = False
        self._settle(0)
        if self._recorder is not None:
            self._recorder.end_if_done(self)

    fit = fit
    evaluate = evaluate

    def check_between_steps(self, what: str) -> None:
        """Refuse a call that may not come between the lanes of a step."""
        if self._step is not None and self._step.is_open:
            raise StepError(
                f"step {self._step.index}: {what} was called inside the step. Call it after step.update(), or before "
                "the step is iterated."
            )
        self._settle(0)

    def gathered(self, model: nn.Module | None = None, write: bool = False) -> AbstractContextManager[None]:
        """Have all parameters whole on this rank, to evaluate, generate or export. Call it on all ranks.

        With `write=True` they may be changed too, by every rank to the same values.

        >>> with run.gathered(model):                                        # doctest: +SKIP
        ...     torch.save(model.state_dict(), "model.pt")
        """
        if model is not None and self.engine.model not in model.modules():
            raise ModelError(
                f"run.gathered was given a {type(model).__name__} that is not the prepared model."
            )
        self._settle(0)
        return gathered.writing(self.engine) if write else gathered.reading(self.engine)

    def digest(self) -> str:
        """A hash of all parameters and optimizer state, the same for any number of ranks. Call it on all."""
        self._settle(0)
        return digests.digest(self.engine)

    def save(
        self,
        folder: str | Path,
        *,
        schedulers: LRScheduler | Sequence[LRScheduler] = (),
        extra: Mapping[str, Any] | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        wait: bool = False,
    ) -> Path:
        """Save the state of the run as a new generation in a folder. Call it on all ranks, between steps.

        The state is copied, and written beside the next steps; `wait=True` returns when it is published. That it
        could not be is then an error, and otherwise a notice after one of the next steps, and training goes on. A
        generation is published whole or not at all, and loads on any number of ranks with any strategy. `extra`
        takes plain values of your own. With `keep_last`, older generations then go, but for those of every
        `keep_every` steps.

        >>> run.save("runs/first", schedulers=scheduler)                # doctest: +SKIP
        """
        self.check_between_steps("run.save")
        self._refuse_held("run.save")
        place = Path(folder).expanduser().absolute()
        return self._keeper.save(place, schedulers, extra, keep_last, keep_every, wait)

    def _refuse_held(self, what: str) -> None:
        if self.engine.passes.is_held:
            raise StepError(f"{what} was called inside run.gathered. Call it after that block.")

    def load(
        self,
        folder: str | Path,
        *,
        step: int | None = None,
        schedulers: LRScheduler | Sequence[LRScheduler] = (),
    ) -> dict[str, Any]:
        """Go on from the newest whole generation in a folder, or from that of a step; returns its `extra`.

        Call it on all ranks, after `prepare`. A generation that is damaged is passed over, with a notice.

        >>> run.load("runs/first", schedulers=scheduler)                # doctest: +SKIP
        """
        self.check_between_steps("run.load")
        self._refuse_held("run.load")
        if self._is_in_loop:
            raise StepError(
                "run.load was called inside a loop over run.steps, whose batches are those of other steps. Leave the "
                "loop, load, and begin another."
            )
        return self._keeper.load(Path(folder).expanduser().absolute(), step, schedulers)

    def memory(self) -> dict[str, int]:
        """Bytes that this rank keeps for the run, by what they are for."""
        return self.engine.memory()

    def log(self, **values: float | torch.Tensor) -> None:
        """Report values of your own, with the number of steps made. Rank 0's are shown.

        >>> run.log(loss=step.loss, lr=scheduler.get_last_lr()[0])      # doctest: +SKIP
        """
        self._report(Scalars(self.position, {name: _number(name, value) for name, value in values.items()}))

    def rehost(self, hosting: str | Sequence[float]) -> None:
        """Choose how many lanes each rank hosts from the next step on. Never changes a bit of the result."""
        self.shares = agree.shares(hosting, self.settings.lanes, self.world_size)

    def close(self) -> None:
        """Leave the run: unhook the model and disconnect. Happens by itself when the process ends."""
        if not self._is_closed:
            self._is_closed = True
            atexit.unregister(self.close)
            error = sys.exception() or getattr(sys, "last_value", None)
            try:
                if error is None:
                    self._keeper.end()
                    self._settle(0)
                else:
                    self._keeper.abandon()
            except Exception as late:
                error = late
                raise
            finally:
                if self._engine is not None:
                    self._engine.close()
                self._transport.close(
                    None if error is None else f"it failed with {type(error).__name__}: {error}"
                )

    def _portions(self, loader: Loader, first: int, total: int) -> Iterator[Portion]:
        """What this rank will compute from a step on, in order, as long as lanes stay where they are."""
        schedule = self.engine.sum.schedule(self.shares)
        for step in range(first, total):
            for lane in schedule.lanes_of(self.rank):
                yield from loader.portions(step, lane)

    def _after_update(self, step: Step) -> None:
        self.position += 1
        self._unsettled.append(step)
        self._keeper.end(only_if_done=True)
        self._settle(0 if step.is_known or self._recorder is not None else 1)

    def _settle(self, left: int) -> None:
        """Look at the outcomes of all steps but the last ones, and report them."""
        while len(self._unsettled) > left:
            step = self._unsettled.popleft()
            outcome = step.settle()
            self._report(StepDone(step.index, outcome.loss, outcome.grad_norm, outcome.skipped))
            if self._recorder is not None:
                self._recorder.after_step(self, step.index, outcome.loss)
            if outcome.refusal is not None:
                raise NonFiniteError(f"step {step.index}: {outcome.refusal}")

    def _before_batch(self, lane: int, micro: int, batch: Any) -> None:
        if self._recorder is not None:
            self._recorder.batch(lane, micro, batch)


def _number(name: str, value: Any) -> float:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise DataError(
                f"run.log: {name} must be one number, found a tensor of shape {tuple(value.shape)}. Reduce it first, "
                "as with .mean()."
            )
        value = value.detach()
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise DataError(f"run.log: {name} must be one number, found {type(value).__name__}.") from error
