"""The conductor of a step: it owns the order of events and hands each to the one who knows it.

Homes keep values, `passes` follows forward and backward, the collector and the gradient sum add lanes, the
committer updates. World size 1 takes every one of these paths too.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lanewise.config import NonFinite, Reduction
from lanewise.engine import attention, device, hashing, precision
from lanewise.engine.buffers import Buffers
from lanewise.engine.collect import Collector
from lanewise.engine.commit import Committer, Outcome
from lanewise.engine.eager import EagerSum
from lanewise.engine.finite import DeviceCheck, FiniteCheck, HostCheck
from lanewise.engine.meter import Meter
from lanewise.engine.original import Original
from lanewise.engine.passes import Passes
from lanewise.engine.report import PLAIN, WEIGHTED, Form, LaneReport, RankReport, StepReport
from lanewise.engine.result import Known, Result, Unseen
from lanewise.engine.strategies import Strategy
from lanewise.engine.transport.messages import MessageTransport
from lanewise.engine.unit import Unit, all_flats
from lanewise.engine.verdict import Judge
from lanewise.engine.world import World
from lanewise.errors import DivergedError, ModelError, StepError
from lanewise.lanes.schedule import Schedule

_LEDGER = "what was exchanged"


class Engine:
    """A prepared model and optimizer."""

    def __init__(
        self,
        model: nn.Module,
        units: tuple[Unit, ...],
        world: World,
        strategy: Strategy,
        reduction: Reduction,
        nonfinite: NonFinite,
    ) -> None:
        self.model = model
        self.units = units
        self.world = world
        self.flats = all_flats(units)
        in_order = (*reversed(units[1:]), units[0])
        trainable = tuple(flat for unit in in_order for flat in unit.trainable)
        self.home = strategy.home(world, units)
        scale = precision.loss_scale(self.flats)
        self._nonfinite = nonfinite
        self._check: FiniteCheck
        if world.runs_ahead:
            self._check = DeviceCheck(world, trainable, nonfinite, scale)
        else:
            self._check = HostCheck(world, trainable, nonfinite, scale)
        self.sum = strategy.gradient_sum(world, trainable, reduction, self._check)
        self.collector = Collector(in_order, self.sum)
        self.committer = Committer(
            world, strategy, self.home, self.sum, self._check, self.collector.parameters, nonfinite, scale
        )
        self.passes = Passes(units, self.home, self.collector.unit_complete)
        self.buffers = Buffers(model, world.transport)
        self._handles: list[RemovableHandle] = []
        self.original = Original(model, self.flats, self.home.frees)
        self._report = RankReport()
        self._done: list[int] = []
        self._schedule: Schedule | None = None
        self._judge: Judge | None = None
        self._is_first = True
        self._runs_ahead = False
        is_gpu = world.device.type == "cuda"
        self._meter = Meter(world.device, lambda: self._held(now=True)) if is_gpu else None
        self._losses: dict[int, torch.Tensor] = {}
        self._weights: dict[int, torch.Tensor] = {}

    def install(self, dtype: torch.dtype | None) -> None:
        """Hook the model; `dtype` is what its inputs are cast to, where that was asked for."""
        self.passes.install()
        if self.world.device.type == "cuda":
            attention.install()
        if dtype is not None:
            self._handles.append(precision.cast_inputs(self.model, dtype))

    def begin_step(self, step: int, shares: Sequence[int]) -> Schedule:
        """Plan a step in which each rank hosts so many lanes. Collective."""
        self._step = step
        self.original.check()
        self.committer.optimizer.check_groups()
        self.committer.optimizer.number = step
        schedule = self.sum.schedule(shares)
        if schedule != self._schedule:
            self.passes.forget_order()
            self._judge = None
        self._schedule = schedule
        self._runs_ahead = self._can_run_ahead()
        if isinstance(self.world.transport, MessageTransport):
            self.world.transport.hush(all(None not in row for row in schedule.table))
        self.passes.observer = self._meter.begin_step() if self._meter is not None else None
        self._check.begin_step()
        self.sum.begin_step(self._schedule)
        self.collector.begin_step()
        self.buffers.begin_step()
        self._report = RankReport(present=self.collector.present)
        self._done = []
        self._losses, self._weights = {}, {}
        return self._schedule

    @property
    def runs_ahead(self) -> bool:
        """Whether this step is decided on the device, and the host learns of it later."""
        return self._runs_ahead

    def _can_run_ahead(self) -> bool:
        """Whether all that a step depends on can be decided on the device.

        Not in the first step, which shows whether a forward changes buffers: these are averaged by the host.
        """
        may = self.world.runs_ahead and not self._is_first and self.committer.optimizer.takes_verdicts
        return may and not self.committer.scale.is_active and not self.buffers.have_changed

    @contextmanager
    def lane(self, lane: int) -> Iterator[None]:
        """A lane's forward and backward happen inside."""
        self.world.transport.say(f"step {self._step}, lane {lane}")
        self.collector.clear()
        self._report.lanes[lane] = LaneReport()
        self._lane = lane
        self.passes.begin_lane()
        try:
            yield
        except BaseException:
            self.passes.abandon_lane()
            raise
        self.passes.end_lane()
        self.buffers.end_lane(lane)
        self._done.append(lane)
        self.sum.end_round()

    def backward(
        self, loss: torch.Tensor, weight: float | torch.Tensor, factor: float, way: int, is_last: bool
    ) -> None:
        """Add a loss to the lane. `factor` scales it; `way` says how the user gave it, and `is_last` that the lane's
        gradient is then whole. A weight may stay on the device where the host runs ahead.
        """
        report = self._report.lanes[self._lane]
        report.ways |= way
        if self._runs_ahead:
            self._note_on_device(loss, weight, factor)
        else:
            if factor:
                report.loss += float(loss.detach()) * factor
            report.weight += float(weight)
        report.is_padding = report.weight == 0.0 and self._lane not in self._weights
        if is_last:
            self.collector.begin(report)
        root = factor * self.committer.scale.value
        if root != 1.0 and loss.dtype == torch.float16:
            loss = loss.float()
        gradient = None if root == 1.0 else torch.full_like(loss, root)
        self.passes.run_backward(loss, gradient, records=not self._done)
        if is_last:
            self.collector.end()

    def _note_on_device(self, loss: torch.Tensor, weight: float | torch.Tensor, factor: float) -> None:
        lane = self._lane
        value = loss.detach().double()
        if loss.dim():
            value = value.view(())
        if factor != 1.0:
            value = value * factor if factor else torch.zeros_like(value)
        self._losses[lane] = self._losses[lane] + value if lane in self._losses else value
        if isinstance(weight, torch.Tensor):
            number = weight.detach().double().view(())
            self._weights[lane] = self._weights[lane] + number if lane in self._weights else number
        else:
            self._report.lanes[lane].weight += weight

    def idle_round(self, number: int) -> None:
        """A round in which this rank has no lane: it only takes part in what the others exchange."""
        assert self._schedule is not None
        leader = next(rank for rank, lane in enumerate(self._schedule.table[number]) if lane is not None)
        for unit in self.collector.order:
            self.home.follow(leader)
            self.sum.deposit(unit, None)
        self.sum.end_round()

    def update(self, clip: float | None, clip_value: float | None) -> Result:
        """Exchange what is left, decide, and step. Collective."""
        transport = self.world.transport
        transport.say(f"step {self._step}, update")
        self.sum.finish()
        self._report.changed_buffers = self.buffers.changed()
        self._report.options = {
            "clip or clip_value": hashing.short([repr(clip), repr(clip_value)]),
            **self.committer.optimizer.options(),
        }
        if isinstance(transport, MessageTransport):
            self._report.options = {**self._report.options, _LEDGER: transport.ledger.check}
        form = Form(
            self.world.lanes, self.world.slots, len(self.collector.parameters),
            len(self._report.changed_buffers), tuple(self._report.options),
        )  # fmt: skip
        if self.passes.observer is not None:
            self.passes.observer()
        result = (self._update_ahead if self._runs_ahead else self._update)(form, clip, clip_value)
        if self.passes.observer is not None:
            self.passes.observer()
        self.sum.end_step()
        self.home.publish()
        if isinstance(transport, MessageTransport):
            transport.hush(False)
        self.original.remember()
        self._is_first = False
        return result

    def _update(self, form: Form, clip: float | None, clip_value: float | None) -> Result:
        """Decide by what all ranks tell this one, and step."""
        assert self._schedule is not None
        self.committer.examine(self._report, wants_norm=clip is not None)
        row = form.fill(self._report, self.world.rank)
        report = form.read(self.world.transport.share(row, "the report of a step"), self._schedule)
        self._refuse_differences(report, self._step, ahead=False)
        outcome = self.committer.commit(report, clip, clip_value)
        if not outcome.skipped:
            real_lanes = [not lane.is_padding for lane in report.lanes]
            self.buffers.commit(report.changed_buffers, self._schedule, real_lanes)
        return Known(outcome)

    def _update_ahead(self, form: Form, clip: float | None, clip_value: float | None) -> Result:
        """Have the device decide and step; the host reads later what was decided."""
        assert self._schedule is not None
        assert isinstance(self._check, DeviceCheck)
        transport, schedule, step = self.world.transport, self._schedule, self._step
        assert isinstance(transport, MessageTransport)
        if self._judge is None:
            self._judge = Judge(form, schedule, self.world.rank, self.world.device)
        row = device.from_host(form.fill(self._report, self.world.rank), self.world.device)
        squares = self.committer.squares() if clip is not None else None
        lanes = schedule.lanes_of(self.world.rank)
        weights = None
        if self._weights:
            nothing = torch.zeros((), dtype=torch.float64, device=self.world.device)
            weights = [self._weights.get(lane, nothing) + self._report.lanes[lane].weight for lane in lanes]
        losses = [self._losses[lane] for lane in lanes]
        self._judge.fill(row, losses, weights, self._check.wanted_flags, squares)
        rows = transport.rows(row, "the report of a step")
        verdict = self._judge.decide(rows, self.committer.scale.value, clip, self._nonfinite == "ignore")
        numbers = device.to_host(verdict.numbers)
        mark = device.Mark(device.Queue.present(self.world.device))
        places = self._check.places
        present: Sequence[bool] = [True] * form.num_parameters
        if len(self._report.present) < form.num_parameters:
            present = form.read(rows.cpu(), schedule, places.index).present
        self.committer.commit_unseen(present, verdict, clip_value)

        def look() -> Outcome:
            self._await(mark)
            found = numbers.tolist()
            if not found[0]:
                return self.committer.agreed(found, clip is not None)
            report = form.read(rows.cpu(), schedule, places.index)
            self._refuse_differences(report, step, ahead=True)
            return self.committer.decide(report, clip)[1]

        return Unseen(look)

    def _await(self, mark: device.Mark) -> None:
        transport = self.world.transport
        assert isinstance(transport, MessageTransport)
        if not mark.is_reached(transport.patience):
            raise transport.silence("the report of a step")

    def _refuse_differences(self, report: StepReport, step: int, ahead: bool) -> None:
        plain, weighted = report.given(PLAIN), report.given(WEIGHTED)
        if plain and weighted:
            raise StepError(
                f"step {step}: step.backward got a weight in lane(s) {weighted} and none in lane(s) {plain}, so "
                "sums would be added to means. Give a weight in every lane, or in none. Nothing was updated."
            )
        for what, ranks in report.other_options.items():
            if what == _LEDGER:
                raise DivergedError(
                    f"step {step}: rank(s) {list(ranks)} have exchanged other things than rank 0, or in another order. "
                    "Nothing was updated. All ranks must run the same program: let no module's call depend on the rank."
                )
            raise DivergedError(
                f"step {step}: rank(s) {list(ranks)} have other values of {what} than rank 0 (lr and the like), "
                "so the ranks would update by different rules. Nothing was updated. Do not let them depend on the rank."
            )
        late = [
            name for (name, _), has in zip(self.buffers.named, report.changed_buffers, strict=True) if has
        ]
        if ahead and late:
            raise ModelError(
                f"step {step}: buffer {late[0]!r} was changed by a forward for the first time, and the run did not "
                "expect it: on a GPU it looks in its first step which buffers change. Nothing was updated. Write to "
                "the buffer in the first step too, even the value that it has."
            )
        if ahead and not report.total_weight > 0:
            raise StepError(
                f"step {step}: the weights of all lanes add up to {report.total_weight:g}, and gradients are divided "
                "by that. A weight is the count that a loss is a sum over. Nothing was updated."
            )

    @property
    def lanes_done(self) -> tuple[int, ...]:
        """The lanes of this step that this rank has computed."""
        return tuple(self._done)

    @property
    def sends_leaves(self) -> bool:
        """Whether gradients travel in the type that autograd made, or in the type of the sums."""
        return isinstance(self.sum, EagerSum)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Run the model in eval mode and without gradient; modes and buffers are then as they were."""
        modes = [(module, module.training) for module in self.model.modules()]
        with self.buffers.preserved(), torch.no_grad():
            self.model.eval()
            try:
                yield
            finally:
                self.passes.reset()
                self.model.train(modes[0][1])
                for module, was_training in modes:
                    module.training = was_training

    def memory(self) -> dict[str, int]:
        """Bytes that this rank uses, by what they are for: of a GPU, at the moment when most was in use."""
        return self._meter.memory() if self._meter is not None else self._held()

    def _held(self, now: bool = False) -> dict[str, int]:
        """Bytes that this rank keeps, and the most of what comes and goes; or what is there just `now`."""
        masters = sum(master.nbytes for master in self.committer.masters.values())
        return {
            **(self.home.present_bytes if now else self.home.num_bytes),
            "masters": masters,
            **(self.sum.present_bytes if now else self.sum.num_bytes),
            "optimizer": self.committer.optimizer.num_bytes,
            "buffers": sum(tensor.nbytes for _, tensor in self.buffers.named),
        }

    def close(self) -> None:
        """Unhook the model and the optimizer."""
        self.passes.remove()
        for handle in self._handles:
            handle.remove()
        self.committer.optimizer.release()
        if self.world.device.type == "cuda":
            attention.release()
