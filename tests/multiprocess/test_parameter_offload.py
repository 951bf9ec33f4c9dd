"""Offloaded frozen weights under every kind of layout: adapters and losses are those of a run
whose weights stay on the device, bit for bit, on every rank.
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
from shardwright.training.checks.run_checks import validate_run
from shardwright.training.setup import build_state
from shardwright.training.step import accumulate_gradients, update_parameters
from tests import forked
from tests.multiprocess import limited_weights
from tests.multiprocess.pool import RankPool
from tests.multiprocess.test_checkpoint_resume import train_some
from tests.multiprocess.test_offload import DENSE, RATE, SPARSE, build_recipe
from tests.unit.training.finished import ALPHABET

NUM_STEPS = 2
NUM_LAYERS = 4
DORA: dict[str, Any] = {"rank": 4, "kind": "dora"}
NF4: dict[str, Any] = {"rank": 4, "quantize": "nf4"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero0": {"layout": {"dp_replicate": 2}},
    "zero1": {"layout": {"dp_shard": 2, "zero_stage": 1}},
    "zero2": {"layout": {"dp_shard": 2, "zero_stage": 2}, "adapters": NF4},
    "zero3": {"layout": {"dp_shard": 2, "zero_stage": 3}},
    "tp2": {"layout": {"tp": 2}},
    "tp2 x zero3": {"layout": {"tp": 2, "dp_shard": 2, "zero_stage": 3}, "adapters": DORA},
    "cp2": {"layout": {"cp": 2, "zero_stage": 3}},
    "ep2": {"layout": {"dp_shard": 2, "ep": 2, "zero_stage": 1}},
    "ep2 x zero3": {"layout": {"dp_shard": 4, "ep": 2, "zero_stage": 3}},
    "hybrid": {"layout": {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 3}, "adapters": NF4},
    "pp2": {"layout": {"pp": 2}},
    "pp2 x zero3": {"layout": {"pp": 2, "dp_shard": 2, "zero_stage": 3}},
    "pp2 interleaved": {"layout": {"pp": 2, "virtual_stages": 2, "schedule": "interleaved_1f1b"}},
    "pp2 zero-bubble": {"layout": {"pp": 2, "schedule": "zb_h1"}},
}
SCRATCH_BYTES_OF_TP2 = (2 * 64 * 128 + 2 * 64 * 64) // 2 * 2 * NUM_LAYERS
"""bf16 columns of `o_proj` and `down_proj` on one of two ranks; rows are read from the model."""


def write_base(folder: Path, config: dict[str, Any], dtype: torch.dtype) -> None:
    shape = read_config(config)
    specs = {spec.name: spec for spec in shape.list_parameters()}
    write_hf_folder(
        folder / "base",
        shape,
        lambda name: initialise_parameter(specs[name], 0, dtype=torch.float32),
        dtype=dtype,
        tokenizer=CharacterTokenizer("".join(sorted(set(ALPHABET)))),
    )


def build_adapter_recipe(folder: Path, name: str, **sections: Any) -> Recipe:
    """Build a recipe of a layout whose base model's files are bf16."""
    config = SPARSE if "ep" in name else DENSE
    write_base(folder, config | {"num_hidden_layers": NUM_LAYERS}, torch.bfloat16)
    base = {"model": {"path": str(folder / "base")}, "precision": "bf16", "adapters": {"rank": 4}}
    return build_recipe(folder, base | LAYOUTS[name] | sections)


def train_adapters(recipe: Recipe, world_size: int) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return this rank's adapters after some steps, and the counts of its transfers."""
    validated_run = validate_run(recipe, world_size)
    state = build_state(validated_run, torch.device("cpu"))
    model = state.model
    plan = validated_run.plan
    order = SampleOrder(recipe.seed, len(validated_run.data.train))
    rank = torch.distributed.get_rank() if world_size > 1 else 0
    data_rank = RankGrid(plan.layout).data_rank(rank)
    losses = []
    for step in range(NUM_STEPS):
        batches = read_step_micro_batches(
            validated_run.data.train, order, plan.batch, step, data_rank
        )
        losses.append(accumulate_gradients(model, batches, seed=0, step=step).loss_sum)
        update_parameters(model, state.optimizer, learning_rate=RATE, max_grad_norm=1.0)
    tensors = {
        name: get_local_tensor(parameter.detach()).clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    tensors["losses"] = torch.stack([loss.detach().double() for loss in losses])
    offload = state.weight_offload
    if offload is None:
        return tensors, {}
    present = [
        name
        for name in model.offloaded_names & dict(model.named_parameters()).keys()
        if dict(model.named_parameters())[name].untyped_storage().nbytes()
    ]
    counts = {
        "read": offload.store.counts.read_bytes,
        "stored": offload.stored_bytes,
        "whole": offload.num_bytes,
        "scratch": sum(offload.written_bytes.values()),
        "layers": len({name.split(".")[2] for name in present}),
    }
    offload.close()
    return tensors, counts


def compare(recipe: Recipe, world_size: int) -> tuple[list[str], dict[str, int]]:
    """List what differs from resident weights on this rank; return the counts of transfers."""
    expected, _ = train_adapters(recipe, world_size)
    offload = {"offload": {"parameters": "disk", "buffer_bytes": 16384}}
    got, counts = train_adapters(
        Recipe.model_validate(recipe.model_dump(mode="json") | offload), world_size
    )
    assert expected.keys() == got.keys()
    return [name for name in expected if not torch.equal(expected[name], got[name])], counts


@pytest.mark.parametrize(
    ("name", "recompute"),
    [
        pytest.param(
            name,
            recompute,
            marks=[] if recompute == ("none", "selective", "full")[index % 3] else pytest.mark.long,
        )
        for index, name in enumerate(LAYOUTS)
        for recompute in ("none", "selective", "full")
    ],
)
def test_steps_have_the_bits_of_resident_weights(
    ranks: RankPool, tmp_path: Path, name: str, recompute: str
) -> None:
    recipe = build_adapter_recipe(tmp_path, name, recompute=recompute)
    degrees = LAYOUTS[name]["layout"]
    world_size = 4 if name in ("tp2 x zero3", "ep2 x zero3", "hybrid", "pp2 x zero3") else 2
    validate_run(recipe, world_size)  # tokenises once
    num_shards = degrees.get("dp_shard", 1) * degrees.get("cp", 1)
    for differences, counts in ranks.run(world_size, compare, recipe, world_size):
        assert differences == []
        assert counts["read"] > counts["stored"]
        assert counts["layers"] <= 2
        if "ep2" not in name:  # its experts are divided over other ranks than the rest
            assert counts["stored"] * num_shards == counts["whole"]
        is_in_place = "tp2" not in name and "quantize" not in LAYOUTS[name].get("adapters", {})
        assert (counts["scratch"] == 0) == is_in_place
        if name == "tp2":
            assert counts["scratch"] == SCRATCH_BYTES_OF_TP2 // 2


def test_runs_that_compare_replicas_save_the_same_checkpoints_under_other_layouts(
    ranks: RankPool, tmp_path: Path
) -> None:
    """With evaluations and sample texts; frozen weights are not in memory when replicas are."""
    recipe = build_adapter_recipe(
        tmp_path,
        "zero0",
        layout={},
        checkpoint={"every_steps": 1, "keep_last": 9},
        evaluation={"every_steps": 1, "num_samples": 1},
    ).model_dump(mode="json", exclude_unset=True)
    recipe["run"]["replica_check_every_steps"] = 1
    recipe["data"] |= {"validation_split": "tail", "validation_fraction": 0.2}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    layouts = ("dp_replicate=2", "dp_shard=2,zero_stage=3")
    for name, tier in (("resident", "none"), ("offloaded", "disk")):
        for number, layout in enumerate(layouts):
            arguments = (str(path), str(tmp_path / name), layout, 2, number > 0)
            ranks.run(2, train_some, *arguments, f"offload.parameters={tier}")
    expected = read_all_checkpoints(tmp_path / "resident")
    # A run with evaluations checks twice per step whether it must stop: one step per layout.
    assert len(expected) == 2 * len(layouts)
    assert read_all_checkpoints(tmp_path / "offloaded") == expected


def read_all_checkpoints(folder: Path) -> dict[str, bytes]:
    """Return the tensors of all ranks' files, by step and rank."""
    return {
        f"{path.parent.name}/{path.name}": path.read_bytes()
        for path in folder.glob("checkpoints/step-*/shard-*.safetensors")
    }


def train_within_limit(
    folder: Path, sections: dict[str, Any], tier: str, limit_bytes: int = 0
) -> tuple[int, list[str], str]:
    recipe = build_recipe(folder, sections | {"adapters": {"rank": 2}})
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe.model_dump(mode="json", exclude_unset=True)))
    command = [sys.executable, "-m", "tests.multiprocess.limited_weights"]
    done = forked.run(
        [*command, str(path), tier, str(limit_bytes)], capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout.split(), done.stderr


def test_weights_on_disk_train_within_a_memory_limit_that_resident_ones_exceed(
    tmp_path: Path,
) -> None:
    """Without files, because safetensors' mapping of a file counts as the process's memory."""
    random = {"model": {"config": limited_weights.CONFIG}}
    limit_bytes = limited_weights.NUM_BLOCKS * limited_weights.BLOCK_BYTES * 4 // 5
    status, _, error = train_within_limit(tmp_path, random, "none", limit_bytes)
    assert status != 0
    assert "can't allocate memory" in error
    status, _, error = train_within_limit(tmp_path, random, "disk", limit_bytes)
    assert status == 0, error


def test_weights_in_the_models_own_files_take_the_memory_of_two_blocks(tmp_path: Path) -> None:
    write_base(tmp_path, limited_weights.CONFIG, torch.float32)
    pretrained = {"model": {"path": str(tmp_path / "base")}}
    status, (expected, resident_bytes), error = train_within_limit(tmp_path, pretrained, "none")
    assert status == 0, error
    status, (got, peak_bytes), error = train_within_limit(tmp_path, pretrained, "disk")
    assert status == 0, error
    assert got == expected
    saved_bytes = int(resident_bytes) - int(peak_bytes)
    # All blocks but two; half of one for the buffer and other memory.
    assert saved_bytes > (limited_weights.NUM_BLOCKS - 2.5) * limited_weights.BLOCK_BYTES
