"""Selection of the weights that a folder stores in 8 bits: models, widths and patterns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwright.architecture import ModelShape, read_config
from shardwright.errors import InputError
from shardwright.model.hf.fp8_weights import select_fp8_weights

WIDE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
NARROW = WIDE | {"intermediate_size": 160}
GPT2 = {"model_type": "gpt2", "n_embd": 128, "n_head": 2, "n_layer": 1, "n_positions": 32}
GPT_OSS = WIDE | {
    "model_type": "gpt_oss",
    "head_dim": 64,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "sliding_window": 8,
}
QWEN3_MOE = WIDE | {
    "model_type": "qwen3_moe",
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 128,
}


def make_shape(config: dict[str, Any]) -> ModelShape:
    return read_config({"vocab_size": 40, **config})


@pytest.mark.parametrize(
    ("config", "name_of_format", "exclude", "message"),
    [
        (WIDE, "fp8", (), "fp8-block, fp8-row"),
        (NARROW, "fp8-block", (), "mlp.gate_proj.weight is 160 x 128.*fp8-row"),
        (WIDE, "fp8-block", ("lm_head*",), "matches no weight"),
        (WIDE, "fp8-row", ("*",), "every weight is excluded"),
        (GPT2, "fp8-row", (), "gpt2 stores matrices with inputs as rows"),
        (GPT_OSS, "fp8-block", (), "gpt_oss stores all experts of a layer in one tensor"),
    ],
)
def test_wrong_input_is_refused(
    config: dict[str, Any], name_of_format: str, exclude: tuple[str, ...], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        select_fp8_weights(make_shape(config), name_of_format, exclude)


def test_excluded_weights_need_no_whole_blocks() -> None:
    weights = select_fp8_weights(make_shape(NARROW), "fp8-block", ("*.mlp.*",))
    assert {name.split(".")[3] for name in weights.names} == {"self_attn"}
    assert weights.build_config()["modules_to_not_convert"] == [
        "lm_head",
        "model.layers.0.mlp.down_proj",
        "model.layers.0.mlp.gate_proj",
        "model.layers.0.mlp.up_proj",
    ]
    assert select_fp8_weights(make_shape(NARROW), "fp8-row").plain_modules == ("lm_head",)


def test_a_tied_head_is_named_though_it_has_no_tensor() -> None:
    """Readers quantise every linear module that the list does not name."""
    shape = make_shape(WIDE | {"tie_word_embeddings": True})
    assert select_fp8_weights(shape, "fp8-row").plain_modules == ("lm_head",)


def test_routers_and_heads_stay_in_high_precision() -> None:
    weights = select_fp8_weights(make_shape(QWEN3_MOE), "fp8-row")
    assert weights.plain_modules == ("lm_head", "model.layers.0.mlp.gate")
    assert "model.layers.0.mlp.experts.1.up_proj.weight" in weights.names
    assert weights.build_config()["ignore"] == list(weights.plain_modules)


@pytest.mark.parametrize("name_of_format", ["fp8-block", "fp8-row"])
def test_rounded_values_are_near_and_fixed(name_of_format: str) -> None:
    """Rounding changes a value by at most 1/16 of it, or half of the smallest code."""
    weights = select_fp8_weights(make_shape(WIDE), name_of_format)
    matrix_NK = torch.randn(256, 384, generator=torch.Generator().manual_seed(0))
    matrix_NK[130:, :200] *= 1e-3
    codes_NK, scales = weights.quantise(matrix_NK)
    assert tuple(scales.shape) == weights.compute_scales_shape(matrix_NK.shape)
    rounded_NK = weights.round(matrix_NK)
    size = [each // num for each, num in zip(codes_NK.shape, scales.shape, strict=True)]
    steps_NK = scales.repeat_interleave(size[0], 0).repeat_interleave(size[1], 1) * 2.0**-10
    limit_NK = torch.maximum(matrix_NK.abs() / 16, steps_NK)
    assert bool(((rounded_NK - matrix_NK).abs() <= limit_NK * (1 + 1e-6)).all())
