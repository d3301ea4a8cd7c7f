"""What ranks must have in common while they train, compared before it can lead them apart."""

from collections.abc import Mapping, Sequence

import torch

from lanewise import config
from lanewise.data.loader import Loader
from lanewise.engine import hashing
from lanewise.engine.transport.protocol import Transport
from lanewise.errors import DataError, DivergedError, SettingsError
from lanewise.lanes.hosting import even, weighted


def on_data(loader: Loader, transport: Transport) -> None:
    """All ranks deal out the same samples in the same order. Collective."""
    mine = torch.tensor(loader.identity, dtype=torch.int64)
    rows = transport.share(mine, "the comparison of loaders").tolist()
    for rank, (size, batch, rest) in enumerate(rows):
        if (size, batch) != tuple(rows[0][:2]):
            raise DataError(
                f"rank {rank} has a loader of {size} samples with batch_size={batch}, but rank 0 one of {rows[0][0]} "
                f"with batch_size={rows[0][1]}. Give every rank the whole data set and the global batch size; the run "
                "deals the samples out to lanes by itself."
            )
        if rest != rows[0][2]:
            raise DataError(
                f"the loaders of rank {rank} and rank 0 differ in shuffle, drop_last or partition. All ranks must deal "
                "out samples alike: do not let these, or the keys of the partition, depend on the rank."
            )


def shares(hosting: str | Sequence[float], lanes: int, world_size: int) -> tuple[int, ...]:
    """The lanes that each rank hosts. Refuses what is no hosting."""
    ranks = min(world_size, lanes)
    try:
        config.check_hosting(hosting)
    except ValueError as error:
        raise SettingsError(f"run.rehost: hosting {error}.") from error
    if isinstance(hosting, str):
        found = even(lanes, ranks)
    elif len(hosting) != world_size:
        raise SettingsError(
            f"hosting names {len(hosting)} weights for {world_size} ranks; give one for each rank."
        )
    else:
        try:
            found = weighted(lanes, hosting)
        except ValueError as error:
            raise SettingsError(f"hosting: {error}.") from error
    return found + (0,) * (world_size - len(found))


def on_hosting(shares: Sequence[int], transport: Transport) -> None:
    """All ranks have the same map of lanes to ranks. Collective."""
    rows = transport.share(torch.tensor(shares, dtype=torch.int64), "the comparison of hosting").tolist()
    for rank, row in enumerate(rows):
        if row != rows[0]:
            raise SettingsError(
                f"rank {rank} has the lanes shared out as {row}, but rank 0 as {rows[0]}. Call run.rehost with the "
                "same weights on every rank."
            )


def on_evaluation(numbers: tuple[int, int, int], transport: Transport) -> None:
    """All ranks evaluate so many samples in batches of one size with so many metrics. Collective."""
    rows = transport.share(torch.tensor(numbers, dtype=torch.int64), "the start of an evaluation").tolist()
    for rank, row in enumerate(rows):
        if row != rows[0]:
            raise DataError(
                f"run.evaluate: rank 0 has {rows[0][0]} samples, batch_size={rows[0][1]} and {rows[0][2]} metric(s), "
                f"but rank {rank} has {row[0]}, {row[1]} and {row[2]}. Give every rank the whole data set and the same "
                "metrics; the run deals the batches out."
            )


def on_values(values: Mapping[str, float], transport: Transport) -> None:
    """All ranks got the same from an evaluation. Collective."""
    words = [word for name, value in values.items() for word in (name, float(value).hex())]
    mine = torch.frombuffer(bytearray.fromhex(hashing.of_words(words)), dtype=torch.uint8)
    rows = transport.share(mine, "the comparison of an evaluation").tolist()
    different = [rank for rank, row in enumerate(rows) if row != rows[0]]
    if different:
        raise DivergedError(
            f"run.fit: evaluate gave other values on rank(s) {different} than on rank 0, so the ranks would not agree "
            "on when to stop. Use run.evaluate, which gives all ranks the same."
        )
