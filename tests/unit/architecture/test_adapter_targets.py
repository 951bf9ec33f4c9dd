"""Adapter targets, shapes and initial values, and refused adapter sections."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwright.architecture import ModelShape, UniformInit, read_config
from shardwright.architecture.adapter_targets import add_adapters, choose_modules
from shardwright.config.adapter_section import AdapterSection
from shardwright.config.recipe_loading import validate_recipe
from shardwright.errors import RecipeError, WeightsError
from shardwright.layout import DimSection, Layout, Shard
from shardwright.placement import build_parameter_layouts
from tests.reference.cases import CASES

LLAMA = read_config(CASES["llama-padding-row"])
MOE = read_config(CASES["qwen3_moe"])


def list_adapter_shapes(shape: ModelShape, **section: Any) -> dict[str, tuple[int, ...]]:
    adapted = add_adapters(shape, AdapterSection.model_validate(section))
    return {
        spec.name: spec.shape for spec in adapted.list_parameters() if spec.adapter_part is not None
    }


def test_every_projection_has_an_adapter_by_default() -> None:
    suffixes = {name.rpartition(".")[2] for name in choose_modules(MOE, None)}
    assert suffixes == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"} | (
        set() if all(layer.sparse for layer in MOE.layers) else {"gate_proj", "up_proj"}
    )


def test_patterns_match_names_and_their_suffixes() -> None:
    layers = range(LLAMA.num_layers)
    assert choose_modules(LLAMA, ("q_proj",)) == {
        f"model.layers.{layer}.self_attn.q_proj" for layer in layers
    }
    assert choose_modules(LLAMA, ("model.layers.1.*",), ("mlp.*",)) == {
        f"model.layers.1.self_attn.{name}_proj" for name in ("q", "k", "v", "o")
    }


def test_sizes_and_names_are_those_of_peft() -> None:
    shapes = list_adapter_shapes(MOE, rank=4, targets=("k_proj", "experts.down_proj"))
    assert MOE.experts is not None
    experts = MOE.experts.num_experts
    inner = MOE.experts.intermediate_size
    width = MOE.hidden_size
    assert shapes["model.layers.1.self_attn.k_proj.lora_A.weight"] == (4, width)
    assert shapes["model.layers.1.self_attn.k_proj.lora_B.weight"] == (MOE.kv_width, 4)
    assert shapes["model.layers.1.mlp.experts.down_proj_lora_A"] == (experts, 4, inner)
    assert shapes["model.layers.1.mlp.experts.down_proj_lora_B"] == (experts, width, 4)
    gpt2 = list_adapter_shapes(read_config(CASES["gpt2"]), kind="dora", rank=2, targets=("c_fc",))
    assert (
        gpt2["transformer.h.0.mlp.c_fc.lora_magnitude_vector"]
        == gpt2["transformer.h.0.mlp.c_fc.lora_B.weight"][:1]
    )


def test_initial_values_and_scale() -> None:
    shape = add_adapters(LLAMA, AdapterSection(rank=8, alpha=4.0, targets=("down_proj",)))
    spec = next(spec for spec in shape.list_parameters() if spec.adapter_part == "lora_A")
    assert spec.init == UniformInit(1 / math.sqrt(LLAMA.intermediate_size))
    assert shape.adapters is not None
    assert (shape.adapters.scale, replace(shape.adapters, kind="rslora").scale) == (
        0.5,
        4.0 / math.sqrt(8),
    )


def test_frozen_matrices_need_no_weight_gradient_flops() -> None:
    whole = LLAMA.count_flops_per_token(16)
    adapted = add_adapters(LLAMA, AdapterSection(rank=1)).count_flops_per_token(16)
    assert 0.66 * whole < adapted < 0.85 * whole


def test_adapters_are_sharded_with_their_matrix() -> None:
    layouts = build_parameter_layouts(
        add_adapters(LLAMA, AdapterSection(kind="dora", rank=3)), Layout(tp=2, dp_replicate=2)
    )
    query = "model.layers.0.self_attn.q_proj"
    out = "model.layers.0.self_attn.o_proj"
    whole = DimSection(0, LLAMA.query_width, 2)
    assert (
        layouts[f"{query}.lora_B.weight"].shards
        == layouts[f"{query}.lora_magnitude_vector"].shards
        == (Shard("tp", 0, (whole,)),)
    )
    assert layouts[f"{out}.lora_A.weight"].shards == (Shard("tp", 1, (whole,)),)
    for name in (f"{query}.lora_A.weight", f"{out}.lora_B.weight", f"{out}.lora_magnitude_vector"):
        assert layouts[name].shards == ()
        assert set(layouts[name].reduced_axes) == {"dp_replicate", "tp"}


@pytest.mark.parametrize(
    ("shape", "section", "message"),
    [
        (LLAMA, {"targets": ("q_prj",)}, "Did you mean `q_proj`"),
        (LLAMA, {"targets": ("q_proj", "c_attn")}, "matches no matrix"),
        (LLAMA, {"targets": ("embed_tokens",)}, "embed_tokens is not a projection"),
        (LLAMA, {"targets": ("input_layernorm",)}, "cannot have an adapter"),
        (MOE, {"targets": ("mlp.gate",)}, "mlp.gate is not a projection"),
        (LLAMA, {"exclude": ("nothing_*",)}, "adapters.exclude"),
        (
            LLAMA,
            {"targets": ("q_proj",), "exclude": ("self_attn.*",)},
            "the patterns match no matrix",
        ),
        (MOE, {"kind": "dora"}, "not supported for stacked experts"),
        (MOE, {"dropout": 0.1}, r"exclude: \[experts"),
    ],
)
def test_refusals_name_the_wrong_key(
    shape: ModelShape, section: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        add_adapters(shape, AdapterSection.model_validate(section))


def test_a_missing_folder_says_where_relative_paths_start() -> None:
    with pytest.raises(WeightsError) as caught:
        add_adapters(LLAMA, AdapterSection(path="nowhere"))
    assert caught.value.field == "nowhere/adapter_config.json"
    assert str(Path.cwd()) in str(caught.value)
    assert "Errno" not in str(caught.value)


@pytest.mark.parametrize(
    ("adapters", "model", "message"),
    [
        ({"path": "somewhere", "rank": 4}, {}, "already determines rank"),
        ({"rank": 4}, {"freeze": ["*.bias"]}, "remove `model.freeze`"),
    ],
)
def test_keys_that_repeat_or_contradict_another_are_refused(
    adapters: dict[str, Any], model: dict[str, Any], message: str
) -> None:
    training = {"sequence_length": 8, "micro_batch_size": 1, "max_steps": 1, "learning_rate": 1.0}
    with pytest.raises(RecipeError, match=message):
        validate_recipe(
            {
                "model": {"config": {}} | model,
                "data": {"sources": "unread"},
                "training": training,
                "adapters": adapters,
            }
        )
