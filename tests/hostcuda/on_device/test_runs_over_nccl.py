"""Whole runs of several ranks, as `tests/gpu/test_layouts_on_nccl.py` trains them on GPUs: from the
rendezvous to the last checkpoint, with evaluation, comparison of replicas and resume.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardwright.checkpoint.tensor_loading import find_newest_checkpoint
from shardwright.config import Recipe
from shardwright.errors import RankFailed
from shardwright.telemetry.event_log import (
    EvaluationEvent,
    read_events,
    select_surviving_steps,
)
from shardwright.training.run import train
from shardwright.verification.rank_pool import RankPool
from tests.gpu.test_layouts_on_nccl import (
    CONFIG,
    DENSE_LAYOUTS,
    EXPERT_CONFIG,
    EXPERT_LAYOUTS,
    NUM_STEPS,
    build_recipe,
    count_ranks,
    name_layout,
)
from tests.hostcuda.whole_runs import train_as_rank

SMALLER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "max_position_embeddings": 32,
}
SHORT = ("pp=2-schedule=1f1b", "dp_shard=2-ep=2-zero_stage=3")
CASES = [
    pytest.param(
        config | SMALLER | {"num_hidden_layers": max(4, 2 * layout.get("pp", 1))},
        layout,
        id=name_layout(layout),
        marks=[] if name_layout(layout) in SHORT else [pytest.mark.long],
    )
    for config, layouts in ((CONFIG, DENSE_LAYOUTS), (EXPERT_CONFIG, EXPERT_LAYOUTS))
    for layout in layouts
    if layout.get("async_tensor_parallel") != "fused"  # PyTorch's kernels over symmetric memory
]


def build_content(
    folder: Path, config: dict[str, Any], layout: dict[str, Any], num_steps: int = NUM_STEPS
) -> dict[str, Any]:
    """Return a deterministic recipe whose replicas are compared, and saved in the background."""
    folder.mkdir(exist_ok=True)
    content = build_recipe(folder, config, layout, num_steps).model_dump(mode="json")
    content["training"] |= {"sequence_length": 32, "deterministic": True}
    content["run"] |= {"replica_check_every_steps": 2, "log_every_steps": 2}
    return content


def read_losses(folder: Path) -> list[float]:
    """Return the losses of the steps and evaluations that count."""
    events = read_events(folder / "run")
    steps = [event.loss for event in select_surviving_steps(events)]
    return [*steps, events.filter_by_type(EvaluationEvent)[-1].loss]


@pytest.fixture(scope="module")
def losses_of_one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Losses of one device without a process group, by configuration."""
    return {}


def run_ranks(
    pool: RankPool, layout: dict[str, Any], content: dict[str, Any], **options: Any
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pool.run(count_ranks(layout), partial(train_as_rank, **options), store.port, content)


@pytest.mark.parametrize(("config", "layout"), CASES)
def test_a_run_that_resumes_has_the_losses_of_one_device(
    device_ranks: RankPool,
    losses_of_one: dict[str, list[float]],
    config: dict[str, Any],
    layout: dict[str, Any],
    tmp_path: Path,
) -> None:
    if str(config) not in losses_of_one:
        content = build_content(tmp_path / "one", config, {})
        content["run"]["device"] = "cpu"
        train(Recipe.model_validate(content))
        losses_of_one[str(config)] = read_losses(tmp_path / "one")
    for num_steps in (NUM_STEPS // 2, NUM_STEPS):
        content = build_content(tmp_path / "several", config, layout, num_steps)
        run_ranks(device_ranks, layout, content, resume=num_steps == NUM_STEPS)
    assert read_losses(tmp_path / "several") == pytest.approx(losses_of_one[str(config)], rel=1e-4)


def test_kernels_over_symmetric_memory_are_refused(device_ranks: RankPool, tmp_path: Path) -> None:
    layout = {"tp": 2, "async_tensor_parallel": "fused"}
    content = build_content(tmp_path, CONFIG | SMALLER, layout)
    with pytest.raises(RankFailed, match="device 0 cannot access the memory of device 1"):
        run_ranks(device_ranks, layout, content)


@pytest.mark.long
def test_a_step_of_which_nccl_aborts_an_operation_is_not_saved(
    device_ranks: RankPool, tmp_path: Path
) -> None:
    layout = {"dp_shard": 2, "zero_stage": 3}
    content = build_content(tmp_path, CONFIG | SMALLER, layout)
    content["checkpoint"] |= {"every_steps": 1, "asynchronous": False}
    with pytest.raises(RankFailed, match="NCCL communicator was aborted: TIMEOUT in the group"):
        run_ranks(device_ranks, layout, content, fails_after=2)
    newest = find_newest_checkpoint(tmp_path / "run/checkpoints")
    assert newest is not None
    assert newest.step == 2
