"""What a proof compares and how it explains a difference: on traces made by hand, without ranks."""

import json
from dataclasses import asdict, replace

import pytest

from lanewise.cli.proof_view import ProofView, verdict
from lanewise.errors import SettingsError
from lanewise.run.prove import Cell, Report, plan, prove
from lanewise.run.trace import Lane, Point, Trace

GOOD = Trace(
    points=tuple(
        Point(n, f"digest {n}", {"a": f"a{n}", "b": f"b{n}", "buffer c": f"c{n}"}) for n in range(4)
    ),
    units={"a": "root", "b": "blocks.0"},
    lanes={(step, lane): Lane(0, "x", "1.5", {"a": "ga", "b": "gb"}) for step in range(3) for lane in (0, 1)},
)
CELLS = (Cell(1, "ddp"), Cell(3, "zero3"))


def with_point(trace, number, **parameters):
    """A trace whose parameters are others from a point on."""
    points = [
        replace(p, digest=f"other {p.digest}", parameters={**p.parameters, **parameters})
        if n >= number
        else p
        for n, p in enumerate(trace.points)
    ]
    return replace(trace, points=tuple(points))


def with_lane(trace, step, lane, **values):
    return replace(
        trace, lanes={**trace.lanes, (step, lane): replace(trace.lanes[step, lane], rank=1, **values)}
    )


def proven(*runs) -> Report:
    """The report where cell after cell gives these traces; the last ones again and again for the re-runs."""
    waiting = list(runs)
    asked = []

    def run(cell, steps, details):
        asked.append((cell, steps, details))
        return waiting.pop(0) if waiting else runs[CELLS.index(cell)]

    report = prove(CELLS, 3, run, lambda result: None)
    assert asked[:2] == [(cell, 3, False) for cell in CELLS]
    assert all(details for _, _, details in asked[2:])
    json.dumps(asdict(report))
    return report


def test_equal_digests_are_the_same_bits():
    report = proven(GOOD, GOOD)
    assert report.is_same
    assert verdict(report) == "same bits: 2 cells, 3 steps, one digest after each step."


@pytest.mark.parametrize(
    ("values", "cause"),
    [
        ({"batch": "y", "loss": "1.6", "gradients": {"a": "ga", "b": "other"}}, "batch"),
        ({"loss": "1.6", "gradients": {"a": "ga", "b": "other"}}, "loss"),
        ({"gradients": {"a": "ga", "b": "other"}}, "gradient"),
    ],
)
def test_a_lane_that_differs_is_named(values, cause):
    report = proven(GOOD, with_lane(with_point(GOOD, 3, a="!", b="!"), 2, 1, **values))
    found = report.difference
    assert (found.step, found.lane, found.unit, found.parameter) == (2, 1, "blocks.0", "b")
    assert (found.cause, found.num_parameters, found.is_repeatable) == (cause, 2, True)
    text = verdict(report)
    assert text.startswith("different bits: 1 of 2 cells differ from ddp on 1 rank.")
    assert "first: step 2, unit 'blocks.0', parameter 'b', lane 1 (2 parameters and buffers differ)" in text
    assert "rank 0" in text
    assert "rank 1" in text
    assert "gb" in text
    assert "other" in text


def test_a_lane_whose_loss_alone_differs_is_not_to_blame():
    other = with_lane(with_lane(with_point(GOOD, 2, a="!"), 1, 0, loss="9"), 1, 1, gradients={"a": "?"})
    assert proven(GOOD, other).difference.lane == 1


def test_equal_gradients_leave_the_sum_or_the_update():
    found = proven(GOOD, with_point(GOOD, 2, **{"buffer c": "!"})).difference
    assert (found.step, found.lane, found.parameter, found.cause) == (1, None, "buffer c", "update")
    assert [side.values["hash"] for side in found.sides] == ["c2", "!"]


def test_first_values_that_differ_are_told_from_steps():
    report = proven(GOOD, with_point(GOOD, 0, a="!"))
    assert report.difference.cause == "first values"
    assert "before the first step, unit 'root', parameter 'a'" in verdict(report)


def test_a_cell_that_does_not_repeat_itself_is_compared_with_itself():
    bad = with_lane(with_point(GOOD, 2, a="!"), 1, 0, loss="9", gradients={"a": "!", "b": "gb"})
    report = proven(GOOD, bad, GOOD, GOOD, bad)
    found = report.difference
    assert not found.is_repeatable
    assert [side.name for side in found.sides] == ["zero3 on 3 ranks, once", "zero3 on 3 ranks, again"]
    assert (found.step, found.lane, found.cause) == (1, 0, "loss")
    assert "does not give the same bits" in verdict(report)


def test_a_difference_that_does_not_come_back_is_called_unsteady():
    found = proven(GOOD, with_point(GOOD, 1, a="!"), GOOD, GOOD, GOOD).difference
    assert (found.cause, found.is_repeatable, found.parameter) == ("unsteady", False, "a")


def test_the_table_has_a_digest_for_every_cell():
    cells = plan("1,3", "ddp,zero3", 5)
    view = ProofView(cells, 5)
    assert [len(list(column.cells)) for column in view.table().columns] == [2, 2, 2]


@pytest.mark.parametrize(
    ("worlds", "strategies", "steps", "message"),
    [
        ("0", "ddp,zero1", 3, "--worlds must be numbers of ranks such as 1,2,3,5; found '0'."),
        ("1,x", "ddp", 3, "found 'x'"),
        ("1,,2", "ddp", 3, "found ''"),
        ("1,2", "dpp", 3, "--strategies must be some of ddp,zero1,zero2,zero3; found 'dpp'."),
        ("1,2,1", "ddp", 3, "--worlds names 1 twice."),
        ("1,2", "ddp,ddp", 3, "--strategies names ddp twice."),
        ("3", "ddp", 3, "is one cell, and there is nothing to compare it with"),
        ("1,3", "ddp", 0, "--steps must be at least 1, found 0."),
    ],
)
def test_what_cannot_be_proven_is_refused(worlds, strategies, steps, message):
    with pytest.raises(SettingsError, match=message):
        plan(worlds, strategies, steps)
