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
from lanewise.engine import hashing, precision
from lanewise.engine.buffers import Buffers
from lanewise.engine.collect import Collector
from lanewise.engine.commit import Committer, Outcome
from lanewise.engine.eager import EagerSum
from lanewise.engine.finite import FiniteCheck
from lanewise.engine.original import Original
from lanewise.engine.passes import Passes
from lanewise.engine.report import PLAIN, WEIGHTED, LaneReport, RankReport, StepReport, exchange_reports
from lanewise.engine.strategies import Strategy
from lanewise.engine.unit import Unit, all_flats
from lanewise.engine.world import World
from lanewise.errors import DivergedError, StepError
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
        self._check = FiniteCheck(nonfinite, scale)
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

    def install(self, dtype: torch.dtype | None) -> None:
        """Hook the model; `dtype` is what its inputs are cast to, where that was asked for."""
        self.passes.install()
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
        self._schedule = schedule
        self._check.begin_step()
        self.sum.begin_step(self._schedule)
        self.collector.begin_step()
        self.buffers.begin_step()
        self._report = RankReport(present=self.collector.present)
        self._done = []
        return self._schedule

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

    def backward(self, loss: torch.Tensor, weight: float, factor: float, way: int, is_last: bool) -> None:
        """Add a loss to the lane. `factor` scales it; `way` says how the user gave it, and `is_last` that the lane's
        gradient is then whole.
        """
        report = self._report.lanes[self._lane]
        report.ways |= way
        if factor:
            report.loss += float(loss.detach()) * factor
        report.weight += weight
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

    def update(self, clip: float | None, clip_value: float | None) -> Outcome:
        """Exchange what is left, decide, and step. Collective."""
        transport = self.world.transport
        transport.say(f"step {self._step}, update")
        self.sum.finish()
        self.committer.examine(self._report, wants_norm=clip is not None)
        self._report.changed_buffers = self.buffers.changed()
        self._report.options = {
            "clip or clip_value": hashing.short([repr(clip), repr(clip_value)]),
            **self.committer.optimizer.options(),
        }
        num_parameters = len(self.collector.parameters)
        assert self._schedule is not None
        where = "the report of a step"
        report = exchange_reports(
            self._report, transport, self._schedule, self.world.slots, num_parameters, where
        )
        self._refuse_differences(report)
        outcome = self.committer.commit(report, clip, clip_value)
        if not outcome.skipped:
            real_lanes = [not lane.is_padding for lane in report.lanes]
            self.buffers.commit(report.changed_buffers, self._schedule, real_lanes)
        self.sum.end_step()
        self.home.publish()
        self.original.remember()
        return outcome

    def _refuse_differences(self, report: StepReport) -> None:
        plain, weighted = report.given(PLAIN), report.given(WEIGHTED)
        if plain and weighted:
            raise StepError(
                f"step {self._step}: step.backward got a weight in lane(s) {weighted} and none in lane(s) {plain}, so "
                "sums would be added to means. Give a weight in every lane, or in none. Nothing was updated."
            )
        for what, ranks in report.other_options.items():
            raise DivergedError(
                f"step {self._step}: rank(s) {list(ranks)} have other values of {what} than rank 0 (lr and the like), "
                "so the ranks would update by different rules. Nothing was updated. Do not let them depend on the rank."
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
        """Bytes that this rank keeps, by what they are for."""
        masters = sum(master.nbytes for master in self.committer.masters.values())
        return {
            **self.home.num_bytes,
            "masters": masters,
            **self.sum.num_bytes,
            "optimizer": self.committer.optimizer.num_bytes,
            "buffers": sum(tensor.nbytes for _, tensor in self.buffers.named),
        }

    def close(self) -> None:
        """Unhook the model and the optimizer."""
        self.passes.remove()
        for handle in self._handles:
            handle.remove()
        self.committer.optimizer.release()
