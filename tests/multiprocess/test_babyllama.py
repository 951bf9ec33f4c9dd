"""A trained model (outside data) continues under each layout with the losses of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwright.config.recipe_loading import parse_layout, validate_recipe
from shardwright.data.loader import read_step_micro_batches
from shardwright.data.sample_order import SampleOrder
from shardwright.layout import RankGrid
from shardwright.optim import compute_learning_rate
from shardwright.training.checks.run_checks import validate_run
from shardwright.training.setup import build_state
from shardwright.training.step import accumulate_gradients, update_parameters
from tests.multiprocess.pool import RankPool

pytestmark = pytest.mark.data

STEPS = 20


def build_recipe(folder: Path, layout: str, cache: Path) -> dict[str, Any]:
    return {
        "model": {"path": str(folder / "models" / "babyllama105")},
        "data": {
            "sources": [str(folder / "text" / "tinyshakespeare.txt")],
            "packing": "documents",
            "cache_dir": str(cache),
        },
        "precision": "fp32",
        "training": {
            "sequence_length": 128,
            "global_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-3,
            "warmup_steps": 5,
            "max_steps": STEPS,
            "weight_decay": 0.1,
        },
        "layout": parse_layout(layout),
    }


def train(document: dict[str, Any]) -> list[float]:
    """Return the training losses of the first steps, as the trainer computes them."""
    world_size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    run = validate_run(validate_recipe(document), world_size)
    device = torch.device("cpu")
    state = build_state(run, device)
    recipe = run.recipe
    batch = run.plan.batch
    order = SampleOrder(recipe.seed, len(run.data.train))
    data_rank = RankGrid(run.plan.layout).data_rank(rank)
    step_losses = []
    for step in range(STEPS):
        micro_batches = read_step_micro_batches(run.data.train, order, batch, step, data_rank)
        step_losses.append(
            accumulate_gradients(state.model, micro_batches, seed=recipe.seed, step=step).mean()
        )
        rate = compute_learning_rate(
            step, recipe.training, run.total_steps, batch.global_batch_size
        )
        update_parameters(
            state.model,
            state.optimizer,
            learning_rate=rate,
            max_grad_norm=recipe.training.max_grad_norm,
        )
    return step_losses


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("babyllama")


@pytest.fixture(scope="module")
def expected(ranks: RankPool, outside_data: Path, cache: Path) -> list[float]:
    return list(ranks.run(1, train, build_recipe(outside_data, "", cache))[0])


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("dp_replicate=2", marks=pytest.mark.long),
        "dp_shard=2,zero_stage=3",
        pytest.param("tp=2", marks=pytest.mark.long),
        pytest.param("tp=4", marks=pytest.mark.long),
        "pp=2",
        "cp=2,cp_method=ring",
        pytest.param("cp=2,cp_method=ulysses", marks=pytest.mark.long),
        "tp=2,pp=2",
    ],
)
def test_losses_are_those_of_one_process(
    ranks: RankPool, outside_data: Path, cache: Path, expected: list[float], layout: str
) -> None:
    num_ranks = 4 if layout in ("tp=4", "tp=2,pp=2") else 2
    assert (
        expected[-1] < expected[0] - 0.3
    )  # the losses fall, so they are not equal by not changing
    for step_losses in ranks.run(num_ranks, train, build_recipe(outside_data, layout, cache)):
        assert step_losses == pytest.approx(expected, rel=1e-4)
