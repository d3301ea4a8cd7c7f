"""Models of Hugging Face `transformers`, as they come: the bits of a plain loop, by every world and strategy."""

from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
from torch.utils.data import default_collate

pytest.importorskip("transformers", reason="needs transformers, which is installed for development only")

from lanewise.engine import hashing
from lanewise.errors import ShardedParameterError
from tests.helpers import plain
from tests.helpers.cases import Cell, on_ranks
from tests.helpers.hugging import MODELS, VOCABULARY

LANES, STEPS, EACH = 4, 3, 2


@dataclass(frozen=True)
class ModelCell(Cell):
    model: str = ""
    change: str = ""


CHANGES = {
    "": lambda model: None,
    "checkpointed": lambda model: model.activation_checkpointing_enable(),
    "reentrant": lambda model: model.activation_checkpointing_enable({"use_reentrant": True}),
    "eager": lambda model: model.set_attn_implementation("eager"),
    "undropped": lambda model: undrop(model),
    "undropped, checkpointed": lambda model: (undrop(model), model.activation_checkpointing_enable()),
}
EVERYWHERE = [
    ModelCell(1, "ddp"),
    ModelCell(3, "ddp", "gloo"),
    ModelCell(2, "zero1", "gloo"),
    ModelCell(3, "zero1", "shared"),
    ModelCell(3, "zero2", "gloo"),
    ModelCell(2, "zero2", "shared"),
    ModelCell(2, "zero3", "gloo"),
    ModelCell(3, "zero3", "gloo"),
    ModelCell(3, "zero3", "shared"),
]
ALONE, SHARDED = ModelCell(1, "ddp"), ModelCell(3, "zero3", "gloo")
CHANGED = [
    replace(ALONE, model="llama"),
    replace(SHARDED, model="llama", change="checkpointed"),
    replace(SHARDED, model="llama", change="reentrant"),
    replace(ALONE, model="gpt2", change="undropped"),
    replace(SHARDED, model="gpt2", change="undropped, checkpointed"),
    *(replace(cell, model=name, change="eager") for name in ("llama", "t5") for cell in (ALONE, SHARDED)),
]


def undrop(model):
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0


def samples(cell):
    return MODELS[cell.model].samples(LANES * STEPS * EACH)


def built(cell):
    model = MODELS[cell.model].build()
    CHANGES[cell.change](model)
    return model


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def values(model):
    return {name: hashing.of([p]).hex() for name, p in model.named_parameters()}


def train(cell):
    """Train; alone, compare with a plain loop too. Returns the digest after every step."""
    run = cell.start(lanes=LANES)
    model, _ = run.prepare(model := built(cell), adamw(model))
    absent = Counter()

    def observe(lane, flat, gradients):
        absent.update(name for name, g in zip(flat.names, gradients, strict=True) if g is None)

    run.engine.collector.observer = observe
    digests = []
    for step in run.steps(run.loader(samples(cell), batch_size=LANES * EACH), total=STEPS):
        for batch in step:
            step.backward(model(**batch).loss)
        step.update()
        digests.append(run.digest())
    if cell.world == 1:
        expected = built(cell)
        plain.train(
            expected,
            adamw,
            lambda model, part, lane: model(**default_collate(part)).loss,
            samples(cell),
            LANES,
            STEPS,
        )
        found, expected = values(model), values(expected)
        assert found == expected, [name for name in found if found[name] != expected[name]]
        kind = MODELS[cell.model].absent
        assert all(kind and kind in name for name in absent), absent
        assert not kind or any(0 < count < LANES * STEPS for count in absent.values())
    run.close()
    return digests


def digests_of(cells):
    """For each cell what its ranks found, which must be the same."""
    found = []
    for cell, by_rank in zip(cells, on_ranks(cells, train), strict=True):
        assert all(digests == by_rank[0] for digests in by_rank), (cell, by_rank)
        found.append((cell, by_rank[0]))
    return found


def test_every_world_and_strategy():
    cells = [replace(cell, model=name) for name in MODELS for cell in EVERYWHERE]
    first = {}
    for cell, digests in digests_of(cells):
        assert digests == first.setdefault(cell.model, digests), cell
    assert len({tuple(digests) for digests in first.values()}) == len(MODELS)


def test_checkpointing_and_attention():
    first = {}
    for cell, digests in digests_of(CHANGED):
        kind = cell.change.split(",")[0].replace("checkpointed", "").replace("reentrant", "")
        assert digests == first.setdefault((cell.model, kind), digests), cell
    assert len(first) == 4


def save(cell, folder):
    """Train a step, save, load and generate."""
    run = cell.start(lanes=LANES)
    model, _ = run.prepare(model := built(cell), adamw(model))
    for step in run.steps(run.loader(samples(cell), batch_size=LANES * EACH), total=1):
        for batch in step:
            step.backward(model(**batch).loss)
        step.update()
    with pytest.raises(ShardedParameterError, match=r"Touch it inside `with run\.gathered\(model\):`"):
        hashing.of(model.state_dict().values())
    with pytest.raises(ShardedParameterError):
        model.save_pretrained(folder / f"{cell.model} of {run.rank}")
    with run.gathered(model):
        model.save_pretrained(folder / cell.model, is_main_process=run.rank == 0)
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        said = generated(model)
    run.digest()
    run.close()
    if run.rank:
        return said
    loaded = type(model).from_pretrained(folder / cell.model)
    assert kept.keys() == loaded.state_dict().keys()
    assert all(torch.equal(kept[name], value) for name, value in loaded.state_dict().items())
    assert generated(loaded) == said
    return said


def generated(model):
    if not model.can_generate():
        return None
    model.eval()
    tokens = torch.arange(1, 9).view(2, 4) % VOCABULARY
    return model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=4, do_sample=False, pad_token_id=0
    ).tolist()


def test_saved_loaded_and_generated(tmp_path):
    cells = [replace(SHARDED, world=2, model=name) for name in MODELS]
    for cell, by_rank in zip(cells, on_ranks(cells, save, tmp_path), strict=True):
        assert by_rank[0] == by_rank[1], cell
        assert (by_rank[0] is None) == (cell.model in ("bert", "vit")), cell
