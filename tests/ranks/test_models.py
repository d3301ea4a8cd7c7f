"""Every trait a model may have: trained to the bits of a plain PyTorch loop, by every world and strategy."""

from dataclasses import dataclass, replace

import pytest
import torch

from lanewise import errors
from lanewise.engine import hashing
from lanewise.errors import DivergedError, PeerLostError
from tests.helpers import plain
from tests.helpers.cases import Cell, on_ranks
from tests.helpers.traits import TRAITS, WIDTH

LANES, STEPS = 5, 2


@dataclass(frozen=True)
class TraitCell(Cell):
    trait: str = ""


ALWAYS = [TraitCell(1, "zero3", "gloo"), TraitCell(3, "zero3", "gloo")]
"""Where most can go wrong: values come and go."""
IN_TURN = [
    TraitCell(3, "ddp", "shared"),
    TraitCell(5, "zero2", "shared"),
    TraitCell(3, "zero1", "gloo"),
    TraitCell(5, "zero3", "shared"),
    TraitCell(2, "zero2", "gloo"),
    TraitCell(3, "ddp", "gloo"),
    TraitCell(2, "zero1", "shared"),
]
"""Each trait meets two of these."""


def data():
    return torch.arange(LANES * STEPS * 4 * WIDTH, dtype=torch.float32).reshape(-1, WIDTH).sin()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5, foreach=False)


def values(model):
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: hashing.of([t]).hex() for name, t in tensors.items()}


def made(trait):
    torch.manual_seed(3)
    return trait.build()


def train(cell):
    """Train, and compare with a plain loop; returns the digest."""
    trait = TRAITS[cell.trait]
    run = cell.start(lanes=LANES, timeout=20.0)
    model = made(trait)
    first = values(model)
    optimizer = (trait.optimizer or sgd)(model)
    run.prepare(model, optimizer, units=trait.units)
    loader = run.loader(data(), batch_size=4 * LANES)
    is_sharded = (cell.strategy, cell.exchange) == ("zero3", "gloo")
    is_alone = cell.world == 1 and trait.refused is DivergedError
    if trait.always or (trait.refused and is_sharded and not is_alone):
        with pytest.raises((trait.refused, PeerLostError)) as caught:
            steps(run, trait, model, loader)
        run.close()
        return caught.type.__name__
    steps(run, trait, model, loader)
    with run.gathered(model):
        found = values(model)
    digest = run.digest()
    run.close()
    check(trait, first, found)
    return digest


def steps(run, trait, model, loader):
    for step in run.steps(loader, total=STEPS):
        trait.before_step(model, step.index)
        for x in step:
            model.lane = step.lane
            step.backward(trait.loss(model, x))
        step.update()


def check(trait, first, found):
    model = made(trait)

    def loss(model, x, lane):
        model.lane = lane
        return trait.loss(model, x)

    plain.train(model, trait.optimizer or sgd, loss, data(), LANES, STEPS, before_step=trait.before_step)
    expected = values(model)
    assert found == expected, [name for name in found if found[name] != expected[name]]
    for name, _ in model.named_parameters():
        assert (found[name] == first[name]) is name.startswith(trait.still or ("-",)), name


def test_traits():
    cells = []
    for number, name in enumerate(TRAITS):
        turns = [IN_TURN[(2 * number + n) % len(IN_TURN)] for n in range(2)]
        cells += [replace(cell, trait=name) for cell in (*ALWAYS, *turns)]
    digests = {}
    for cell, by_rank in zip(cells, on_ranks(cells, train), strict=True):
        if "Error" in "".join(by_rank):
            kind = TRAITS[cell.trait].refused
            assert any(issubclass(getattr(errors, name), kind) for name in by_rank), (cell, by_rank)
        else:
            assert set(by_rank) == {digests.setdefault(cell.trait, by_rank[0])}, (cell, by_rank)
    assert digests.keys() == {name for name, trait in TRAITS.items() if not trait.always}


def count_traffic(run):
    """Count the bytes that this rank sends in exchanges of gradients and in gathers, by unit."""
    sent = {}
    transport = run._transport
    plain_open, plain_gather = transport.open, transport.gather

    def note(where, tensors):
        key = where.rsplit(" ", 1)[-1]
        sent[key] = sent.get(key, 0) + sum(tensor.nbytes for tensor in tensors)

    def counted_open(board, outgoing, incoming, where, *rest):
        note(where, [tensor for item in outgoing for tensor in item.tensors])
        return plain_open(board, outgoing, incoming, where, *rest)

    def counted_gather(whole, spans, where, *rest):
        low, high = spans[run.rank]
        note(where, [whole[low:high]] * (run.world_size - 1))
        return plain_gather(whole, spans, where, *rest)

    transport.open, transport.gather = counted_open, counted_gather
    return sent


def train_low_rank(cell):
    """What frozen parameters cost: their memory, and in zero3 their gathers."""
    run = cell.start(lanes=LANES)
    trait = TRAITS["LowRank"]
    model = made(trait)
    run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    sent = count_traffic(run)
    steps(run, trait, model, run.loader(data(), batch_size=4 * LANES))
    trainable = sum(f.layout.length * 4 for f in run.engine.flats if f.trainable)
    memory = run.memory()
    states = len(run.engine.committer.optimizer.optimizer.state)
    run.close()
    return sent, memory, trainable, states


def test_frozen_parameters_cost_no_state_and_no_gradient_traffic():
    cells = [TraitCell(1, "ddp"), TraitCell(2, "zero1", "gloo"), TraitCell(2, "zero2", "gloo")]
    for cell, by_rank in zip(cells, on_ranks(cells, train_low_rank), strict=True):
        for sent, memory, trainable, states in by_rank:
            assert sent.keys() <= {"blocks.0", "blocks.1", "blocks.2"}
            assert memory["optimizer"] <= 2 * trainable + 100
            assert memory["parameters"] > 3 * trainable // 2
            assert states <= 6 * (1 if cell.world == 1 else 2)
        if cell.world > 1:
            lanes_sent = {"zero1": 2, "zero2": LANES}[cell.strategy]
            total = sum(sum(sent.values()) for sent, *_ in by_rank)
            gathers = by_rank[0][2]
            assert total <= STEPS * (lanes_sent * trainable + gathers), (cell, total, trainable)
            assert total > STEPS * gathers
