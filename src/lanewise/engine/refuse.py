"""Steps that are errors although every rank did its part: what the ranks' reports say does not fit together."""

import math
from collections.abc import Sequence
from typing import NoReturn

from lanewise.engine.report import PLAIN, WEIGHTED, StepReport
from lanewise.errors import DivergedError, ModelError, StepError

LEDGER = "what was exchanged"
"""The option of a report that holds the check of a transport's ledger."""


def differences(report: StepReport, step: int) -> None:
    """Raise if lanes gave losses in unlike ways, or ranks did or chose unlike things."""
    plain, weighted = report.given(PLAIN), report.given(WEIGHTED)
    if plain and weighted:
        raise StepError(
            f"step {step}: step.backward got a weight in lane(s) {weighted} and none in lane(s) {plain}, so "
            "sums would be added to means. Give a weight in every lane, or in none. Nothing was updated."
        )
    for what, ranks in report.other_options.items():
        if what == LEDGER:
            raise DivergedError(
                f"step {step}: rank(s) {list(ranks)} have exchanged other things than rank 0, or in another order. "
                "Nothing was updated. All ranks must run the same program: let no module's call depend on the rank."
            )
        raise DivergedError(
            f"step {step}: rank(s) {list(ranks)} have other values of {what} than rank 0 (lr and the like), "
            "so the ranks would update by different rules. Nothing was updated. Do not let them depend on the rank."
        )


def late(report: StepReport, step: int, buffers: Sequence[str]) -> None:
    """Raise what can only be found out late, where the device has decided."""
    changed = [name for name, has_changed in zip(buffers, report.changed_buffers, strict=True) if has_changed]
    if changed:
        raise ModelError(
            f"step {step}: buffer {changed[0]!r} was changed by a forward for the first time, and the run did not "
            "expect it: on a GPU it looks in its first step which buffers change. Nothing was updated. Write to "
            "the buffer in the first step too, even the value that it has."
        )
    for lane, one in enumerate(report.lanes):
        if one.ways & WEIGHTED and not one.is_padding and not 0 < one.weight < math.inf:
            raise StepError(
                f"step {step}, lane {lane}: weight must be a positive, finite number, found {one.weight:g}. It is the "
                "count that the loss is a sum over. Nothing was updated."
            )


def too_far(divisor: float, step: int) -> NoReturn:
    """Raise for a divisor that a GPU's fused optimizer does not take."""
    raise StepError(
        f"step {step}: gradients would have to be divided by {divisor:g}, which is beyond fp32, and fused optimizers "
        "divide in it. Nothing was updated. Look at the loss and its weight; an optimizer made without fused=True "
        "divides in fp64 where it must."
    )
