"""What the environment says of a launch, and every message where it says it wrongly."""

import pytest

from lanewise import env
from lanewise.env import Launch
from lanewise.errors import SettingsError

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip


def test_without_a_launcher_this_is_a_world_of_one():
    assert env.launch({}) == Launch(0, 1)
    assert env.launch({"MASTER_ADDR": "somewhere", "LOCAL_RANK": "3"}) == Launch(0, 1)


def test_torchrun_and_launchers_that_say_less():
    assert env.launch(TORCHRUN) == Launch(5, 6, 1, "10.0.0.7", 29500, "2", True)
    less = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    assert env.launch(less) == Launch(5, 6, 5, "10.0.0.7", 29500, "0", False)
    assert env.launch(env.place(2, 3, 1234, 4)) == Launch(2, 3, 2, "127.0.0.1", 1234, "4", True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"MASTER_PORT": None},
            "the environment names only part of a launch: MASTER_PORT not set. Start the script with `lanewise run` or "
            "`torchrun`, or unset RANK and WORLD_SIZE to run alone.",
        ),
        ({"RANK": None, "MASTER_ADDR": None}, "only part of a launch: RANK, MASTER_ADDR not set."),
        ({"WORLD_SIZE": None}, "only part of a launch: WORLD_SIZE not set."),
        ({"RANK": "-1"}, "the environment variable RANK must be a whole number, found '-1'."),
        ({"WORLD_SIZE": "six"}, "the environment variable WORLD_SIZE must be a whole number, found 'six'."),
        ({"LOCAL_RANK": ""}, "the environment variable LOCAL_RANK must be a whole number, found ''."),
        (
            {"MASTER_PORT": "29.5"},
            "the environment variable MASTER_PORT must be a whole number, found '29.5'.",
        ),
        (
            {"RANK": "6"},
            "the environment says RANK=6 of WORLD_SIZE=6: ranks count from 0 and stay below the world size.",
        ),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK=0 of WORLD_SIZE=0: ranks count from 0"),
        ({"MASTER_PORT": "0"}, "the environment variable MASTER_PORT must be between 1 and 65535, found 0."),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT must be between 1 and 65535, found 99999."),
    ],
)
def test_a_launch_that_is_told_wrongly(changes, message):
    told = {name: value for name, value in {**TORCHRUN, **changes}.items() if value is not None}
    with pytest.raises(SettingsError) as caught:
        env.launch(told)
    assert message in str(caught.value)


@pytest.mark.parametrize(("read", "name"), [(env.overrides, env.OVERRIDES), (env.record, env.RECORD)])
def test_what_a_launcher_hands_on_is_an_object_of_json(read, name):
    assert read({}) == {}
    assert read({name: '{"lanes": 4}'}) == {"lanes": 4}
    with pytest.raises(SettingsError, match=rf"the environment variable {name} is not JSON: Expecting value"):
        read({name: "lanes=4"})
    with pytest.raises(SettingsError, match=rf"variable {name} must hold a JSON object, found \[4\]\."):
        read({name: "[4]"})


def test_only_variables_that_change_bits_are_compared():
    assert env.numeric_variables({"MKL_CBWR": "AVX2", "HOME": "/"}) == {"MKL_CBWR": "AVX2"}


def test_a_variable_of_the_user_is_left_alone(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    with env.temporarily("GLOO_SOCKET_IFNAME", "lo"):
        assert env.os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    with env.temporarily("GLOO_SOCKET_IFNAME", None):
        assert "GLOO_SOCKET_IFNAME" not in env.os.environ
    with env.temporarily("GLOO_SOCKET_IFNAME", "lo"):
        assert env.os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in env.os.environ
