"""A checkpoint of any layout loads under any other, bit by bit.

The tensors are random, so the layouts need not be able to train; `build_parameter_layouts`
defines each rank's part.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwright.architecture import ModelShape, read_config
from shardwright.checkpoint.local_tensors import ParameterShard
from shardwright.checkpoint.manifest import read_manifest
from shardwright.checkpoint.tensor_loading import load_checkpoint
from shardwright.checkpoint.tensor_saving import save_checkpoint
from shardwright.layout import Layout, RankGrid, compute_local_boxes, compute_local_shape
from shardwright.placement import build_parameter_layouts, partition_stages, place_model
from tests.multiprocess.pool import RankPool

SEQUENCE_LENGTH = 24
DENSE: dict[str, Any] = {
    # One projection for queries, keys and values, one for gate and up; tied, so that two stages
    # hold the embedding.
    "model_type": "phi3", "vocab_size": 61, "hidden_size": 24, "intermediate_size": 20,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 32, "tie_word_embeddings": True, "pad_token_id": 0,
}  # fmt: skip
SPARSE: dict[str, Any] = {
    "model_type": "deepseek_v3", "vocab_size": 61, "hidden_size": 20, "intermediate_size": 28,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "moe_intermediate_size": 12, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "kv_lora_rank": 6, "q_lora_rank": 10, "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4, "v_head_dim": 5, "routed_scaling_factor": 1.5, "norm_topk_prob": True,
}  # fmt: skip

LAYOUTS: dict[str, Layout] = {
    "one": Layout(),
    "ddp-2": Layout(dp_replicate=2),
    "zero1-3": Layout(dp_shard=3, zero_stage=1),
    "zero2-2": Layout(dp_shard=2, zero_stage=2),
    "zero3-5": Layout(dp_shard=5, zero_stage=3),
    "hybrid-6": Layout(dp_replicate=2, dp_shard=3, zero_stage=3),
    "cp-3": Layout(cp=3, zero_stage=3),
    "tp-2": Layout(tp=2),
    "tp-4": Layout(tp=4),
    "tp-zero3-4": Layout(tp=2, dp_shard=2, zero_stage=3),
    "pp-2": Layout(pp=2),
    "pp-4": Layout(pp=4),
    "pp-interleaved-2": Layout(pp=2, schedule="interleaved_1f1b", virtual_stages=2),
    "pp-zbv-2": Layout(pp=2, schedule="zbv"),
    "pp-zero2-6": Layout(pp=2, dp_shard=3, zero_stage=2),
    "ep-4": Layout(dp_shard=4, ep=2, zero_stage=3),
    "ep-cp-4": Layout(dp_shard=2, cp=2, ep=4, zero_stage=3),
    "pp-tp-ep-8": Layout(pp=2, tp=2, dp_shard=2, ep=2, zero_stage=3),
    "hybrid-tp-cp-8": Layout(dp_replicate=2, cp=2, tp=2, zero_stage=3),
}
MODELS = {"dense": DENSE, "sparse": SPARSE}


@cache
def read_shape(model: str) -> ModelShape:
    return read_config(MODELS[model])


@cache
def build_value(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return the whole tensor of a name, the same on every rank: random bits where every bit
    pattern of the dtype is valid.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def build_shards(layout: Layout, *, blank: bool) -> dict[str, ParameterShard]:
    """Return this rank's weights and one moment of both models, with their values or with
    zeros.
    """
    here = RankGrid(layout).coordinates(dist.get_rank() if layout.world_size > 1 else 0)
    parts: dict[str, ParameterShard] = {}
    for model in MODELS:
        shape = read_shape(model)
        for name, layout_of_parameter in build_parameter_layouts(
            shape, layout, partition_stages(shape, layout, SEQUENCE_LENGTH)
        ).items():
            boxes = compute_local_boxes(layout_of_parameter, layout, here)
            if here["pp"] not in layout_of_parameter.pp_ranks:
                continue
            for kind, dtype in (("weight", torch.bfloat16), ("exp_avg", torch.float32)):
                key = f"{model}.{name}.{kind}"
                local = torch.zeros(
                    compute_local_shape(layout_of_parameter, layout, here), dtype=dtype
                )
                for box in boxes if not blank else ():
                    narrow(local, box.local_bounds).copy_(
                        narrow(
                            build_value(key, layout_of_parameter.shape, dtype), box.global_bounds
                        )
                    )
                parts[key] = ParameterShard(local, layout_of_parameter.shape, boxes)
    return parts


def narrow(tensor: torch.Tensor, bounds: tuple[tuple[int, int], ...]) -> torch.Tensor:
    for dim, (start, length) in enumerate(bounds):
        tensor = tensor.narrow(dim, start, length)
    return tensor


def save_under(root: str, name: str) -> None:
    save_checkpoint(root, 3, build_shards(LAYOUTS[name], blank=False), {"layout": name})


def load_each(roots: dict[str, str], reading: str) -> None:
    """Load every root's checkpoint under one layout, each into new zeros."""
    expected = build_shards(LAYOUTS[reading], blank=False)
    for writing, root in roots.items():
        parts = build_shards(LAYOUTS[reading], blank=True)
        assert load_checkpoint(Path(root) / "step-00000003", parts) == {"layout": writing}
        for key, part in parts.items():
            assert part.local.view(torch.uint8).equal(expected[key].local.view(torch.uint8)), (
                f"{key}: {writing} under {reading}"
            )


SHORT = (
    "one",
    "zero1-3",
    "hybrid-6",
    "cp-3",
    "tp-4",
    "tp-zero3-4",
    "pp-zbv-2",
    "pp-zero2-6",
    "ep-4",
    "pp-tp-ep-8",
)
"""Ten layouts, a hundred ordered pairs; the long suite runs all layouts."""


def write_each(
    ranks: RankPool, names: Iterable[str], factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Save under each layout and return its folder by name."""
    roots = {}
    for name in names:
        layout = LAYOUTS[name]
        for model in MODELS:  # a dense model loads under ep too, although no run would use it
            place_model(
                read_shape(model),
                layout if model == "sparse" else replace(layout, ep=1),
                SEQUENCE_LENGTH,
            )
        roots[name] = str(factory.mktemp(name))
        ranks.run(layout.world_size, save_under, roots[name], name)
    return roots


@pytest.fixture(scope="module")
def written(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_each(ranks, SHORT, tmp_path_factory)


@pytest.fixture(scope="module")
def written_by_all(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_each(ranks, LAYOUTS, tmp_path_factory)


@pytest.mark.parametrize("reading", SHORT)
def test_the_checkpoint_of_every_layout_loads(
    ranks: RankPool, written: dict[str, str], reading: str
) -> None:
    ranks.run(LAYOUTS[reading].world_size, load_each, written, reading)


@pytest.mark.long
@pytest.mark.parametrize("reading", LAYOUTS)
def test_the_whole_matrix(ranks: RankPool, written_by_all: dict[str, str], reading: str) -> None:
    ranks.run(LAYOUTS[reading].world_size, load_each, written_by_all, reading)


def test_each_element_is_written_once(written: dict[str, str]) -> None:
    sizes = set()
    for root in written.values():
        folder = Path(root) / "step-00000003"
        headers = sum(
            8 + int.from_bytes(path.read_bytes()[:8], "little")
            for path in folder.glob("*.safetensors")
        )
        sizes.add(sum(path.stat().st_size for path in folder.glob("*.safetensors")) - headers)
        assert sum(entry.num_bytes for entry in read_manifest(folder).tensors.values()) in sizes
    assert len(sizes) == 1
