"""The flat layout: every element has one place and one owner."""

from hypothesis import given
from hypothesis import strategies as st

from lanewise.lanes.hosting import even, spans
from lanewise.lanes.layout import BLOCK, lay_out, pieces

SIZES = st.lists(st.integers(0, 1000), min_size=1, max_size=12)
LANES = st.integers(1, 64)
RANKS = st.integers(1, 20)


def layout_of(sizes, lanes):
    return lay_out([(f"p{n}", size) for n, size in enumerate(sizes)], lanes)


@given(SIZES, LANES, RANKS)
def test_every_element_has_one_owner(sizes, lanes, ranks):
    flat = layout_of(sizes, lanes)
    seen = {(field, element): 0 for field, size in enumerate(sizes) for element in range(size)}
    for slots in spans(even(lanes, ranks)):
        for part in flat.parts(flat.span(slots)):
            for element in range(part.start, part.stop):
                seen[part.field, element] += 1
    assert all(count == 1 for count in seen.values())


@given(SIZES, LANES, RANKS)
def test_boundaries_are_on_blocks(sizes, lanes, ranks):
    flat = layout_of(sizes, lanes)
    assert all(field.start % BLOCK == 0 for field in flat.fields)
    assert flat.slot % BLOCK == 0
    for slots in spans(even(lanes, ranks)):
        for part in flat.parts(flat.span(slots)):
            assert part.start % BLOCK == 0
            assert part.offset % BLOCK == 0


@given(SIZES, LANES)
def test_the_place_of_an_element_does_not_depend_on_the_ranks(sizes, lanes):
    flat = layout_of(sizes, lanes)
    whole = {(p.field, p.start) for p in flat.parts((0, flat.length))}
    for ranks in (1, 2, 3, 5):
        starts = set()
        for slots in spans(even(lanes, ranks)):
            span = flat.span(slots)
            starts |= {(p.field, p.start) for p in flat.parts(span) if p.start == 0}
            for part in flat.parts(span):
                assert span[0] + part.offset == flat.fields[part.field].start + part.start
        assert starts == whole


@given(SIZES, LANES, st.data())
def test_parts_and_gaps_tile_a_stretch(sizes, lanes, data):
    flat = layout_of(sizes, lanes)
    start = data.draw(st.integers(0, flat.length))
    stop = data.draw(st.integers(start, flat.length))
    covered = [0] * (stop - start)
    for part in flat.parts((start, stop)):
        for n in range(part.offset, part.offset + part.stop - part.start):
            covered[n] += 1
    for low, high in flat.gaps((start, stop)):
        for n in range(low, high):
            covered[n] += 1
    assert all(count == 1 for count in covered)


@given(SIZES, LANES, RANKS, st.integers(1, 5000))
def test_pieces_tile_every_owner(sizes, lanes, ranks, limit):
    flat = layout_of(sizes, lanes)
    owners = [flat.span(slots) for slots in spans(even(lanes, ranks))]
    cut = pieces(owners, limit)
    for owner, (start, stop) in enumerate(owners):
        stretches = [piece[owner] for piece in cut]
        assert [n for low, high in stretches for n in range(low, high)] == list(range(start, stop))
        assert all(low % BLOCK == 0 for low, _ in stretches)
    for piece in cut:
        assert sum(high - low for low, high in piece) <= max(limit, BLOCK * ranks)
