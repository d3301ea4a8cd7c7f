"""Sparse embeddings: the bits of a plain loop with dense gradients, and fewer bytes where ranks send them."""

from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lanewise.data.loader import make_loader
from lanewise.engine import sparse
from lanewise.engine.reference import Reference
from lanewise.errors import NonFiniteError
from lanewise.run.record import _describe as describe
from tests.helpers.cases import STRATEGIES, TRANSPORTS, Cell, grid, on_ranks, same_on_ranks
from tests.helpers.odd import compare

LANES, STEPS = 8, 3
SAMPLES = 37
"""Two samples a lane; in the third step three lanes have none of their own."""


class Rows(nn.Module):
    """What the first column says decides what a lane does with its embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1009, 17, sparse=True, padding_idx=3)
        self.bag = nn.EmbeddingBag(257, 65, sparse=True, mode="sum")
        self.rare = nn.Embedding(53, 6, sparse=True)
        self.tied = nn.Embedding(101, 16, sparse=True)
        self.signed = nn.Embedding(67, 5, sparse=True)
        self.crowded = nn.Embedding(11, 8, sparse=True)
        self.never = nn.Embedding(23, 3, sparse=True)
        self.head = nn.Linear(17 + 65 + 16 + 8, 4)

    def forward(self, x):
        mode, words = int(x[0, 0]), x[:, 1:]
        tied = self.tied(words % 101).mean(1)
        parts = [self.words(words).mean(1), self.bag(words % 257), tied, self.crowded(words % 11).mean(1)]
        logits = self.head(torch.cat(parts, dim=1))
        if mode & 4:
            penalty = (self.signed.weight * -0.0).sum()
        else:
            penalty = (self.signed(words[:, :3] % 67) * -0.0).sum()
        if mode & 1:
            penalty = penalty + self.rare(words[:, :2] % 53).square().sum()
        if mode & 2:
            penalty = penalty + (tied @ self.tied.weight.T).square().mean()
        if mode & 8:
            penalty = penalty + self.rare(words[:, :0]).sum()
        return logits, penalty


FLATS = [[f"{name}.weight"] for name in ("words", "bag", "rare", "tied", "signed", "crowded", "never")]
FLATS += [["head.weight", "head.bias"]]


def data() -> TensorDataset:
    """Words that repeat, and modes: some lanes use a weight densely; the first step has no row of `signed`."""
    generator = torch.Generator().manual_seed(3)
    x = (torch.rand(SAMPLES, 12, generator=generator) ** 3 * 1009).long()
    for sample in range(SAMPLES):
        step, lane = sample // (2 * LANES), sample % (2 * LANES) // 2
        x[sample, 0] = 4 if step == 0 else (lane * 5 + step) % 16
    return TensorDataset(x, torch.randint(0, 4, (SAMPLES,), generator=generator))


@dataclass(frozen=True)
class Trial(Cell):
    """What one run trains, and where."""

    precision: str = "fp32"
    optimizer: str = "SGD"
    micro_batches: int = 1
    clip: float | None = None

    def make(self, parameters) -> torch.optim.Optimizer:
        more = {"momentum": 0.9} if self.optimizer == "SGD" else {}
        return getattr(torch.optim, self.optimizer)(parameters, lr=0.1, foreach=False, **more)


def build() -> Rows:
    torch.manual_seed(11)
    return Rows()


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    logits, penalty = model(x)
    return F.cross_entropy(logits.float(), y) + penalty.float()


@cache
def plain(precision: str, optimizer: str, micro_batches: int, clip: float | None) -> tuple[list, Reference]:
    torch.set_num_threads(1)
    trial = Trial(1, "ddp", precision=precision, optimizer=optimizer)
    model = build()
    masters = {}
    if precision == "bf16":
        masters = {name: p.detach().clone() for name, p in model.named_parameters()}
        model.bfloat16()
    made = trial.make([masters.get(name, p) for name, p in model.named_parameters()])
    reference = Reference(model, made, LANES, 0, FLATS, masters)
    loader = make_loader(data(), 16, LANES, 0, micro_batches, False, False, 0, None, "uniform", None)
    seen = []
    for step in range(STEPS):

        def losses(lane: int, step: int = step):
            for portion in loader.portions(step, lane):
                yield loss_of(model, *data()[list(portion.samples)]), portion.share, portion.share

        seen.append((reference.step(step, losses, clip), reference.grad_norm))
    return seen, reference


def equals_plain_loop(trial: Trial) -> tuple[str, ...]:
    """Train, and compare with the plain loop; returns the digest after every step."""
    seen, reference = plain(trial.precision, trial.optimizer, trial.micro_batches, trial.clip)
    run = trial.start(lanes=LANES, precision=trial.precision, micro_batches=trial.micro_batches)
    model = build()
    run.prepare(model, trial.make(model.parameters()))
    digests = []
    for step in run.steps(run.loader(data(), batch_size=16), total=STEPS):
        for x, y in step:
            step.backward(loss_of(model, x, y))
        step.update(clip=trial.clip)
        assert (step.loss, step.grad_norm) == seen[step.index]
        digests.append(run.digest())
    compare(run, model, reference)
    compare_signs(run, reference)
    run.close()
    return tuple(digests)


def compare_signs(run, reference):
    """Zeros that are equal may still differ in their sign."""
    sliced = run.engine.committer.optimizer
    for piece in sliced.slices:
        whole = reference.updated(piece.name)
        cut = slice(piece.part.start, piece.part.stop)
        pairs = [(piece.tensor, whole)]
        if "momentum_buffer" in (state := sliced.state_of(piece)):
            pairs.append((state["momentum_buffer"], reference.optimizer.state[whole]["momentum_buffer"]))
        for found, wanted in pairs:
            assert torch.equal(found.signbit(), wanted.detach().reshape(-1)[cut].signbit()), piece.name


def test_every_world_strategy_and_transport():
    trials = [Trial(c.world, c.strategy, c.exchange, clip=0.3) for c in grid([1, 2, 3, 5])]
    assert len(set(same_on_ranks(trials, equals_plain_loop))) == 1


def test_precisions_micro_batches_and_uneven_hosting():
    kinds = [
        {"precision": "bf16", "optimizer": "Adam"},
        {"micro_batches": 2},
        {"optimizer": "Adagrad", "hosting": (3, 0, 5)},
        {"precision": "bf16", "clip": 0.1, "hosting": (1, 6, 1)},
    ]
    trials = [Trial(1, "zero3", "gloo", **{**kind, "hosting": "even"}) for kind in kinds]
    for strategy in STRATEGIES:
        for transport in TRANSPORTS:
            trials += [Trial(3, strategy, transport, **kind) for kind in kinds]
    digests = same_on_ranks(trials, equals_plain_loop)
    for number in range(len(kinds)):
        assert len(set(digests[number :: len(kinds)])) == 1, kinds[number]


VOCABULARY, COLUMNS = 20_011, 12


@dataclass(frozen=True)
class Traffic(Cell):
    """What one run sends."""

    is_sparse: bool = True
    rows: int = VOCABULARY
    words: int = 24
    """How many a lane uses, some of them twice."""


def count_gradient_bytes(run) -> list[int]:
    """Count what this rank sends of gradients, and of the numbers of rows, in all."""
    sent = [0]
    transport = run._transport
    plain_open, plain_gather, plain_share = transport.open, transport.gather, transport.share

    def counted_open(board, outgoing, incoming, where, *rest):
        assert where.startswith("the exchange of gradients")
        sent[0] += sum(tensor.nbytes for item in outgoing for tensor in item.tensors)
        return plain_open(board, outgoing, incoming, where, *rest)

    def counted_gather(whole, spans, where, *rest):
        low, high = spans[run.rank] if "gradients" in where else (0, 0)
        sent[0] += whole[low:high].nbytes * (run.world_size - 1)
        return plain_gather(whole, spans, where, *rest)

    def counted_share(values, where):
        sent[0] += values.nbytes * (run.world_size - 1) * ("rows" in where)
        return plain_share(values, where)

    transport.open, transport.gather, transport.share = counted_open, counted_gather, counted_share
    return sent


def train_words(cell: Traffic) -> tuple[int, int, str]:
    """The bytes of gradients that this rank sent in a step, the most that it made dense, and the digest."""
    run = cell.start(lanes=LANES)
    torch.manual_seed(5)
    model = nn.Embedding(cell.rows, COLUMNS, sparse=cell.is_sparse)
    run.prepare(model, torch.optim.Adam(model.parameters()))
    sent = count_gradient_bytes(run)
    most = 0
    plain_spread = sparse.Band.spread

    def noted_spread(band, rows, values):
        nonlocal most
        most = max(most, band.span[1] - band.span[0])
        return plain_spread(band, rows, values)

    sparse.Band.spread = noted_spread
    words = (
        torch.rand(LANES, cell.words, generator=torch.Generator().manual_seed(2)) ** 2 * cell.rows
    ).long()
    try:
        for step in run.steps(run.loader(words, batch_size=LANES), total=1):
            for x in step:
                step.backward(model(x).square().sum())
            step.update()
    finally:
        sparse.Band.spread = plain_spread
    digest = run.digest()
    run.close()
    return sent[0], most, digest


def test_fewer_bytes_are_sent():
    """Rows where they are few; just as many bytes, and the numbers of rows, where they are not."""
    for rows, words in ((VOCABULARY, 24), (85, 1000)):
        cells = [Traffic(3, strategy, "gloo", rows=rows, words=words) for strategy in STRATEGIES]
        cells += [Traffic(1, "zero3", "gloo", rows=rows, words=words)]
        cells += [replace(cell, is_sparse=False) for cell in cells]
        found = on_ranks(cells, train_words)
        assert len({digest for by_rank in found for _, _, digest in by_rank}) == 1
        totals = [sum(sent for sent, _, _ in by_rank) for by_rank in found]
        for cell, by_rows, dense in zip(cells, totals[:5], totals[5:], strict=False):
            numbers = 3 * 2 * 3 * 2 * 4 * (LANES if cell.strategy in ("zero2", "zero3") else 2)
            if cell.world == 1:
                assert by_rows == dense == 0
            elif rows == VOCABULARY:
                assert 0 < by_rows < dense / 20, (cell, by_rows, dense)
            else:
                assert dense <= by_rows <= dense + numbers, (cell, by_rows, dense)


def train_to_a_bad_row(cell: Cell) -> tuple[str, dict[int, list[str]]]:
    """The error of a step in which one lane's gradient is infinite in one row, and what a proof would record."""
    run = cell.start(lanes=LANES)
    model = build()
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    seen = []
    run.engine.collector.observer = lambda report, flat, gradients: seen.extend(
        describe(gradient) for gradient in gradients if gradient is not None
    )
    recorded = {}
    for step in run.steps(run.loader(data(), batch_size=16), total=1):
        for x, y in step:
            factor = 1e39 if step.lane == 5 else 1.0
            step.backward(loss_of(model, x, y) + model.rare(x[0, 3] % 53).sum() * factor)
            recorded[step.lane] = list(seen)
            seen.clear()
        with pytest.raises(NonFiniteError) as caught:
            step.update()
    run.close()
    return str(caught.value), recorded


def test_a_bad_row_is_named_and_records_agree():
    cells = [
        Cell(1, "ddp"),
        *(Cell(3, strategy, "gloo") for strategy in STRATEGIES),
        Cell(3, "zero2", "shared"),
    ]
    found = on_ranks(cells, train_to_a_bad_row)
    messages = {message for by_rank in found for message, _ in by_rank}
    assert len(messages) == 1, messages
    message = messages.pop()
    assert "lane 5" in message
    assert "rare.weight" in message
    records = [{lane: r for _, of_rank in by_rank for lane, r in of_rank.items()} for by_rank in found]
    assert all(record == records[0] for record in records)


def test_no_lane_is_made_dense_as_a_whole():
    cells = [Traffic(3, strategy, transport) for strategy in ("zero2", "zero3") for transport in TRANSPORTS]
    for by_rank in on_ranks(cells, train_words):
        assert all(0 < most <= 3 * (VOCABULARY * COLUMNS / LANES + 64) for _, most, _ in by_rank)


class Loose(nn.Module):
    """A sparse gradient of a parameter that belongs to no sparse embedding, so that its flat is a dense one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(31, 6))
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor, is_sparse: bool) -> torch.Tensor:
        return self.head(F.embedding(x, self.table, sparse=is_sparse).mean(1))


def train_loose(cell: Cell, is_sparse: bool) -> str:
    run = cell.start(lanes=6)
    torch.manual_seed(0)
    model = Loose()
    run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    assert not any(flat.sparse_columns for flat in run.engine.flats)
    data = torch.randint(0, 31, (24, 5), generator=torch.Generator().manual_seed(1))
    for step in run.steps(run.loader(data, batch_size=12), epochs=1):
        for x in step:
            step.backward(model(x, is_sparse).square().mean())
        step.update()
    found = run.digest()
    run.close()
    return found


def test_a_sparse_gradient_in_a_dense_flat_is_made_dense():
    cells = grid([1, 3], ["ddp", "zero3"])
    assert set(same_on_ranks(cells, train_loose, True)) == set(same_on_ranks(cells, train_loose, False))
