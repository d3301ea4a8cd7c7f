"""The only file that talks to torch.distributed: its store, its groups and its messages.

Free functions with explicit group and handle. No pickle: what goes through the store is JSON, what goes
through a group is a tensor.
"""

import contextlib
import json
import socket
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch._C._distributed_c10d import Store as Store

from lanewise.env import Launch
from lanewise.errors import ExchangeError, PeerLostError

Group = dist.ProcessGroup
Work = dist.Work


def open_store(launch: Launch, timeout: timedelta) -> Store:
    """The store of a launch: rank 0 serves it unless the launcher does."""
    try:
        tcp = TCPStore(
            launch.address,
            launch.port,
            launch.world_size,
            is_master=launch.rank == 0 and not launch.launcher_serves_store,
            timeout=timeout,
            wait_for_workers=False,
        )
    except dist.DistNetworkError as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            raise ExchangeError(
                f"rank {launch.rank}: port {launch.port} on {launch.address} is in use by another process. "
                "Another run may still be up; start again with a free --port, or leave it out to have one "
                "chosen."
            ) from error
        raise PeerLostError(
            (0,),
            f"rank {launch.rank} could not reach rank 0 at {launch.address}:{launch.port} within "
            f"{timeout.total_seconds():g} s: {first_line(error)}",
        ) from error
    return PrefixStore(f"lanewise/{launch.attempt}", tcp)


def serve_store(port: int | None) -> tuple[Store, int]:
    """A store that this process serves to others of this host, on a port that nobody else can take."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port or 0))
        except OSError as error:
            raise ExchangeError(
                f"port {port} is in use by another process. Another run may still be up; choose another --port, "
                "or leave it out to have one chosen."
            ) from error
        listener.listen()
        found = int(listener.getsockname()[1])
        store = TCPStore(
            "127.0.0.1",
            found,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    return store, found


def tell_all(store: Store, rank: int, size: int, key: str, value: object, timeout: timedelta) -> list[Any]:
    """Exchange one JSON value a rank through the store; the values of all ranks in order."""
    store.set(f"{key}/{rank}", json.dumps(value))
    values = []
    deadline = time.monotonic() + timeout.total_seconds()
    for peer in range(size):
        left = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
        try:
            store.wait([f"{key}/{peer}"], left)
        except (dist.DistStoreError, dist.DistNetworkError, RuntimeError) as error:
            raise PeerLostError(
                (peer,),
                f"rank {rank} waited {timeout.total_seconds():g} s in {key!r}: rank {peer} did not come "
                f"({first_line(error)}). Look at that rank's own output; it may have failed or not started.",
            ) from error
        values.append(json.loads(store.get(f"{key}/{peer}")))
    return values


def farewell(store: Store, rank: int, size: int, timeout: timedelta) -> None:
    """Wait for all ranks to come to their end; rank 0, which serves the store, leaves last.

    A rank that does not come in time is not waited for: there is nothing left to lose.
    """
    deadline = time.monotonic() + timeout.total_seconds()

    def wait_for(key: str, count: int) -> None:
        while store.add(key, 0) < count and time.monotonic() < deadline:
            time.sleep(0.001)

    with contextlib.suppress(RuntimeError):
        store.add("farewell", 1)
        wait_for("farewell", size)
        store.add("gone", 1)
        if rank == 0:
            wait_for("gone", size)


def join_group(store: Store, rank: int, size: int, backend: str, timeout: timedelta) -> Group:
    """Join the group of all ranks on a backend."""
    with _quiet():
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    group = dist.group.WORLD
    assert group is not None
    return group


def side_group(backend: str, timeout: timedelta) -> Group:
    """A second group of the same ranks on another backend."""
    with _quiet():
        group = dist.new_group(backend=backend, timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    return group


def leave_group() -> None:
    """Leave every group. Does nothing where none was joined."""
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass
class Channel:
    """Messages between pairs of ranks of a group, with errors that name the rank at the other end."""

    group: Group
    rank: int
    timeout: timedelta
    has_failed: bool = False

    def isend(self, tensor: torch.Tensor, peer: int, tag: int, where: str) -> Work:
        """Start to send a contiguous tensor."""
        try:
            return self.group.send([tensor], peer, tag)
        except RuntimeError as error:
            raise self._lost(peer, where, error) from error

    def irecv(self, tensor: torch.Tensor, peer: int, tag: int, where: str) -> Work:
        """Start to receive into a contiguous tensor."""
        try:
            return self.group.recv([tensor], peer, tag)
        except RuntimeError as error:
            raise self._lost(peer, where, error) from error

    def wait(self, work: Work, peer: int, where: str) -> None:
        """Wait for one message."""
        try:
            work.wait()
        except RuntimeError as error:
            raise self._lost(peer, where, error) from error

    def _lost(self, peer: int, where: str, error: RuntimeError) -> PeerLostError:
        self.has_failed = True
        reason = first_line(error)
        is_late = "timed out" in reason.lower()
        what = (
            f"did not come within {self.timeout.total_seconds():g} s" if is_late else "has ended or hung up"
        )
        return PeerLostError(
            (peer,),
            f"rank {self.rank} waited in {where}: rank {peer} {what} ({reason}). Look at that rank's own output; a "
            "longer wait is set with timeout=.",
        )


def all_to_all(
    group: Group, received: torch.Tensor, sent: torch.Tensor, from_each: list[int], to_each: list[int]
) -> Work:
    """Start one exchange in which each pair of ranks may send a different length."""
    return group.alltoall_base(received, sent, from_each, to_each, dist.AllToAllOptions())


def all_reduce(group: Group, tensor: torch.Tensor) -> Work:
    """Start the backend's own sum, in place."""
    return group.allreduce([tensor], dist.ReduceOp.SUM)


def reduce_scatter(group: Group, output: torch.Tensor, whole: torch.Tensor) -> Work:
    """Start the backend's own sum, each rank keeping an equal share."""
    return group._reduce_scatter_base(output, whole, dist.ReduceScatterOptions())


def all_gather(group: Group, whole: torch.Tensor, mine: torch.Tensor) -> Work:
    """Start to gather equal shares."""
    return group._allgather_base(whole, mine)


def broadcast(group: Group, tensor: torch.Tensor) -> Work:
    """Start to overwrite a tensor with rank 0's."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return group.broadcast([tensor], options)


def free_port() -> int:
    """A port that was free a moment ago on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def first_line(error: BaseException) -> str:
    """The part of a C++ error that a person reads."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
