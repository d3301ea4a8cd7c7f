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
from lanewise.state.manifest import plain, restore

if TYPE_CHECKING:
    from lanewise.run.session import Run

_IDENTITY = ("lanes", "seed", "precision", "moments", "micro_batches", "reduction")
"""The settings that decide bits."""
Schedulers = LRScheduler | Sequence[LRScheduler]


def save(
    run: "Run",
    folder: Path,
    schedulers: Schedulers,
    extra: Mapping[str, Any] | None,
    keep_last: int | None,
    keep_every: int | None,
) -> saving.Saving:
    """Begin a save. Collective."""
    if keep_last is None and keep_every is not None:
        raise SettingsError("run.save: keep_every= says which older generations stay; give keep_last= too.")
    retain.superfluous((), keep_last or 1, keep_every)
    settings = asdict(run.settings)
    facts = saving.Facts(
        step=run.position,
        seed=run.settings.seed,
        settings={key: settings[key] for key in _IDENTITY},
        extra={
            "user": plain(dict(extra or {}), "extra"),
            "schedulers": [
                {"type": type(one).__name__, "state": plain(one.state_dict(), type(one).__name__)}
                for one in _listed(schedulers)
            ],
        },
    )

    def tidy() -> None:
        if keep_last is not None:
            newest = saving.name_of(facts.step)  # others of later steps belong to a run that went back
            names = [name for name in loading.generations(folder) if name <= newest]
            retain.prune(folder, names, keep_last, keep_every, is_sure=True)

    patience = run.settings.timeout.total_seconds()
    return saving.begin(run.engine, folder, facts, patience, tidy)


def finish(run: "Run", under_way: saving.Saving) -> None:
    """Wait until a generation is published, on all ranks; an error on all of them where it is not. Collective."""
    under_way.wait()
    problems = together.failures(run.engine.world.transport, under_way.problem, "the end of a save")
    if problems:
        raise saving.not_saved(under_way.target, problems[:1])
    untidy = together.failures(run.engine.world.transport, under_way.untidy, "the end of a save")
    if untidy:
        raise StateError(
            f"{under_way.target} was saved, but older generations were not removed: {untidy[0]}."
        )


def load(
    run: "Run", folder: Path, step: int | None, schedulers: Schedulers, notify: Callable[[str], None]
) -> dict[str, Any]:
    """See `Run.load`."""
    names = loading.generations(folder) if step is None else [saving.name_of(step)]
    listed = _listed(schedulers)
    found = loading.load(run.engine, folder, names, [type(one).__name__ for one in listed], notify)
    run.position = found.step
    settings = asdict(run.settings)
    for key, value in found.settings.items():
        if settings.get(key) != value:
            notify(
                f"the generation was saved with {key}={value!r}, and this run has {settings.get(key)!r}: other bits"
            )
    for scheduler, state in zip(listed, found.extra["schedulers"], strict=True):
        scheduler.load_state_dict(restore(state["state"]))
    now = digests.digest(run.engine)
    if now != found.digest:
        raise StateError(
            f"{folder}: what was loaded has digest {now}, and {found.digest} was saved. This is a fault of Lanewise; "
            "do not go on."
        )
    user: dict[str, Any] = restore(found.extra["user"])
    return user


def _listed(schedulers: Schedulers) -> list[LRScheduler]:
    return [schedulers] if isinstance(schedulers, LRScheduler) else list(schedulers)
