"""Offloaded trained weights under every covered layout: after five steps weights, moments, losses
and step counts are those of a run whose weights are resident, bit for bit, on every rank.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from shardwright.architecture import read_config
from shardwright.config import Recipe
from shardwright.data.loader import read_step_micro_batches
from shardwright.data.sample_order import SampleOrder
from shardwright.data.tokens.tokenizer import CharacterTokenizer
from shardwright.layout import RankGrid
from shardwright.model.hf.hf_folder import write_hf_folder
from shardwright.model.weight_init import initialise_parameter
from shardwright.numerics import get_local_tensor
from shardwright.offload import OffloadedOptimizer, ParameterOffload
from shardwright.optim import collect_optimizer_moments, collect_optimizer_values
from shardwright.training.checks.run_checks import validate_run
from shardwright.training.setup import build_state
from shardwright.training.step import accumulate_gradients, update_parameters
from tests import forked
from tests.multiprocess import limited_weights
from tests.multiprocess.pool import RankPool
from tests.multiprocess.test_offload import DENSE, NUM_STEPS, RATE, RULES, SPARSE, build_recipe
from tests.unit.training.finished import ALPHABET

DEEP = DENSE | {"num_hidden_layers": 4}
DEEP_SPARSE = SPARSE | {"num_hidden_layers": 8}
BROAD = DENSE | {"hidden_size": 256, "head_dim": 128, "intermediate_size": 256}
BROAD |= {"max_position_embeddings": 128}
"""Half of each matrix is whole blocks of 128."""
ACCUMULATED: dict[str, Any] = {
    "sequence_length": 16,
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 4,
    "max_steps": NUM_STEPS,
    "learning_rate": RATE,
}
LONG_ROWS = ACCUMULATED | {"sequence_length": 32, "gradient_accumulation_steps": 2}
COPIED = {"kind": "bf16", "working_weights": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "working weights": {"precision": COPIED, "training": ACCUMULATED},
    "working weights, frozen": {
        "model": {"config": DEEP, "freeze": ["*q_proj.weight", "*norm.weight"]},
        "precision": COPIED,
        "recompute": "full",
    },
    "zb_h1 with working weights": {
        "model": {"config": DEEP_SPARSE},
        "layout": {"pp": 2, "schedule": "zb_h1"},
        "precision": COPIED,
        "training": ACCUMULATED,
    },
    "tp2 x dp2 with working weights, pruned": {
        "layout": {"tp": 2, "dp_replicate": 2},
        "precision": COPIED,
    },
    "working weights in fp8": {
        "model": {"config": SPARSE | {"num_hidden_layers": 3}},
        "precision": {"kind": "fp8", "working_weights": True},
        "training": ACCUMULATED,
    },
    "tp2 with working weights in tensorwise": {
        "layout": {"tp": 2},
        "precision": {
            "kind": "fp8",
            "working_weights": True,
            "fp8": {"recipe": "tensorwise"},
        },
        "training": ACCUMULATED,
    },
    "zero1 with working shards": {
        "layout": {"dp_shard": 2, "zero_stage": 1},
        "precision": COPIED,
        "recompute": "full",
    },
    "zero1 with working shards, accumulated": {
        "layout": {"dp_shard": 2, "zero_stage": 1},
        "precision": COPIED,
        "training": ACCUMULATED,
    },
    "zero2 with working shards, unclipped": {
        "layout": {"dp_shard": 2, "zero_stage": 2},
        "precision": COPIED,
        "training": ACCUMULATED | {"max_grad_norm": None},
    },
    "zero3 with working shards": {
        "layout": {"dp_shard": 2, "zero_stage": 3},
        "precision": COPIED,
        "recompute": "selective",
        "training": ACCUMULATED,
    },
    "zero3 over 3 by twos with working shards, frozen": {
        "model": {"config": DEEP, "freeze": ["*q_proj.weight", "*layers.0.*", "*norm.weight"]},
        "layout": {
            "dp_shard": 3,
            "zero_stage": 3,
            "wrap_blocks": 2,
            "prefetch_depth": 2,
            "max_gathers_in_flight": 3,
        },
        "precision": COPIED,
    },
    "zero3 in mxfp8 with working shards": {
        "layout": {"dp_shard": 2, "zero_stage": 3},
        "precision": {
            "kind": "fp8",
            "working_weights": True,
            "fp8": {"recipe": "mxfp8"},
        },
        "training": LONG_ROWS,
    },
    "zero2 in blockwise with working shards": {
        "model": {"config": BROAD},
        "layout": {"dp_shard": 2, "zero_stage": 2},
        "precision": {
            "kind": "fp8",
            "working_weights": True,
            "fp8": {"recipe": "blockwise"},
        },
        "recompute": "full",
        "training": LONG_ROWS | {"sequence_length": 128},
    },
    "tp2 x zero3 in fp8 with working shards": {
        "model": {"config": SPARSE | {"num_hidden_layers": 3}},
        "layout": {"tp": 2, "dp_shard": 2, "zero_stage": 3},
        "precision": {"kind": "fp8", "working_weights": True},
    },
    "cp2 x zero2 with working shards": {
        "layout": {"cp": 2, "zero_stage": 2},
        "precision": COPIED,
    },
    "tp2 x zero3 with working shards": {
        "layout": {"tp": 2, "dp_shard": 2, "zero_stage": 3},
        "precision": COPIED,
        "training": ACCUMULATED,
    },
    "ep2 x zero1 with working shards": {
        "model": {"config": SPARSE | {"num_hidden_layers": 3}},
        "layout": {"dp_shard": 2, "ep": 2, "zero_stage": 1},
        "precision": COPIED,
    },
    "ep2 x zero3 with working shards": {
        "model": {"config": SPARSE | {"num_hidden_layers": 3}},
        "layout": {"dp_shard": 4, "ep": 2, "zero_stage": 3},
        "precision": COPIED,
        "training": ACCUMULATED,
    },
    "pp2 x zero1 with working shards": {
        "layout": {"pp": 2, "dp_shard": 2, "zero_stage": 1},
        "precision": COPIED,
    },
    "zb_h1 x zero2 with working shards, pruned": {
        "layout": {"pp": 2, "dp_shard": 2, "zero_stage": 2, "schedule": "zb_h1"},
        "precision": COPIED,
    },
    "zbv x ep2 x zero3 by twos with working shards": {
        "model": {"config": DEEP_SPARSE},
        "layout": {
            "pp": 2,
            "dp_shard": 2,
            "ep": 2,
            "zero_stage": 3,
            "schedule": "zbv",
            "wrap_blocks": 2,
        },
        "precision": COPIED,
        "recompute": "full",
    },
    "hsdp with working shards": {
        "layout": {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 3},
        "precision": COPIED,
        "training": ACCUMULATED,
    },
    "one rank": {"recompute": "full"},
    "one rank of zero3": {"layout": {"zero_stage": 3}, "recompute": "selective"},
    "frozen": {"model": {"config": DEEP, "freeze": ["*q_proj.weight", "*norm.weight"]}},
    "sparse": {"model": {"config": SPARSE | {"num_hidden_layers": 3}}},
    "bf16": {"precision": "bf16"},
    "zero0": {"layout": {"dp_replicate": 2}},
    "tp2": {"layout": {"tp": 2}},
    "cp2": {"layout": {"cp": 2, "zero_stage": 0}, "recompute": "full"},
    "pp2": {"layout": {"pp": 2}},
    "pp2 x dp2": {"layout": {"pp": 2, "dp_replicate": 2}},
    "interleaved": {
        "layout": {"pp": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2},
        "recompute": "full",
        "training": ACCUMULATED,
    },
    "gpipe": {"layout": {"pp": 2, "schedule": "gpipe"}},
    "zb_h1": {"layout": {"pp": 2, "schedule": "zb_h1"}, "training": ACCUMULATED},
    "zb_h1 x dp2, frozen": {
        "model": {"config": DEEP_SPARSE, "freeze": ["*self_attn*"]},
        "layout": {"pp": 2, "dp_replicate": 2, "schedule": "zb_h1"},
    },
    "zbv": {
        "model": {"config": DEEP_SPARSE},
        "layout": {"pp": 2, "schedule": "zbv"},
        "recompute": "full",
        "training": ACCUMULATED,
    },
    "dualpipev": {
        "model": {"config": DEEP_SPARSE},
        "layout": {"pp": 2, "schedule": "dualpipev"},
        "precision": "bf16",
        "training": ACCUMULATED,
    },
    "zbv x tp2": {"layout": {"pp": 2, "tp": 2, "schedule": "zbv"}, "recompute": "selective"},
    "tp2 x dp2, pruned": {"layout": {"tp": 2, "dp_replicate": 2}},
    "zb_h1 x zero2, pruned": {
        "layout": {"pp": 2, "dp_shard": 2, "zero_stage": 2, "schedule": "zb_h1"}
    },
    "tp2 x dp2": {"layout": {"tp": 2, "dp_replicate": 2}},
    "zero1": {"layout": {"dp_shard": 2, "zero_stage": 1}},
    "zero1, accumulated": {"layout": {"dp_shard": 2, "zero_stage": 1}, "training": ACCUMULATED},
    "zero2": {"layout": {"dp_shard": 2, "zero_stage": 2}, "training": ACCUMULATED},
    "zero3": {"layout": {"dp_shard": 2, "zero_stage": 3}, "training": ACCUMULATED},
    "zero3 in bf16": {
        "layout": {"dp_shard": 2, "zero_stage": 3},
        "precision": "bf16",
        "recompute": "full",
    },
    "zero3 in mxfp8": {
        "layout": {
            "dp_shard": 2,
            "zero_stage": 3,
            "prefetch_depth": 2,
            "max_gathers_in_flight": 3,
        },
        "precision": {"kind": "fp8", "fp8": {"recipe": "mxfp8", "compute": "fp32"}},
        "training": LONG_ROWS,
    },
    "zero2 in blockwise": {
        "model": {"config": BROAD},
        "layout": {"dp_shard": 2, "zero_stage": 2},
        "precision": {"kind": "fp8", "fp8": {"recipe": "blockwise", "compute": "fp32"}},
        "recompute": "full",
        "training": LONG_ROWS | {"sequence_length": 128},
    },
    "zero3 in nvfp4": {
        "layout": {"dp_shard": 2, "zero_stage": 3},
        "precision": {"kind": "nvfp4", "nvfp4": {"experimental": True, "compute": "fp32"}},
        "training": LONG_ROWS,
    },
    "tp2 in fp8": {"layout": {"tp": 2}, "precision": "fp8", "recompute": "full"},
    "tp2 x zero3 in fp8": {
        "model": {"config": SPARSE | {"num_hidden_layers": 3}},
        "layout": {"tp": 2, "dp_shard": 2, "zero_stage": 3},
        "precision": "fp8",
    },
    "pp2 in tensorwise": {
        "layout": {"pp": 2},
        "precision": {"kind": "fp8", "fp8": {"recipe": "tensorwise"}},
    },
    "zero3 by twos": {
        "layout": {
            "dp_shard": 2,
            "zero_stage": 3,
            "wrap_blocks": 2,
            "prefetch_depth": 2,
            "max_gathers_in_flight": 3,
        },
        "recompute": "selective",
    },
    "zero3, frozen": {
        "model": {"config": DEEP, "freeze": ["*q_proj.weight", "*norm.weight"]},
        "layout": {"dp_shard": 2, "zero_stage": 3},
    },
    "zero3 over 3": {"layout": {"dp_shard": 3, "zero_stage": 3}, "training": ACCUMULATED},
    "cp2 x zero2": {"layout": {"cp": 2, "zero_stage": 2}},
    "tp2 x zero3": {"layout": {"tp": 2, "dp_shard": 2, "zero_stage": 3}, "training": ACCUMULATED},
    "ep2 x zero1": {
        "model": {"config": SPARSE | {"num_hidden_layers": 3}},
        "layout": {"dp_shard": 2, "ep": 2, "zero_stage": 1},
    },
    "ep2 x zero3": {
        "model": {"config": SPARSE | {"num_hidden_layers": 3}},
        "layout": {"dp_shard": 4, "ep": 2, "zero_stage": 3},
    },
    "pp2 x zero1": {"layout": {"pp": 2, "dp_shard": 2, "zero_stage": 1}},
    "pp2 x zero3": {"layout": {"pp": 2, "dp_shard": 2, "zero_stage": 3}},
    "pp2 x zero3 by twos": {
        "layout": {"pp": 2, "dp_shard": 2, "zero_stage": 3, "wrap_blocks": 2},
        "training": ACCUMULATED,
    },
    "zb_h1 x zero3": {
        "model": {"config": DEEP_SPARSE},
        "layout": {"pp": 2, "dp_shard": 2, "zero_stage": 3, "schedule": "zb_h1"},
        "precision": "bf16",
    },
    "zbv x zero1": {
        "model": {"config": DEEP | {"num_hidden_layers": 8}},
        "layout": {"pp": 2, "dp_shard": 2, "zero_stage": 1, "schedule": "zbv"},
    },
    "zbv x ep2 x zero3 by twos": {
        "model": {"config": DEEP_SPARSE},
        "layout": {
            "pp": 2,
            "dp_shard": 2,
            "ep": 2,
            "zero_stage": 3,
            "schedule": "zbv",
            "wrap_blocks": 2,
        },
        "recompute": "full",
    },
    "dualpipev x zero2": {
        "model": {"config": DEEP | {"num_hidden_layers": 8}},
        "layout": {"pp": 2, "dp_shard": 2, "zero_stage": 2, "schedule": "dualpipev"},
        "training": ACCUMULATED,
    },
    "hsdp": {"layout": {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 3}},
    "hsdp, accumulated": {
        "layout": {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 2},
        "precision": "bf16",
        "training": ACCUMULATED,
    },
    "interleaved x zero2": {
        "layout": {
            "pp": 2,
            "dp_shard": 2,
            "zero_stage": 2,
            "schedule": "interleaved_1f1b",
            "virtual_stages": 2,
        },
        "training": ACCUMULATED,
    },
}
WORLD_SIZES = {"zb_h1 with working weights": 2, "tp2 x dp2 with working weights, pruned": 4}
WORLD_SIZES |= {"tp2 with working weights in tensorwise": 2}
WORLD_SIZES |= {"zero1 with working shards": 2, "zero1 with working shards, accumulated": 2}
WORLD_SIZES |= {"zero2 with working shards, unclipped": 2, "zero3 with working shards": 2}
WORLD_SIZES |= {"zero3 over 3 by twos with working shards, frozen": 3}
WORLD_SIZES |= {"zero3 in mxfp8 with working shards": 2}
WORLD_SIZES |= {"zero2 in blockwise with working shards": 2}
WORLD_SIZES |= {"tp2 x zero3 in fp8 with working shards": 4, "cp2 x zero2 with working shards": 2}
WORLD_SIZES |= {"tp2 x zero3 with working shards": 4, "ep2 x zero1 with working shards": 2}
WORLD_SIZES |= {"ep2 x zero3 with working shards": 4, "pp2 x zero1 with working shards": 4}
WORLD_SIZES |= {"zb_h1 x zero2 with working shards, pruned": 4, "hsdp with working shards": 4}
WORLD_SIZES |= {"zbv x ep2 x zero3 by twos with working shards": 4}
WORLD_SIZES |= {"zero0": 2, "tp2": 2, "cp2": 2, "tp2 x dp2": 4}
WORLD_SIZES |= {"tp2 x dp2, pruned": 4, "zb_h1 x zero2, pruned": 4}
WORLD_SIZES |= {"pp2": 2, "pp2 x dp2": 4, "interleaved": 2, "gpipe": 2}
WORLD_SIZES |= {"zb_h1": 2, "zb_h1 x dp2, frozen": 4, "zbv": 2, "dualpipev": 2, "zbv x tp2": 4}
WORLD_SIZES |= {"zero1": 2, "zero1, accumulated": 2, "zero2": 2, "zero3": 2, "zero3 in bf16": 2}
WORLD_SIZES |= {"zero3 in mxfp8": 2, "zero2 in blockwise": 2, "zero3 in nvfp4": 2}
WORLD_SIZES |= {"tp2 in fp8": 2, "tp2 x zero3 in fp8": 4, "pp2 in tensorwise": 2}
WORLD_SIZES |= {"zero3 by twos": 2, "zero3, frozen": 2, "zero3 over 3": 3, "cp2 x zero2": 2}
WORLD_SIZES |= {"tp2 x zero3": 4, "ep2 x zero1": 2, "ep2 x zero3": 4}
WORLD_SIZES |= {"pp2 x zero1": 4, "pp2 x zero3": 4, "interleaved x zero2": 4}
WORLD_SIZES |= {"zb_h1 x zero3": 4, "zbv x zero1": 4, "zbv x ep2 x zero3 by twos": 4}
WORLD_SIZES |= {"dualpipev x zero2": 4}
WORLD_SIZES |= {"pp2 x zero3 by twos": 4, "hsdp": 4, "hsdp, accumulated": 4}
SHORT = (
    ("working weights, frozen", "adamw_8bit"),
    ("tp2 with working weights in tensorwise", "adamw"),
    ("zero3 over 3 by twos with working shards, frozen", "adamw_8bit"),
    ("zero2 in blockwise with working shards", "adafactor"),
    ("tp2 x zero3 with working shards", "adamw"),
    ("zb_h1 x zero2 with working shards, pruned", "muon"),
    ("one rank", "sgd"),
    ("sparse", "muon"),
    ("zero0", "adafactor"),
    ("tp2", "muon"),
    ("zero3 in mxfp8", "adafactor"),
    ("hsdp", "adamw_8bit"),
    ("dualpipev", "sgd"),
    ("zb_h1 x zero2, pruned", "muon"),
)


def write_pruned_model(folder: Path) -> str:
    """Write a model of `DEEP` in which every third element of each matrix is zero."""
    shape = read_config(DEEP | {"vocab_size": len(set(ALPHABET))})
    specs = {spec.name: spec for spec in shape.list_parameters()}

    def prune(name: str) -> Tensor:
        weights = initialise_parameter(specs[name], 0, dtype=torch.float32)
        if weights.ndim > 1:
            weights.view(-1)[::3] = 0.0
        return weights

    tokenizer = CharacterTokenizer("".join(sorted(set(ALPHABET))))
    write_hf_folder(folder / "base", shape, prune, dtype=torch.float32, tokenizer=tokenizer)
    return str(folder / "base")


def train_steps(
    recipe: Recipe, world_size: int
) -> tuple[dict[str, Tensor], list[Any], ParameterOffload | None]:
    """Return this rank's weights and moments, its losses, norms and step counts.

    The weights have codes of fixed blocks in their gathers if the recipe has such blocks.
    """
    validated_run = validate_run(recipe, world_size)
    state = build_state(validated_run, torch.device("cpu"))
    model = state.model
    plan = validated_run.plan
    order = SampleOrder(recipe.seed, len(validated_run.data.train))
    rank = torch.distributed.get_rank() if world_size > 1 else 0
    data_rank = RankGrid(plan.layout).data_rank(rank)
    values: list[Any] = []
    for step in range(NUM_STEPS):
        batches = read_step_micro_batches(
            validated_run.data.train, order, plan.batch, step, data_rank
        )
        loss = accumulate_gradients(model, batches, seed=0, step=step)
        max_grad_norm = None if recipe.training.max_grad_norm is None else 0.5
        update = update_parameters(
            model, state.optimizer, learning_rate=RATE, max_grad_norm=max_grad_norm
        )
        values.append((loss.mean(), update.gradient_norm))
    named = dict(model.named_parameters())
    moments = collect_optimizer_moments(state.optimizer, named.items())
    tensors = {key: get_local_tensor(moment.tensor).clone() for key, moment in moments.items()}
    for name in named:
        local = model.read_parameter(name)
        assert local is not None
        tensors[name] = local.clone()
    values.append(collect_optimizer_values(state.optimizer))
    assert (model.decoder.working_weights is not None) == plan.has_working_weights
    section = plan.precision.low_precision
    if section is not None and section.recipe in ("mxfp8", "blockwise"):
        scaled = [getattr(module, "scaled", None) for module in model.decoder.modules()]
        assert any(products is not None and products.is_gathered_as_codes for products in scaled)
    offload = state.weight_offload
    assert offload is None or isinstance(offload, ParameterOffload)
    if isinstance(state.optimizer, OffloadedOptimizer):
        state.optimizer.close()
    if offload is not None:
        offload.close()
    return tensors, values, offload


def drop_working_weights(recipe: Recipe) -> Recipe:
    """Return the recipe of the resident run: ZeRO has working weights of offloaded shards only."""
    if not recipe.layout.zero_stage:
        return recipe
    precision = recipe.precision.model_copy(update={"working_weights": "auto"})
    return recipe.model_copy(update={"precision": precision})


def find_differences(recipe: Recipe, world_size: int) -> list[str]:
    """Train with resident and with offloaded weights; list what differs."""
    content = recipe.model_dump(mode="json")
    expected, expected_values, _ = train_steps(drop_working_weights(recipe), world_size)
    section = {"optimizer": "disk", "parameters": "disk", "buffer_bytes": 8192}
    offloaded = Recipe.model_validate(content | {"offload": section})
    got, values, offload = train_steps(offloaded, world_size)
    differences = [] if values == expected_values else [f"{expected_values} is not {values}"]
    if got.keys() != expected.keys():
        differences.append(f"names: {got.keys() ^ expected.keys()}")
    if offload is None or len(offload.names) < 14:
        differences.append("nothing left the device")
    return differences + [
        key for key, tensor in expected.items() if not torch.equal(tensor, got[key])
    ]


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        pytest.param(name, rule, marks=[] if (name, rule) in SHORT else pytest.mark.long)
        for name in LAYOUTS
        for rule in RULES
    ],
)
def test_five_steps_have_the_bits_of_resident_weights(
    ranks: RankPool, tmp_path: Path, name: str, rule: str
) -> None:
    sections = {"model": {"config": DEEP}, "optimizer": RULES[rule]} | LAYOUTS[name]
    if name.endswith("pruned"):
        sections["model"] = {"path": write_pruned_model(tmp_path), "keep_zeros": True}
    recipe = build_recipe(tmp_path, sections)
    world_size = WORLD_SIZES.get(name, 1)
    validate_run(drop_working_weights(recipe), world_size)  # tokenises once
    if world_size == 1:
        assert find_differences(recipe, 1) == []
    else:
        assert ranks.run(world_size, find_differences, recipe, world_size) == [[]] * world_size


def train_within_limit(folder: Path, tier: str, limit_bytes: int) -> tuple[int, list[str], str]:
    sections = {
        "model": {"config": limited_weights.CONFIG},
        "offload": {"optimizer": "disk"},
        "recompute": "full",
    }
    path = folder / "recipe.yaml"
    recipe = build_recipe(folder, sections)
    path.write_text(yaml.safe_dump(recipe.model_dump(mode="json", exclude_unset=True)))
    command = [sys.executable, "-m", "tests.multiprocess.limited_weights"]
    done = forked.run(
        [*command, str(path), tier, str(limit_bytes)], capture_output=True, text=True, timeout=200
    )
    return done.returncode, done.stdout.split(), done.stderr


@pytest.mark.long
def test_weights_and_gradients_on_disk_train_within_a_limit_that_resident_ones_exceed(
    tmp_path: Path,
) -> None:
    """Both runs have their moments on disk. Resident weights and gradients are twelve blocks."""
    status, (expected, resident_bytes), error = train_within_limit(tmp_path, "none", 0)
    assert status == 0, error
    status, (got, peak_bytes), error = train_within_limit(tmp_path, "disk", 0)
    assert status == 0, error
    assert got == expected
    # On disk: the weights of two blocks, and the gradients of two.
    saved_bytes = int(resident_bytes) - int(peak_bytes)
    assert saved_bytes > (2 * limited_weights.NUM_BLOCKS - 5) * limited_weights.BLOCK_BYTES
    limit_bytes = limited_weights.NUM_BLOCKS * limited_weights.BLOCK_BYTES * 5 // 3
    status, _, error = train_within_limit(tmp_path, "none", limit_bytes)
    assert status != 0
    assert "can't allocate memory" in error
    status, (got, _), error = train_within_limit(tmp_path, "disk", limit_bytes)
    assert status == 0, error
    assert got == expected
