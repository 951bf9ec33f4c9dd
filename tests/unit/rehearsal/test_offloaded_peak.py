"""A rehearsal predicts the peak of a real run that offloads to disk, by the allocator's events."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from benchmarks.allocated import AllocationCounter
from tests.multiprocess.test_offload import build_recipe

from shardwright.config import Recipe
from shardwright.data.loader import read_step_micro_batches
from shardwright.data.sample_order import SampleOrder
from shardwright.offload import OffloadedOptimizer, disk_store, staging_buffer
from shardwright.rehearsal.rank_rehearsal import rehearse_rank
from shardwright.training.checks.run_checks import validate_run
from shardwright.training.setup import build_state
from shardwright.training.step import accumulate_gradients, begin_update, update_parameters
from shardwright.training.training_state import TrainingState

NUM_LAYERS = 4
CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 60, "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}  # fmt: skip
TRAINING: dict[str, Any] = {
    "sequence_length": 64, "micro_batch_size": 2, "gradient_accumulation_steps": 2,
    "max_steps": 3, "learning_rate": 1e-3,
}  # fmt: skip
OFFLOADS: dict[str, dict[str, Any]] = {
    "trained weights": {"optimizer": "disk", "parameters": "disk"},
    "activations": {"activations": "disk"},
}
CASES = (("trained weights", "none"), ("activations", "selective"))
TOLERANCE = 0.02
RATE = 1e-3
NUM_STEPS = 2


def build_case(folder: Path, name: str, recompute: str) -> Recipe:
    """Build a recipe that offloads to disk."""
    return build_recipe(
        folder,
        {
            "model": {"config": CONFIG, "loss_chunk_tokens": 32},
            "training": TRAINING,
            "recompute": recompute,
            "offload": OFFLOADS[name] | {"buffer_bytes": 65536},
        },
    )


def run_steps(recipe: Recipe) -> TrainingState:
    """Run `NUM_STEPS` steps as training does, with updates that overlap with passes."""
    validated_run = validate_run(recipe, 1)
    state = build_state(validated_run, torch.device("cpu"))
    dataset = validated_run.data.train
    order = SampleOrder(recipe.seed, len(dataset))
    for step in range(NUM_STEPS):
        batches = read_step_micro_batches(dataset, order, validated_run.plan.batch, step, 0)
        begin_update(state.optimizer, RATE)
        accumulate_gradients(state.model, batches, seed=0, step=step)
        update_parameters(
            state.model,
            state.optimizer,
            learning_rate=RATE,
            max_grad_norm=1.0,
            overlaps_forward=True,
        )
    return state


def run_at_once(
    _pool: ThreadPoolExecutor, function: Callable[..., Any], /, *arguments: Any, **options: Any
) -> Future[Any]:
    """Run a job on this thread: the allocator records no event of another one."""
    job: Future[Any] = Future()
    try:
        job.set_result(function(*arguments, **options))
    except BaseException as error:
        job.set_exception(error)
    return job


def measure_peak_bytes(recipe: Recipe) -> int:
    """Return the peak of a run's tensors and staging buffers in bytes."""
    allocate = disk_store.allocate_buffer
    buffer_bytes = []

    def count(num_bytes: int, *, is_pinned: bool) -> Any:
        """Count a buffer, which does not come from torch's allocator."""
        buffer_bytes.append(num_bytes)
        return allocate(num_bytes, is_pinned=is_pinned)

    gc.collect()  # else the run frees garbage of earlier tests
    with (
        patch.object(ThreadPoolExecutor, "submit", run_at_once),
        patch.object(disk_store, "allocate_buffer", count),
        patch.object(staging_buffer, "allocate_buffer", count),
    ):
        counter = AllocationCounter()
        state = run_steps(recipe)
        peak_bytes = counter.end()
    if isinstance(state.optimizer, OffloadedOptimizer):
        state.optimizer.close()
    for offload in (state.activation_offload, state.weight_offload):
        if offload is not None:
            offload.close()
    return peak_bytes + sum(buffer_bytes)


@pytest.mark.parametrize(("name", "recompute"), CASES)
def test_the_peak_is_that_of_the_rehearsal(tmp_path: Path, name: str, recompute: str) -> None:
    recipe = build_case(tmp_path, name, recompute)
    report = rehearse_rank(recipe, validate_run(recipe, 1).plan, 0)
    assert report.peak_bytes == pytest.approx(measure_peak_bytes(recipe), rel=TOLERANCE)
