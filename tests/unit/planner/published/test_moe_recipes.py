"""Kernels and parallelism of experts in NeMo's releases, read from published rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.architecture import ModelShape
from shardwright.hardware import find_node
from shardwright.planner.published.moe_recipes import (
    add_prediction_layer,
    has_all_to_all,
    list_expert_features,
    read_release,
    resolve_expert_parallel,
)
from tests.unit.planner import models

ROW = {
    "model_name": "Qwen3-30B-A3B",
    "precision": "fp8",
    "notes.release": "",
    "notes.expert_tensor": "",
    "notes.optimizer": "",
    "notes.routing": "",
    "notes.without_prediction": "",
    "virtual_pp": "",
}


def make_moe_shape(**changes: bool) -> ModelShape:
    shape = models.read_shape("qwen3_moe")
    assert shape.experts is not None
    return replace(shape, experts=replace(shape.experts, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("release", "gpu", "changes", "expected"),
    [
        ("26.06", "GB300", {}, ["fused experts", "overlapped experts"]),
        ("26.06", "GB300", {"notes.optimizer": "Muon"}, ["fp8 experts"]),
        ("26.06", "H100", {}, ["fp8 experts"]),
        ("26.06", "GB300", {"precision": "nvfp4"}, ["nvfp4 experts"]),
        ("26.04.01", "GB300", {}, ["fp8 experts"]),
        ("26.02", "B200", {}, ["fp8 experts", "unfused routing"]),
        ("26.02", "GB200", {}, ["fp8 experts"]),
        ("26.02.01", "B200", {}, ["fp8 experts"]),
        ("26.04", "H100", {"virtual_pp": "4"}, ["fp8 experts", "overlapped experts"]),
        ("26.04", "GB200", {"virtual_pp": "4"}, ["fp8 experts"]),
        ("26.04", "H100", {"virtual_pp": "4", "model_name": "Qwen3-235B-A22B"}, ["fp8 experts"]),
        ("25.11", "H100", {"precision": "bf16"}, ["unfused routing"]),
        ("25.09", "H100", {"notes.routing": "tokendrop"}, ["fp8 experts", "token dropping"]),
        ("", "H100", {}, ["fp8 experts"]),
    ],
)
def test_kernels_follow_release_accelerator_and_precision(
    release: str, gpu: str, changes: dict[str, str], expected: list[str]
) -> None:
    row = ROW | {"notes.release": release} | changes
    assert list_expert_features(row, make_moe_shape(), find_node(gpu), is_hybrid=False) == expected


def test_hybrid_models_use_the_older_kernels_and_dense_ones_none() -> None:
    row = ROW | {"notes.release": "26.06"}
    node = find_node("GB300")
    assert list_expert_features(row, make_moe_shape(), node, is_hybrid=True) == ["fp8 experts"]
    assert list_expert_features(row, make_moe_shape(expert_bias=True), node, is_hybrid=True) == [
        "biased experts"
    ]
    assert list_expert_features(row, models.read_shape("llama"), node, is_hybrid=False) == []


@pytest.mark.parametrize(
    ("model", "gpu", "release", "expected"),
    [
        ("GPT-OSS-120B", "GB200", "26.04", True),
        ("GPT-OSS-120B", "B200", "26.04", False),
        ("GPT-OSS-120B", "GB200", "26.06", False),
        ("Qwen3-235B-A22B", "H100", "26.06", True),
        ("Qwen3-235B-A22B", "GB300", "26.04", False),
        ("Qwen3-30B-A3B", "H100", "26.02", True),
        ("Qwen3-30B-A3B", "H100", "26.04", False),
        ("DeepSeek-V3", "B200", "26.02", False),
        ("Qwen3-235B-A22B", "H100", "", False),
    ],
)
def test_recipes_choose_the_dispatcher_by_model_and_node(
    model: str, gpu: str, release: str, expected: bool
) -> None:
    row = ROW | {"model_name": model, "notes.release": release}
    assert has_all_to_all(row, find_node(gpu)) is expected
    dropped = row | {"notes.routing": "tokendrop", "notes.release": "25.09"}
    assert has_all_to_all(dropped, find_node(gpu))


def test_patch_releases_are_ordered_after_their_release() -> None:
    assert (
        read_release({"notes.release": "26.02"})
        < read_release({"notes.release": "26.02.01"})
        < read_release({"notes.release": "26.04"})
    )


@pytest.mark.parametrize(
    ("stated", "tp", "data", "expected"),
    [
        (64, 2, 32, (32, True)),
        (8, 2, 32, (4, True)),
        (64, 1, 256, (64, False)),
        (2, 4, 8, (2, False)),
    ],
)
def test_recipes_place_whole_experts_on_tensor_parallel_ranks(
    stated: int, tp: int, data: int, expected: tuple[int, bool]
) -> None:
    assert resolve_expert_parallel(ROW | {"notes.release": "25.11"}, stated, tp, data) == expected
    assert not resolve_expert_parallel(ROW, stated, tp, data)[1], (
        "Megatron-Core itself shards each expert"
    )


def test_deepseek_v3_has_a_prediction_layer_unless_the_row_excludes_it() -> None:
    shape = make_moe_shape()
    row = ROW | {"model_name": "DeepSeek-V3", "notes.release": "26.04"}
    assert add_prediction_layer(row, shape).num_layers == shape.num_layers + 1
    assert add_prediction_layer(row | {"notes.without_prediction": "w/o MTP"}, shape) is shape
    assert add_prediction_layer(ROW | {"notes.release": "26.04"}, shape) is shape
