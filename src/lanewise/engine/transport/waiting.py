"""Counters in shared memory, and waiting for them: spin a little, then sleep in the kernel.

A counter has one writer and only grows. Plain loads and stores suffice on x86, where no store passes an
earlier one; on other processors Python has no fence to offer, so the shared transport is not used there.
"""

import ctypes
import mmap
import os
import platform
import select
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

from lanewise.engine.transport.suspects import Suspects
from lanewise.errors import PeerLostError

_FUTEX = 202
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_SPINS = 200
_SLICE_S = 0.1


def is_supported() -> bool:
    """Whether this machine can wait on shared memory (Linux on x86-64)."""
    return sys.platform == "linux" and platform.machine() == "x86_64" and hasattr(os, "pidfd_open")


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Counter:
    """A number in a shared mapping that one process raises and others wait for."""

    def __init__(self, mapping: mmap.mmap, offset: int) -> None:
        self._words = memoryview(mapping).cast("Q")
        self._index = offset // 8
        self._low_word = ctypes.c_uint32.from_buffer(mapping, offset)
        self._address = ctypes.c_void_p(ctypes.addressof(self._low_word))
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall

    @property
    def value(self) -> int:
        """The number now."""
        return self._words[self._index]

    def advance(self) -> int:
        """Raise the number by one and wake who waits for it. Only its writer calls this."""
        value = self._words[self._index] + 1
        self._words[self._index] = value
        self._syscall(_FUTEX, self._address, _FUTEX_WAKE, 2**31 - 1, None, None, 0)
        return value

    def sleep(self, seen: int, seconds: float) -> None:
        """Sleep until the number is no longer `seen`, or for so long."""
        limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        self._syscall(
            _FUTEX,
            self._address,
            _FUTEX_WAIT,
            ctypes.c_uint32(seen & 0xFFFFFFFF),
            ctypes.byref(limit),
            None,
            0,
        )

    def release(self) -> None:
        """Let go of the mapping."""
        self._words.release()
        del self._low_word


class Watch:
    """Notices that a process has ended, at once and without its help."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.pids = tuple(pids)
        self._poll = select.poll()
        self._ranks = {}
        self._never_met = []
        for rank, pid in enumerate(pids):
            if pid == os.getpid():
                continue
            try:
                handle = os.pidfd_open(pid)
            except ProcessLookupError:
                self._never_met.append(rank)
                continue
            self._ranks[handle] = rank
            self._poll.register(handle, select.POLLIN)

    def ended(self) -> tuple[int, ...]:
        """The ranks whose process is gone."""
        return tuple(sorted([*self._never_met, *(self._ranks[handle] for handle, _ in self._poll.poll(0))]))

    def state(self, rank: int) -> str:
        """What the kernel says of a process: running, stopped, gone."""
        try:
            text = Path(f"/proc/{self.pids[rank]}/stat").read_text(encoding="ascii", errors="replace")
            letter = text.rpartition(")")[2].split()[0]
        except OSError:
            return "gone"
        return {"T": "stopped", "t": "stopped by a debugger", "Z": "gone", "D": "waiting for a disk"}.get(
            letter, "alive"
        )

    def close(self) -> None:
        """Give the handles back."""
        for handle in self._ranks:
            self._poll.unregister(handle)
            os.close(handle)
        self._ranks.clear()


def wait_until(
    awaited: Sequence[tuple[int, Counter, int]],
    watch: Watch,
    suspects: Suspects,
    timeout: timedelta,
    check: Callable[[], None],
    explain: Callable[[tuple[int, ...], str], str],
    spin: bool,
) -> None:
    """Return when each (rank, counter, target) has reached its target.

    Raises `PeerLostError` at once when a rank that has not is gone, and after `timeout` otherwise;
    `explain` words it. `check` is called while waiting is long, and raises if it would never end.
    """
    deadline: float | None = None
    for rank, counter, target in awaited:
        spins = _SPINS if spin else 0
        while (seen := counter.value) < target:
            if spins:
                spins -= 1
                os.sched_yield()
                continue
            if deadline is None:
                deadline = time.monotonic() + timeout.total_seconds()
            suspects.await_(rank)
            counter.sleep(seen, _SLICE_S)
            if counter.value >= target:
                break
            check()
            gone = watch.ended()
            late = tuple(r for r, c, t in awaited if c.value < t)
            if lost := tuple(r for r in late if r in gone):
                what = "has ended"
            elif late and time.monotonic() > deadline:
                lost, what = late, f"did not come within {timeout.total_seconds():g} s"
            else:
                continue
            culprits = tuple(sorted({suspects.behind(r, r in gone) for r in lost}))
            suspects.accuse(culprits[0])
            if culprits != lost:
                what = f"is the one that rank(s) {list(lost)} waited for"
            raise PeerLostError(culprits, explain(culprits, what))
    if deadline is not None:
        suspects.await_(None)
