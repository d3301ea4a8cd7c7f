"""The end of a step: from sums of gradients to new values, by a decision that all ranks share.

Nothing is changed before the decision is made, so a refused step leaves everything as it was.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lanewise.config import NonFinite
from lanewise.engine import sum as sums
from lanewise.engine.finite import FiniteCheck, is_finite
from lanewise.engine.homes import Home
from lanewise.engine.optimizer import Slice, SlicedOptimizer, divide
from lanewise.engine.precision import LossScale
from lanewise.engine.report import RankReport, StepReport
from lanewise.engine.strategies import GradientSum, Strategy
from lanewise.engine.unit import Flat
from lanewise.engine.world import World
from lanewise.lanes.layout import Part


@dataclass(frozen=True)
class Outcome:
    """What came of a step."""

    loss: float
    weight: float
    grad_norm: float | None
    skipped: bool
    """Whether nothing was updated, because a gradient was not finite."""
    refusal: str | None
    """Why the step is an error, where it was skipped and should not have been."""
    loss_scale: float


class Committer:
    """Owns the optimizer's slices and the masters, and updates them once a step."""

    def __init__(
        self,
        world: World,
        strategy: Strategy,
        home: Home,
        gradient_sum: GradientSum,
        check: FiniteCheck,
        parameters: Sequence[tuple[Flat, int]],
        nonfinite: NonFinite,
        scale: LossScale,
    ) -> None:
        self._world = world
        self._updates_everything = strategy.updates_everything
        self._home = home
        self._sum = gradient_sum
        self._check = check
        self._parameters = parameters
        self._index = {(flat.number, place): n for n, (flat, place) in enumerate(parameters)}
        self._flats = tuple(dict.fromkeys(flat for flat, _ in parameters))
        self._nonfinite = nonfinite
        self.masters: dict[tuple[int, int], torch.Tensor] = {}
        """The wide copy of what an owner owns of a flat, by flat and owner."""
        self.scale = scale
        self.optimizer: SlicedOptimizer

    @property
    def owners(self) -> range | tuple[int, ...]:
        """The ranks whose slots this rank updates."""
        return range(self._world.size) if self._updates_everything else (self._world.rank,)

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Put slices of what this rank updates in the place of the optimizer's parameters."""
        slices = []
        for flat in self._flats:
            for owner in self.owners:
                values = self.values(flat, owner)
                for part in flat.layout.parts(self._world.spans(flat)[owner]):
                    tensor = values[part.offset : part.offset + part.stop - part.start]
                    slices.append(Slice(flat, part, owner, tensor))
        self.optimizer = SlicedOptimizer(optimizer, slices)

    def values(self, flat: Flat, owner: int) -> torch.Tensor:
        """What the optimizer works on of an owner's slots: the master where there is one."""
        if flat.has_master:
            return self.masters[flat.number, owner]
        return self.stored(flat, owner)

    def stored(self, flat: Flat, owner: int) -> torch.Tensor:
        """The values of an owner's slots as they are stored."""
        if owner == self._world.rank:
            return self._home.mine(flat)
        low, high = self._world.spans(flat)[owner]
        return flat.storage[low:high]

    def examine(self, report: RankReport, wants_norm: bool) -> None:
        """Note what this rank's sums say: whether they are finite, and their squares by slot."""
        report.bad_total = self._first_bad()
        bad = [(lane, self._index[flat, field]) for lane, flat, field in self._check.leaves]
        report.bad_leaf = min(bad, default=None)
        if wants_norm:
            report.slot_squares = self._squares()

    def commit(self, report: StepReport, clip: float | None, clip_value: float | None) -> Outcome:
        """Decide, and step."""
        overflowed = any(index >= 0 for index in report.bad_totals)
        is_routine = self.scale.can_shrink or self._nonfinite == "skip"
        skipped = overflowed and (is_routine or self._nonfinite == "raise")
        refusal = self._describe_bad(report) if skipped and not is_routine else None
        scale = self.scale.value
        divisor = report.total_weight * scale
        norm = None
        if clip is not None:
            norm = report.norm_of_sum / divisor
            factor = clip / (norm + 1e-6)
            divisor = divisor / factor if 0.0 < factor < 1.0 or math.isnan(factor) else divisor
            divisor = math.inf if factor == 0.0 else divisor
        if not skipped:
            self._step(report.present, divisor, clip_value)
        self.scale.update(overflowed)
        return Outcome(report.mean_loss, report.total_weight, norm, skipped, refusal, scale)

    def _step(self, present: Sequence[bool], divisor: float, clip_value: float | None) -> None:
        if clip_value is not None or (self._updates_everything and not self._divides_later(divisor)):
            for flat in self._flats:
                total = self._sum.total(flat, self._world.rank)
                divide(total, divisor)
                if clip_value is not None:
                    total.clamp_(-clip_value, clip_value)
            divisor = 1.0
        if self._updates_everything:
            self._sum.gather()
            if self._world.transport.is_shared:
                self._world.transport.barrier("the gather of gradients")
        gradients = [self._gradient(piece, present) for piece in self.optimizer.slices]
        self.optimizer.step(gradients, divisor)
        for (number, owner), master in self.masters.items():
            flat = next(f for f in self._flats if f.number == number)
            self.stored(flat, owner).copy_(master)

    def _divides_later(self, divisor: float) -> bool:
        """Whether the optimizer may divide the sums itself: it writes them back, so not where others read them."""
        return not self._world.transport.is_shared and self.optimizer.divides_by(divisor)

    def _gradient(self, piece: Slice, present: Sequence[bool]) -> torch.Tensor | None:
        if not present[self._index[piece.flat.number, piece.part.field]]:
            return None
        part = piece.part
        return self._sum.total(piece.flat, piece.owner)[part.offset : part.offset + part.stop - part.start]

    def _my_parts(self, flat: Flat) -> tuple[Part, ...]:
        return flat.layout.parts(self._world.my_span(flat))

    def _first_bad(self) -> int:
        """The first parameter of this rank's slots whose sum is not finite, or -1."""
        for flat in self._flats:
            if flat.number not in self._check.flats:
                continue
            total = self._sum.total(flat, self._world.rank)
            for part in self._my_parts(flat):
                if not is_finite(total[part.offset : part.offset + part.stop - part.start]):
                    return self._index[flat.number, part.field]
        return -1

    def _squares(self) -> list[float]:
        low, high = self._world.slots[self._world.rank]
        squares = torch.zeros(high - low, dtype=torch.float64, device=self._world.device)
        for flat in self._flats:
            total = self._sum.total(flat, self._world.rank)
            for slot in range(high - low):
                stretch = total[slot * flat.layout.slot : (slot + 1) * flat.layout.slot]
                squares[slot] += sums.sum_of_squares(stretch)
        return [float(value) for value in squares.tolist()]

    def _describe_bad(self, report: StepReport) -> str:
        def name(index: int) -> str:
            flat, place = self._parameters[index]
            return f"parameter {flat.names[place]!r} of unit {flat.unit_name!r}"

        advice = (
            "Nothing was updated. Look at that lane's samples and loss; nonfinite='skip' leaves such steps out, "
            "nonfinite='ignore' updates anyway."
        )
        if report.bad_leaf is not None:
            lane, index = report.bad_leaf
            return f"the gradient of {name(index)} is not finite in lane {lane}. {advice}"
        first = min(index for index in report.bad_totals if index >= 0)
        return f"the gradient of {name(first)} is finite in every lane, but its sum over the lanes is not. {advice}"
