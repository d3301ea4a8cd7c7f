"""The tree, the programs and the schedules: every way of working computes the one canonical sum."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanewise.lanes import hosting, program, schedule, tree
from lanewise.lanes.program import Action, Program, plan

LANES = st.integers(1, 64)
RANKS = st.integers(1, 20)


@st.composite
def hostings(draw):
    """A number of lanes and how many of them each rank hosts, some ranks perhaps none."""
    lanes, ranks = draw(LANES), draw(RANKS)
    if draw(st.booleans()):
        return hosting.even(lanes, ranks)
    weights = draw(st.lists(st.integers(0, 9), min_size=ranks, max_size=ranks).filter(any))
    return hosting.weighted(lanes, weights)


def run_program(
    lanes: int,
    steps: Program,
    values: dict[tree.Node, str],
    resident: dict[tree.Node, int] | None = None,
) -> dict[int, str]:
    """Execute a program on expressions in place of numbers, checking that it joins only siblings."""
    covers = {register: node for node, register in (resident or {}).items()}
    registers = {register: values[node] for node, register in (resident or {}).items()}

    def joined(left: tree.Node, right: tree.Node) -> tree.Node:
        low, high = sorted((left, right))
        whole = (low[0], high[1])
        assert low[1] == high[0]
        assert whole == tree.parent(low, lanes) == tree.parent(high, lanes)
        return whole

    def add(a: tuple[tree.Node, str], b: tuple[tree.Node, str]) -> str:
        low, high = sorted((a, b))
        return f"({low[1]}+{high[1]})"

    for instructions in steps.rounds:
        for step in instructions:
            r = step.register
            assert r < steps.num_registers
            if step.action is Action.LOAD:
                assert r not in registers, "a load overwrites a pending sum"
                registers[r], covers[r] = values[step.arrival], step.arrival
            elif step.action is Action.FOLD:
                registers[r] = add((covers[r], registers[r]), (step.arrival, values[step.arrival]))
                covers[r] = joined(covers[r], step.arrival)
            elif step.action is Action.PAIR:
                assert r not in registers, "a pair overwrites a pending sum"
                registers[r] = add((step.arrival, values[step.arrival]), (step.second, values[step.second]))
                covers[r] = joined(step.arrival, step.second)
            else:
                registers[r] = add((covers[r], registers[r]), (covers[step.source], registers[step.source]))
                covers[r] = joined(covers[r], covers.pop(step.source))
                del registers[step.source]
            assert covers[r] == step.result
    assert {node: r for r, node in covers.items()} == dict(steps.outputs)
    return registers


def test_grouping_is_siblings_first():
    assert tree.grouping(8) == "(((0+1)+(2+3))+((4+5)+(6+7)))"
    assert tree.grouping(5) == "(((0+1)+(2+3))+4)"
    assert tree.grouping(7) == "(((0+1)+(2+3))+((4+5)+6))"
    assert tree.grouping(1) == "0"


@given(LANES)
def test_every_node_has_one_sibling(lanes):
    nodes = {tree.leaf(lane) for lane in range(lanes)}
    while nodes != {tree.root(lanes)}:
        deepest = min(nodes, key=lambda n: (n[1] - n[0], n))
        other = tree.sibling(deepest, lanes)
        above = tree.parent(deepest, lanes)
        assert tree.sibling(other, lanes) == deepest
        assert above == tree.parent(other, lanes) == (min(deepest[0], other[0]), max(deepest[1], other[1]))
        while other not in nodes:
            inner = min((n for n in nodes if other[0] <= n[0] < other[1]), key=lambda n: n[1] - n[0])
            nodes -= {inner, tree.sibling(inner, lanes)}
            nodes.add(tree.parent(inner, lanes))
        nodes -= {deepest, other}
        nodes.add(above)


def test_the_root_has_no_parent():
    with pytest.raises(ValueError, match=r"node \(0, 5\) is the root of 5 lanes"):
        tree.parent((0, 5), 5)


@given(st.data(), LANES)
def test_aligned_covers_a_range_with_the_fewest_nodes(data, lanes):
    start = data.draw(st.integers(0, lanes))
    stop = data.draw(st.integers(start, lanes))
    nodes = tree.aligned(start, stop, lanes)
    assert [lane for a, b in nodes for lane in range(a, b)] == list(range(start, stop))
    for node in nodes:
        if node != tree.root(lanes):
            above = tree.parent(node, lanes)
            assert above[0] < start or above[1] > stop, "a larger node would have fitted"


@given(hostings())
def test_schedules_compute_every_lane_once_and_leave_no_rank_out(shares):
    for make in (schedule.late, schedule.eager):
        table = make(shares)
        lanes = [lane for row in table.table for lane in row if lane is not None]
        assert sorted(lanes) == list(range(sum(shares)))
        assert all(len(row) == len(shares) for row in table.table)
        assert tuple(len(table.lanes_of(rank)) for rank in range(len(shares))) == tuple(shares)
        assert all(lane in table.lanes_of(table.host[lane]) for lane in range(sum(shares)))


@given(hostings())
def test_late_ranks_host_neighbours(shares):
    table = schedule.late(shares)
    for rank in range(len(shares)):
        lanes = table.lanes_of(rank)
        assert list(lanes) == list(range(lanes[0], lanes[0] + len(lanes))) if lanes else True


@given(hostings())
def test_eager_rounds_hold_neighbours_in_order(shares):
    lanes = [lane for row in schedule.eager(shares).table for lane in row if lane is not None]
    assert lanes == list(range(sum(shares)))


@given(hostings())
def test_late_sum_is_canonical_for_every_owner(shares):
    lanes = sum(shares)
    table = schedule.late(shares)
    sent: dict[tree.Node, str] = {}
    kept: list[dict[tree.Node, int]] = []
    for rank in range(len(shares)):
        local = schedule.local_program(table, rank)
        registers = run_program(lanes, local, {tree.leaf(lane): str(lane) for lane in table.lanes_of(rank)})
        assert tuple(node for node, _ in local.outputs) == schedule.sent_nodes(table, rank)
        sent |= {node: registers[register] for node, register in local.outputs}
        kept.append(dict(local.outputs))
        lane = schedule.unmerged_lane(table, rank)
        if lane is not None:
            del kept[-1][tree.leaf(lane)]
    for rank in range(len(shares)):
        owner = schedule.owner_program_late(table, rank)
        registers = run_program(lanes, owner, sent, kept[rank])
        assert registers == {owner.root_register: tree.grouping(lanes)}
        assert owner.root_register == 0, "the sum ends in the register that is already in place"


@given(hostings())
def test_eager_sum_is_canonical(shares):
    lanes = sum(shares)
    steps = schedule.owner_program_eager(schedule.eager(shares))
    registers = run_program(lanes, steps, {tree.leaf(lane): str(lane) for lane in range(lanes)})
    assert registers == {0: tree.grouping(lanes)}
    assert steps.num_registers <= lanes.bit_length() + 1


@given(LANES, RANKS)
def test_late_needs_few_buffers(lanes, ranks):
    table = schedule.late(hosting.even(lanes, ranks))
    for rank in range(ranks):
        share = len(table.lanes_of(rank))
        if share:
            registers = schedule.local_program(table, rank).num_registers
            assert registers <= 2 * share.bit_length()


@pytest.mark.parametrize(("lanes", "ranks", "sent"), [(8, 3, 5), (8, 2, 2), (64, 8, 8), (16, 3, 7)])
def test_what_late_ranks_send(lanes, ranks, sent):
    table = schedule.late(hosting.even(lanes, ranks))
    assert sum(len(schedule.sent_nodes(table, rank)) for rank in range(ranks)) == sent


@given(st.permutations(range(9)))
def test_any_order_of_arrival_gives_the_same_sum(order):
    steps = plan(9, [[tree.leaf(lane)] for lane in order])
    registers = run_program(9, steps, {tree.leaf(lane): str(lane) for lane in range(9)})
    assert list(registers.values()) == [tree.grouping(9)]


def test_a_node_that_arrives_twice_is_refused():
    with pytest.raises(ValueError, match="arrives twice in one round"):
        plan(4, [[(0, 1), (0, 1)]])


def test_an_unfinished_sum_has_no_root_register():
    with pytest.raises(ValueError, match="too many values"):
        _ = program.plan(4, [[(0, 1), (2, 3)]]).root_register


@given(st.integers(0, 200), RANKS)
def test_even_shares(total, ranks):
    shares = hosting.even(total, ranks)
    assert sum(shares) == total
    assert max(shares) - min(shares) <= 1
    assert list(shares) == sorted(shares, reverse=True)
    assert hosting.spans(shares)[-1][1] == total


@given(st.integers(0, 200), st.lists(st.floats(0, 1e6), min_size=1, max_size=20).filter(any))
def test_weighted_shares(total, weights):
    shares = hosting.weighted(total, weights)
    assert sum(shares) == total
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share - total * weight / sum(weights)) < 1 + 1e-9
        assert share == 0 or weight > 0


@pytest.mark.parametrize("weights", [[], [0, 0], [1, -1], [float("inf"), 1], [float("nan")]])
def test_weights_that_say_nothing_are_refused(weights):
    with pytest.raises(ValueError, match="weights must be finite"):
        hosting.weighted(8, weights)
