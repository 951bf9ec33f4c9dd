"""Runs whose trained weights ZeRO shards and keeps on disk: checkpoints under other layouts and
settings, ranks that die, gradients that the last micro-batch leaves as they are, and memory.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from torch.torch_version import TorchVersion

from shardwright.checkpoint.disk import Disk
from shardwright.config import Recipe
from shardwright.data.loader import read_step_micro_batches
from shardwright.data.sample_order import SampleOrder
from shardwright.errors import RankFailed
from shardwright.offload import ShardOffload
from shardwright.parallel.sharded_weights import list_parameter_groups
from shardwright.training.checks.run_checks import validate_run
from shardwright.training.setup import build_state
from shardwright.training.step import accumulate_gradients, update_parameters
from tests.multiprocess.pool import RankPool
from tests.multiprocess.test_checkpoint_resume import train_some
from tests.multiprocess.test_offload import build_recipe
from tests.multiprocess.test_parameter_offload import read_all_checkpoints
from tests.multiprocess.test_trained_offload import ACCUMULATED, DEEP

RESIDENT = ("offload.optimizer=none", "offload.parameters=none")
ON_DISK = ("offload.optimizer=disk", "offload.parameters=disk", "offload.buffer_bytes=8192")
ZERO_3 = {"layout": {"dp_shard": 2, "zero_stage": 3}}
BLOCK_BYTES = 4 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128)
NORM_BYTES = 4 * 64 * (2 * 4 + 1)
"""Of the norms of four blocks, and the last one."""


def write_recipe(folder: Path, **sections: Any) -> Path:
    """Write a recipe that saves each step, evaluates and compares replicas."""
    recipe = build_recipe(
        folder,
        {
            "model": {"config": DEEP},
            "checkpoint": {"every_steps": 1, "keep_last": 9},
            "evaluation": {"every_steps": 1},
        }
        | sections,
    ).model_dump(mode="json", exclude_unset=True)
    recipe["run"]["replica_check_every_steps"] = 1
    recipe["data"] |= {"validation_split": "tail", "validation_fraction": 0.2}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


CHAIN = (
    ("dp_shard=2,zero_stage=3", ON_DISK),
    ("dp_shard=2,zero_stage=1", RESIDENT),
    ("dp_replicate=2", ON_DISK),
    ("dp_shard=2,zero_stage=2", ON_DISK),
)


def test_checkpoints_open_under_every_layout_and_setting(ranks: RankPool, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    for name in ("resident", "run"):
        for number, (layout, offload) in enumerate(CHAIN):
            settings = RESIDENT if name == "resident" else offload
            arguments = (str(recipe), str(tmp_path / name), layout, 2, number > 0)
            ranks.run(2, train_some, *arguments, *settings)
    expected = read_all_checkpoints(tmp_path / "resident")
    # A run with evaluations checks twice per step whether it must stop: one step per layout.
    assert len(expected) == 2 * len(CHAIN)
    assert read_all_checkpoints(tmp_path / "run") == expected


@pytest.fixture
def own_ranks() -> Iterator[RankPool]:
    """Return a pool for one test, whose ranks die."""
    with RankPool(timeout_seconds=120.0) as pool:
        yield pool


def train_and_die(recipe: str, folder: str, num_operations: int) -> None:
    """Train on these ranks; the first one is killed at an operation of its scratch file."""
    remaining = num_operations
    operations = {name: getattr(Disk, name) for name in ("read_at", "write_at")}

    def count(name: str) -> Any:
        def run(self: Disk, *arguments: Any) -> Any:
            nonlocal remaining
            remaining -= 1
            if remaining < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return operations[name](self, *arguments)

        return run

    if torch.distributed.get_rank() == 0:
        for name in operations:
            setattr(Disk, name, count(name))
    train_some(recipe, folder, "dp_shard=2,zero_stage=3", 9, False, *ON_DISK)


@pytest.mark.long
@pytest.mark.parametrize("num_operations", [0, 20, 60, 150, 300, 500, 700, 900])
def test_a_run_with_a_rank_killed_at_an_operation_resumes_with_the_same_bits(
    ranks: RankPool, own_ranks: RankPool, tmp_path: Path, num_operations: int
) -> None:
    recipe = write_recipe(tmp_path, evaluation={"every_steps": 99})
    layout = "dp_shard=2,zero_stage=3"
    ranks.run(2, train_some, str(recipe), str(tmp_path / "whole"), layout, 9, False, *RESIDENT)
    with pytest.raises(RankFailed, match=r"rank 0 of 2 .*SIGKILL"):
        own_ranks.run(2, train_and_die, str(recipe), str(tmp_path / "run"), num_operations)
    ranks.run(2, train_some, str(recipe), str(tmp_path / "run"), layout, 9, True, *ON_DISK)
    expected = read_all_checkpoints(tmp_path / "whole")
    assert len(expected) >= 2 * 4
    assert read_all_checkpoints(tmp_path / "run") == expected


def train_without_last_block(recipe: Recipe) -> float:
    """Return the norm after two micro-batches, of which the second has no gradient of the last
    block."""
    validated_run = validate_run(recipe, 2)
    state = build_state(validated_run, torch.device("cpu"))
    order = SampleOrder(recipe.seed, len(validated_run.data.train))
    batches = read_step_micro_batches(
        validated_run.data.train, order, validated_run.plan.batch, 0, torch.distributed.get_rank()
    )
    num_calls = 0

    def skip(_module: Any, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        hidden: Tensor = arguments[0]
        return hidden + 0.0 * output.detach() if num_calls == 2 else output

    state.model.decoder.blocks[-1].register_forward_hook(skip)
    accumulate_gradients(state.model, batches, seed=0, step=0)
    update = update_parameters(state.model, state.optimizer, learning_rate=0.0, max_grad_norm=0.5)
    if state.weight_offload is not None:
        state.weight_offload.close()
    return update.gradient_norm


def test_gradients_of_earlier_micro_batches_count_in_the_norm(
    ranks: RankPool, tmp_path: Path
) -> None:
    offload = {"optimizer": "disk", "parameters": "disk"}
    sections = ZERO_3 | {"model": {"config": DEEP}}
    norms = []
    for section in ({}, offload):
        recipe = build_recipe(tmp_path, sections | {"offload": section})
        validate_run(recipe, 2)  # tokenises once
        norms.append(ranks.run(2, train_without_last_block, recipe))
    assert norms[0] == norms[1]


COPIED = {"kind": "bf16", "working_weights": True}


def count_moved(recipe: Recipe, world_size: int) -> tuple[int, int, int]:
    """Return the bytes of weights and gradients that a step reads and writes on this rank, and
    those of its working shards."""
    validated_run = validate_run(recipe, world_size)
    state = build_state(validated_run, torch.device("cpu"))
    offload = state.weight_offload
    working_weights = state.model.decoder.working_weights
    assert isinstance(offload, ShardOffload)
    assert working_weights is not None
    order = SampleOrder(recipe.seed, len(validated_run.data.train))
    for step in range(2):
        offload.store.synchronise()  # a write is counted when it ends
        offload.pop_counts()
        batches = read_step_micro_batches(
            validated_run.data.train,
            order,
            validated_run.plan.batch,
            step,
            torch.distributed.get_rank(),
        )
        accumulate_gradients(state.model, batches, seed=0, step=step)
        update_parameters(state.model, state.optimizer, learning_rate=1e-3, max_grad_norm=0.5)
    assert offload.count_device_bytes() <= BLOCK_BYTES // 2, "only the last unit is being written"
    offload.store.synchronise()
    counts = offload.pop_counts()
    offload.close()
    copied_bytes = sum(copy.nbytes for copy in working_weights.copies)
    return counts.read_bytes, counts.written_bytes, copied_bytes


@pytest.mark.parametrize(("stage", "num_micro_batches"), [(3, 1), (3, 4), (2, 2), (1, 2)])
def test_working_shards_stay_and_only_gradients_move_in_the_passes(
    ranks: RankPool, tmp_path: Path, stage: int, num_micro_batches: int
) -> None:
    sections = {
        "model": {"config": DEEP},
        "layout": {"dp_shard": 2, "zero_stage": stage},
        "precision": COPIED,
        "offload": {"optimizer": "disk", "parameters": "disk"},
        "training": ACCUMULATED | {"gradient_accumulation_steps": num_micro_batches},
    }
    recipe = build_recipe(tmp_path, sections)
    validate_run(recipe, 2)  # tokenises once
    shard_bytes = 4 * BLOCK_BYTES // 2
    # Stage 1 reduces once per step. The update reads weights and gradients, and writes weights.
    num_reductions = 1 if stage == 1 else num_micro_batches
    for read_bytes, written_bytes, copied_bytes in ranks.run(2, count_moved, recipe, 2):
        assert read_bytes == shard_bytes * (1 + num_reductions)
        assert written_bytes == shard_bytes * (1 + num_reductions)
        # bf16 copies of the matrices, and of the norms with which they are gathered.
        assert copied_bytes == shard_bytes // 2 + NORM_BYTES // 2 // 2


def test_checkpoints_of_working_shards_open_under_every_layout_and_setting(
    ranks: RankPool, tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path, precision="bf16")
    working = (*ON_DISK, "precision.working_weights=true")
    chain = (CHAIN[0][0], CHAIN[1][0], CHAIN[3][0])
    for name, settings in (("resident", (RESIDENT,) * 3), ("run", (working, RESIDENT, working))):
        for number, (layout, offload) in enumerate(zip(chain, settings, strict=True)):
            arguments = (str(recipe), str(tmp_path / name), layout, 2, number > 0)
            ranks.run(2, train_some, *arguments, *offload)
    expected = read_all_checkpoints(tmp_path / "resident")
    assert len(expected) == 2 * len(chain)
    assert read_all_checkpoints(tmp_path / "run") == expected


def count_present(recipe: Recipe, world_size: int) -> tuple[int, ...]:
    """Return the most bytes of shards, the most gradients of matrices, and the most sums over
    replicas that FSDP2 keeps, on this rank's device when a block begins its forward pass or ends
    its backward pass."""
    validated_run = validate_run(recipe, world_size)
    state = build_state(validated_run, torch.device("cpu"))
    model = state.model
    offload = state.weight_offload
    assert isinstance(offload, ShardOffload)
    order = SampleOrder(recipe.seed, len(validated_run.data.train))
    batches = read_step_micro_batches(
        validated_run.data.train, order, validated_run.plan.batch, 0, torch.distributed.get_rank()
    )
    groups = [group for module in model.fsdp_modules for group in list_parameter_groups(module)]
    present = []

    def count(*_: Any) -> None:
        gradients = [
            name
            for name, parameter in model.named_parameters()
            if parameter.grad is not None and name in offload.names
        ]
        num_sums = sum(group._all_reduce_state is not None for group in groups)
        present.append((offload.count_device_bytes(), len(gradients), num_sums))

    for block in model.decoder.blocks:
        block.register_forward_pre_hook(count)
        block.register_full_backward_hook(count)
    accumulate_gradients(model, batches, seed=0, step=0)
    offload.close()
    assert len(present) == 2 * len(batches) * len(model.decoder.blocks)
    return tuple(max(values) for values in zip(*present, strict=True))


# FSDP2 of torch 2.15 keeps gradients that it hands to a hook as it keeps those that it sums.
KEEPS_EVERY_SUM = torch.__version__ >= TorchVersion("2.15")


@pytest.mark.parametrize(
    ("stage", "num_replicas"),
    [
        pytest.param(1, 1, marks=pytest.mark.long),
        (2, 1),
        pytest.param(3, 2, marks=pytest.mark.long),
    ],
)
def test_the_device_has_the_shards_of_two_blocks(
    ranks: RankPool, tmp_path: Path, stage: int, num_replicas: int
) -> None:
    sections = {
        "model": {"config": DEEP | {"num_hidden_layers": 8}},
        "layout": {"dp_shard": 2, "zero_stage": stage, "dp_replicate": num_replicas},
        "offload": {"optimizer": "disk", "parameters": "disk"},
    }
    if num_replicas > 1:  # sums of several micro-batches stay
        sections["training"] = ACCUMULATED | {"gradient_accumulation_steps": 1}
    recipe = build_recipe(tmp_path, sections)
    world_size = 2 * num_replicas
    validate_run(recipe, world_size)  # tokenises once
    for present_bytes, num_gradients, num_sums in ranks.run(
        world_size, count_present, recipe, world_size
    ):
        assert 0 < present_bytes <= 2 * BLOCK_BYTES // 2
        assert num_gradients <= 3 * 7 * (stage > 1)
        assert num_sums <= 3 * (num_replicas > 1 or KEEPS_EVERY_SUM)
