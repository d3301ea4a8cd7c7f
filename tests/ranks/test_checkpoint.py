"""A run that was saved goes on anywhere, to the bits of one that never stopped; what is damaged is never loaded."""

import errno
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from lanewise.errors import StateError
from lanewise.state import files
from lanewise.state.inspect import Generation
from tests.helpers.cases import STRATEGIES, Cell, on_ranks
from tests.helpers.models import Gpt, token_data


@dataclass(frozen=True)
class Leg:
    """A cell that begins from a generation, or from nothing, and saves one at its end."""

    cell: Cell
    until: int
    folder: Path | None = None
    loads: bool = False
    saves: bool = False
    precision: str = "model"
    moments: str = "fp32"
    skips: bool = False

    @property
    def world(self) -> int:
        return self.cell.world


class Skipping(Gpt):
    """A model whose last block is used from step 2 on only, so that its parameters have no state before."""

    uses_last = True

    def forward(self, tokens):
        kept = self.blocks
        if not self.uses_last:
            self.blocks = kept[:-1]
        try:
            return super().forward(tokens)
        finally:
            self.blocks = kept


def travel(leg: Leg) -> list[str]:
    run = leg.cell.start(lanes=6, precision=leg.precision, moments=leg.moments)
    torch.manual_seed(0)
    model = Skipping(dropout=0.1) if leg.skips else Gpt(dropout=0.1)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "lr": 2e-3},
    ]
    model, optimizer = run.prepare(model, torch.optim.AdamW(groups, lr=1e-2))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    loader = run.loader(token_data(36), batch_size=12, shuffle=True)
    if leg.loads:
        told = run.load(leg.folder, schedulers=scheduler)
        assert told == {"note": [1, 2.5, None]}
    digests = []
    for step in run.steps(loader, total=leg.until):
        if leg.skips:
            model.uses_last = step.index >= 2
        for tokens, targets in step:
            step.backward(F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten()))
        step.update(clip=0.5)
        scheduler.step()
        digests.append(run.digest())
    if leg.saves:
        run.save(leg.folder, schedulers=scheduler, extra={"note": [1, 2.5, None]}, wait=leg.until < 3)
    run.close()
    return digests


SAVERS = [
    Cell(1, "ddp"),
    *(Cell(3, s, "gloo") for s in STRATEGIES),
    Cell(2, "zero3", "shared"),
    Cell(5, "zero1", "shared"),
]
LOADERS = [
    Cell(1, "zero3"),
    *(Cell(2, s, "gloo") for s in STRATEGIES),
    Cell(5, "zero2", "gloo"),
    Cell(3, "ddp", "shared"),
]


def saved_and_loaded(folder: Path, **options) -> None:
    """Every pair of cells, and one that never stops."""
    straight = Leg(Cell(1, "ddp"), 5, **options)
    legs = [straight]
    for number, saver in enumerate(SAVERS):
        place = folder / str(number)
        legs.append(Leg(saver, 2, place, saves=True, **options))
        legs += [Leg(LOADERS[(number + n) % len(LOADERS)], 5, place, loads=True, **options) for n in (0, 3)]
    found = on_ranks(legs, travel, timeout=280)
    wanted = found[0][0]
    for leg, by_rank in zip(legs, found, strict=True):
        for digests in by_rank:
            assert digests == (wanted[2:] if leg.loads else wanted[: leg.until]), leg


def test_saved_anywhere_goes_on_anywhere(tmp_path):
    saved_and_loaded(tmp_path)


def test_masters_and_narrow_moments_are_saved(tmp_path):
    saved_and_loaded(tmp_path, precision="bf16", moments="bf16", skips=True)


def test_a_generation_is_never_overwritten_and_the_newest_whole_one_is_loaded(tmp_path):
    cell = Cell(2, "zero3", "gloo")
    on_ranks([Leg(cell, 1, tmp_path, saves=True), Leg(cell, 2, tmp_path, saves=True)], travel)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000000001", "step-000000002"]
    path = tmp_path / "step-000000002" / "slots-00003-00006.safetensors"
    data = bytearray(path.read_bytes())
    data[-9] ^= 4
    path.write_bytes(data)
    legs = [
        Leg(cell, 4),
        Leg(Cell(1, "zero1"), 4, tmp_path, loads=True),
        replace(Leg(cell, 2, tmp_path, saves=True)),
    ]
    straight, after_fall_back = on_ranks(legs[:2], travel)
    assert after_fall_back[0] == straight[0][1:]
    on_ranks(legs[2:], travel)  # the damaged one is moved aside
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names[0].startswith(".step-000000002-damaged-")
    assert names[1:] == ["step-000000001", "step-000000002"]
    Generation(tmp_path / "step-000000002").verify()
    on_ranks(legs[2:], travel)  # the same state again is no error
    other = replace(legs[2], precision="bf16")
    with pytest.raises(Exception, match="there is another state of this step already"):
        on_ranks([other], travel)


def disk_full(cell: Cell, folder: Path) -> list[object]:
    """Rank 1 has no room for its first generation, beside training; then it has."""
    heard: list[str] = []
    run = cell.start(lanes=6, sinks=[lambda event: heard.append(getattr(event, "text", ""))])
    torch.manual_seed(0)
    model, _ = run.prepare(model := Gpt(), torch.optim.AdamW(model.parameters(), lr=1e-2))
    real = files.write

    def full(path, tensors):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    heard.clear()
    for step in run.steps(run.loader(token_data(36), batch_size=12), total=4):
        for tokens, targets in step:
            step.backward(F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()))
        step.update()
        if step.index == 0:
            files.write = full if run.rank == 1 else real
            run.save(folder)
            run._keeper._saving.wait()
            files.write = real
    after_failure = sorted(path.name for path in folder.iterdir())
    told = [text.split(":")[0] for text in heard if "not saved" in text]
    run.save(folder)
    run.save(folder / "other")  # waits for the one before
    first = sorted(path.name for path in folder.glob("step-*"))
    if run.rank == 1:
        files.write = full
    try:
        run.save(folder / "third", wait=True)
        refused = ""
    except StateError as error:
        refused = str(error)
    run.close()
    left = sorted(path.name for path in (folder / "third").iterdir())
    return [run.rank, after_failure, told, first, "No space left" in refused, left]


def test_a_save_that_fails_beside_training_is_told_and_changes_nothing(tmp_path):
    (by_rank,) = on_ranks([Cell(2, "zero3", "gloo")], disk_full, tmp_path)
    name = "step-000000004"
    target = f"{tmp_path}/step-000000001 was not saved"
    for rank, after_failure, told, first, is_refused, left in by_rank:
        assert after_failure == []
        assert told == ([target] if rank == 0 else [])
        assert rank == 1 or first == [name]
        assert is_refused
        assert left == []
    assert (tmp_path / name / "manifest.json").exists()
    assert (tmp_path / "other" / name / "manifest.json").exists()


def load_where_one_sees_nothing(cell: Cell, folder: Path) -> tuple[str, bool]:
    run = cell.start(lanes=6)
    model, _ = run.prepare(model := Gpt(), torch.optim.AdamW(model.parameters(), lr=1e-2))
    before = run.digest()
    words = ""
    try:
        run.load(folder if run.rank == 0 else folder / "elsewhere")
    except StateError as error:
        words = str(error)
    same = run.digest() == before
    run.close()
    return words, same


def test_a_rank_that_does_not_see_the_folder_fails_on_all(tmp_path):
    cell = Cell(2, "zero3", "gloo")
    on_ranks([Leg(cell, 1, tmp_path, saves=True)], travel)
    (by_rank,) = on_ranks([cell], load_where_one_sees_nothing, tmp_path)
    for words, same in by_rank:
        assert "rank 1: " in words
        assert same
