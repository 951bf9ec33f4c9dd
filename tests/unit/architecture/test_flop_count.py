"""Parameter and FLOP counts, compared with published or hand-computed numbers."""

from __future__ import annotations

import pytest

from shardwright.architecture import (
    ModelShape,
    NormalInit,
    OnesInit,
    ParameterSpec,
    ZerosInit,
    read_config,
)
from shardwright.architecture.flop_count import (
    compute_mean_visible_keys,
    count_matmul_parameters,
)
from shardwright.planner.model_costs import ModelFacts
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
GPT2_124M = {
    "model_type": "gpt2",
    "vocab_size": 50257,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_positions": 1024,
}


def test_published_parameter_counts() -> None:
    assert read_config(LLAMA3_8B).num_parameters == 8_030_261_248  # meta-llama/Meta-Llama-3-8B
    assert read_config(GPT2_124M).num_parameters == 124_439_808  # openai-community/gpt2


# Published models with experts: number of all parameters, and of the matrix elements that one
# token uses, in billions.
SPARSE = {
    "mistralai/Mixtral-8x7B-v0.1": (46_702_792_704, 12.75, {
        "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32768,
        "num_local_experts": 8,
    }),
    "allenai/OLMoE-1B-7B-0924": (6_919_161_856, 1.18, {
        "model_type": "olmoe", "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 16, "max_position_embeddings": 4096, "num_experts": 64,
        "num_experts_per_tok": 8,
    }),
    "Qwen/Qwen3-30B-A3B": (30_532_122_624, 3.04, {
        "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128, "max_position_embeddings": 40960, "num_experts": 128,
        "num_experts_per_tok": 8,
    }),
    "openai/gpt-oss-20b": (20_914_757_184, 3.61, {
        "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880,
        "intermediate_size": 2880, "num_hidden_layers": 24,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "max_position_embeddings": 131072,
        "num_local_experts": 32,
    }),
    # The published 671.03 billion leave out the 58 x 256 balance biases.
    "deepseek-ai/DeepSeek-V3": (671_026_404_352 + 58 * 256, 36.62, {
        "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "max_position_embeddings": 163840, "n_routed_experts": 256,
    }),
}  # fmt: skip


@pytest.mark.parametrize("model", SPARSE)
def test_a_token_costs_the_experts_that_it_uses(model: str) -> None:
    total, active, config = SPARSE[model]
    shape = read_config(config)
    assert shape.num_parameters == total
    num_active = count_matmul_parameters(
        shape.list_parameters(), is_tied=False, active_share=shape.active_share
    )
    assert num_active / 1e9 == pytest.approx(active, abs=0.005)
    attention = shape.count_flops_per_token(2) - 6 * num_active
    assert attention == pytest.approx(
        6 * 1.5 * (shape.query_width + shape.value_width) * shape.num_layers
    )


def test_tied_embedding_counts_once_and_positions_never() -> None:
    shape = read_config(GPT2_124M)
    blocks = 12 * 12 * 768 * 768
    assert count_matmul_parameters(shape.list_parameters(), is_tied=True) == blocks + 50257 * 768


def test_flops_of_llama_3_8b_by_hand() -> None:
    shape = read_config(LLAMA3_8B)
    matrices = 8_030_261_248 - 128256 * 4096 - 65 * 4096
    attention = 32 * 12 * 4096 * (8192 + 1) / 2
    assert shape.count_flops_per_token(8192) == pytest.approx(6 * matrices + attention, rel=1e-12)


def test_matrices_are_counted_once_for_rows_of_all_lengths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of real data have hundreds of lengths, and a large model thousands of parameters."""
    shape = read_config(LLAMA3_8B)
    lengths = range(100, 8192, 100)
    expected = [shape.count_flops_per_token(length) for length in lengths]
    facts = ModelFacts(shape)
    calls = []
    original = ModelShape.list_parameters

    def count_calls(counted: ModelShape) -> tuple[ParameterSpec, ...]:
        calls.append(counted)
        return original(counted)

    monkeypatch.setattr(ModelShape, "list_parameters", count_calls)
    assert [facts.compute_flops_per_token(length) for length in lengths] == expected
    assert 0 < len(calls) <= 2


@pytest.mark.parametrize("window", [None, 1, 3, 7, 8, 100])
def test_mean_visible_keys_equal_a_count(window: int | None) -> None:
    length = 8
    visible = [min(i + 1, window or length) for i in range(length)]
    assert compute_mean_visible_keys(length, window) == pytest.approx(sum(visible) / length)


def test_initial_values_by_family() -> None:
    gpt2 = {spec.name: spec.init for spec in read_config(CASES["gpt2"]).list_parameters()}
    assert gpt2["transformer.h.0.attn.c_proj.weight"] == NormalInit(0.02 / 6**0.5)
    assert gpt2["transformer.h.0.mlp.c_proj.weight"] == NormalInit(0.02 / 6**0.5)
    assert gpt2["transformer.h.0.attn.c_attn.weight"] == NormalInit(0.02)
    assert gpt2["transformer.h.0.attn.c_attn.bias"] == ZerosInit()
    assert gpt2["transformer.ln_f.weight"] == OnesInit()
    gemma = {spec.name: spec.init for spec in read_config(CASES["gemma2"]).list_parameters()}
    assert gemma["model.norm.weight"] == ZerosInit()
    padded = {
        spec.name: spec.init for spec in read_config(CASES["llama-padding-row"]).list_parameters()
    }
    assert padded["model.embed_tokens.weight"] == NormalInit(0.02, zero_row=5)
