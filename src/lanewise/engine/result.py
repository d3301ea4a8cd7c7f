"""What came of a step: known at once, or decided on the device and read later."""

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


class Unseen:
    """See `Result`."""

    is_known = False

    def __init__(self, look: Callable[[], Outcome]) -> None:
        self._look: Callable[[], Outcome] | None = look
        self._outcome: Outcome | None = None

    def outcome(self) -> Outcome:
        """Waits for the device, once."""
        if self._outcome is None:
            assert self._look is not None
            self._outcome = self._look()
            self._look = None
        return self._outcome
