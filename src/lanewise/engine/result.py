"""What came of a step: known at once, or decided on the device and read later."""

import math
from collections.abc import Callable
from typing import Protocol

from lanewise.engine.commit import Outcome


class Result(Protocol):
    """The outcome of a step, when it is asked for."""

    is_known: bool

    def outcome(self) -> Outcome:
        """What came of the step; may wait for the device. Raises what makes the step an error."""
        ...


class Known:
    """See `Result`."""

    is_known = True

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome

    def outcome(self) -> Outcome:
        """At once."""
        return self._outcome


_FAILED = Outcome(loss=math.nan, weight=math.nan, grad_norm=None, skipped=True, refusal=None, loss_scale=1.0)


class Unseen:
    """See `Result`."""

    is_known = False

    def __init__(self, look: Callable[[], Outcome]) -> None:
        self._look: Callable[[], Outcome] | None = look
        self._outcome: Outcome | None = None

    def outcome(self) -> Outcome:
        """Waits for the device, once. An error is raised once too; a step that has failed was skipped."""
        if self._outcome is None:
            assert self._look is not None
            look, self._look = self._look, None
            self._outcome = _FAILED
            self._outcome = look()
        return self._outcome
