"""How ranks fail: each leaves word of its exception, and the launcher finds the one that came first.

A rank that only lost another one says so too, but its word counts last: it is a consequence.
"""

import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Failure:
    """An exception that ended a rank."""

    rank: int
    time_s: float
    kind: str
    message: str
    traceback: str
    is_consequence: bool
    """Whether it only says that another rank was lost."""

    def write(self, folder: Path) -> None:
        """Leave it where the launcher looks."""
        unfinished = folder / f"{self.rank}.part"
        unfinished.write_text(json.dumps(asdict(self)), encoding="utf-8")
        unfinished.rename(folder / f"{self.rank}.json")


def read(folder: Path) -> tuple[Failure, ...]:
    """What the ranks have left, causes before consequences, the first of them first."""
    found = [Failure(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("*.json")]
    return tuple(sorted(found, key=lambda failure: (failure.is_consequence, failure.time_s)))


@dataclass(frozen=True)
class Outcome:
    """How a launch ended."""

    ranks: int
    exit_codes: Mapping[int, int] = field(default_factory=dict)
    """Of the ranks that failed, in the order in which they were seen to end; negative for a signal."""
    failures: Sequence[Failure] = ()
    interrupted_by: str = ""
    """The signal that ended the launcher, if one did."""

    @property
    def is_good(self) -> bool:
        """Whether every rank came to its end."""
        return not self.exit_codes and not self.interrupted_by

    @property
    def first(self) -> Failure | None:
        """The exception that began it; None where a rank ended without one."""
        causes = [failure for failure in self.failures if not failure.is_consequence]
        if causes:
            return causes[0]
        return None if self._silent else next(iter(self.failures), None)

    @property
    def exit_code(self) -> int:
        """What the launcher should exit with: the code of the rank that failed first."""
        if self.interrupted_by:
            return 128 + signal.Signals[self.interrupted_by].value
        if self.is_good:
            return 0
        code = self.exit_codes.get(self.culprit, 1)
        if self.first is not None and code == -signal.SIGTERM:
            return 1  # the launcher was quicker to end it than its exception was
        return 128 - code if code < 0 else code

    def describe(self) -> str:
        """One sentence on what happened."""
        who = f"rank {self.culprit} of {self.ranks}"
        if self.first is not None:
            alike = sum((f.kind, f.message) == (self.first.kind, self.first.message) for f in self.failures)
            also = f", as did {alike - 1} other(s)" if alike > 1 else ""
            return f"{who} failed with {self.first.kind}{also}."
        code = self.exit_codes[self.culprit]
        if code >= 0:
            return f"{who} ended with exit code {code} and no exception; its own output says why."
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        hint = " The kernel does that when memory runs out." if name == "SIGKILL" else ""
        return f"{who} was ended by {name}.{hint}"

    @property
    def culprit(self) -> int:
        """The rank that failed first; rank 0 where none did."""
        if self.first is not None:
            return self.first.rank
        return next(iter([*self._silent, *self.exit_codes]), 0)

    @property
    def _silent(self) -> list[int]:
        """The ranks that ended badly without an exception, and not because the launcher ended the rest.

        It ends with SIGKILL who does not end otherwise: a rank that another one waited for in vain.
        """
        spoke = {failure.rank for failure in self.failures}
        by_launcher = {-signal.SIGTERM}
        if any("did not come within" in failure.message for failure in self.failures):
            by_launcher.add(-signal.SIGKILL)
        return [r for r, code in self.exit_codes.items() if r not in spoke and code not in by_launcher]
