"""The end of a step: from sums of gradients to new values, by a decision that all ranks share.

Nothing is changed before the decision is made, so a refused step leaves everything as it was.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from lanewise.config import NonFinite
from lanewise.engine import sum as sums
from lanewise.engine.finite import FiniteCheck
from lanewise.engine.homes import Home
from lanewise.engine.optimizer import Slice, SlicedOptimizer, divide
from lanewise.engine.precision import LossScale
from lanewise.engine.report import RankReport, StepReport
from lanewise.engine.strategies import GradientSum, Strategy
from lanewise.engine.unit import Flat
from lanewise.engine.verdict import Verdict
from lanewise.engine.world import World


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
        is_fp32 = all(flat.update_dtype == torch.float32 for flat in self._flats)
        self.optimizer = SlicedOptimizer(optimizer, slices, is_fp32)
        flats = {flat.number: flat for flat in self._flats}
        stored = {key: master for key, master in self.masters.items() if not self._home.rounds(flats[key[0]])}
        self._masters = list(stored.values())
        self._rounded = [self.stored(flats[number], owner) for number, owner in stored]

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
        report.bad_total, report.bad_leaves = self._check.found()
        if wants_norm:
            report.slot_squares = self.squares().tolist()

    def squares(self) -> torch.Tensor:
        """The squares of what this rank owns, by slot."""
        low, high = self._world.slots[self._world.rank]
        squares = torch.zeros(high - low, dtype=torch.float64, device=self._world.device)
        for flat in self._flats:
            total = self._sum.total(flat, self._world.rank)
            sums.add_squares(total, flat.layout.slot, squares)
        return squares

    def commit(self, report: StepReport, clip: float | None, clip_value: float | None) -> Outcome:
        """Decide, and step."""
        divisor, outcome = self.decide(report, clip)
        if not outcome.skipped:
            self._step(report.present, divisor, None, clip_value)
        self.scale.update(report.bad_total is not None)
        return outcome

    def must_look(self, present: Sequence[bool]) -> bool:
        """Whether a step that is refused would leave something behind, so that the host has to see it first."""
        has = [present[self._index[p.flat.number, p.part.field]] for p in self.optimizer.slices]
        return self.optimizer.is_new_to(has)

    def commit_unseen(self, present: Sequence[bool], verdict: Verdict, clip_value: float | None) -> None:
        """Step as the device has decided."""
        self._step(present, 1.0, verdict, clip_value)

    def agreed(self, numbers: Sequence[float], clips: bool) -> Outcome:
        """What became of a step that the device did not refuse."""
        _, loss, weight, squares = numbers
        norm = math.sqrt(squares) / weight if clips else None
        return Outcome(loss / weight, weight, norm, False, None, self.scale.value)

    def decide(self, report: StepReport, clip: float | None) -> tuple[float, Outcome]:
        """By what to divide the sums, and what becomes of the step."""
        overflowed = report.bad_total is not None
        is_routine = self.scale.can_shrink or self._nonfinite == "skip"
        skipped = overflowed and (is_routine or self._nonfinite == "raise")
        refusal = self._describe_bad(report) if skipped and not is_routine else None
        divisor = report.total_weight * self.scale.value
        norm = None
        if clip is not None:
            norm = report.norm_of_sum / divisor
            factor = clip / (norm + 1e-6)
            divisor = divisor / factor if 0.0 < factor < 1.0 or math.isnan(factor) else divisor
            divisor = math.inf if factor == 0.0 else divisor
        loss, weight = report.mean_loss, report.total_weight
        return divisor, Outcome(loss, weight, norm, skipped, refusal, self.scale.value)

    def _step(
        self, present: Sequence[bool], divisor: float, verdict: Verdict | None, clip_value: float | None
    ) -> None:
        divides_now = verdict is None and self._updates_everything and not self._divides_later(divisor)
        if clip_value is not None or divides_now:
            for flat in self._flats:
                total = self._sum.total(flat, self._world.rank)
                if verdict is None:
                    divide(total, divisor)
                else:
                    total.div_(verdict.divisor.to(total.dtype))
                if clip_value is not None:
                    total.clamp_(-clip_value, clip_value)
            divisor = 1.0
            verdict = verdict and replace(verdict, divisor=torch.ones_like(verdict.divisor))
        if self._updates_everything:
            self._sum.gather()
            if self._world.transport.is_shared:
                self._world.transport.barrier("the gather of gradients")
        gradients = [self._gradient(piece, present) for piece in self.optimizer.slices]
        self.optimizer.step(gradients, divisor, verdict)
        if self._masters:
            torch._foreach_copy_(self._rounded, self._masters)

    def _divides_later(self, divisor: float) -> bool:
        """Whether the optimizer may divide the sums itself: it writes them back, so not where others read them."""
        return not self._world.transport.is_shared and self.optimizer.divides_by(divisor)

    def _gradient(self, piece: Slice, present: Sequence[bool]) -> torch.Tensor | None:
        if not present[self._index[piece.flat.number, piece.part.field]]:
            return None
        part = piece.part
        return self._sum.total(piece.flat, piece.owner)[part.offset : part.offset + part.stop - part.start]

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
        assert report.bad_total is not None
        if self._world.runs_ahead:
            return f"the gradient of {name(report.bad_total)} has a sum over the lanes that is not finite. {advice}"
        return (
            f"the gradient of {name(report.bad_total)} is finite in every lane, but its sum over the lanes is not. "
            f"{advice}"
        )
