"""The flat layout: where every element of a unit lies, and who owns it.

The parameters of one unit and one dtype stand one after the other in a *flat*, each beginning on a
multiple of `BLOCK` elements. A flat is cut into as many equal *slots* as there are lanes, also multiples
of `BLOCK`, and a rank owns neighbouring slots. Neither the number of ranks nor the strategy moves an
element, so a vectorised kernel meets each of them at the same place of its body or tail.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lanewise.lanes.hosting import Span

BLOCK = 64
"""Fields and slots begin on multiples of so many elements."""


@dataclass(frozen=True)
class Field:
    """The place of one parameter in a flat."""

    name: str
    start: int
    numel: int

    @property
    def stop(self) -> int:
        """One past the last element; up to the next field there is padding."""
        return self.start + self.numel


@dataclass(frozen=True)
class Part:
    """What a stretch of a flat holds of one field: elements `start` to `stop - 1` of that field."""

    field: int
    start: int
    stop: int
    offset: int
    """Where the part begins, counted from the beginning of the stretch."""


@dataclass(frozen=True)
class FlatLayout:
    """The fields of a flat, and its length with padding."""

    fields: tuple[Field, ...]
    lanes: int
    slot: int
    """Elements in a slot."""
    _known: dict[tuple[str, Span, int], Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def length(self) -> int:
        """Elements in all slots."""
        return self.lanes * self.slot

    @property
    def num_padding(self) -> int:
        """Elements that belong to no parameter."""
        return self.length - sum(field.numel for field in self.fields)

    def span(self, slots: Span) -> Span:
        """The elements of a range of slots."""
        return (slots[0] * self.slot, slots[1] * self.slot)

    def parts(self, span: Span) -> tuple[Part, ...]:
        """What lies in a stretch, field by field, padding left out."""
        key = ("parts", span, 0)
        if key not in self._known:
            self._known[key] = self._find_parts(span)
        found: tuple[Part, ...] = self._known[key]
        return found

    def gaps(self, span: Span) -> tuple[Span, ...]:
        """The padding in a stretch, counted from its beginning."""
        key = ("gaps", span, 0)
        if key not in self._known:
            self._known[key] = between([_place(part) for part in self.parts(span)], span[1] - span[0])
        found: tuple[Span, ...] = self._known[key]
        return found

    def segments(self, span: Span, alone: int) -> tuple[Span, ...]:
        """The messages that a stretch is sent as, counted from its beginning.

        A part of at least `alone` elements goes by itself, straight from where it lies; smaller neighbours
        are laid together, padding between them included. Without a part of that size, all goes together.
        """
        key = ("segments", span, alone)
        if key not in self._known:
            self._known[key] = self._find_segments(span, alone)
        found: tuple[Span, ...] = self._known[key]
        return found

    def _find_parts(self, span: Span) -> tuple[Part, ...]:
        found = []
        for number, place in enumerate(self.fields):
            start, stop = max(span[0], place.start), min(span[1], place.stop)
            if start < stop:
                found.append(Part(number, start - place.start, stop - place.start, start - span[0]))
        return tuple(found)

    def _find_segments(self, span: Span, alone: int) -> tuple[Span, ...]:
        if all(part.stop - part.start < alone for part in self.parts(span)):
            return ((0, span[1] - span[0]),) if span[0] < span[1] else ()
        found: list[Span] = []
        may_join = False
        for part in self.parts(span):
            start, stop = _place(part)
            is_small = stop - start < alone
            if is_small and may_join:
                start = found.pop()[0]
            found.append((start, stop))
            may_join = is_small
        return tuple(found)


def _place(part: Part) -> Span:
    """Where a part lies in its stretch."""
    return (part.offset, part.offset + part.stop - part.start)


def between(places: Sequence[Span], length: int) -> tuple[Span, ...]:
    """What neighbouring places leave free of a length."""
    found = []
    position = 0
    for start, stop in [*places, (length, length)]:
        if start > position:
            found.append((position, start))
        position = stop
    return tuple(found)


def round_up(number: int, multiple: int) -> int:
    """The least multiple that is not below `number`."""
    return -(-number // multiple) * multiple


def lay_out(sizes: Sequence[tuple[str, int]], lanes: int) -> FlatLayout:
    """Place parameters of the given names and element counts, in the given order."""
    fields = []
    position = 0
    for name, numel in sizes:
        fields.append(Field(name, position, numel))
        position = round_up(position + numel, BLOCK)
    slot = round_up(-(-position // lanes), BLOCK)
    return FlatLayout(tuple(fields), lanes, slot)


def pieces(spans: Sequence[Span], limit: int) -> tuple[tuple[Span, ...], ...]:
    """Cut the owners' spans of one flat into pieces of at most `limit` elements over all owners.

    A piece holds a stretch of every owner's span, so that each exchange keeps all of them busy.

    >>> pieces([(0, 128), (128, 192)], limit=128)
    (((0, 64), (128, 192)), ((64, 128), (192, 192)))
    """
    each = max(limit // len(spans) // BLOCK * BLOCK, BLOCK)
    longest = max(stop - start for start, stop in spans)
    return tuple(
        tuple((min(start + low, stop), min(start + low + each, stop)) for start, stop in spans)
        for low in range(0, longest, each)
    )
