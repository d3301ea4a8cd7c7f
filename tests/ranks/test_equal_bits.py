"""The promise: one digest after every step, for any number of ranks, strategy, transport and hosting.

Worlds of two prove nothing about order, since two numbers commute; so there are always 3 and 5.
"""

from dataclasses import replace

from tests.helpers.cases import STRATEGIES, Cell, Recipe, grid, on_ranks, one_value, same_on_ranks, train

FULL = Recipe(dropout=0.1, clip=0.05, weighted=True)
"""Everything at once that could make lanes or ranks differ."""


def test_worlds_strategies_and_transports():
    cells = grid([1, 2, 3, 5])
    digests = one_value(cells, train, FULL)
    assert len(set(digests)) == FULL.steps


def test_seven_and_eight_ranks():
    cells = [*grid([1], ["ddp"], ["shared"]), Cell(7, "zero3", "gloo"), Cell(8, "zero2", "shared")]
    one_value(cells, train, replace(FULL, steps=2))


def test_hosting_is_uneven_or_changes_in_mid_run():
    cells = grid([1], ["ddp"], ["shared"])
    for transport in ("shared", "gloo"):
        for strategy in STRATEGIES:
            cells.append(Cell(3, strategy, transport, hosting=(5, 2, 1)))
            cells.append(Cell(3, strategy, transport, rehost={1: (0, 3, 5), 2: (1, 6, 1), 3: "even"}))
        cells.append(Cell(5, "zero1", transport, hosting=(4, 0, 1, 0, 3), rehost={2: (0, 0, 8, 0, 0)}))
        cells.append(Cell(5, "zero3", transport, hosting=(4, 0, 1, 0, 3), rehost={2: (0, 0, 8, 0, 0)}))
    one_value(cells, train, replace(FULL, steps=4))


def test_ranks_are_resized_and_the_strategy_changes_in_mid_run(tmp_path):
    """A run is handed on twice: to other ranks, another strategy and another transport."""
    recipe = replace(FULL, steps=4, precision="bf16")
    chains = [
        [(3, "zero3", "gloo"), (5, "zero1", "shared"), (2, "zero2", "gloo")],
        [(1, "ddp", "shared"), (3, "zero2", "shared"), (5, "ddp", "gloo")],
        [(5, "zero2", "shared"), (2, "zero3", "shared"), (3, "zero3", "gloo")],
    ]
    cells = [Cell(1, "ddp")]
    for number, (first, second, third) in enumerate(chains):
        one, two = tmp_path / f"{number}a", tmp_path / f"{number}b"
        cells.append(Cell(*first, until=1, leaves=one))
        cells.append(Cell(*second, follows=one, until=3, leaves=two, hosting=tuple(range(second[0], 0, -1))))
        cells.append(Cell(*third, follows=two))
    straight, *handed_on = same_on_ranks(cells, train, recipe)
    for number in range(len(chains)):
        first, second, third = handed_on[3 * number : 3 * number + 3]
        assert first + second + third == straight, chains[number]


def test_an_odd_number_of_lanes_and_spare_ranks():
    for lanes, worlds in ((5, [1, 2, 3, 5]), (3, [1, 2, 5])):
        one_value(grid(worlds, transports=["shared"]), train, replace(FULL, lanes=lanes))
    cells = [*grid([1], ["ddp"], ["gloo"]), *grid([3, 5], ["zero1", "zero3"], ["gloo"])]
    one_value(cells, train, replace(FULL, lanes=3))


def test_micro_batches_and_short_batches():
    """37 samples make a last batch in which lanes have fewer samples, or none of their own."""
    cells = grid([1, 3], transports=["shared"]) + grid([5], ["zero1", "zero3"], ["gloo"])
    for weighted in (False, True):
        recipe = replace(FULL, micro_batches=2, samples=37, steps=4, weighted=weighted)
        one_value(cells, train, recipe)


def test_unlike_runs_have_unlike_digests():
    """Else the digest would prove nothing."""
    recipes = [
        FULL,
        replace(FULL, seed=1),
        replace(FULL, lanes=4),
        replace(FULL, micro_batches=2),
        replace(FULL, weighted=False),
        replace(FULL, dropout=0.2),
        replace(FULL, clip=0.06),
        replace(FULL, precision="bf16"),
    ]
    ((runs,),) = on_ranks([Cell(1, "ddp")], _train_each, recipes)
    ends = [digests[-1] for digests in runs]
    assert len(set(ends)) == len(recipes)


def _train_each(cell: Cell, recipes: list[Recipe]) -> list[list[str]]:
    return [train(cell, recipe) for recipe in recipes]
