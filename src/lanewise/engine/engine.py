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
from lanewise.engine import attention, hashing, precision, refuse
from lanewise.engine.ahead import Ahead
from lanewise.engine.buffers import Buffers
from lanewise.engine.collect import Collector
from lanewise.engine.commit import Committer, Outcome
from lanewise.engine.eager import EagerSum
from lanewise.engine.finite import DeviceCheck, FiniteCheck, HostCheck
from lanewise.engine.meter import Meter
from lanewise.engine.original import Original
from lanewise.engine.passes import Passes
from lanewise.engine.report import Form, LaneReport, RankReport
from lanewise.engine.result import Known, Result, Unseen
from lanewise.engine.strategies import Strategy
from lanewise.engine.transport.messages import MessageTransport
from lanewise.engine.unit import Unit, all_flats
from lanewise.engine.world import World
from lanewise.lanes.schedule import Schedule


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
        self._check: FiniteCheck
        self._ahead: Ahead | None = None
        if world.runs_ahead:
            self._check = check = DeviceCheck(world, trainable, nonfinite, scale)
            self._ahead = Ahead(world, check, nonfinite)
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
        self._shares: Sequence[int] = ()
        self._form: Form | None = None
        self._is_first = True
        self._runs_ahead = False
        is_gpu = world.device.type == "cuda"
        self._meter = Meter(world.device, lambda: self._held(now=True)) if is_gpu else None

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
        if self._schedule is None or shares != self._shares:
            self._shares, self._schedule = shares, self.sum.schedule(shares)
            self.passes.forget_order()
        schedule = self._schedule
        self._runs_ahead = self._can_run_ahead()
        if isinstance(self.world.transport, MessageTransport):
            self.world.transport.hush(all(None not in row for row in schedule.table))
        self.passes.observer = self._meter.begin_step() if self._meter is not None else None
        self._check.begin_step()
        self.sum.begin_step(schedule)
        self.collector.begin_step()
        self.buffers.begin_step()
        self._report = RankReport(present=self.collector.present)
        self._done = []
        if self._ahead is not None:
            self._ahead.begin_step()
        return schedule

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
            assert self._ahead is not None
            self._ahead.note(self._lane, report, loss, weight, factor)
        else:
            if factor:
                report.loss += float(loss.detach()) * factor
            report.weight += float(weight)
            report.is_padding = report.weight == 0.0
        if is_last:
            self.collector.begin(report)
        root = factor * self.committer.scale.value
        if root != 1.0 and loss.dtype == torch.float16:
            loss = loss.float()
        gradient = None if root == 1.0 else torch.full_like(loss, root)
        self.passes.run_backward(loss, gradient, records=not self._done)
        if is_last:
            self.collector.end()

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
        self._report.options = self._options(clip, clip_value)
        form = self._form = self._form or self._make_form()
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

    def _options(self, clip: float | None, clip_value: float | None) -> dict[str, int]:
        """What must be equal on all ranks for this step, as hashes."""
        found = {
            "clip or clip_value": hashing.short([repr(clip), repr(clip_value)]),
            **self.committer.optimizer.options(),
        }
        if isinstance(self.world.transport, MessageTransport):
            found[refuse.LEDGER] = self.world.transport.ledger.check
        return found

    def _make_form(self) -> Form:
        """The form of all reports of the run, from the first of them."""
        return Form(
            self.world.lanes, self.world.slots, len(self.collector.parameters),
            len(self._report.changed_buffers), tuple(self._report.options),
        )  # fmt: skip

    def _update(self, form: Form, clip: float | None, clip_value: float | None) -> Result:
        """Decide by what all ranks tell this one, and step."""
        assert self._schedule is not None
        self.committer.examine(self._report, wants_norm=clip is not None)
        row = form.fill(self._report, self.world.rank)
        report = form.read(self.world.transport.share(row, "the report of a step"), self._schedule)
        self.buffers.have_changed |= any(report.changed_buffers)
        refuse.differences(report, self._step)
        outcome = self.committer.commit(report, clip, clip_value)
        if not outcome.skipped:
            real_lanes = [not lane.is_padding for lane in report.lanes]
            self.buffers.commit(report.changed_buffers, self._schedule, real_lanes)
        return Known(outcome)

    def _update_ahead(self, form: Form, clip: float | None, clip_value: float | None) -> Result:
        """Have the device decide and step; the host reads later what was decided."""
        assert self._schedule is not None
        assert self._ahead is not None
        squares = self.committer.squares() if clip is not None else None
        pending = self._ahead.decide(form, self._report, self._schedule, squares, clip)
        present = (True,) * form.num_parameters
        if len(self._report.present) < form.num_parameters:
            present = pending.report().present
        if not (self.committer.must_look(present) and pending.numbers()[0]):
            self.committer.commit_unseen(present, pending.verdict, clip_value)
        step = self._step

        def look() -> Outcome:
            found = pending.numbers()
            if not found[0]:
                return self.committer.agreed(found, clip is not None)
            report = pending.report()
            self.buffers.have_changed |= any(report.changed_buffers)
            refuse.differences(report, step)
            refuse.late(report, step, [name for name, _ in self.buffers.named])
            divisor, outcome = self.committer.decide(report, clip)
            return outcome if outcome.skipped else refuse.too_far(divisor, step)

        return Unseen(look)

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
