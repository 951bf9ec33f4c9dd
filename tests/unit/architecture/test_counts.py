"""Counts against numbers published or computed by hand."""

from __future__ import annotations

import pytest

from shardwright.architecture import Normal, Ones, Zeros, read_config
from shardwright.architecture.count import matmul_parameters, mean_visible_keys, parameters_by_part
from tests.reference.cases import CASES

LLAMA3_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
GPT2_124M = {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}


def test_published_parameter_counts() -> None:
    assert read_config(LLAMA3_8B).num_parameters == 8_030_261_248  # meta-llama/Meta-Llama-3-8B
    assert read_config(GPT2_124M).num_parameters == 124_439_808  # openai-community/gpt2


def test_parts_add_up() -> None:
    for case in CASES.values():
        shape = read_config(case)
        parts = parameters_by_part(shape.parameters())
        assert sum(parts.values()) == shape.num_parameters
        assert (parts["head"] == 0) == shape.tied_embeddings


def test_tied_embedding_is_multiplied_once_and_positions_never() -> None:
    shape = read_config(GPT2_124M)
    blocks = 12 * 12 * 768 * 768
    assert matmul_parameters(shape.parameters(), tied=True) == blocks + 50257 * 768


def test_flops_of_llama_3_8b_by_hand() -> None:
    shape = read_config(LLAMA3_8B)
    matrices = 8_030_261_248 - 128256 * 4096 - 65 * 4096
    attention = 32 * 12 * 4096 * (8192 + 1) / 2
    assert shape.flops_per_token(8192) == pytest.approx(6 * matrices + attention, rel=1e-12)


@pytest.mark.parametrize("window", [None, 1, 3, 7, 8, 100])
def test_visible_keys_by_counting(window: int | None) -> None:
    length = 8
    seen = [min(i + 1, window or length) for i in range(length)]
    assert mean_visible_keys(length, window) == pytest.approx(sum(seen) / length)


def test_initial_values_by_family() -> None:
    gpt2 = {spec.name: spec.init for spec in read_config(CASES["gpt2"]).parameters()}
    assert gpt2["transformer.h.0.attn.c_proj.weight"] == Normal(0.02 / 6**0.5)
    assert gpt2["transformer.h.0.mlp.c_proj.weight"] == Normal(0.02 / 6**0.5)
    assert gpt2["transformer.h.0.attn.c_attn.weight"] == Normal(0.02)
    assert gpt2["transformer.h.0.attn.c_attn.bias"] == Zeros()
    assert gpt2["transformer.ln_f.weight"] == Ones()
    gemma = {spec.name: spec.init for spec in read_config(CASES["gemma2"]).parameters()}
    assert gemma["model.norm.weight"] == Zeros()
    padded = {spec.name: spec.init for spec in read_config(CASES["llama-padding-row"]).parameters()}
    assert padded["model.embed_tokens.weight"] == Normal(0.02, zero_row=5)
