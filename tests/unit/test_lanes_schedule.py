"""Schedules as a whole: for all numbers of lanes and ranks, nothing is computed twice, sent twice or left out."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanewise.lanes import hosting, layout, schedule, tree
from lanewise.lanes.order import Order
from lanewise.lanes.program import Action, plan
from lanewise.lanes.seeds import derive
from tests.unit.test_lanes_sums import LANES, RANKS, run_program

KINDS = pytest.mark.parametrize("make", [schedule.late, schedule.eager])


@st.composite
def any_hosting(draw, lanes=LANES):
    """Lanes dealt out by any weights; a rank of weight 0 hosts none."""
    weights = st.one_of(st.integers(0, 5), st.floats(0, 1e6))
    ranks = draw(RANKS)
    return hosting.weighted(draw(lanes), draw(st.lists(weights, min_size=ranks, max_size=ranks).filter(any)))


def leaves(table, rank):
    return {tree.leaf(lane): str(lane) for lane in table.lanes_of(rank)}


@KINDS
def test_every_world_computes_each_lane_once_and_keeps_a_rank_at_work(make):
    for lanes in range(1, 65):
        for ranks in range(1, 21):
            table = make(hosting.even(lanes, ranks))
            done = [lane for row in table.table for lane in row if lane is not None]
            assert sorted(done) == list(range(lanes))
            assert all(len(row) == ranks for row in table.table), "a rank is left out of a round"
            assert all(any(lane is not None for lane in row) for row in table.table), "nobody leads a round"
            assert len(table.table) == -(-lanes // ranks)
            assert all(table.table[n].count(None) == 0 for n in range(lanes // ranks)), "a rank idles early"


def test_every_world_comes_to_the_same_grouping():
    """All 1280 worlds; of the owners of a late sum, one for each."""
    for lanes in range(1, 65):
        canonical = tree.grouping(lanes)
        for ranks in range(1, 21):
            shares = hosting.even(lanes, ranks)
            table = schedule.eager(shares)
            program = schedule.owner_program_eager(table)
            sums = run_program(lanes, program, {tree.leaf(lane): str(lane) for lane in range(lanes)})
            assert sums == {0: canonical}
            late_sum(schedule.late(shares), (lanes + ranks) % ranks)


def late_sum(table, owner):
    """What the ranks send each other, carried out for one owner: the canonical sum, of every arrival once."""
    sent = {}
    for rank in range(table.num_ranks):
        local = schedule.local_program(table, rank)
        registers = run_program(table.lanes, local, leaves(table, rank))
        nodes = {node: registers[register] for node, register in local.outputs}
        assert not sent.keys() & nodes.keys()
        sent |= nodes
        if rank == owner:
            resident = dict(local.outputs)
    unmerged = schedule.unmerged_lane(table, owner)
    if unmerged is not None:
        del resident[tree.leaf(unmerged)]
    program = schedule.owner_program_late(table, owner)
    taken = Counter(
        node for step in program.rounds[0] for node in (step.arrival, step.second) if node is not None
    )
    assert taken == Counter(sent.keys() - resident.keys()), "an arrival is used twice, or not at all"
    assert run_program(table.lanes, program, sent, resident) == {0: tree.grouping(table.lanes)}


@given(any_hosting(), st.data())
def test_any_hosting_comes_to_the_same_grouping_late(shares, data):
    late_sum(schedule.late(shares), data.draw(st.integers(0, len(shares) - 1)))


@given(any_hosting())
def test_any_hosting_comes_to_the_same_grouping_eagerly(shares):
    lanes = sum(shares)
    table = schedule.eager(shares)
    program = schedule.owner_program_eager(table)
    taken = Counter(
        node
        for instructions in program.rounds
        for step in instructions
        for node in (step.arrival, step.second)
        if node is not None
    )
    assert taken == Counter(tree.leaf(lane) for lane in range(lanes))
    assert run_program(lanes, program, {tree.leaf(lane): str(lane) for lane in range(lanes)}) == {
        0: tree.grouping(lanes)
    }


@KINDS
@given(shares=any_hosting())
def test_small_sums_are_canonical_whatever_lanes_a_rank_has(make, shares):
    """As buffers are averaged: every rank adds what it can of its lanes, and all ranks add the rest alike."""
    table = make(shares)
    sent = {}
    for rank in range(len(shares)):
        own = plan(table.lanes, [[tree.leaf(lane)] for lane in table.lanes_of(rank)])
        registers = run_program(table.lanes, own, leaves(table, rank))
        sent |= {node: registers[register] for node, register in own.outputs}
    final = plan(table.lanes, [list(sent)])
    assert run_program(table.lanes, final, sent) == {final.root_register: tree.grouping(table.lanes)}


@given(any_hosting())
def test_nobody_waits_for_more_than_is_sent(shares):
    """A late exchange carries as few subtrees as cover the lanes of each rank."""
    table = schedule.late(shares)
    for rank in range(len(shares)):
        nodes = schedule.sent_nodes(table, rank)
        assert [lane for a, b in nodes for lane in range(a, b)] == list(table.lanes_of(rank))
        assert len(nodes) <= 2 * table.lanes.bit_length()
        unmerged = schedule.unmerged_lane(table, rank)
        assert unmerged is None or tree.leaf(unmerged) in nodes
        last = schedule.local_program(table, rank).rounds[-1]
        assert (unmerged is not None) == bool(last and [s.action for s in last] == [Action.LOAD])


@given(LANES, RANKS)
def test_every_slot_has_one_owner_next_to_the_others(lanes, ranks):
    slots = hosting.spans(hosting.even(lanes, ranks))
    assert [slot for low, high in slots for slot in range(low, high)] == list(range(lanes))
    assert len(slots) == ranks


@given(
    sizes=st.lists(st.integers(0, 1000), min_size=1, max_size=12),
    lanes=LANES,
    ranks=RANKS,
    alone=st.integers(1, 300),
    limit=st.integers(64, 5000),
)
def test_what_is_sent_of_a_stretch_is_all_of_it_once(sizes, lanes, ranks, alone, limit):
    flat = layout.lay_out([(f"p{n}", size) for n, size in enumerate(sizes)], lanes)
    owners = [flat.span(slots) for slots in hosting.spans(hosting.even(lanes, ranks))]
    for span in (span for piece in layout.pieces(owners, limit)[:5] for span in piece):
        length = span[1] - span[0]
        segments = flat.segments(span, alone)
        places = [(part.offset, part.offset + part.stop - part.start) for part in flat.parts(span)]
        assert all(0 <= low < high <= length for low, high in segments)
        assert all(a[1] <= b[0] for a, b in pairwise(segments)), "they overlap"
        for low, high in places:
            assert sum(a <= low and high <= b for a, b in segments) == 1, "a part is sent once, and whole"
            if high - low >= alone:
                assert (low, high) in segments, "a large part goes by itself"
        gaps = layout.between(segments, length)
        assert not any(low < b and a < high for a, b in gaps for low, high in places), "a part is left out"


@settings(max_examples=60)
@given(
    lanes=LANES,
    size=st.integers(1, 150),
    lane_batch=st.integers(1, 3),
    shuffle=st.booleans(),
    keyed=st.booleans(),
    epochs=st.integers(1, 3),
    data=st.data(),
)
def test_each_sample_once_an_epoch_whatever_becomes_of_the_ranks(
    lanes, size, lane_batch, shuffle, keyed, epochs, data
):
    """Steps are dealt out to other ranks, by other weights, from any step on; a run may stop there and go on."""
    lane_of = [derive(sample, "key") % lanes for sample in range(size)] if keyed else None
    settings = {"seed": 3, "shuffle": shuffle, "lane_of": lane_of}
    order = Order(size, lanes * lane_batch, lanes, **settings)
    seen = Counter()
    table = schedule.late(hosting.even(lanes, 1))
    for step in range(epochs * order.steps_per_epoch):
        if data.draw(st.integers(0, 3)) == 0:
            shares = data.draw(any_hosting(st.just(lanes)))
            table = data.draw(st.sampled_from([schedule.late, schedule.eager]))(shares)
            order = Order(size, lanes * lane_batch, lanes, **settings)
        for rank in range(table.num_ranks):
            for lane in table.lanes_of(rank):
                batch = order.lane(step, lane)
                assert batch.epoch == step // order.steps_per_epoch
                if not batch.padding:
                    seen.update((batch.epoch, sample) for sample in batch.samples)
    assert seen == Counter((epoch, sample) for epoch in range(epochs) for sample in range(size))


@given(st.integers(1, 150), st.integers(1, 16), st.integers(1, 3))
def test_a_partition_that_drops_the_rest_fills_every_lane(size, lanes, lane_batch):
    lane_of = [derive(sample, "key") % lanes for sample in range(size)]
    order = Order(size, lanes * lane_batch, lanes, shuffle=True, drop_last=True, lane_of=lane_of)
    seen = Counter()
    for step in range(order.steps_per_epoch):
        for lane in range(lanes):
            batch = order.lane(step, lane)
            assert not batch.padding
            assert len(batch.samples) == lane_batch
            assert all(lane_of[sample] == lane for sample in batch.samples)
            seen.update(batch.samples)
    assert max(seen.values(), default=1) == 1
