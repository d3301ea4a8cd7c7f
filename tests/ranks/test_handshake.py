"""Ranks that differ in what decides bits, or in who they are: told at start, on every rank, all at once."""

import os
import socket
from contextlib import ExitStack, contextmanager
from datetime import timedelta

import pytest
import torch
from torch import nn

import lanewise as lw
from lanewise.errors import HandshakeError, LanewiseError
from lanewise.run import facts, handshake
from tests.helpers.cases import Cell, on_ranks
from tests.helpers.spawn import Ranks, free_port, meet

WORLD = 3
ODD = 1
"""The rank that differs."""


def setting(**values):
    @contextmanager
    def differ():
        yield values

    return differ


def variable(name, value):
    @contextmanager
    def differ():
        os.environ[name] = value
        try:
            yield {}
        finally:
            del os.environ[name]

    return differ


def switch(call, value, usual):
    @contextmanager
    def differ():
        call(value)
        try:
            yield {}
        finally:
            call(usual)

    return differ


def fact(name, value):
    return switch(lambda value: setattr(facts, name, value), value, getattr(facts, name))


SETTINGS = {
    "lanes": (setting(lanes=12), "lw.start's lanes: 6 on rank(s) 0, 2; 12 on rank(s) 1"),
    "strategy": (setting(strategy="zero2"), "lw.start's strategy: \"zero1\" on rank(s) 0, 2; \"zero2\" on rank(s) 1"),
    "seed": (setting(seed=7), "lw.start's seed: 0 on rank(s) 0, 2; 7 on rank(s) 1"),
    "hosting": (
        setting(hosting=[1, 2, 3]),
        "lw.start's hosting: \"even\" on rank(s) 0, 2; [1.0, 2.0, 3.0] on rank(s) 1",
    ),
    "allow_mixed": (setting(allow_mixed=True), "lw.start's allow_mixed: false on rank(s) 0, 2; true on rank(s) 1"),
}  # fmt: skip
FACTS = {
    "threads": (
        setting(threads=2),
        "lw.start's threads: 1 on rank(s) 0, 2; 2 on rank(s) 1\n"
        "  - number of threads: 1 on rank(s) 0, 2; 2 on rank(s) 1",
    ),
    "MKL_CBWR": (variable("MKL_CBWR", "AVX2"), '$MKL_CBWR: "not set" on rank(s) 0, 2; "AVX2" on rank(s) 1'),
    "ATEN_CPU_CAPABILITY": (
        variable("ATEN_CPU_CAPABILITY", "default"),
        '$ATEN_CPU_CAPABILITY: "not set" on rank(s) 0, 2; "default" on rank(s) 1',
    ),
    "version": (
        fact("__version__", "0.0.7"),
        f'lanewise version: "{lw.__version__}" on rank(s) 0, 2; "0.0.7" on rank(s) 1',
    ),
    "processor": (fact("_cpu", lambda: "AnotherMaker avx2"), '; "AnotherMaker avx2" on rank(s) 1'),
    "default dtype": (
        switch(torch.set_default_dtype, torch.float64, torch.float32),
        'torch.get_default_dtype: "torch.float32" on rank(s) 0, 2; "torch.float64" on rank(s) 1',
    ),
    "deterministic": (
        switch(torch.use_deterministic_algorithms, True, False),
        "torch.are_deterministic_algorithms_enabled: false on rank(s) 0, 2; true on rank(s) 1",
    ),
    "matmul precision": (
        switch(torch.set_float32_matmul_precision, "medium", "highest"),
        'torch.get_float32_matmul_precision: "highest" on rank(s) 0, 2; "medium" on rank(s) 1',
    ),
    "denormals": (
        switch(torch.set_flush_denormal, True, False),
        "torch.set_flush_denormal: false on rank(s) 0, 2; true on rank(s) 1",
    ),
}
DIFFERENCES = {**SETTINGS, **FACTS}


def start(cell, differing=(), notices=None, **settings):
    """Start a run in which the odd rank differs in these, and none does afterwards."""
    sinks = [] if notices is None else [lambda event: notices.append(str(event))]
    with ExitStack() as stack:
        for name in differing if cell.rank == ODD else ():
            settings |= stack.enter_context(DIFFERENCES[name][0]())
        return lw.start(
            **{
                "lanes": 6, "strategy": cell.strategy, "exchange": cell.exchange, "timeout": 60.0, "sinks": sinks,
                **settings,
            }
        )  # fmt: skip


class JobCell(Cell):
    @property
    def rank(self):
        return int(os.environ["RANK"])


def refusals(cell, cases):
    """The message that this rank gets in each case."""
    found = []
    for differing, settings in cases:
        try:
            start(cell, differing, **settings).close()
            found.append("it started")
        except HandshakeError as error:
            found.append(str(error))
    return found


ONE_EACH = [((name,), {}) for name in DIFFERENCES]
TOGETHER = [(("seed", "threads", "MKL_CBWR", "default dtype", "lanes"), {})]
MIXED = [
    (("seed", "threads"), {"allow_mixed": True}),
    (("MKL_CBWR",), {"allow_mixed": True, "strategy": "ddp"}),
]


@pytest.fixture(scope="module")
def messages():
    cells = [JobCell(WORLD, "zero1", "shared")]
    (by_rank,) = on_ranks(cells, refusals, [*ONE_EACH, *TOGETHER, *MIXED])
    for row in by_rank:
        assert row == by_rank[0], "every rank is told the same"
    return by_rank[0]


def differences(message):
    return message.partition(":\n  - ")[2].rpartition("\n")[0].split("\n  - ")


@pytest.mark.parametrize("name", DIFFERENCES)
def test_one_difference_is_named_with_the_ranks(messages, name):
    message = messages[list(DIFFERENCES).index(name)]
    lines = differences(message)
    expected = DIFFERENCES[name][1].split("\n  - ")
    assert len(lines) == len(expected)
    assert all(wanted in line for wanted, line in zip(expected, lines, strict=True)), message
    if name in SETTINGS:
        assert message.startswith("the ranks were started with different settings, and cannot work together:")
        assert message.endswith(
            "\nGive every rank the same; allow_mixed covers hardware, versions and torch's switches only."
        )
    else:
        assert message.startswith("the ranks differ in what decides bits:")
        assert message.endswith(
            "\nMake them equal, or start with allow_mixed=True to run without the promise of equal bits."
        )


def test_all_differences_are_told_at_once(messages):
    message = messages[len(ONE_EACH)]
    names = [line.partition(":")[0] for line in differences(message)]
    assert names == [
        "$MKL_CBWR", "lw.start's lanes", "lw.start's seed", "lw.start's threads", "number of threads",
        "torch.get_default_dtype",
    ]  # fmt: skip
    assert message.startswith("the ranks were started with different settings")


def test_allow_mixed_does_not_cover_settings_nor_ddp(messages):
    settings, ddp = messages[-2:]
    assert "allow_mixed covers hardware, versions and torch's switches only" in settings
    assert [line.partition(":")[0] for line in differences(ddp)] == ["$MKL_CBWR"]
    assert ddp.endswith(
        "\nWith strategy='ddp' every rank updates a copy of its own, and such copies would drift apart. Use "
        "allow_mixed=True with zero1, zero2 or zero3."
    )


def train(run, model):
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in run.steps(run.loader(torch.ones(12, 4), batch_size=6)):
        for x in step:
            step.backward(model(x).square().mean())
        step.update()
    return run.digest()


def mixed(cell):
    notices = []
    timeout = timedelta(seconds=61) if cell.rank == ODD else 60.0
    run = start(cell, ["threads", "MKL_CBWR"], notices, allow_mixed=True, timeout=timeout)
    digest = train(run, nn.Linear(4, 4))
    run.close()
    run = start(cell, [], notices, reduction="native", exchange="gloo")
    run.close()
    return digest, [text for text in notices if "bits" in text]


def test_mixed_ranks_train_without_the_promise():
    for by_rank in on_ranks([JobCell(WORLD, "zero3", "shared"), JobCell(WORLD, "zero1", "gloo")], mixed):
        assert len({digest for digest, _ in by_rank}) == 1
        assert [len(notices) for _, notices in by_rank] == [2, 0, 0], "rank 0 speaks"
        first, second = by_rank[0][1]
        assert "bits are not promised: ranks differ in $MKL_CBWR: " in first
        assert "number of threads: 1 on rank(s) 0, 2; 2 on rank(s) 1" in first
        assert "bits are not promised: reduction='native' adds in the backend's own order" in second


def other_models(cell):
    """What prepare says where the odd rank builds another model, or groups it otherwise."""
    found = []
    for how in ("shape", "more", "group", "unit", "frozen"):
        run = start(cell)
        is_odd = cell.rank == ODD
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5 if is_odd and how == "shape" else 4))
        if is_odd and how == "more":
            model.extra = nn.Parameter(torch.ones(3))
        if is_odd and how == "frozen":
            model[0].bias.requires_grad_(False)
        parameters = list(model.parameters())
        groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
        if is_odd and how == "group":
            groups = [{"params": parameters[:1]}, {"params": parameters[1:]}]
        before = [p.data_ptr() for p in parameters]
        with pytest.raises(HandshakeError) as caught:
            run.prepare(
                model, torch.optim.SGD(groups, lr=0.1), units=["1"] if is_odd and how == "unit" else None
            )
        assert [p.data_ptr() for p in parameters] == before, "nothing was touched"
        found.append(str(caught.value))
        run.close()
    return found


def test_models_that_differ():
    cells = [JobCell(WORLD, "zero3", "gloo"), JobCell(WORLD, "ddp", "shared")]
    for by_rank in on_ranks(cells, other_models):
        assert by_rank[0] == by_rank[1] == by_rank[2]
        for message in by_rank[0]:
            assert message.startswith(
                "the models of rank(s) 1 and rank 0 differ in names, shapes, types, units or"
            )
            assert message.endswith("the same model and optimizer: do not let them depend on the rank.")
        firsts = [text.partition("first differ, ")[2].partition(". Every rank")[0] for text in by_rank[0]]
        parameter = "parameter {!r} of shape {} and torch.float32 in unit {!r}, {}"
        one, two = "in optimizer group 0", "in optimizer group 1"
        last = [parameter.format("1.weight", shape, "1", two) for shape in ((5, 4), (4, 4))]
        first = parameter.format("0.weight", (4, 4), "0", one)
        bias = [parameter.format("0.bias", (4,), "0", group) for group in (two, one)]
        pairs = [
            last,
            (parameter.format("extra", (3,), "root", one), first),
            bias,
            (parameter.format("0.weight", (4, 4), "root", one), first),
            (parameter.format("0.bias", (4,), "0", "frozen"), bias[1]),
        ]
        for found, (odd, usual) in zip(firsts, pairs, strict=True):
            assert found == f"rank 1 has {odd}, and rank 0 {usual}"


def outcome(timeout, before_close):
    """What comes of lw.start here."""
    try:
        run = lw.start(lanes=6, exchange="gloo", sinks=[], timeout=timeout)
    except LanewiseError as error:
        before_close()
        return type(error).__name__, str(error), getattr(error, "ranks", None)
    before_close()
    run.close()
    return "started", run.rank, run.world_size


def who_they_are(folder, ports, taken):
    """Launches that are told wrongly, each on a port of its own."""
    told = int(os.environ["RANK"])
    found = []

    def launch(port, timeout, **changes):
        os.environ.update(MASTER_PORT=str(port), RANK=str(told), WORLD_SIZE="3", MASTER_ADDR="127.0.0.1")
        meet(folder, f"launch {len(found)}", WORLD)
        os.environ.update(changes)

        def wait_for_all():
            os.environ["RANK"] = str(told)
            meet(folder, f"over {len(found)}", WORLD)

        found.append(outcome(timeout, wait_for_all))

    launch(ports[0], 20.0, WORLD_SIZE="4" if told == 2 else "3")
    launch(ports[1], 20.0, WORLD_SIZE="2", RANK=str(min(told, 1)))
    launch(taken, 1.0)
    launch(ports[2], 1.0, MASTER_ADDR="no host")
    return found


def test_launches_that_are_told_wrongly(tmp_path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        taken = listener.getsockname()[1]
        ends = Ranks(WORLD, who_they_are, tmp_path, [free_port() for _ in range(3)], taken).join()
    assert all(end[0] == "ok" for end in ends.values()), ends
    sizes, twice, in_use, no_host = zip(*(ends[rank][1] for rank in range(WORLD)), strict=True)

    rule = "this rank was told WORLD_SIZE={}, but rank {} was told {}. Start all ranks with one world size"
    assert [end[0] for end in sizes] == ["HandshakeError"] * 3
    assert rule.format(3, 2, 4) in sizes[0][1]
    assert rule.format(3, 2, 4) in sizes[1][1]
    assert rule.format(4, 0, 3) in sizes[2][1] or rule.format(4, 1, 3) in sizes[2][1]

    assert twice[0] == ("started", 0, 2)
    second = sorted([twice[1], twice[2]])
    assert second[1] == ("started", 1, 2), second
    assert second[0][0] == "HandshakeError"
    assert second[0][1].startswith(
        "rank 1 of this launch was started twice; this process (the second) leaves."
    )

    assert in_use[0][:2] == (
        "ExchangeError",
        f"rank 0: port {taken} on 127.0.0.1 is in use. Another run may still be up, or rank 0 was started twice. Start "
        "again with another MASTER_PORT; `lanewise run` chooses a free one.",
    )
    for kind, message, ranks in in_use[1:]:
        assert (kind, ranks) == ("PeerLostError", (0,))
        assert (
            f"at 127.0.0.1:{taken} within 1 s: it accepts connections but does not answer. Check" in message
        )

    assert no_host[0][0] == "SettingsError"
    assert no_host[0][1].startswith(
        "rank 0: MASTER_ADDR='no host' is not the name or address of a host: [Errno -"
    )
    for rank, (kind, message, ranks) in enumerate(no_host[1:], 1):
        assert (kind, ranks) == ("PeerLostError", (0,))
        assert message.startswith(f"rank {rank} could not reach rank 0 at no host:")


def unlike_hosts(cell):
    """Ranks on several hosts, as far as they can tell."""
    usual = handshake._host
    handshake._host = lambda: f"host {cell.rank // 2}"
    try:
        shared = outcome_of(cell, exchange="shared")
        run = start(cell, exchange="auto")
        kind = type(run._transport).__name__
        run.close()
        return shared, kind, outcome_of(cell, exchange="nccl")
    finally:
        handshake._host = usual


def outcome_of(cell, **settings):
    with pytest.raises(LanewiseError) as caught:
        start(cell, **settings)
    return type(caught.value).__name__, str(caught.value)


def test_transports_that_cannot_be_had():
    (by_rank,) = on_ranks([JobCell(WORLD, "zero3", "auto")], unlike_hosts)
    for shared, kind, nccl in by_rank:
        assert shared == (
            "SettingsError",
            "exchange='shared' needs all ranks on one Linux host with an x86-64 processor. Use 'auto' or 'gloo'.",
        )
        assert kind == "MessageTransport"
        assert nccl == (
            "SettingsError",
            "exchange='nccl' needs a GPU on every rank, and this rank has none. Use 'auto'.",
        )
