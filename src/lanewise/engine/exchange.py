"""The only file that talks to torch.distributed: its store, its groups and its messages.

Free functions with explicit group and handle. No pickle: what goes through the store is JSON, what goes
through a group is a tensor.
"""

import contextlib
import errno
import ipaddress
import re
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch._C._distributed_c10d import Store as Store

from lanewise.engine.patience import OutOfPatienceError, within
from lanewise.env import Launch
from lanewise.errors import ExchangeError, PeerLostError, SettingsError

_PAUSE_S = 0.05
"""Between two tries to reach a server that is not up yet."""
_NEVER_SENT = 1 << 30
"""The tag of a message that no rank sends."""
_ALL_TO_ALL = dist.AllToAllOptions()
Group = dist.ProcessGroup
Work = dist.Work


def open_store(launch: Launch, timeout: timedelta) -> Store:
    """The store of a launch: rank 0 serves it unless the launcher does."""
    where = f"{launch.address}:{launch.port}"
    serves = launch.rank == 0 and not launch.launcher_serves_store
    server = "the launcher" if launch.launcher_serves_store else "rank 0"
    listener = _listen(launch) if serves else None

    def connect() -> TCPStore:
        return TCPStore(
            launch.address,
            listener.getsockname()[1] if listener is not None else launch.port,
            launch.world_size,
            is_master=serves,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach() if listener is not None else None,
        )

    try:
        if not serves:
            _await_server(launch, timeout)
        tcp = within(timeout + timedelta(seconds=1), connect)
    except (OSError, UnicodeError, dist.DistNetworkError, dist.DistStoreError, OutOfPatienceError) as error:
        reason = first_line(error) if str(error) else "it accepts connections but does not answer"
        raise PeerLostError(
            () if launch.launcher_serves_store else (0,),
            f"rank {launch.rank} could not reach {server} at {where} within {timeout.total_seconds():g} s: {reason}. "
            f"Check that {server} runs, and that MASTER_ADDR and MASTER_PORT name it as seen from this host.",
        ) from error
    return PrefixStore(f"lanewise/{launch.attempt}/{_num_starts(where, launch.attempt)}", tcp)


def _await_server(launch: Launch, timeout: timedelta) -> None:
    """Return when somebody listens there. torch's own client writes pages about each try."""
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection((launch.address, launch.port), timeout=max(left, _PAUSE_S)).close()
            return
        except OSError:
            if left <= 0:
                raise
            time.sleep(_PAUSE_S)


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


def _listen(launch: Launch) -> socket.socket:
    """A socket that listens for the other ranks: on loopback alone where that is how they are told to come."""
    try:
        addresses = socket.getaddrinfo(launch.address, launch.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise SettingsError(
            f"rank 0: MASTER_ADDR={launch.address!r} is not the name or address of a host: {error}."
        ) from error
    is_loopback = all(ipaddress.ip_address(a[4][0]).is_loopback for a in addresses)
    has_ipv6 = socket.has_dualstack_ipv6()
    family, address = addresses[0][0], addresses[0][4][0]
    if not is_loopback or launch.address not in ("localhost", address):
        family, address = (socket.AF_INET6, "::") if has_ipv6 else (socket.AF_INET, "0.0.0.0")
    try:
        return socket.create_server(
            (address, launch.port), family=family, backlog=2048, dualstack_ipv6=address == "::"
        )
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise ExchangeError(f"rank 0 cannot listen on {address} port {launch.port}: {error}.") from error
        raise ExchangeError(
            f"rank 0: port {launch.port} on {launch.address} is in use. Another run may still be up, or rank 0 was "
            "started twice. Start again with another MASTER_PORT; `lanewise run` chooses a free one."
        ) from error


_starts: dict[tuple[str, str], int] = {}


def _num_starts(where: str, attempt: str) -> int:
    """How often this process has started a run of this launch: each start has its own part of the store."""
    _starts[where, attempt] = _starts.get((where, attempt), 0) + 1
    return _starts[where, attempt]


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
    """Messages between pairs of ranks of a group, with errors that name the rank that is to blame."""

    group: Group
    rank: int
    timeout: timedelta
    behind: Callable[[int, bool], tuple[int, str]]
    """The rank behind the silence of another, and its last word. Told whether a timeout was what ended the wait."""
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

    def hang_up(self) -> None:
        """Close all connections, so that ranks that wait for this one notice at once. Gloo closes them when a wait
        takes too long; nothing else does before the process ends.
        """
        for peer in range(self.group.size()):
            if peer != self.rank:
                with contextlib.suppress(RuntimeError):
                    never = self.group.recv([torch.empty(1)], peer, _NEVER_SENT)
                    never.wait(timedelta(milliseconds=1))

    def _lost(self, peer: int, where: str, error: RuntimeError) -> PeerLostError:
        self.has_failed = True
        reason = first_line(error)
        is_late = "timed out" in reason.lower()
        culprit, word = self.behind(peer, is_late)
        self.hang_up()
        what = (
            f"did not come within {self.timeout.total_seconds():g} s" if is_late else "has ended or hung up"
        )
        if culprit != peer:
            what = f"is the one that rank {peer} waited for"
        said = word or ("" if is_late else reason)
        return PeerLostError(
            (culprit,),
            f"rank {self.rank} waited in {where}: rank {culprit} {what}{f' ({said})' if said else ''}. Look at that "
            "rank's own output; a longer wait is set with timeout=.",
        )


def all_to_all(
    group: Group, received: torch.Tensor, sent: torch.Tensor, from_each: list[int], to_each: list[int]
) -> Work:
    """Start one exchange in which each pair of ranks may send a different length."""
    return group.alltoall_base(received, sent, from_each, to_each, _ALL_TO_ALL)


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
    """The part of a C++ error that a person reads: without its place in the source, or general advice."""
    text = str(error).strip()
    line = text.splitlines()[0] if text else type(error).__name__
    return re.sub(r"^\[\S+:\d+\] ", "", line).partition(" This is typically caused by")[0].rstrip(".")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
