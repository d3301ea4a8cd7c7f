"""What becomes of a step, decided on the device, so that the host goes on without having seen it.

Every rank's report lies on the device as a row of numbers. From all rows the device finds by what to divide the
gradients, and whether the step is refused; the optimizer's own kernel then divides or leaves everything alone. The
host reads the same rows later and comes to the same decision in words.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lanewise.engine.report import NOTHING, PLAIN, WEIGHTED, Form
from lanewise.lanes.schedule import Schedule

_SMALLEST = torch.finfo(torch.float32).tiny
"""Divisors below are not exact in fp32."""


@dataclass(frozen=True)
class Verdict:
    """What the device has decided; the first two in the form that fused optimizers take."""

    divisor: torch.Tensor
    refused: torch.Tensor
    """1 where nothing is to be changed, else 0."""
    numbers: torch.Tensor
    """For the host: whether it is refused, the sum of losses, their weight, and the squares of all gradients."""


class Judge:
    """Finds verdicts for one schedule."""

    def __init__(self, form: Form, schedule: Schedule, rank: int, device: torch.device) -> None:
        self.schedule = schedule
        self._form = form
        self._rank = rank
        self._device = device
        lanes, squares, *_ = form.starts
        width = form.starts[-1]
        owner = [keeper for keeper, span in enumerate(form.slots) for _ in range(*span)]
        self._mine = schedule.lanes_of(rank)
        rows = [host * width + lanes + 4 * lane for lane, host in enumerate(schedule.host)]
        places = [keeper * width + squares + slot for slot, keeper in enumerate(owner)]
        self._picked = self._index([[row, row + 1, place] for row, place in zip(rows, places, strict=True)])
        self._lanes = self._index([[row + 1, row + 2, row + 3] for row in rows])
        self._losses = self._index([lanes + 4 * lane for lane in self._mine])
        self._weights = self._index([lanes + 4 * lane + 1 for lane in self._mine])

    def fill(
        self,
        row: torch.Tensor,
        losses: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor] | None,
        flags: torch.Tensor | None,
        squares: torch.Tensor | None,
    ) -> None:
        """Write into this rank's row what only the device knows."""
        if losses:
            row.index_copy_(0, self._losses, torch.stack(list(losses)))
        if weights:
            row.index_copy_(0, self._weights, torch.stack(list(weights)))
        if flags is not None:
            start = self._form.starts[2]
            row[start : start + flags.numel()].copy_(flags)
        if squares is not None:
            start = self._form.starts[1] + self._form.slots[self._rank][0]
            row[start : start + squares.numel()].copy_(squares)

    def decide(self, rows: torch.Tensor, clip: float | None, ignores_bad: bool) -> Verdict:
        """Come to a verdict from the rows of all ranks."""
        _, _, bad, present, buffers, options = self._form.starts[:-1]
        numbers = rows.view(-1)
        total = _tree_sum(numbers[self._picked])
        weight = total[1]
        weights, padding, ways = numbers[self._lanes].unbind(1)
        is_weighted = ways >= WEIGHTED
        refused = ((ways == PLAIN) | (ways == PLAIN + WEIGHTED)).any() & is_weighted.any()
        refused |= (is_weighted & (padding == 0) & ~((weights > 0) & torch.isfinite(weights))).any()
        if not ignores_bad:
            refused |= (rows[:, bad:present] < NOTHING).any()
        refused |= (rows[:, options:] != rows[:1, options:]).any()
        if options > buffers:
            refused |= (rows[:, buffers:options] != 0).any()
        divisor = weight
        if clip is not None:
            factor = clip / (total[2].sqrt() / divisor + 1e-6)
            clips = (factor < 1.0) | torch.isnan(factor)
            divisor = torch.where(clips, divisor / factor, divisor)
        narrow = divisor.float()
        refused |= torch.isfinite(divisor) & (~torch.isfinite(narrow) | (narrow < _SMALLEST))
        numbers = torch.cat([refused.double().view(1), total])
        return Verdict(narrow, refused.float(), numbers)

    def _index(self, numbers: object) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)


def _tree_sum(level: torch.Tensor) -> torch.Tensor:
    """The canonical sum of rows."""
    while len(level) > 1:
        pairs = len(level) // 2
        paired = level[0 : 2 * pairs : 2] + level[1 : 2 * pairs : 2]
        level = torch.cat([paired, level[2 * pairs :]]) if len(level) % 2 else paired
    return level[0]
