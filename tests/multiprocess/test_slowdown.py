"""Two ranks that are slower than predicted name the part that is slow: real steps with a link, a
rank, or the products of all ranks delayed.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardwright.architecture import read_config
from shardwright.config.recipe_loading import validate_recipe
from shardwright.hardware import MatmulRate, MeasuredProfile, save_profile
from shardwright.launch.rank_environment import RankEnvironment
from shardwright.layout import Layout
from shardwright.parallel import collectives, comm_timing
from shardwright.parallel.comm_timing import use_timer
from shardwright.plans import BatchPlan, build_plan
from shardwright.training.checks.run_checks import ValidatedRun
from shardwright.training.metrics import run_prediction
from shardwright.training.metrics.rank_metrics import RankStepTimes
from shardwright.training.metrics.run_prediction import PredictionComparison, predict_training_run
from shardwright.training.rank_sync import RankSync
from shardwright.training.step import accumulate_gradients
from tests.multiprocess.models import LLAMA, build_model
from tests.multiprocess.pool import RankPool
from tests.multiprocess.test_pipeline_execution import micro_batch

CONFIG = LLAMA | {"num_hidden_layers": 2, "intermediate_size": 28}
SEQUENCE_LENGTH = 8
DELAY_SECONDS = 1.2
"""Delay of a step, several times the predicted step of 0.1 to 0.4 s."""
SLOW_PROFILE = MeasuredProfile(
    "any", None, "2026", 2**34, 1e7, (MatmulRate("fp32", 16, 16, 16, 5e6),), handoff_seconds=1e-3
)
"""Rates so low that a step of the small model takes less, also on a busy machine."""


WINDOWS = SimpleNamespace(report=SimpleNamespace(packing="windows"))


def build_run(layout: Layout, profile: Path) -> ValidatedRun:
    recipe = validate_recipe(
        {
            "model": {"config": CONFIG},
            "data": {"sources": ["nowhere"]},
            "cluster": {"node": "2xcpu", "profile": str(profile)},
            "precision": "fp32",
            "training": {
                "sequence_length": SEQUENCE_LENGTH,
                "micro_batch_size": 2,
                "gradient_accumulation_steps": 2,
                "learning_rate": 1e-3,
                "max_steps": 1,
            },
        }
    )
    shape = read_config(CONFIG)
    batch = BatchPlan(SEQUENCE_LENGTH, 2, 2, layout.data_ranks)
    plan = build_plan(shape, layout, batch, recipe.precision, "none")
    run = SimpleNamespace(recipe=recipe, planned_recipe=None, plan=plan, shape=shape, data=WINDOWS)
    return cast(ValidatedRun, run)


def delay_first_call(stack: ExitStack, owner: Any, name: str, delayed: list[bool]) -> None:
    """Delay the first call of a function in every step."""
    original = getattr(owner, name)

    def call_later(*arguments: Any, **options: Any) -> Any:
        if not delayed:
            delayed.append(True)
            time.sleep(DELAY_SECONDS)
        return original(*arguments, **options)

    stack.enter_context(mock.patch.object(owner, name, call_later))


def measure_steps(layout: Layout, profile: Path, slow: str) -> tuple[float, Any]:
    """Run two steps, the second of which is measured; return the predicted step and the
    event's fields, None if the steps are as fast as predicted.
    """
    run = build_run(layout, profile)
    model = build_model(run.shape, layout, run.plan.batch, run.recipe.precision, seed=3)
    batches = [micro_batch(2, SEQUENCE_LENGTH, number) for number in range(2)]
    rank_sync = RankSync(RankEnvironment(dist.get_rank(), 2, dist.get_rank()), torch.device("cpu"))
    prediction = predict_training_run(run)
    assert prediction is not None
    comparison = PredictionComparison(run, prediction, rank_sync)
    timer = model.build_comm_timer()
    delayed: list[bool] = []
    found = None
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(run_prediction, "_WARMUP_STEPS", 1))
        stack.enter_context(mock.patch.object(run_prediction, "_MEASURED_STEPS", 1))
        if slow == "data link":
            delay_first_call(stack, comm_timing, "reduce_scatter_single", delayed)
        elif slow == "tensor link":
            delay_first_call(stack, collectives, "all_gather_single", delayed)
        elif slow == "products" or (slow == "rank 1" and dist.get_rank() == 1):
            delay_first_call(stack, model.decoder.blocks[0].attention, "forward", delayed)
        for step in range(2):
            delayed[:] = [True] * (step == 0)  # the warm-up is as fast as predicted
            timer.reset()
            dist.barrier()
            start = time.perf_counter()
            if step and slow == "input" and dist.get_rank() == 1:
                time.sleep(DELAY_SECONDS)
            data_seconds = time.perf_counter() - start
            with use_timer(timer):
                accumulate_gradients(model, batches, seed=0, step=step)
            seconds = time.perf_counter() - start
            waits = timer.seconds()
            times = RankStepTimes(
                seconds, seconds - sum(waits.values()), {"data": data_seconds}, waits
            )
            found = comparison.add(times, ())
    return prediction.step_interval[1], None if found is None else found.as_dict()


@pytest.mark.parametrize(
    ("layout", "slow", "expected"),
    [
        (Layout(dp_shard=2, zero_stage=1), "nothing", None),
        (Layout(dp_shard=2, zero_stage=1), "data link", {"part": "traffic", "parallelism": "data"}),
        (Layout(tp=2), "tensor link", {"part": "traffic", "parallelism": "tensor"}),
        (Layout(dp_shard=2, zero_stage=3), "products", {"part": "products"}),
        (Layout(dp_replicate=2), "rank 1", {"part": "waiting", "rank": 1}),
        (Layout(dp_shard=2, zero_stage=2), "input", {"part": "input"}),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_the_slow_part_of_real_steps_is_named(
    ranks: RankPool,
    tmp_path: Path,
    layout: Layout,
    slow: str,
    expected: dict[str, Any] | None,
) -> None:
    save_profile(SLOW_PROFILE, tmp_path / "profile.json")
    (high_seconds, found), (_, other) = ranks.run(
        2, measure_steps, layout, tmp_path / "profile.json", slow
    )
    assert other is None  # rank 0 reports
    assert 0.1 < high_seconds < DELAY_SECONDS / 2, high_seconds
    if expected is None:
        assert found is None
        return
    assert expected.items() <= found.items(), found
    assert found["measured_part_seconds"] > 0.9 * DELAY_SECONDS
    assert found["measured_seconds"] > found["high_seconds"] == high_seconds
    if slow == "tensor link":
        # Replicas would exchange their gradients once instead of hidden states in every layer.
        assert found["faster_layout"]["tp"] == 1
        assert found["faster_seconds"] < found["measured_seconds"]
