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

    def __init__(self, read: Callable[[], Known]) -> None:
        self._read: Callable[[], Known] | None = read
        self._known: Known | None = None

    def outcome(self) -> Outcome:
        """Waits for the device, once."""
        if self._known is None:
            assert self._read is not None
            self._known = self._read()
            self._read = None
        return self._known.outcome()
