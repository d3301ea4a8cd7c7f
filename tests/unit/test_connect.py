"""Where a store listens and which transport is chosen, without any other process."""

import socket

import pytest
import torch

from lanewise.config import Settings
from lanewise.engine import exchange
from lanewise.engine.exchange import first_line
from lanewise.env import Launch
from lanewise.errors import ExchangeError, SettingsError
from lanewise.run import connect


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_a_store_for_one_host_is_not_offered_to_others(name):
    with exchange._listen(Launch(address=name)) as listener:
        assert listener.getsockname()[0] in ("127.0.0.1", "::1")


def test_a_store_for_several_hosts_listens_everywhere(monkeypatch):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.1.2.3", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **keywords: found)
    with exchange._listen(Launch(address="node-1")) as listener:
        assert listener.getsockname()[0] in ("0.0.0.0", "::")


def test_a_port_that_may_not_be_used(monkeypatch):
    def refuse(*arguments, **keywords):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket, "create_server", refuse)
    with pytest.raises(
        ExchangeError, match=r"rank 0 cannot listen on 127\.0\.0\.1 port 80: \[Errno 13\] Permission"
    ):
        exchange._listen(Launch(address="127.0.0.1", port=80))


@pytest.mark.parametrize("name", ["", "no host", "a" * 64 + ".org"])
def test_an_address_that_is_none(name):
    with pytest.raises(
        SettingsError, match=rf"rank 0: MASTER_ADDR='{name}' is not the name or address of a host: "
    ):
        exchange._listen(Launch(address=name, port=29500))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[/gloo/tcp/pair.cc:53] Read error [127.0.0.1]:1: Connection reset by peer. This is typically caused by a "
            "remote worker. GLHF!",
            "Read error [127.0.0.1]:1: Connection reset by peer",
        ),
        ("Broken pipe\nException raised from here:\nframe #0", "Broken pipe"),
        ("", "RuntimeError"),
    ],
)  # fmt: skip
def test_of_a_long_error_what_a_person_reads(text, said):
    assert first_line(RuntimeError(text)) == said


def test_what_a_gpu_cannot_have():
    gpu = torch.device("cuda")
    with pytest.raises(
        SettingsError, match=r"exchange='shared' is for ranks on CPUs, and this rank has a GPU\. Use"
    ):
        connect._check_shared(gpu, [])


def test_the_transport_that_is_chosen():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    here, there = ({"host": host, "gpu": host, "shares": True} for host in ("a", "b"))
    native = Settings(reduction="native")
    assert connect._choose(Settings(), cpu, [here, here]) == "shared"
    assert connect._choose(Settings(), cpu, [here, there]) == "gloo"
    assert connect._choose(Settings(), cpu, [here, {**here, "shares": False}]) == "gloo"
    assert connect._choose(native, cpu, [here, here]) == "gloo"
    assert connect._choose(native, gpu, [here, there]) == "nccl"
    assert connect._choose(Settings(), gpu, [here, here]) == "gloo", "NCCL refuses two ranks on one GPU"


def test_which_promise_is_made():
    assert connect.promise(Settings(lanes=5), []) == (
        "identical bits for any number of ranks, any strategy and any hosting: exact reduction over 5 lanes"
    )
    assert connect.promise(Settings(), ["cpu: x", "seed: y"]) == (
        "bits are not promised: ranks differ in cpu: x; seed: y"
    )
    assert connect.promise(Settings(reduction="native"), ["cpu: x"]) == (
        "bits are not promised: reduction='native' adds in the backend's own order"
    )
