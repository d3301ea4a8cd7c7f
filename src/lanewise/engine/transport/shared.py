"""Exchange through memory that the ranks of one host map together: nothing is sent, it is read in place.

Memory is made with memfd and opened by the peers through /proc, so it has no name: it cannot outlive the
processes that map it, however they die, and is not bound by the size of /dev/shm. It is allocated before
it is used, so that a host without enough says so here and not with a SIGBUS later.
"""

import mmap
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from lanewise.engine.meeting import Meeting
from lanewise.engine.transport import calls, words
from lanewise.engine.transport.protocol import Board, Incoming, Outgoing
from lanewise.engine.transport.suspects import Suspects
from lanewise.engine.transport.waiting import Counter, Watch, wait_until
from lanewise.errors import ExchangeError
from lanewise.lanes.hosting import Span

_POSTED, _OPENED, _CLOSED, _SUSPECTS = 0, 64, 128, 192
_WORDS_START, _WORDS_LENGTH = 256, 512
_CALLS_START = 1024
_MAIL_START, _MAIL_BYTES = 40960, 1 << 16
_PAGE_BYTES = _MAIL_START + 2 * _MAIL_BYTES


class _Memory:
    """One mapping and the tensor that shows it."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self.mapping = mapping
        self.tensor = torch.frombuffer(mapping, dtype=torch.uint8)


class SharedTransport:
    """The ranks of one host. See `protocol.Transport`."""

    is_shared = True
    sends_alone = 0
    received_bytes = 0

    def __init__(
        self, meeting: Meeting | None, watch: Watch, rank: int, size: int, timeout: timedelta
    ) -> None:
        """`watch` knows the processes of all ranks; it is closed with this."""
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self._meeting = meeting
        self._watch = watch
        self._spin = size <= (os.cpu_count() or 1)
        self._num_allocations = 0
        pages = self._allocate(_PAGE_BYTES)
        self._pages = [page.mapping for page in pages]
        self._mail = [page.tensor[_MAIL_START:] for page in pages]
        self._posted = [Counter(page, _POSTED) for page in self._pages]
        self._opened = [Counter(page, _OPENED) for page in self._pages]
        self._closed = [Counter(page, _CLOSED) for page in self._pages]
        self._calls = calls.Calls(self._pages, _CALLS_START, rank, self._last_word)
        self._suspects = Suspects(self._pages, _SUSPECTS, rank)
        self._peers = [peer for peer in range(size) if peer != rank]

    def board(self, numel: int, dtype: torch.dtype) -> Board:
        """Memory that the others may read."""
        memories = self._allocate(max(numel * dtype.itemsize, 1))
        views = tuple(
            memory.tensor[: memory.tensor.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
            for memory in memories
        )
        return Board(views[self.rank], views)

    def common(self, num_bytes: int) -> torch.Tensor:
        """One stretch of memory that all ranks map."""
        return self._allocate(max(num_bytes, 1) if self.rank == 0 else 0)[0].tensor

    def announce(self, where: str) -> int:
        """Write it down."""
        return self._calls.note(where)

    def open(
        self,
        board: Board,
        outgoing: Sequence[Outgoing],
        incoming: Sequence[Incoming],
        where: str,
        under: int | None = None,
    ) -> "SharedTransfer":
        """Let the others read; nothing moves."""
        if under is None:
            self._calls.note(where)
        return SharedTransfer(self, self._opened[self.rank].advance(), board, incoming, where)

    def gather(
        self, whole: torch.Tensor, spans: Sequence[Span], where: str, under: int | None = None
    ) -> "SharedArrival":
        """Bring every rank's span together. `whole` is private memory; it goes through the mail."""
        for owner, (start, stop) in enumerate(spans):
            self._relay(owner, whole[start:stop], where)
        return SharedArrival()

    def share(self, values: torch.Tensor, where: str) -> torch.Tensor:
        """Give a few numbers to all ranks."""
        flat = values.detach().contiguous().view(torch.uint8).reshape(-1)
        rows = torch.empty(self.size, flat.numel(), dtype=torch.uint8)
        for start in range(0, max(flat.numel(), 1), _MAIL_BYTES):
            part = flat[start : start + _MAIL_BYTES]
            box = self._box()
            self._mail[self.rank][box : box + part.numel()].copy_(part)
            self._meet(where)
            for peer in range(self.size):
                rows[peer, start : start + part.numel()] = self._mail[peer][box : box + part.numel()]
        return rows.view(values.dtype).view(self.size, *values.shape)

    def broadcast(self, values: torch.Tensor, where: str) -> None:
        """Overwrite with rank 0's, by way of the mail."""
        self._relay(0, values.view(-1), where)

    def barrier(self, where: str) -> None:
        """Return when all ranks have come here."""
        self._meet(where)

    def say(self, what: str) -> None:
        """Leave word in the shared page."""
        words = what.encode()[: _WORDS_LENGTH - 1]
        self._pages[self.rank][_WORDS_START : _WORDS_START + len(words) + 1] = words + b"\0"

    def close(self, failure: str | None) -> None:
        """Let go of the pages. Whatever else was mapped goes with the last tensor that shows it."""
        if failure is None:
            self._calls.note(words.THE_END)
        else:
            self.say(f"{self._last_word(self.rank)}; {failure}")
        for counter in (*self._posted, *self._opened, *self._closed):
            counter.release()
        self._calls.release()
        self._suspects.release()
        self._watch.close()
        self._pages.clear()
        self._mail.clear()

    def wait_opened(self, number: int, peers: Sequence[int], where: str) -> None:
        """Wait until these ranks have opened so many transfers, and be sure that they opened the same."""
        self._wait([(peer, self._opened[peer], number) for peer in peers], where)
        self._calls.check(peers)

    def wait_closed(self, number: int, where: str) -> None:
        """Wait until all other ranks have closed so many transfers."""
        self._wait([(peer, self._closed[peer], number) for peer in self._peers], where)

    def close_transfer(self) -> None:
        """Count one more closed transfer."""
        self._closed[self.rank].advance()

    def _box(self) -> int:
        """The half of the mail that no rank can still be reading: all have passed the meeting after it."""
        return self._posted[self.rank].value % 2 * _MAIL_BYTES

    def _meet(self, where: str) -> None:
        self._calls.note(where)
        number = self._posted[self.rank].advance()
        self._wait([(peer, self._posted[peer], number) for peer in self._peers], where)
        self._calls.check(self._peers)

    def _relay(self, owner: int, values: torch.Tensor, where: str) -> None:
        flat = values.detach().view(torch.uint8)
        for start in range(0, flat.numel(), _MAIL_BYTES):
            part = flat[start : start + _MAIL_BYTES]
            box = self._box()
            if owner == self.rank:
                self._mail[owner][box : box + part.numel()].copy_(part)
            self._meet(where)
            if owner != self.rank:
                part.copy_(self._mail[owner][box : box + part.numel()])

    def _wait(self, awaited: Sequence[tuple[int, Counter, int]], where: str) -> None:
        wait_until(
            awaited,
            self._watch,
            self._suspects,
            self.timeout,
            self._calls.check_all,
            lambda ranks, what: self._explain(ranks, what, where),
            self._spin,
        )

    def _last_word(self, rank: int) -> str:
        page = self._pages[rank][_WORDS_START : _WORDS_START + _WORDS_LENGTH]
        return page.split(b"\0")[0].decode(errors="replace") or words.SILENCE

    def _explain(self, ranks: tuple[int, ...], what: str, where: str) -> str:
        lines = [f"rank {self.rank} waited in {where}:"]
        for rank in ranks:
            pid, state, word = self._watch.pids[rank], self._watch.state(rank), self._last_word(rank)
            lines.append(f"rank {rank} (pid {pid}) {what}; it is {state}; its last word: {word}.")
        lines.append("Look at that rank's own output; a longer wait is set with timeout=.")
        return " ".join(lines)

    def _tell(self, what: str, value: Any) -> list[Any]:
        if self._meeting is None:
            return [value]
        self._num_allocations += 1
        return self._meeting.tell_all(f"shared/{self._num_allocations}/{what}", value)

    def _allocate(self, num_bytes: int) -> list[_Memory]:
        """Allocate so much here, learn what the others allocated, and map all of it. 0 allocates nothing."""
        made = None
        handle = None
        problem = None
        if num_bytes:
            handle = os.memfd_create("lanewise", os.MFD_CLOEXEC)
            try:
                os.posix_fallocate(handle, 0, num_bytes)
                made = _Memory(mmap.mmap(handle, num_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE))
            except OSError as error:
                problem = f"rank {self.rank} could not allocate {num_bytes} bytes of shared memory: {error}"
        told = self._tell("memory", [os.getpid(), handle, num_bytes, problem])
        problems = [entry[3] for entry in told if entry[3]]
        if problems:
            if handle is not None:
                os.close(handle)
            raise ExchangeError(f"{'; '.join(problems)}. Use fewer ranks on this host, or exchange='gloo'.")
        memories = []
        for peer, (pid, peer_handle, peer_bytes, _) in enumerate(told):
            if peer == self.rank and made:
                memories.append(made)
            elif peer_bytes:
                memories.append(self._map(pid, peer_handle, peer_bytes))
        self._tell("mapped", None)
        if handle is not None:
            os.close(handle)
        return memories

    def _map(self, pid: int, handle: int, num_bytes: int) -> _Memory:
        opened = os.open(f"/proc/{pid}/fd/{handle}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return _Memory(mmap.mmap(opened, num_bytes, mmap.MAP_SHARED))
        finally:
            os.close(opened)


class SharedTransfer:
    """A transfer in which nothing moves: taking is looking. See `protocol.Transfer`."""

    def __init__(
        self,
        transport: SharedTransport,
        number: int,
        board: Board,
        incoming: Sequence[Incoming],
        where: str,
    ) -> None:
        self._transport = transport
        self._number = number
        self._board = board
        self._incoming = incoming
        self._where = where

    def take(self) -> list[torch.Tensor]:
        """The peers' own memory, once they have opened this transfer."""
        peers = sorted({item.peer for item in self._incoming})
        self._transport.wait_opened(self._number, peers, self._where)
        return [self._board.peers[i.peer][i.span[0] : i.span[1]] for i in self._incoming]

    def close(self) -> None:
        """Count this transfer as closed."""
        self._transport.close_transfer()

    def drain(self) -> None:
        """Wait until the others have counted it."""
        self._transport.wait_closed(self._number, self._where)


class SharedArrival:
    """A gather that was over when it was started."""

    def wait(self) -> None:
        """Nothing is left to wait for."""
