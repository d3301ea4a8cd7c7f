"""Small models of Hugging Face `transformers` from random configurations, their data, and the units in them."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import nn
from transformers.utils import logging

logging.disable_progress_bar()
logging.set_verbosity_error()

VOCABULARY, LENGTH, PIXELS, CLASSES = 128, 12, 16, 5
WIDE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "num_layers": 3}


@dataclass(frozen=True)
class Hugging:
    """A model of a library that knows nothing of ours."""

    kind: str
    config: dict[str, Any]
    units: tuple[str, ...]
    """What the units' names begin with; each has three."""
    tied: tuple[str, str] | None = None
    """Two names of one parameter."""
    absent: str = ""
    """What stands in the names of parameters that some lanes give no gradient to."""
    samples: Callable[[int], list[dict[str, torch.Tensor]]] = lambda count: texts(count)

    def build(self) -> nn.Module:
        """The model, ready to be trained."""
        kind = getattr(transformers, self.kind)
        torch.manual_seed(3)
        return kind(kind.config_class(**self.config)).train()


def texts(count: int) -> list[dict[str, torch.Tensor]]:
    """Texts of unlike length, padded."""
    generator = torch.Generator().manual_seed(1)
    samples = []
    for number in range(count):
        tokens = torch.randint(1, VOCABULARY, (LENGTH,), generator=generator)
        is_token = torch.arange(LENGTH) < LENGTH // 2 + number % (LENGTH // 2 + 1)
        samples.append(
            {
                "input_ids": tokens * is_token,
                "attention_mask": is_token.long(),
                "labels": tokens.masked_fill(~is_token, -100),
            }
        )
    return samples


def images(count: int) -> list[dict[str, torch.Tensor]]:
    """Images, with a class each."""
    pixels = torch.randn(count, 3, PIXELS, PIXELS, generator=torch.Generator().manual_seed(1))
    return [{"pixel_values": pixels[n], "labels": torch.tensor(n % CLASSES)} for n in range(count)]


MODELS = {
    "gpt2": Hugging(
        "GPT2LMHeadModel",
        {
            "vocab_size": VOCABULARY,
            "n_positions": 32,
            "n_embd": 32,
            "n_layer": 3,
            "n_head": 4,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        ("transformer.h",),
        ("transformer.wte.weight", "lm_head.weight"),
    ),
    "llama": Hugging("LlamaForCausalLM", {**WIDE, "num_key_value_heads": 2}, ("model.layers",)),
    "mixtral": Hugging(
        "MixtralForCausalLM",
        {**WIDE, "num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": True},
        ("model.layers",),
    ),
    "bert": Hugging(
        "BertForMaskedLM",
        {**WIDE, "max_position_embeddings": 32},
        ("bert.encoder.layer",),
        ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
    ),
    "vit": Hugging(
        "ViTForImageClassification",
        {**WIDE, "image_size": PIXELS, "patch_size": 4, "num_labels": CLASSES},
        ("vit.layers",),
        samples=images,
    ),
    "t5": Hugging(
        "T5ForConditionalGeneration",
        {**T5, "decoder_start_token_id": 0},
        ("encoder.block", "decoder.block"),
        ("shared.weight", "lm_head.weight"),
    ),
    "switch": Hugging(
        "SwitchTransformersForConditionalGeneration",
        {
            **T5,
            "num_decoder_layers": 3,
            "num_experts": 16,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "decoder_start_token_id": 0,
        },
        ("encoder.block", "decoder.block"),
        ("shared.weight", "lm_head.weight"),
        absent=".experts.",
    ),
}
"""The last one has a module for each expert, which runs where tokens come to it; Mixtral's experts are one tensor."""
