"""Calls that may never return: made in a thread of their own, and left there when patience ends.

torch's client of a store waits forever for a server that is stopped, whatever timeout it is given.
"""

import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

_SLICE_S = 0.05
_T = TypeVar("_T")


class OutOfPatienceError(Exception):
    """The call did not return in time. It may still be running."""


def within(limit: timedelta, call: Callable[[], _T], look: Callable[[], None] | None = None) -> _T:
    """What the call returns or raises, unless it takes longer than `limit`. `look` is called now and then,
    and may raise.
    """
    answers: queue.SimpleQueue[tuple[bool, object]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((True, call()))
        except Exception as error:
            answers.put((False, error))

    threading.Thread(target=run, daemon=True, name="lanewise-patience").start()
    deadline = time.monotonic() + limit.total_seconds()
    while True:
        left = deadline - time.monotonic()
        try:
            succeeded, answer = answers.get(timeout=max(min(_SLICE_S, left), 0.0))
        except queue.Empty:
            if left <= 0:
                raise OutOfPatienceError from None
            if look is not None:
                look()
            continue
        if isinstance(answer, Exception) and not succeeded:
            raise answer
        return answer  # type: ignore[return-value]
