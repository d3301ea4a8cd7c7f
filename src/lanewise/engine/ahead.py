"""A step of which the host sees nothing until later: what the device knows of it, and how it is asked.

See `docs/decisions/0008-the-device-decides.md`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lanewise.config import NonFinite
from lanewise.engine import device
from lanewise.engine.finite import DeviceCheck
from lanewise.engine.report import Form, LaneReport, RankReport, StepReport
from lanewise.engine.transport.messages import MessageTransport
from lanewise.engine.verdict import Judge, Verdict
from lanewise.engine.world import World
from lanewise.lanes.schedule import Schedule

_WHERE = "the report of a step"


@dataclass(frozen=True)
class Pending:
    """What the device has decided or will decide."""

    verdict: Verdict
    _rows: torch.Tensor
    _numbers: torch.Tensor
    _mark: device.Mark
    _form: Form
    _schedule: Schedule
    _check: DeviceCheck
    _transport: MessageTransport

    def numbers(self) -> list[float]:
        """The verdict's numbers. Waits for the device."""
        if not self._mark.is_reached(self._transport.patience):
            raise self._transport.silence(_WHERE)
        found: list[float] = self._numbers.tolist()
        return found

    def report(self) -> StepReport:
        """All that the ranks have reported. Waits for the device."""
        self.numbers()
        return self._form.read(self._rows.cpu(), self._schedule, self._check.places.index)


class Ahead:
    """What the device knows of the step under way."""

    def __init__(self, world: World, check: DeviceCheck, nonfinite: NonFinite) -> None:
        self._world = world
        self._check = check
        self._ignores_bad = nonfinite == "ignore"
        self._judge: Judge | None = None
        self._losses: dict[int, torch.Tensor] = {}
        self._weights: dict[int, torch.Tensor] = {}

    def begin_step(self) -> None:
        """Nothing is known."""
        self._losses.clear()
        self._weights.clear()

    def note(
        self, lane: int, report: LaneReport, loss: torch.Tensor, weight: float | torch.Tensor, factor: float
    ) -> None:
        """Add a loss to a lane, and its weight, wherever that is."""
        value = self._number(loss)
        if factor != 1.0:
            value = value * factor if factor else torch.zeros_like(value)
        self._losses[lane] = self._losses[lane] + value if lane in self._losses else value
        if isinstance(weight, torch.Tensor):
            number = self._number(weight)
            self._weights[lane] = self._weights[lane] + number if lane in self._weights else number
        else:
            report.weight += weight
        report.is_padding = report.weight == 0.0 and lane not in self._weights

    def _number(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of our own: the script may use its tensor again."""
        return tensor.detach().to(self._world.device, torch.float64, non_blocking=True, copy=True).view(())

    def decide(
        self,
        form: Form,
        mine: RankReport,
        schedule: Schedule,
        squares: torch.Tensor | None,
        clip: float | None,
    ) -> Pending:
        """Put the reports of all ranks together on the device, and have it decide. Collective."""
        where, transport = self._world.device, self._world.transport
        assert isinstance(transport, MessageTransport)
        if self._judge is None or self._judge.schedule is not schedule:
            self._judge = Judge(form, schedule, self._world.rank, where)
        judge = self._judge
        row = device.from_host(form.fill(mine, self._world.rank), where)
        lanes = schedule.lanes_of(self._world.rank)
        losses = [self._losses[lane] for lane in lanes]
        judge.fill(row, losses, self._weights_of(lanes, mine), self._check.wanted_flags, squares)
        rows = transport.rows(row, _WHERE)
        verdict = judge.decide(rows, clip, self._ignores_bad)
        numbers = device.to_host(verdict.numbers)
        mark = device.Mark(device.Queue.present(where))
        return Pending(verdict, rows, numbers, mark, form, schedule, self._check, transport)

    def _weights_of(self, lanes: Sequence[int], mine: RankReport) -> list[torch.Tensor] | None:
        """The weights of lanes, if any of them is known to the device only."""
        if not self._weights:
            return None
        nothing = torch.zeros((), dtype=torch.float64, device=self._world.device)
        return [self._weights.get(lane, nothing) + mine.lanes[lane].weight for lane in lanes]
