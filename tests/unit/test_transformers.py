"""Which units are found in models of Hugging Face `transformers`, and where tied and shared parameters stand."""

import pytest

pytest.importorskip("transformers", reason="needs transformers, which is installed for development only")

from lanewise.engine.find import check_model, find_units
from tests.helpers.hugging import MODELS

IN_THE_ROOT = {
    "gpt2": {
        "transformer.wte.weight",
        "transformer.wpe.weight",
        "transformer.ln_f.weight",
        "transformer.ln_f.bias",
    },
    "llama": {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"},
    "mixtral": {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"},
    "t5": {"shared.weight", "encoder.final_layer_norm.weight", "decoder.final_layer_norm.weight"},
}


@pytest.mark.parametrize("name", MODELS)
def test_units_are_the_blocks(name):
    kind = MODELS[name]
    model = kind.build()
    check_model(model)
    root, *blocks = find_units(model)
    assert [unit.name for unit in blocks] == [f"{prefix}.{n}" for prefix in kind.units for n in range(3)]
    assert len({type(unit.module) for unit in blocks}) == 1
    for unit in blocks:
        assert [p for _, p in unit.parameters] == list(unit.module.parameters())
        assert all(key.startswith(f"{unit.name}.") for key, _ in unit.parameters)
    if name in IN_THE_ROOT:
        assert {key for key, _ in root.parameters} == IN_THE_ROOT[name]


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_stands_once_and_tied_ones_in_the_root(name):
    kind = MODELS[name]
    model = kind.build()
    units = find_units(model)
    everything = [id(p) for unit in units for _, p in unit.parameters]
    assert len(everything) == len(set(everything))
    assert set(everything) == {id(p) for p in model.parameters()}
    if kind.tied is None:
        return
    names = dict(model.named_parameters(remove_duplicate=False))
    first, second = (names[key] for key in kind.tied)
    assert first is second
    assert id(first) in {id(p) for _, p in units[0].parameters}


def test_a_bias_that_all_blocks_use_belongs_to_the_one_that_computes_it():
    units = {unit.name: dict(unit.parameters) for unit in find_units(MODELS["t5"].build())}
    for prefix in ("encoder", "decoder"):
        bias = f"{prefix}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        assert bias in units[f"{prefix}.block.0"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mixtral", ["model.layers.0", "model.layers.1", "model.layers.2"]),
        ("switch", ["encoder.block.1", "decoder.block.1"]),
    ],
)
def test_experts_are_part_of_their_block(name, expected):
    units = find_units(MODELS[name].build())
    assert [u.name for u in units if any(".experts." in key for key, _ in u.parameters)] == expected
