"""Saving and loading a run: its engine's state, with what the run itself and its schedulers know."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LRScheduler

from lanewise.errors import SettingsError, StateError
from lanewise.run import digest as digests
from lanewise.state import load as loading
from lanewise.state import retain, together
from lanewise.state import save as saving
from lanewise.state.manifest import name_of, plain, restore

if TYPE_CHECKING:
    from lanewise.run.session import Run

_IDENTITY = ("lanes", "seed", "precision", "moments", "micro_batches", "reduction")
"""The settings that decide bits."""
Schedulers = LRScheduler | Sequence[LRScheduler]


class Keeper:
    """Saves and loads one run, and knows of the save that is under way."""

    def __init__(self, run: "Run", notify: Callable[[str], None]) -> None:
        self._run = run
        self._notify = notify
        self._saving: saving.Saving | None = None

    def save(
        self,
        folder: Path,
        schedulers: Schedulers,
        extra: Mapping[str, Any] | None,
        keep_last: int | None,
        keep_every: int | None,
        wait: bool,
    ) -> Path:
        """See `Run.save`."""
        if keep_last is None and keep_every is not None:
            raise SettingsError(
                "run.save: keep_every= says which older generations stay; give keep_last= too."
            )
        retain.superfluous((), keep_last or 1, keep_every)
        facts = self._facts(schedulers, extra)
        self.end()

        def tidy() -> None:
            if keep_last is not None:
                newest = name_of(facts.step)  # others of later steps belong to a run that went back
                names = [name for name in loading.generations(folder) if name <= newest]
                retain.prune(folder, names, keep_last, keep_every, is_sure=True)

        patience = self._run.settings.timeout.total_seconds()
        try:
            under_way = saving.begin(self._run.engine, folder, facts, patience, tidy)
        except saving.NotSavedError as error:
            if wait:
                raise
            self._notify(str(error))
            return error.target
        if wait:
            self._finish(under_way)
        else:
            self._saving = under_way
        return under_way.target

    def load(self, folder: Path, step: int | None, schedulers: Schedulers) -> dict[str, Any]:
        """See `Run.load`."""
        self.end()
        run, every = self._run, listed(schedulers)
        found = loading.load(run.engine, folder, step, [type(one).__name__ for one in every], self._notify)
        run.position = found.step
        settings = asdict(run.settings)
        for key, value in found.settings.items():
            if settings.get(key) != value:
                self._notify(
                    f"the generation was saved with {key}={value!r}, and this run has {settings.get(key)!r}: other bits"
                )
        for scheduler, saved in zip(every, found.extra["schedulers"], strict=True):
            scheduler.load_state_dict(restore(saved["state"]))
        now = digests.digest(run.engine)
        if now != found.digest:
            raise StateError(
                f"{folder}: what was loaded has digest {now}, and {found.digest} was saved. This is a fault of "
                "Lanewise; do not go on."
            )
        user: dict[str, Any] = restore(found.extra["user"])
        return user

    def end(self, only_if_done: bool = False) -> None:
        """Wait for a save under way, and say so if it failed."""
        if self._saving is None or (only_if_done and not self._saving.is_done):
            return
        under_way, self._saving = self._saving, None
        under_way.wait()
        if under_way.problem is not None:
            self._notify(f"{under_way.target} was not saved: {under_way.problem}")
        elif under_way.untidy is not None:
            self._notify(f"older generations than {under_way.target} were not removed: {under_way.untidy}")

    def abandon(self) -> None:
        """The run ends with an error: do not wait for what other ranks write."""
        if self._saving is not None:
            self._saving.abandon()

    def _finish(self, under_way: saving.Saving) -> None:
        """Wait until a generation is published; an error on all ranks where it is not. Collective."""
        under_way.wait()
        told = [under_way.problem, under_way.untidy]
        problem, untidy = together.tell_all(self._run.engine.world.transport, told, "the end of a save")[0]
        if problem is not None:
            raise saving.not_saved(under_way.target, [problem])
        if untidy is not None:
            raise StateError(
                f"{under_way.target} was saved, but older generations were not removed: {untidy}."
            )

    def _facts(self, schedulers: Schedulers, extra: Mapping[str, Any] | None) -> saving.Facts:
        settings = asdict(self._run.settings)
        return saving.Facts(
            step=self._run.position,
            seed=self._run.settings.seed,
            settings={key: settings[key] for key in _IDENTITY},
            extra={
                "user": plain(dict(extra or {}), "extra"),
                "schedulers": [
                    {"type": type(one).__name__, "state": plain(one.state_dict(), type(one).__name__)}
                    for one in listed(schedulers)
                ],
            },
        )


def listed(schedulers: Schedulers) -> list[LRScheduler]:
    """One scheduler or several, as a list."""
    return [schedulers] if isinstance(schedulers, LRScheduler) else list(schedulers)
