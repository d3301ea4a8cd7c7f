"""What a loader gives the lanes: the same samples and bits with and without workers, and no process left behind."""

import multiprocessing
import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import lanewise as lw
from lanewise.data.loader import make_loader
from lanewise.lanes.seeds import derive

CPU = torch.device("cpu")
LANES = 4


class Noisy(Dataset):
    """Every sample draws from all three global streams."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, place):
        drawn = [*torch.rand(2).tolist(), float(np.random.rand()), random.random()]
        return torch.tensor([float(place), *drawn], dtype=torch.float64)


class NoisyInBatches(Noisy):
    """Gives a whole batch at once, and draws for it as a whole."""

    def __getitems__(self, places):
        noise = torch.rand(2, dtype=torch.float64)
        return [torch.cat([self[place], noise + place]) for place in places]


class Failing(Noisy):
    def __getitem__(self, place):
        if place == 5:
            raise LookupError("sample 5 is damaged")
        return super().__getitem__(place)


def noisy_collate(samples):
    stacked = torch.stack(samples)
    return {"x": stacked + torch.rand(1, dtype=torch.float64), "n": [len(samples), random.random()]}


def make(dataset, batch_size=8, **options):
    settings = {
        "lanes": LANES,
        "seed": 3,
        "micro_batches": 1,
        "shuffle": False,
        "drop_last": False,
        "num_workers": 0,
        "collate_fn": None,
        "partition": "uniform",
        "key": None,
    }
    return make_loader(dataset, batch_size, **{**settings, **options})


def stream(loader, steps, lanes=range(LANES)):
    portions = [portion for step in range(steps) for lane in lanes for portion in loader.portions(step, lane)]
    return list(loader.stream(portions, CPU))


def children():
    return multiprocessing.active_children()


@pytest.mark.parametrize("dataset", [Noisy(21), NoisyInBatches(21)])
def test_workers_change_neither_samples_nor_what_they_draw(dataset):
    loaded = {}
    for num_workers in (0, 2):
        loader = make(dataset, shuffle=True, num_workers=num_workers, collate_fn=noisy_collate)
        state = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
        loaded[num_workers] = stream(loader, 2 * len(loader))
        assert torch.equal(torch.get_rng_state(), state[0])
        assert (np.random.get_state()[1].tolist(), random.getstate()) == state[1:]
    assert len(loaded[0]) == 2 * 3 * LANES
    for (portion, alone), (other, helped) in zip(loaded[0], loaded[2], strict=True):
        assert portion == other
        assert torch.equal(alone["x"], helped["x"])
        assert alone["n"] == helped["n"]
    assert not children()


@pytest.mark.parametrize("dataset", [Noisy(24), NoisyInBatches(24)])
def test_what_a_lane_loads_does_not_depend_on_which_lanes_are_loaded_with_it(dataset):
    loader = make(dataset, shuffle=True)
    together = {(p.step, p.lane): batch for p, batch in stream(loader, 3)}
    for lane in range(LANES):
        for portion, batch in stream(loader, 3, [lane]):
            assert torch.equal(batch, together[portion.step, lane])


def test_a_sample_draws_anew_in_every_epoch():
    loader = make(Noisy(8))
    first, second = stream(loader, 2)[0][1], stream(loader, 2)[LANES][1]
    assert torch.equal(first[:, 0], second[:, 0])
    assert not (first[:, 1:] == second[:, 1:]).any()


def test_an_epoch_has_every_sample_once_and_len_says_how_many_steps():
    for size in (1, 7, 8, 9, 31):
        loader = make(Noisy(size), shuffle=True)
        assert len(loader) == -(-size // 8)
        assert loader.batch_size == 8
        own = [portion for portion, _ in stream(loader, len(loader)) if portion.share]
        assert sorted(s for portion in own for s in portion.samples) == list(range(size))


def test_drop_last_keeps_full_batches_only():
    loader = make(Noisy(31), shuffle=True, drop_last=True)
    assert len(loader) == 3
    loaded = stream(loader, 3)
    assert {len(batch) for _, batch in loaded} == {2}
    assert {portion.share for portion, _ in loaded} == {1.0}


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_short_and_empty_lanes_weigh_what_they_hold(micro_batches):
    """11 samples in steps of 16: the lanes of the only step have 3, 3, 3 and 2 of them."""
    loader = make(Noisy(11), 16, micro_batches=micro_batches)
    full = 4 // micro_batches
    for lane, size in enumerate((3, 3, 3, 2)):
        portions = loader.portions(0, lane)
        assert len(portions) == micro_batches
        assert sum(portion.share for portion in portions) * full == size
        assert sorted({s for p in portions if p.share for s in p.samples}) == list(
            range(3 * lane, 3 * lane + size)
        )
        assert all(portion.samples for portion in portions)
    for lane in (1, 2, 3):
        padded = make(Noisy(1), 16, micro_batches=micro_batches).portions(0, lane)
        assert {(portion.share, portion.samples) for portion in padded} == {(0.0, (0,) * full)}


def lanes_of(loader):
    """The samples of each lane over an epoch."""
    found = {lane: [] for lane in range(LANES)}
    for step in range(len(loader)):
        for lane in range(LANES):
            for portion in loader.portions(step, lane):
                found[lane] += portion.samples if portion.share else ()
    return found


def test_samples_of_one_key_share_a_lane():
    users = [f"user {n % 5}" for n in range(40)]
    for key in (lambda i: users[i], lambda i: np.str_(users[i]), lambda i: (users[i], i % 5, None)):
        found = lanes_of(make(Noisy(40), partition="hash", key=key, shuffle=True))
        assert sorted(s for samples in found.values() for s in samples) == list(range(40))
        for user in set(users):
            assert len({lane for lane, samples in found.items() for s in samples if users[s] == user}) == 1


def test_keys_that_are_equal_are_the_same_in_numpy_torch_and_python():
    numbers = [n * 7 % 11 for n in range(30)]
    expected = lanes_of(make(Noisy(30), partition="hash", key=lambda i: numbers[i]))
    assert expected == lanes_of(make(Noisy(30), partition="hash", key=lambda i: np.int32(numbers[i])))
    assert expected == lanes_of(make(Noisy(30), partition="hash", key=lambda i: torch.tensor(numbers)[i]))
    assert expected[derive("key", "7") % LANES].count(1) == 1


@pytest.mark.parametrize("number", [int, np.int64, lambda n: torch.tensor(n)])
def test_a_function_says_the_lane(number):
    found = lanes_of(make(Noisy(20), partition=lambda i: number(i * i % LANES)))
    assert found == {0: list(range(0, 20, 2)), 1: list(range(1, 20, 2)), 2: [], 3: []}


class Tiny:
    """A run that trains on `Noisy` data."""

    def __init__(self, dataset, num_workers=2):
        self.run = lw.start(lanes=LANES, sinks=[])
        self.model = torch.nn.Linear(5, 1).double()
        self.run.prepare(self.model, torch.optim.SGD(self.model.parameters(), lr=0.1))
        self.loader = self.run.loader(dataset, batch_size=8, num_workers=num_workers)

    def train(self, step):
        for x in step:
            step.backward(self.model(x).mean())
        step.update()

    def epoch(self, after=lambda step: None):
        for step in self.run.steps(self.loader):
            self.train(step)
            after(step)


def test_workers_last_over_epochs_and_end_with_the_loop():
    tiny = Tiny(Noisy(16))
    seen = []
    for step in tiny.run.steps(tiny.loader, epochs=3):
        tiny.train(step)
        seen.append({child.pid for child in children()})
    assert len(seen) == 6
    assert len(seen[0]) == 2
    assert all(pids <= seen[0] for pids in seen)
    assert not children()
    tiny.run.close()


def test_a_loop_left_early_leaves_no_worker():
    tiny = Tiny(Noisy(64))
    for step in tiny.run.steps(tiny.loader):
        tiny.train(step)
        if step.index == 1:
            assert children()
            break
    assert not children()
    assert tiny.run.position == 2
    with pytest.raises(ZeroDivisionError):
        tiny.epoch(lambda step: 1 / 0)
    assert not children()
    tiny.run.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sample_that_fails_raises_its_own_error(num_workers):
    tiny = Tiny(Failing(8), num_workers)
    with pytest.raises(LookupError, match="sample 5 is damaged"):
        tiny.epoch()
    assert not children()
    tiny.run.close()


def test_anything_with_places_is_a_data_set():
    for dataset in ([torch.ones(5)] * 8, torch.ones(8, 5), TensorDataset(torch.ones(8, 5))):
        assert len(stream(make(dataset), 1)) == LANES
