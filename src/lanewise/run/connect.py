"""Connecting the ranks of a launch: which transport carries the exchanges of this run."""

from collections.abc import Callable

import torch

from lanewise.config import Settings
from lanewise.engine import exchange
from lanewise.engine.transport.messages import MessageTransport
from lanewise.engine.transport.protocol import Transport
from lanewise.engine.transport.shared import SharedTransport
from lanewise.engine.transport.wire import CollectiveWire, PeerWire, Wire
from lanewise.env import Launch
from lanewise.errors import SettingsError
from lanewise.run import handshake


def connect(
    launch: Launch, settings: Settings, device: torch.device, notify: Callable[[str], None]
) -> Transport:
    """Shake hands and choose: shared memory on one host without GPUs, else messages."""
    rank, size, timeout = launch.rank, launch.world_size, settings.timeout
    mine = handshake.hello(settings, device)
    store = exchange.open_store(launch, timeout) if size > 1 else None
    hellos = exchange.tell_all(store, rank, size, "hello", mine, timeout) if store is not None else [mine]
    differences = handshake.check(hellos, settings.allow_mixed)
    notify(promise(settings, differences))
    kind: str = settings.exchange
    if kind == "auto":
        kind = _choose(settings, device, hellos)
    if kind == "shared":
        _check_shared(device, hellos)
        return SharedTransport(store, rank, size, timeout)
    if kind == "nccl" and device.type != "cuda":
        raise SettingsError("exchange='nccl' needs a GPU on every rank, and this rank has none. Use 'auto'.")
    control = data = None
    if store is not None:
        data = exchange.join_group(store, rank, size, kind, timeout)
        side = data if kind == "gloo" else exchange.side_group("gloo", timeout)
        control = exchange.Channel(side, rank, timeout)
    wire: Wire = PeerWire(control, rank) if device.type == "cpu" else CollectiveWire(data, rank, size)
    return MessageTransport(store, control, wire, rank, size, device)


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
