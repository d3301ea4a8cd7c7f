"""What must be the same on every rank and is chosen between steps: found before anything is updated."""

from pathlib import Path

import torch

from lanewise.errors import DivergedError, LanewiseError, SettingsError
from tests.helpers.cases import STRATEGIES, TRANSPORTS, Cell, on_ranks, one_value


def unlike_lr(run, optimizer, step):
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + run.rank)
    step.update()


def unlike_clip(run, optimizer, step):
    step.update(clip=1.0 + (run.rank == 2))


def unlike_momentum_in_a_tensor(run, optimizer, step):
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1 * (1 + run.rank))
    step.update()


def unlike_hosting(run, optimizer, step):
    step.update()
    run.rehost((3, 2, 1) if run.rank == 1 else "even")


CASES = (unlike_lr, unlike_clip, unlike_momentum_in_a_tensor, unlike_hosting)


def outcomes(cell):
    found = []
    for case in CASES:
        run = cell.start(lanes=6)
        torch.manual_seed(3)
        model = torch.nn.Linear(8, 4)
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loader = run.loader(torch.arange(96.0).reshape(12, 8).sin(), batch_size=6)
        before = run.digest()
        try:
            for step in run.steps(loader, total=3):
                for x in step:
                    step.backward(model(x).square().mean())
                case(run, optimizer, step)
            found.append(("no error", "", True))
        except LanewiseError as error:
            found.append((type(error).__name__, str(error), case is unlike_hosting or run.digest() == before))
        run.close()
    return found


def test_ranks_that_choose_otherwise():
    cells = [Cell(3, s, t) for s, t in zip(STRATEGIES, TRANSPORTS * 2, strict=True)]
    for cell, by_rank in zip(cells, on_ranks(cells, outcomes), strict=True):
        for rank, found in enumerate(by_rank):
            where = f"{cell}, rank {rank}: {found}"
            lr, clip, tensor, hosting = found
            for kind, text, untouched in (lr, tensor):
                assert kind == DivergedError.__name__, where
                assert "step 0: rank(s) [1, 2] have other values of optimizer group 0 than rank 0" in text, (
                    where
                )
                assert untouched, where
            assert clip[0] == DivergedError.__name__, where
            assert "rank(s) [2] have other values of clip or clip_value" in clip[1], where
            assert clip[2], where
            assert hosting[0] in (SettingsError.__name__, DivergedError.__name__), where
            if hosting[0] == SettingsError.__name__:
                assert "run.rehost with the same weights on every rank" in hosting[1], where


def rehosted_again_and_again(cell):
    run = cell.start(lanes=6)
    torch.manual_seed(3)
    model = torch.nn.Linear(512, 512)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = run.loader(torch.randn(12, 512, generator=torch.Generator().manual_seed(0)), batch_size=6)
    mapped = []
    for step in run.steps(loader, total=9):
        for x in step:
            step.backward(model(x).square().mean())
        step.update()
        run.rehost((5, 1) if step.index % 2 else "even")
        mapped.append(num_mappings())
    run.close()
    assert mapped[-1] <= mapped[4], mapped
    return mapped[-1] <= mapped[4]


def num_mappings():
    with Path("/proc/self/maps").open() as file:
        return sum("memfd:lanewise" in line for line in file)


def test_memory_of_an_earlier_hosting_is_given_back():
    assert one_value([Cell(2, "zero1", "shared")], rehosted_again_and_again)
