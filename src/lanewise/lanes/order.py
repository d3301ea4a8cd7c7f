"""The order of the data: which samples a lane gets at a step, as a pure function of integers.

Nothing here depends on the number of ranks, so a run can stop at any step and go on with another number
of ranks without losing or repeating a sample. A shuffle is a keyed permutation computed per index, not
a list: it costs no memory and can be entered anywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from lanewise.lanes.hosting import even, spans
from lanewise.lanes.seeds import derive

_MASK = (1 << 64) - 1
_ROUNDS = 6


def _mix(value: int) -> int:
    """A 64-bit finaliser that spreads every input bit over the output."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def permute(index: int, size: int, key: int) -> int:
    """Where `index` goes in the permutation of ``range(size)`` that `key` chooses.

    A Feistel network over the next even power of two, walked until it lands inside the range.
    """
    half = max(((size - 1).bit_length() + 1) // 2, 1)
    low = (1 << half) - 1
    while True:
        left, right = index >> half, index & low
        for number in range(_ROUNDS):
            left, right = right, left ^ (_mix(right ^ _mix(key + number)) & low)
        index = left << half | right
        if index < size:
            return index


@dataclass(frozen=True)
class LaneBatch:
    """The samples of one lane at one step.

    `samples` are places in the data set. Where `padding` is true the lane has run out of samples of its
    own: it computes these for their shape alone, and they carry weight 0.
    """

    epoch: int
    samples: tuple[int, ...]
    padding: bool = False


@dataclass(frozen=True)
class Order:
    """The order of a data set of `size` samples, cut into global batches of `batch` over `lanes`.

    `lane_of` is an optional partition: the lane that each sample always goes to. Without it a lane takes
    its neighbours' share of one shuffled row.
    """

    size: int
    batch: int
    lanes: int
    seed: int = 0
    shuffle: bool = False
    drop_last: bool = False
    lane_of: Sequence[int] | None = None
    _members: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        members: list[list[int]] = [[] for _ in range(self.lanes)] if self.lane_of is not None else []
        for sample, lane in enumerate(self.lane_of if self.lane_of is not None else ()):
            members[lane].append(sample)
        object.__setattr__(self, "_members", tuple(tuple(m) for m in members))

    @property
    def lane_batch(self) -> int:
        """Samples a lane gets at a full step."""
        return self.batch // self.lanes

    @property
    def steps_per_epoch(self) -> int:
        """Steps until every sample has been seen once (or, with `drop_last`, the full ones of them)."""
        if self._members:
            counts = [len(members) for members in self._members]
            if self.drop_last:
                return min(counts) // self.lane_batch
            return -(-max(counts) // self.lane_batch)
        return self.size // self.batch if self.drop_last else -(-self.size // self.batch)

    def lane(self, step: int, lane: int) -> LaneBatch:
        """The samples of a lane at a global step, counted from the beginning of the run."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        if self._members:
            return self._from_members(epoch, step_in_epoch, lane)
        start = step_in_epoch * self.batch
        left = min(self.batch, self.size - start)
        low, high = spans(even(left, self.lanes))[lane]
        if low == high:
            return self._padding(epoch, lane)
        places = range(start + low, start + high)
        return LaneBatch(epoch, tuple(self._place(epoch, p, self.size, "all") for p in places))

    def _from_members(self, epoch: int, step_in_epoch: int, lane: int) -> LaneBatch:
        members = self._members[lane]
        start = step_in_epoch * self.lane_batch
        stop = min(start + self.lane_batch, len(members))
        if start < stop:
            places = [self._place(epoch, p, len(members), f"lane {lane}") for p in range(start, stop)]
            return LaneBatch(epoch, tuple(members[p] for p in places))
        return self._padding(epoch, lane)

    def _padding(self, epoch: int, lane: int) -> LaneBatch:
        first = lane * self.lane_batch
        return LaneBatch(epoch, tuple((first + n) % self.size for n in range(self.lane_batch)), padding=True)

    def _place(self, epoch: int, place: int, size: int, stream: str) -> int:
        if not self.shuffle:
            return place
        return permute(place, size, derive(self.seed, "order", epoch, stream))
