"""Connecting the ranks of a launch: which transport carries the exchanges of this run."""

from collections.abc import Callable
from typing import Any

import torch

from lanewise import env
from lanewise.config import Settings
from lanewise.engine import exchange
from lanewise.engine.meeting import Meeting
from lanewise.engine.transport.messages import MessageTransport
from lanewise.engine.transport.protocol import Transport
from lanewise.engine.transport.shared import SharedTransport
from lanewise.engine.transport.waiting import Watch
from lanewise.engine.transport.wire import CollectiveWire, PeerWire, Wire
from lanewise.env import Launch
from lanewise.errors import SettingsError
from lanewise.run import handshake


def connect(
    launch: Launch, settings: Settings, device: torch.device, notify: Callable[[str], None]
) -> Transport:
    """Shake hands and choose: shared memory on one host without GPUs, else messages."""
    rank, size, timeout = launch.rank, launch.world_size, settings.timeout
    if size == 1:
        hello = handshake.hello(settings, device, size)
        return _transport(settings, device, [hello], None, 0, notify)
    store = exchange.open_store(launch, timeout)
    meeting = Meeting(store, rank, size, timeout, None if launch.launcher_serves_store else 0)
    try:
        mine = handshake.hello(settings, device, size)
        hellos = meeting.tell_all(
            "hello", mine, lambda peer, theirs: handshake.check_size(mine, peer, theirs)
        )
        return _transport(settings, device, hellos, (meeting, store), rank, notify)
    except BaseException as error:
        meeting.give_up(None, f"it failed with {type(error).__name__}: {error}")
        meeting.part(in_peace=False)
        exchange.leave_group()
        raise


def _transport(
    settings: Settings,
    device: torch.device,
    hellos: list[dict[str, Any]],
    known: tuple[Meeting, exchange.Store] | None,
    rank: int,
    notify: Callable[[str], None],
) -> Transport:
    """The transport that suits what the ranks say of themselves."""
    size, timeout = len(hellos), settings.timeout
    differences = handshake.check(hellos, settings.allow_mixed)
    notify(promise(settings, differences))
    kind: str = settings.exchange
    if kind == "auto":
        kind = _choose(settings, device, hellos)
    if kind == "nccl" and device.type != "cuda":
        raise SettingsError("exchange='nccl' needs a GPU on every rank, and this rank has none. Use 'auto'.")
    if kind == "shared":
        _check_shared(device, hellos)
    watch = Watch([entry["pid"] for entry in hellos]) if handshake.share_a_host(hellos) else None
    meeting = known[0] if known else None
    if meeting is not None and watch is not None:
        meeting.ended = watch.ended
    if kind == "shared":
        assert watch is not None
        return SharedTransport(meeting, watch, rank, size, timeout)
    control = data = None
    if known is not None:
        meeting, store = known
        with env.temporarily("GLOO_SOCKET_IFNAME", "lo" if watch is not None else None):
            data = meeting.join(
                lambda: exchange.join_group(store, rank, size, kind, timeout), "the connecting of ranks"
            )
            side = data if kind == "gloo" else exchange.side_group("gloo", timeout)
        control = exchange.Channel(side, rank, timeout, meeting.blame)
    wire: Wire = PeerWire(control, rank) if device.type == "cpu" else CollectiveWire(data, rank, size)
    may_hush = device.type == "cuda" and kind == "nccl"
    return MessageTransport(meeting, watch, control, wire, rank, size, device, timeout, may_hush)


def promise(settings: Settings, differences: list[str]) -> str:
    """Which of the two promises this run is under, and why."""
    if settings.reduction == "native":
        return "bits are not promised: reduction='native' adds in the backend's own order"
    if differences:
        return "bits are not promised: ranks differ in " + "; ".join(differences)
    return (
        f"identical bits for any number of ranks, any strategy and any hosting: exact reduction over "
        f"{settings.lanes} lanes"
    )


def _choose(settings: Settings, device: torch.device, hellos: list[dict[str, object]]) -> str:
    if device.type == "cuda":
        return "gloo" if handshake.share_a_gpu(hellos) else "nccl"
    if settings.reduction == "native":
        return "gloo"
    return "shared" if handshake.share_a_host(hellos) else "gloo"


def _check_shared(device: torch.device, hellos: list[dict[str, object]]) -> None:
    if device.type != "cpu":
        raise SettingsError("exchange='shared' is for ranks on CPUs, and this rank has a GPU. Use 'auto'.")
    if not handshake.share_a_host(hellos):
        raise SettingsError(
            "exchange='shared' needs all ranks on one Linux host with an x86-64 processor. Use 'auto' or 'gloo'."
        )
