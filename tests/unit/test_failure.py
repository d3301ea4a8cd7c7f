"""Which rank began it, and what the launcher says and exits with."""

import pytest

from lanewise.run.failure import Failure, Outcome


def spoke(rank, time_s=1.0, is_consequence=False):
    kind = "PeerLostError" if is_consequence else "ValueError"
    return Failure(rank, time_s, kind, "words", "a traceback", is_consequence)


def test_a_rank_that_does_not_answer_did_not_run_out_of_memory():
    """The launcher itself ends with SIGKILL who does not end otherwise."""
    waited = Failure(0, 1.0, "PeerLostError", "rank 1 did not come within 4 s", "a traceback", True)
    outcome = Outcome(2, {0: 1, 1: -9}, [waited])
    assert outcome.first is waited
    assert outcome.describe() == "rank 0 of 2 failed with PeerLostError."
    assert outcome.exit_code == 1


@pytest.mark.parametrize(
    ("outcome", "exit_code", "words"),
    [
        (Outcome(3, {1: 1, 0: -15, 2: -15}, [spoke(1)]), 1, "rank 1 of 3 failed with ValueError."),
        (Outcome(3, {2: 1, 0: -15, 1: -15}, [spoke(0), spoke(2)]), 1, "with ValueError, as did 1 other(s)."),
        (Outcome(3, {0: 1, 2: -9}, [spoke(0, is_consequence=True)]), 137, "rank 2 of 3 was ended by SIGKILL."),
        (Outcome(3, {0: 1, 1: -15}, [spoke(0, is_consequence=True)]), 1, "rank 0 of 3 failed with PeerLostError."),
        (Outcome(3, {1: 7, 0: -15}), 7, "rank 1 of 3 ended with exit code 7 and no exception"),
        (Outcome(2, {0: -15, 1: -15}), 143, "was ended by SIGTERM."),
    ],
)  # fmt: skip
def test_what_is_said_of_a_failed_launch(outcome, exit_code, words):
    assert outcome.exit_code == exit_code
    assert words in outcome.describe()


def test_a_good_launch_and_an_interrupted_one():
    assert (Outcome(2).is_good, Outcome(2).exit_code) == (True, 0)
    assert Outcome(2, interrupted_by="SIGINT").exit_code == 130
