"""Rank 0 of a world that is not there: every collective is called, and nothing goes to another rank.

Torch's `fake` backend copies inputs into outputs in newer releases and not in older ones. `Silent` is the same for
every engine and every release. Buffers that would be received into hold plausible numbers all the same: kernels
on zeros draw less power and run faster (by a tenth), and engines refuse numbers that are not finite. They are filled
while an engine warms up, and lie in a pool of memory of their own, which nothing else is written to afterwards.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from lanewise import config
from lanewise.engine import device as devices
from lanewise.engine.room import AllocatedRoom
from lanewise.engine.streamed import StreamedSum
from lanewise.engine.transport.messages import MessageTransport
from lanewise.engine.transport.wire import CollectiveWire
from lanewise.events import Reporter
from lanewise.run.session import Run

WORLD = 64
_SMALL = 1 << 16
"""Elements of what is a report of all ranks rather than values of a model."""


class Done(dist.Work):
    """Work that is over. Made once: to make one takes long."""

    def __init__(self, tensors: list[torch.Tensor] | None = None) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future:
        on_gpu = sorted({t.device.index for t in self._tensors or [] if t.is_cuda})
        future = torch.futures.Future(devices=[torch.device("cuda", n) for n in on_gpu])
        future.set_result(self._tensors)
        return future


class Silent(dist.ProcessGroup):
    """A group whose other ranks say nothing."""

    last: ClassVar["Silent | None"] = None

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._name = "silent"
        self._num_ranks = size
        self._done = Done()
        self._known: set[tuple[int, int]] = set()
        self.is_warming_up = True
        self.filled = 0
        """Buffers filled since the warm-up."""
        self.calls = 0
        Silent.last = self

    def warmed_up(self) -> None:
        """Fill no more than is needed from here on."""
        self.is_warming_up, self.filled, self.calls = False, 0, 0

    def getBackendName(self) -> str:
        return "silent"

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _receive(self, output: torch.Tensor, source: torch.Tensor | None) -> Done:
        """Have plausible numbers in `output`: repetitions of `source`, or zeros."""
        self.calls += 1
        if source is not None and output.numel() <= _SMALL:
            self._fill(output, source)
            return self._done
        key = (output.data_ptr(), output.numel())
        is_known = key in self._known
        if self.is_warming_up or not is_known:
            self._known.add(key)
            self.filled += 1
            self._fill(output, source)
        return self._done

    def _fill(self, output: torch.Tensor, source: torch.Tensor | None) -> None:
        with torch.no_grad():
            if source is None:
                output.detach().zero_()
            else:
                whole, part = _widened(output.detach().view(-1), source.detach().reshape(-1))
                rows = whole.view(self._num_ranks, -1)
                rows.copy_(part.view(1, -1).expand_as(rows))

    def _allgather_base(self, output, source, opts=None):
        return self._receive(output, source)

    all_gather_single = _allgather_base

    def allgather(self, outputs, sources, opts=None):
        # only set-up gathers lists: DDP compares the shapes of all ranks
        for output in outputs[0]:
            if output.numel() <= _SMALL:
                output.copy_(sources[0])
        return self._done

    def allgather_into_tensor_coalesced(self, outputs, sources, opts=None):
        for output, source in zip(outputs, sources, strict=True):
            self._receive(output, source).wait()
        return self._done

    def _reduce_scatter_base(self, output, source, opts=None):
        # a 64th of the bytes: new memory would hold anything else
        self.calls += 1
        with torch.no_grad():
            output.detach().view(-1).copy_(source.detach().view(self._num_ranks, -1)[0])
        return self._done

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs, sources, opts=None):
        for output, source in zip(outputs, sources, strict=True):
            self._reduce_scatter_base(output, source)
        return self._done

    def alltoall_base(self, output, source, to_here=None, from_here=None, opts=None):
        return self._receive(output, None)

    all_to_all_single = alltoall_base

    def allreduce(self, tensors, opts=None):
        self.calls += 1
        return Done(tensors=list(tensors))

    def allreduce_coalesced(self, tensors, opts=None):
        self.calls += 1
        return Done(tensors=list(tensors))

    def broadcast(self, tensors, opts=None):
        self.calls += 1
        return self._done

    def barrier(self, opts=None):
        return self._done


def _widened(output: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same bytes in longer elements, which copy faster, where both can be read so."""
    pair = (output, source)
    if any((t.nbytes | t.data_ptr() | t.storage_offset() * t.itemsize) % 8 for t in pair):
        return pair
    return output.view(torch.int64), source.view(torch.int64)


def join(backend: str) -> dist.ProcessGroup:
    """Join the pretended world as its rank 0."""
    if backend == "silent" and "silent" not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            "silent", lambda store, rank, size, timeout: Silent(rank, size), devices=["cpu", "cuda"]
        )
    dist.init_process_group(backend, store=FakeStore(), rank=0, world_size=WORLD)
    group = dist.group.WORLD
    assert group is not None
    return group


class _Echo:
    """Headers that nobody reads."""

    word = ""

    def __init__(self) -> None:
        self._number = 0

    def announce(self, where: str) -> int:
        self._number += 1
        return self._number

    def agree(self, number: int, where: str) -> None:
        """All the others are where this rank is."""

    def say(self, what: str) -> None:
        """Nobody listens."""


class _NoChannel:
    """What a transport is given to send headers by, until `_Echo` takes their place."""

    def isend(self, *arguments: Any) -> Done:
        return Done()

    irecv = isend

    def wait(self, *arguments: Any) -> None:
        """Nothing was sent."""


class PretendedTransport(MessageTransport):
    """A transport whose other ranks always do and say what this one does."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        wire = CollectiveWire(group, 0, WORLD)
        super().__init__(None, None, _NoChannel(), wire, 0, WORLD, device)  # type: ignore[arg-type]
        self._headers = _Echo()  # type: ignore[assignment]
        self._truth: Mapping[int, torch.Tensor] | None = None

    def teach(self, truth: Mapping[int, torch.Tensor] | None) -> None:
        """While an engine warms up, have gathers bring these values, by the storage that they come to."""
        self._truth = truth

    def gather(self, whole: Any, spans: Any, where: str, under: int | None = None) -> Any:
        arrival = super().gather(whole, spans, where, under)
        if self._truth is not None:
            values = self._truth.get(whole.untyped_storage()._cdata)
            if values is not None:
                whole.copy_(values)
        return arrival

    def share(self, values: torch.Tensor, where: str) -> torch.Tensor:
        mine = values.detach().cpu()
        return mine.expand(self.size, *mine.shape).clone()

    def barrier(self, where: str) -> None:
        """All the others are there."""

    def finish(self, number: int, works: Any, where: str) -> None:
        for _, work in works:
            work.wait()

    def close(self, failure: str | None) -> None:
        """Nobody has to be told."""


def keep_apart(device: torch.device) -> None:
    """Find memory that is received into in pools of its own, for this process: Lanewise's and FSDP2's.

    Values and gradients apart, so that no weight is ever a gradient of zero, which would be quick to compute with.
    """
    if device.type != "cuda":
        return
    # torch.cuda.use_mem_pool makes these three calls, and takes ten times as long for it
    from torch.cuda import memory
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    begin, end, release = (
        memory._cuda_beginAllocateCurrentThreadToPool,
        memory._cuda_endAllocateToPool,
        memory._cuda_releasePool,
    )
    where = device.index or 0

    def pooled(function: Any, pool: Any) -> Any:
        number = pool.id

        def inside(*arguments: Any, **keywords: Any) -> Any:
            begin(where, number)
            try:
                return function(*arguments, **keywords)
            finally:
                end(where, number)
                release(where, number)

        inside.pool = pool  # lives as long as what is found in it
        return inside

    values, gradients = torch.cuda.MemPool(), torch.cuda.MemPool()
    for owner, name, pool in (
        (AllocatedRoom, "make", values),
        (AllocatedRoom, "fill", values),
        (StreamedSum, "_new", gradients),
        (getattr(collectives, "DefaultAllGather", None), "allocate", values),
        (getattr(collectives, "DefaultReduceScatter", None), "allocate", gradients),
    ):
        if owner is not None:
            setattr(owner, name, pooled(getattr(owner, name), pool))


def start(backend: str, device: torch.device, **settings: Any) -> Run:
    """`lw.start` as rank 0 of the pretended world."""
    chosen, _ = config.settings({"lanes": WORLD, **settings}, {})
    devices.settle(device, chosen.threads, chosen.reduction == "exact")
    keep_apart(device)
    return Run(chosen, PretendedTransport(join(backend), device), device, Reporter([]))
