"""What `lw.start` is told: every setting that cannot be, in words, and what the launcher changes."""

from datetime import timedelta

import pytest

import lanewise as lw
from lanewise import env
from lanewise.config import Settings, settings
from lanewise.errors import SettingsError
from lanewise.events import Notice

WRONG = [
    ({"lanes": 0}, ["lanes: must be greater than or equal to 1, found 0"]),
    ({"lanes": "8"}, ["lanes: must be a valid integer, found '8'"]),
    ({"lanes": True}, ["lanes: must be a valid integer, found True"]),
    ({"seed": -1}, ["seed: must be greater than or equal to 0, found -1"]),
    ({"seed": 2**63}, [f"seed: must be less than {2**63}, found {2**63}"]),
    ({"threads": 0}, ["threads: must be greater than or equal to 1, found 0"]),
    ({"micro_batches": 0}, ["micro_batches: must be greater than or equal to 1, found 0"]),
    (
        {"strategy": "zero4"},
        ["strategy: must be 'ddp', 'zero1', 'zero2' or 'zero3', found 'zero4'; did you mean 'zero3'?"],
    ),
    ({"strategy": 3}, ["strategy: must be 'ddp', 'zero1', 'zero2' or 'zero3', found 3"]),
    (
        {"precision": "bf15"},
        ["precision: must be 'model', 'fp32', 'bf16' or 'fp16', found 'bf15'; did you mean 'bf16'?"],
    ),
    ({"reduction": "fast"}, ["reduction: must be 'exact' or 'native', found 'fast'"]),
    ({"nonfinite": "stop"}, ["nonfinite: must be 'raise', 'skip' or 'ignore', found 'stop'"]),
    (
        {"exchange": "share"},
        ["exchange: must be 'auto', 'shared', 'gloo' or 'nccl', found 'share'; did you mean 'shared'?"],
    ),
    ({"allow_mixed": "perhaps"}, ["allow_mixed: must be a valid boolean, unable to interpret input, found 'perhaps'"]),
    ({"hosting": "odd"}, ["hosting: must be 'even' or a list with a weight for each rank, found 'odd'"]),
    ({"hosting": ["1"]}, ["hosting: must be 'even' or a list with a weight for each rank, found ['1']"]),
    ({"hosting": 3}, ["hosting: must be 'even' or a list with a weight for each rank, found 3"]),
    ({"timeout": 0}, ["timeout: must be greater than 0 seconds, found 0 s"]),
    ({"timeout": -3}, ["timeout: must be greater than 0 seconds, found -3 s"]),
    ({"timeout": "soon"}, ["timeout: must be a valid timedelta, invalid digit in duration, found 'soon'"]),
    (
        {"reduction": "native", "exchange": "shared"},
        ["reduction='native' is the backend's own sum and needs a backend: use exchange='gloo' or 'nccl'"],
    ),
    (
        {"lanes": 0, "strategy": "zer03", "seed": 1.5},
        [
            "lanes: must be greater than or equal to 1, found 0",
            "strategy: must be 'ddp', 'zero1', 'zero2' or 'zero3', found 'zer03'; did you mean 'zero3'?",
            "seed: must be a valid integer, found 1.5",
        ],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("told", "problems"), WRONG, ids=[str(told) for told, _ in WRONG])
def test_settings_that_cannot_be(told, problems):
    with pytest.raises(SettingsError) as caught:
        lw.start(sinks=[], **told)
    lines = "".join(f"\n  - {problem}" for problem in problems)
    assert str(caught.value) == f"lw.start: {len(problems)} problem(s):{lines}"


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"hosting": [1, 2]}, r"hosting names 2 weights for 1 ranks; give one for each rank\."),
        ({"hosting": [-1]}, r"hosting: weights must be finite, not negative and not all 0: \[-1\.0\]\."),
        (
            {"exchange": "nccl"},
            r"exchange='nccl' needs a GPU on every rank, and this rank has none\. Use 'auto'\.",
        ),
    ],
)
def test_settings_that_do_not_suit_this_world(told, message):
    with pytest.raises(SettingsError, match=message):
        lw.start(sinks=[], **told)


def test_a_setting_that_is_misspelt_is_an_error_of_python():
    with pytest.raises(TypeError, match="unexpected keyword argument 'lane'"):
        lw.start(lane=8)


def test_a_setting_of_the_launcher_that_cannot_be(monkeypatch):
    monkeypatch.setenv(env.OVERRIDES, '{"lanse": 4, "strategy": "ddp"}')
    with pytest.raises(SettingsError) as caught:
        lw.start(sinks=[])
    assert str(caught.value) == (
        "the launcher's settings over lw.start's: 1 problem(s):\n  - lanse: unknown key; did you mean 'lanes'?"
    )


def test_what_the_launcher_changes_is_said(monkeypatch):
    monkeypatch.setenv(env.OVERRIDES, '{"lanes": 4, "strategy": "zero2", "seed": 0}')
    told = []
    run = lw.start(lanes=8, strategy="zero2", timeout=1.5, sinks=[told.append])
    assert (run.settings.lanes, run.settings.timeout) == (4, timedelta(seconds=1.5))
    assert [event.text for event in told if isinstance(event, Notice)] == [
        "lanes=4 from the launcher replaces the script's 8",
        "identical bits for any number of ranks, any strategy and any hosting: exact reduction over 4 lanes",
    ]
    run.close()


def test_without_anything_said():
    chosen, notices = settings({}, {})
    assert chosen == Settings()
    assert notices == ()


def test_names_that_lanewise_has_and_has_not():
    assert dir(lw) == ["Run", "__version__", "errors", "metrics", "start"] == sorted(lw.__all__)
    assert all(hasattr(lw, name) for name in dir(lw))
    with pytest.raises(AttributeError, match="module 'lanewise' has no attribute 'strat'"):
        _ = lw.strat
