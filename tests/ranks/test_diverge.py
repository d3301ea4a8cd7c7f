"""Ranks that do different things: found within seconds, on both transports, with the ranks and what each does."""

import time

import pytest
import torch
from torch import nn

import lanewise as lw
from lanewise.errors import ExchangeError, SettingsError, StepError
from tests.helpers.cases import STRATEGIES, TRANSPORTS, Cell, grid, on_ranks, one_value

SOON = 5.0
EVERYTHING = (0, 1, 2)


class Experts(nn.Module):
    """Every lane may use other blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, used):
        x = self.stem(x)
        for number in used:
            x = torch.tanh(self.blocks[number](x))
        return x.square().mean()


def prepared(run):
    torch.manual_seed(5)
    model = Experts()
    run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    return model, run.loader(torch.arange(96.0).reshape(12, 8).sin(), batch_size=6)


def one_digests_while_others_update(run, model, loader):
    for step in run.steps(loader, total=2):
        for x in step:
            step.backward(model(x, EVERYTHING))
        if run.rank == 1 and step.index == 1:
            run.digest()
        step.update()


def one_asks_for_another_collective(run, model, loader):
    if run.rank == 1:
        run._transport.barrier("a barrier of its own")
    run.digest()


def one_shares_more_numbers(run, model, loader):
    odd = run.rank == 1
    run._transport.share(torch.zeros(3 if odd else 5000), "a small share" if odd else "a large share")


def one_skips_a_step(run, model, loader):
    for step in run.steps(loader, total=3):
        if run.rank == 1 and step.index == 2:
            break
        for x in step:
            step.backward(model(x, EVERYTHING))
        step.update()
    run.digest()


def one_runs_other_units(run, model, loader):
    for step in run.steps(loader, total=2):
        for x in step:
            step.backward(model(x, (0, 2) if run.rank == 1 else EVERYTHING))
        step.update()


def one_evaluates_alone(run, model, loader):
    if run.rank == 1:
        with torch.no_grad():
            model(torch.ones(2, 8), EVERYTHING)
    run.digest()


def one_ends_early(run, model, loader):
    if run.rank != 1:
        run.digest()


ANYWHERE = (
    one_digests_while_others_update, one_asks_for_another_collective, one_shares_more_numbers, one_skips_a_step,
    one_ends_early,
)  # fmt: skip
BETWEEN_HOSTS = (one_runs_other_units, one_evaluates_alone)
"""Only where a unit's values have to be gathered is it an error to run one alone."""


def outcomes(cell, cases):
    """How each case ended on this rank: the error, its message, and the seconds it took."""
    found = []
    for case in cases:
        run = lw.start(lanes=6, strategy=cell.strategy, exchange=cell.exchange, timeout=60.0, sinks=[])
        model, loader = prepared(run)
        began = time.monotonic()
        try:
            case(run, model, loader)
            found.append(("no error", "", 0.0))
        except ExchangeError as error:
            found.append((type(error).__name__, str(error), time.monotonic() - began))
            run.close()
        run.close()
    return found


def test_ranks_that_do_different_things():
    cells = [
        Cell(3, "ddp", "shared"),
        Cell(3, "zero3", "shared"),
        Cell(3, "zero1", "gloo"),
        Cell(3, "zero3", "gloo"),
    ]
    for cell, by_rank in zip(cells, on_ranks(cells, outcomes, ANYWHERE), strict=True):
        for number, case in enumerate(ANYWHERE):
            check(cell, case.__name__, [found[number] for found in by_rank])
    cells = [Cell(3, "zero3", "gloo")]
    (by_rank,) = on_ranks(cells, outcomes, BETWEEN_HOSTS)
    for number, case in enumerate(BETWEEN_HOSTS):
        check(cells[0], case.__name__, [found[number] for found in by_rank])


def check(cell, case, ends):
    """Everybody ends soon; who notices names itself and the other, and what both are in."""
    where = f"{case} in {cell}: {ends}"
    assert all(seconds < SOON for _, _, seconds in ends), where
    if case == "one_ends_early":
        assert [kind for kind, _, _ in ends] == ["PeerLostError", "no error", "PeerLostError"], where
        assert all("rank 1 has ended its run" in ends[rank][1] for rank in (0, 2)), where
        return
    assert all(kind in ("DivergedError", "PeerLostError") for kind, _, _ in ends), where
    noticed = [(rank, text) for rank, (kind, text, _) in enumerate(ends) if kind == "DivergedError"]
    assert noticed, where
    for rank, text in noticed:
        other = 1 if rank != 1 else text.partition("but rank ")[2][0]
        assert f"rank {rank} is in " in text, where
        assert f"but rank {other} is in " in text, where
        assert "All ranks must make the same exchanges in the same order" in text, where


def lanes_use_other_units(cell):
    run = cell.start(lanes=6)
    model, loader = prepared(run)
    for step in run.steps(loader, total=3):
        for x in step:
            step.backward(model(x, [(0, 1, 2), (0, 2), (1,)][step.lane % 3]))
        step.update()
    digest = run.digest()
    run.close()
    return digest


def test_lanes_may_use_other_units_where_nothing_is_gathered():
    cells = grid([1, 3], STRATEGIES, ["shared"]) + grid([3], ["ddp", "zero1", "zero2"], ["gloo"])
    assert TRANSPORTS == ("shared", "gloo")
    one_value(cells, lanes_use_other_units)


def one_changes_its_copy(cell):
    run = cell.start(lanes=6)
    prepared(run)
    run.digest()
    if run.rank == 1:
        flat = next(flat for flat in run.engine.flats if flat.unit_name == "blocks.1")
        flat.storage[3] += 1e-3
    with pytest.raises(ExchangeError) as caught:
        run.digest()
    run.close()
    return str(caught.value)


def test_a_copy_that_was_changed_on_one_rank_is_found():
    """With ddp every rank has all slots, so a memory that fails shows when they are compared."""
    for by_rank in on_ranks(grid([3], ["ddp"]), one_changes_its_copy):
        assert set(by_rank) == {
            "rank 1 has other values of parameter 'blocks.1.weight' (unit 'blocks.1', slot 0) than the ranks before "
            "it. Copies must be equal: a rank's memory may be faulty, or something changed the parameter on one rank "
            "only."
        }


def one_weighs_its_losses(cell):
    """The hosting is another on each rank at first; then rank 1 gives weights, and the others none."""
    run = cell.start(lanes=6)
    model, loader = prepared(run)
    run.rehost((3, 2, 1) if run.rank == 1 else (1, 2, 3))
    with pytest.raises(SettingsError) as hosting:
        next(run.steps(loader))
    run.rehost("even")
    before = run.digest()
    step = next(steps := run.steps(loader))
    for x in step:
        step.backward(model(x, EVERYTHING), 2.0 if run.rank == 1 else None)
    with pytest.raises(StepError) as weights:
        step.update()
    steps.close()
    assert run.digest() == before
    run.close()
    return str(hosting.value), str(weights.value)


def test_what_only_all_ranks_together_can_see():
    found = on_ranks([Cell(3, "zero1", "shared"), Cell(3, "zero3", "gloo")], one_weighs_its_losses)
    for lanes, by_rank in zip(([2, 3], [1, 4]), found, strict=True):
        others = sorted(set(range(6)) - set(lanes))
        assert len(set(by_rank)) == 1
        hosting, weights = by_rank[0]
        assert hosting == (
            "rank 1 has the lanes shared out as [3, 2, 1], but rank 0 as [1, 2, 3]. Call run.rehost with the same "
            "weights on every rank."
        )
        assert weights == (
            f"step 0: step.backward got a weight in lane(s) {lanes} and none in lane(s) {others}, so sums would be "
            "added to means. Give a weight in every lane, or in none. Nothing was updated."
        )
