"""Moments in bf16 are the same bits for any number of ranks, strategy, transport and hosting, and after a resize."""

from dataclasses import replace

from tests.helpers.cases import Cell, Recipe, grid, on_ranks, one_value, same_on_ranks, train

NARROW = Recipe(dropout=0.1, clip=0.05, weighted=True, moments="bf16")


def test_worlds_strategies_and_transports():
    cells = [*grid([1, 2, 3]), Cell(5, "zero2", "shared", hosting=(4, 0, 1, 0, 3)), Cell(5, "zero3", "gloo")]
    assert len(set(one_value(cells, train, NARROW))) == NARROW.steps
    cells = [Cell(1, "ddp"), Cell(3, "zero1", "shared"), Cell(3, "ddp", "gloo"), Cell(3, "zero3", "gloo")]
    one_value(cells, train, replace(NARROW, precision="bf16", fused=True, steps=2))


def test_ranks_are_resized_and_the_strategy_changes_in_mid_run(tmp_path):
    recipe = replace(NARROW, steps=4, precision="bf16")
    chains = [
        [(3, "zero3", "gloo"), (5, "zero1", "shared"), (2, "zero2", "gloo")],
        [(1, "ddp", "shared"), (3, "zero2", "shared"), (2, "ddp", "gloo")],
    ]
    cells = [Cell(1, "ddp")]
    for number, (first, second, third) in enumerate(chains):
        one, two = tmp_path / f"{number}a", tmp_path / f"{number}b"
        cells.append(Cell(*first, until=1, leaves=one))
        cells.append(Cell(*second, follows=one, until=3, leaves=two))
        cells.append(Cell(*third, follows=two))
    straight, *handed_on = same_on_ranks(cells, train, recipe)
    for number in range(len(chains)):
        first, second, third = handed_on[3 * number : 3 * number + 3]
        assert first + second + third == straight, chains[number]


def test_they_are_part_of_the_identity_of_a_run():
    recipes = [NARROW, replace(NARROW, moments="fp32"), replace(NARROW, seed=1)]
    ((runs,),) = on_ranks([Cell(1, "ddp")], _train_each, recipes)
    assert len({digests[-1] for digests in runs}) == len(recipes)


def _train_each(cell: Cell, recipes: list[Recipe]) -> list[list[str]]:
    return [train(cell, recipe) for recipe in recipes]
