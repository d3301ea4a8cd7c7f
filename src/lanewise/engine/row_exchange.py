"""The exchange of sparse gradients by messages: as rows where that is smaller, else as they lie.

Who asks for a message must know its length. So before the messages of a piece, every rank tells all others
how many rows each of its own holds: a few numbers, in one exchange by the channel of headers. They could
ride before each message, to spare ranks that wait for each other here; but then a receive could only be
posted when its number has come, and one collective for all ranks (`wire.CollectiveWire`) could not be had.
"""

from collections.abc import Mapping, Sequence

import torch

from lanewise.engine.sparse import Band, Message
from lanewise.engine.sum import Leaf
from lanewise.engine.transport.protocol import Board, Incoming, Outgoing, Transfer
from lanewise.engine.unit import Flat
from lanewise.engine.world import World
from lanewise.lanes.hosting import Span

_DENSE = -1
"""In the place of a number of rows: all of the stretch is sent."""

Source = Leaf | torch.Tensor
"""What is sent of: a lane's gradient, or a register over the whole flat."""


class RowTransfer:
    """A transfer of which some messages hold rows; what is taken is dense. See `protocol.Transfer`."""

    def __init__(self, inner: Transfer, bands: Sequence[Band], counts: Sequence[int]) -> None:
        self._inner = inner
        self._bands = bands
        self._counts = counts

    def take(self) -> list[torch.Tensor]:
        """Wait for the messages, and lay their rows out."""
        arrived = zip(self._inner.take(), self._bands, self._counts, strict=True)
        return [tensor if count == _DENSE else band.unpack(tensor, count) for tensor, band, count in arrived]

    def close(self) -> None:
        """Free what was received."""
        self._inner.close()

    def drain(self) -> None:
        """Wait until what was sent has left."""
        self._inner.drain()


def scatter(
    world: World,
    flat: Flat,
    piece: Sequence[Span],
    sources: Sequence[Source],
    expected: Sequence[int],
    board: Board,
    under: int | None,
) -> RowTransfer:
    """Send every owner its stretch of each source. `expected` says how many sources each rank has."""
    mine = [piece[world.rank]] * world.size
    return _open(world, flat, dict(enumerate(piece)), mine, sources, expected, board, under)


def gather(world: World, flat: Flat, pieces: Sequence[Sequence[Span]], whole: torch.Tensor) -> None:
    """Send what this rank owns of a register to all, and receive what they own in place."""
    board = Board(whole[:0])
    for piece in pieces:
        mine = dict.fromkeys(range(world.size), piece[world.rank])
        transfer = _open(world, flat, mine, piece, [whole], [1] * world.size, board, None)
        for peer, tensor in zip(world.others, transfer.take(), strict=True):
            whole[slice(*piece[peer])].copy_(tensor)
        transfer.drain()
        transfer.close()


def _open(
    world: World,
    flat: Flat,
    sent: Mapping[int, Span],
    received: Sequence[Span],
    sources: Sequence[Source],
    expected: Sequence[int],
    board: Board,
    under: int | None,
) -> RowTransfer:
    """Tell the numbers of rows, and start the messages: `sent` to each rank, `received` from each."""
    dtype, alone = board.mine.dtype, world.transport.sends_alone
    spans = dict.fromkeys(sent[peer] for peer in world.others)
    messages = {span: [_message(flat, span, source, dtype, alone) for source in sources] for span in spans}
    counts = torch.full((world.size, max(expected)), _DENSE, dtype=torch.int32)
    outgoing = []
    for peer in world.others:
        for number, message in enumerate(messages[sent[peer]]):
            counts[peer, number] = message.count
            outgoing.append(Outgoing(peer, message.tensors))
    told = world.transport.share(counts, f"the numbers of rows of {flat.unit_name}")
    incoming, bands, arriving = [], [], []
    for peer in world.others:
        band = Band(received[peer], flat.sparse_columns)
        for count in told[peer, world.rank, : expected[peer]].tolist():
            if count == _DENSE:
                asked = Incoming(peer, band.span, flat.layout.segments(band.span, alone))
            else:
                asked = Incoming(peer, (0, band.length(count, dtype)), band.segments(count, dtype))
            incoming.append(asked)
            bands.append(band)
            arriving.append(count)
    where = f"the exchange of gradients of {flat.unit_name}"
    return RowTransfer(world.transport.open(board, outgoing, incoming, where, under), bands, arriving)


def _message(flat: Flat, span: Span, source: Source, dtype: torch.dtype, alone: int) -> Message:
    """What one rank gets of a source: rows, or the whole stretch."""
    place = flat.layout.fields[0]
    gradient = source.gradients[0] if isinstance(source, Leaf) else source[place.start : place.stop]
    if gradient is None:
        return Message(0, [])
    if gradient.layout == torch.strided:
        gradient = gradient.reshape(-1, flat.sparse_columns)
    packed = Band(span, flat.sparse_columns).pack(gradient, dtype)
    if packed is not None:
        return packed
    if isinstance(source, Leaf):
        return Message(_DENSE, source.parcels(span, alone, dtype))
    segments = flat.layout.segments(span, alone)
    return Message(_DENSE, [source[span[0] + low : span[0] + high] for low, high in segments])
