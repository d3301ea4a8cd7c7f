"""Places whose memory comes and goes: the same storage for good, and no more memory than is filled at a time."""

import re
from pathlib import Path

import pytest
import torch

from lanewise.engine import room as rooms

CPU = torch.device("cpu")
BYTES = 3_000_001
KINDS = [rooms.AllocatedRoom(CPU)] + ([rooms.PagedRoom()] if rooms._pages_can_move() else [])


def resident_bytes():
    return int(re.search(r"Rss:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text())[1]) * 1024


@pytest.mark.parametrize("room", KINDS, ids=lambda room: type(room).__name__)
def test_a_view_shows_what_is_there_after_every_refill(room):
    room.empty(room.make(0))
    places = [room.make(BYTES) for _ in range(3)]
    views = [place[:999_936].view(torch.float32).view(64, -1).t() for place in places]
    for number in range(12):
        place, view = places[number % 3], views[number % 3]
        if number >= 3:
            room.fill(place)
        place.fill_(number)
        assert place.numel() == BYTES
        assert view.contiguous().view(torch.uint8).unique().tolist() == [number]
        room.empty(place)


@pytest.mark.skipif(len(KINDS) < 2, reason="this system does not move pages")
def test_pages_are_used_again():
    """Twenty places of different sizes, two filled at a time."""
    room = rooms.PagedRoom()
    places = [room.make(20_000_000 + 100_000 * n) for n in range(20)]
    for place in places:
        room.empty(place)
    before = resident_bytes()
    for number in range(60):
        pair = (places[number % 20], places[(number + 7) % 20])
        for place in pair:
            room.fill(place)
            place.fill_(1)
        for place in pair:
            room.empty(place)
    assert resident_bytes() - before < 3 * 22_000_000


def test_a_device_other_than_a_cpu_has_its_allocator():
    assert isinstance(rooms.choose(torch.device("meta")), rooms.AllocatedRoom)
