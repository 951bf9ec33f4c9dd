"""Parameter layouts by role: shards, replicas and reductions per axis; refused layouts."""

from __future__ import annotations

import re
from typing import Any

import pytest

from shardwright.architecture import ModelShape, read_config
from shardwright.errors import LayoutError
from shardwright.layout import DimSection, Layout, ParameterLayout, PipelineStage, Shard
from shardwright.placement import build_parameter_layouts, place_model

LLAMA = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}  # fmt: skip


def get_layout(layout: Layout, name: str) -> ParameterLayout:
    return build_parameter_layouts(read_config(LLAMA), layout)[name]


def test_descriptors_list_shard_replica_and_reduction_axes() -> None:
    norm = "model.norm.weight"
    hybrid = get_layout(Layout(dp_replicate=2, dp_shard=2, zero_stage=1), norm)
    assert (hybrid.shard_axes, hybrid.replicated_axes, hybrid.reduced_axes) == (
        ("fsdp",),
        ("dp_replicate",),
        ("dp_replicate", "dp_shard"),
    )
    replicated = get_layout(Layout(dp_replicate=2), norm)
    assert (replicated.shard_axes, replicated.replicated_axes, replicated.reduced_axes) == (
        (),
        ("dp_replicate",),
        ("dp_replicate",),
    )
    alone = get_layout(Layout(), norm)
    assert (alone.shard_axes, alone.replicated_axes, alone.reduced_axes) == ((), (), ())


def test_tensor_parallel_shards_heads_and_reduces_norm_gradients() -> None:
    layout = Layout(tp=4)
    query = get_layout(layout, "model.layers.0.self_attn.q_proj.weight")
    assert query.shards == (Shard("tp", 0, (DimSection(0, 32, 4),)),)
    assert query.reduced_axes == ()
    # Two key-value heads on four ranks: neighbouring ranks share one.
    assert get_layout(layout, "model.layers.0.self_attn.k_proj.weight").shards == (
        Shard("tp", 0, (DimSection(0, 16, 2),)),
    )
    assert get_layout(layout, "model.layers.0.mlp.down_proj.weight").shards == (
        Shard("tp", 1, (DimSection(0, 48, 4),)),
    )
    norm = get_layout(layout, "model.norm.weight")
    assert (norm.shards, norm.replicated_axes, norm.reduced_axes) == ((), ("tp",), ("tp",))
    assert get_layout(Layout(tp=4, sequence_parallel=False), "model.norm.weight").reduced_axes == ()


def test_a_tied_embedding_is_on_the_first_and_the_last_stage() -> None:
    stages = [
        PipelineStage(0, 0, 0, 1, has_embedding=True, has_head=False),
        PipelineStage(1, 1, 1, 2, has_embedding=False, has_head=True),
    ]
    layouts = build_parameter_layouts(read_config(LLAMA), Layout(pp=2), stages)
    embedding = layouts["model.embed_tokens.weight"]
    assert (embedding.pp_ranks, embedding.reduced_axes) == ((0, 1), ("pp",))
    assert layouts["model.layers.1.mlp.up_proj.weight"].pp_ranks == (1,)
    assert layouts["model.norm.weight"].pp_ranks == (1,)


def make_model(**changes: Any) -> ModelShape:
    """Return a model with twelve heads and four key-value heads."""
    sizes = {
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 4,
        "hidden_size": 48,
        "intermediate_size": 96,
    }
    return read_config(
        {**LLAMA, "vocab_size": 72, "max_position_embeddings": 64, **sizes, **changes}
    )


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        ({"tp": 5}, {}, r"layout\.tp: 12 heads are not divisible by 5.*1, 2, 4, 12.*tp=4"),
        (
            {"tp": 6},
            {},
            r"4 key-value heads can neither be split evenly over 6 ranks nor be shared evenly"
            r".*1, 2, 4, 12.*tp=4",
        ),
        (
            {"tp": 4},
            {"intermediate_size": 98},
            r"98 features of the feed-forward are not divisible by 4.*1, 2\b.*tp=2",
        ),
        (
            {"tp": 12},
            {"vocab_size": 11},
            r"11 vocabulary rows leave one of 12 ranks without a row.*1, 2, 4\b",
        ),
    ],
    ids=str,
)
def test_indivisible_sizes_are_refused_with_the_numbers(
    layout: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(LayoutError) as raised:
        place_model(make_model(**changes), Layout(**layout), 24)
    assert re.search(message, str(raised.value), re.DOTALL)


def test_sequence_parallelism_requires_divisible_tokens() -> None:
    place_model(make_model(), Layout(tp=4), 24)
    with pytest.raises(
        LayoutError,
        match=r"26 tokens of a sequence are not divisible by 4.*tp=2, or .*sequence_parallel=false",
    ):
        place_model(make_model(), Layout(tp=4), 26)
    with pytest.raises(LayoutError, match=r"6 tokens of a context rank are not divisible by 4"):
        place_model(make_model(), Layout(tp=4, cp=4, cp_method="all_gather"), 24)
    place_model(make_model(), Layout(tp=4, sequence_parallel=False), 26)
