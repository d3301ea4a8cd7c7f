"""Which samples are kept for evaluation: a pure function of the seed and the number of samples."""

from lanewise.errors import DataError
from lanewise.lanes.seeds import derive


def split(size: int, valid: float, seed: int, what: str) -> tuple[list[int], list[int]]:
    """The places of samples to train on and of those to evaluate, each in order."""
    count = round(size * valid)
    if valid and not 0 < count < size:
        raise DataError(
            f"{what}: data.valid={valid:g} of {size} samples leaves {size - count} to train on and {count} to "
            "evaluate. Use more data, another part, or 0 to evaluate nothing."
        )
    shuffled = sorted(range(size), key=lambda place: derive(seed, "valid", place))
    return sorted(shuffled[count:]), sorted(shuffled[:count])
