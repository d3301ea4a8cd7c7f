"""Room for values that come and go under zero3: memory at one address for good, there only while it is filled.

What autograd saved of a unit's values points into their storage, so that storage must stay the same one. On
a GPU it is freed and found again by torch's allocator, which keeps blocks of equal size. The C library does
not: an aligned block never fits the hole that its like has left, so the heap grows with every gather.
On a CPU under Linux, pages therefore move between the places of values and a
store of spare ones, which costs neither a fault nor a copy.
"""

import ctypes
import mmap
import sys
from functools import cache
from typing import Any, Protocol

import torch

_CHUNK_BYTES = 1 << 19
_HOMES_AT_ONCE = 64
_MAYMOVE, _FIXED, _DONTUNMAP = 1, 2, 4


class Room(Protocol):
    """Makes places whose memory comes and goes."""

    is_safe: bool
    """Whether to read a place that is empty is an error, of torch or of the device, and never a value."""

    def make(self, num_bytes: int) -> torch.Tensor:
        """A place, filled: bytes of any value."""
        ...

    def fill(self, place: torch.Tensor) -> None:
        """Have memory there, its values unknown."""
        ...

    def empty(self, place: torch.Tensor) -> None:
        """Have none there. Whoever reads it before it is filled again reads nothing sensible."""
        ...


class AllocatedRoom:
    """Memory from torch's allocator. An empty place has no address: a GPU refuses that, and a CPU ends the process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_safe = device.type == "cuda"

    def make(self, num_bytes: int) -> torch.Tensor:
        """An ordinary tensor."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def fill(self, place: torch.Tensor) -> None:
        """Allocate."""
        place.untyped_storage().resize_(place.numel())

    def empty(self, place: torch.Tensor) -> None:
        """Free."""
        place.untyped_storage().resize_(0)


class PagedRoom:
    """Pages that move. A spare chunk of them lives at a home, one that is used at its place."""

    is_safe = False

    def __init__(self) -> None:
        self._spare: list[int] = []
        """Homes with pages."""
        self._vacant: list[int] = []
        """Homes whose pages are away."""
        self._mappings: list[mmap.mmap] = []

    def make(self, num_bytes: int) -> torch.Tensor:
        """Map a range; its pages come when they are first written."""
        return torch.frombuffer(_map(_num_chunks(num_bytes)), dtype=torch.uint8)[:num_bytes]

    def fill(self, place: torch.Tensor) -> None:
        """Move spare pages there, as far as there are any."""
        for address in _chunks(place):
            if not self._spare:
                return
            home = self._spare.pop()
            _move(home, address)
            self._vacant.append(home)

    def empty(self, place: torch.Tensor) -> None:
        """Move the pages home."""
        for address in _chunks(place):
            if not self._vacant:
                self._add_homes()
            home = self._vacant.pop()
            _move(address, home)
            self._spare.append(home)

    def _add_homes(self) -> None:
        mapping = _map(_HOMES_AT_ONCE)
        self._mappings.append(mapping)
        first = _address(mapping)
        self._vacant += [first + n * _CHUNK_BYTES for n in range(_HOMES_AT_ONCE)]


def choose(device: torch.device) -> Room:
    """What suits the device and the system."""
    return PagedRoom() if device.type == "cpu" and _pages_can_move() else AllocatedRoom(device)


def _num_chunks(num_bytes: int) -> int:
    return max(-(-num_bytes // _CHUNK_BYTES), 1)


def _chunks(place: torch.Tensor) -> range:
    """The addresses of the chunks of a place."""
    first = place.data_ptr()
    num_chunks = _num_chunks(place.numel()) if place.numel() else 0
    return range(first, first + num_chunks * _CHUNK_BYTES, _CHUNK_BYTES)


def _map(num_chunks: int) -> mmap.mmap:
    return mmap.mmap(-1, num_chunks * _CHUNK_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _address(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


@cache
def _mremap() -> Any:
    function = ctypes.CDLL(None, use_errno=True).mremap
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    function.restype = ctypes.c_void_p
    return function


def _move(source: int, target: int) -> None:
    """Move a chunk of pages. The source stays mapped, without pages."""
    if _mremap()(source, _CHUNK_BYTES, _CHUNK_BYTES, _MAYMOVE | _FIXED | _DONTUNMAP, target) != target:
        problem = ctypes.get_errno()
        raise OSError(problem, "the kernel refused to move pages (mremap)")


@cache
def _pages_can_move() -> bool:
    """Whether this system moves pages: Linux from 5.7 on does."""
    if sys.platform != "linux":
        return False
    source, target = _map(1), _map(1)
    source[0] = 1
    try:
        _move(_address(source), _address(target))
    except (OSError, AttributeError):
        return False
    return target[0] == 1
