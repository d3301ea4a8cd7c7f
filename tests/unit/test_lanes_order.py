"""The order of the data: each sample exactly once an epoch, whatever the ranks do."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanewise.lanes.hosting import even
from lanewise.lanes.order import Order, permute
from lanewise.lanes.schedule import eager, late
from lanewise.lanes.seeds import derive


@given(st.integers(1, 3000), st.integers(0, 2**63))
def test_permute_is_a_permutation(size, key):
    assert sorted(permute(n, size, key) for n in range(size)) == list(range(size))


def test_permute_depends_on_the_key_and_mixes():
    first = [permute(n, 1000, 1) for n in range(1000)]
    assert first != [permute(n, 1000, 2) for n in range(1000)]
    assert sum(a < b for a, b in itertools.pairwise(first)) in range(400, 600)
    assert sum(n == place for n, place in enumerate(first)) < 10


def test_seeds_tell_parts_apart():
    assert derive(1, 23) != derive(12, 3)
    assert derive("1") != derive(1)
    assert 0 <= derive(0, "lane", 1, 2) < 2**63


@given(
    size=st.integers(1, 200),
    lanes=st.integers(1, 16),
    lane_batch=st.integers(1, 4),
    shuffle=st.booleans(),
    keyed=st.booleans(),
    data=st.data(),
)
def test_each_sample_once_an_epoch_across_resizes(size, lanes, lane_batch, shuffle, keyed, data):
    lane_of = [derive(s, "key") % lanes for s in range(size)] if keyed else None
    order = Order(size, lanes * lane_batch, lanes, seed=3, shuffle=shuffle, lane_of=lane_of)
    seen: Counter[int] = Counter()
    for step in range(order.steps_per_epoch):
        ranks = data.draw(st.integers(1, 20))
        schedule = data.draw(st.sampled_from([late, eager]))(even(lanes, ranks))
        for rank in range(ranks):
            for lane in schedule.lanes_of(rank):
                batch = order.lane(step, lane)
                assert batch.epoch == 0
                assert 1 <= len(batch.samples) <= lane_batch
                if not batch.padding:
                    seen.update(batch.samples)
                    if lane_of:
                        assert all(lane_of[sample] == lane for sample in batch.samples)
    assert seen == Counter(range(size))


@given(st.integers(1, 200), st.integers(1, 16), st.integers(1, 4))
def test_drop_last_gives_only_full_lanes(size, lanes, lane_batch):
    order = Order(size, lanes * lane_batch, lanes, shuffle=True, drop_last=True)
    seen: Counter[int] = Counter()
    for step in range(order.steps_per_epoch):
        for lane in range(lanes):
            batch = order.lane(step, lane)
            assert not batch.padding
            assert len(batch.samples) == lane_batch
            seen.update(batch.samples)
    assert max(seen.values(), default=1) == 1
    assert len(seen) == size // order.batch * order.batch


def test_epochs_differ_when_shuffled_and_not_otherwise():
    shuffled = Order(100, 10, 2, seed=1, shuffle=True)
    assert shuffled.lane(0, 0).samples != shuffled.lane(10, 0).samples
    assert shuffled.lane(10, 0).epoch == 1
    plain = Order(100, 10, 2)
    assert plain.lane(0, 0).samples == plain.lane(10, 0).samples == (0, 1, 2, 3, 4)
    assert plain.lane(0, 1).samples == (5, 6, 7, 8, 9)


def test_a_short_last_batch_is_shared_evenly():
    order = Order(19, 16, 8)
    assert [len(order.lane(1, lane).samples) for lane in range(8)] == [1, 1, 1, 2, 2, 2, 2, 2]
    assert [order.lane(1, lane).padding for lane in range(8)] == [False] * 3 + [True] * 5


@pytest.mark.parametrize("lanes", [1, 4, 8])
def test_a_seed_gives_one_order(lanes):
    a, b = (Order(50, 8, lanes, seed=9, shuffle=True) for _ in range(2))
    assert all(a.lane(s, v) == b.lane(s, v) for s in range(20) for v in range(lanes))
