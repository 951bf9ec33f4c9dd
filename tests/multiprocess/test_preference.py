"""Preference training under layouts: losses, norms, rewards and weights of one process, with a
reference model or with adapters off.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import Tensor

from shardwright.cli.main import run as shardwright
from shardwright.config.recipe_loading import validate_recipe
from shardwright.data.loader import read_step_micro_batches
from shardwright.data.sample_order import SampleOrder
from shardwright.errors import ExitCode
from shardwright.layout import RankGrid
from shardwright.telemetry.event_log import EvaluationEvent, read_events, select_surviving_steps
from shardwright.training.checks.run_checks import validate_run
from shardwright.training.evaluation import evaluate_loss
from shardwright.training.preference_objective import PreferenceObjective
from shardwright.training.setup import build_state
from shardwright.training.step import accumulate_gradients, update_parameters
from tests.multiprocess.pool import RankPool
from tests.unit.training.preference_data import preference_recipe

STEPS = 3


def train_preferences(document: dict[str, Any]) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Return loss, norm and rewards of every step, then the validation loss; and the weights at
    the end.
    """
    world_size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    run = validate_run(validate_recipe(document), world_size)
    state = build_state(run, torch.device("cpu"))
    objective = state.objective
    model = state.model
    assert isinstance(objective, PreferenceObjective)
    order = SampleOrder(run.recipe.seed, len(run.data.train))
    data_rank = RankGrid(run.plan.layout).data_rank(rank)
    rows = []
    for step in range(STEPS):
        batches = read_step_micro_batches(run.data.train, order, run.plan.batch, step, data_rank)
        loss = accumulate_gradients(model, batches, seed=0, step=step, objective=objective)
        done = update_parameters(model, state.optimizer, learning_rate=1e-2, max_grad_norm=1.0)
        rows.append([loss.mean(), done.gradient_norm, *asdict(objective.pop_metrics()).values()])
    evaluation = evaluate_loss(run, model, data_rank, lambda: False, objective)
    assert evaluation is not None
    rows.append(
        [evaluation.loss, float(evaluation.tokens), *asdict(objective.pop_metrics()).values()]
    )
    names = [name for name in model.layouts if name in model.trainable]
    return rows, {name: model.gather_parameter(name).clone() for name in names}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("preference")


CHANGES: dict[str, dict[str, Any]] = {"frozen": {}, "adapter_off": {"adapters": {"rank": 2}}}
PRECISE = {"precision": {"kind": "fp64"}, "data": {"validation_fraction": 0.2}}


@pytest.fixture(scope="module")
def one_process(ranks: RankPool, folder: Path) -> dict[str, Any]:
    return {
        name: ranks.run(1, train_preferences, preference_recipe(folder, **change, **PRECISE))[0]
        for name, change in CHANGES.items()
    }


@pytest.mark.parametrize(
    ("layout", "reference"),
    [
        ("dp_replicate=2", "frozen"),
        ("dp_shard=2,zero_stage=3", "frozen"),
        ("tp=2", "frozen"),
        ("cp=2,cp_method=ring", "frozen"),
        ("dp_shard=2,zero_stage=1", "adapter_off"),
        ("dp_shard=2,zero_stage=3", "adapter_off"),
        ("tp=2", "adapter_off"),
        ("pp=2", "frozen"),
        ("pp=2", "adapter_off"),
        pytest.param("pp=2,dp_shard=2,zero_stage=2", "adapter_off", marks=pytest.mark.long),
        pytest.param("dp_shard=2,zero_stage=2", "frozen", marks=pytest.mark.long),
        pytest.param("dp_shard=2,tp=2,zero_stage=3", "frozen", marks=pytest.mark.long),
        pytest.param("cp=2,cp_method=ulysses", "adapter_off", marks=pytest.mark.long),
    ],
)
def test_layouts_train_as_one_process(
    ranks: RankPool, folder: Path, one_process: dict[str, Any], layout: str, reference: str
) -> None:
    num_ranks = (
        4 if layout in ("dp_shard=2,tp=2,zero_stage=3", "pp=2,dp_shard=2,zero_stage=2") else 2
    )
    expected, weights = one_process[reference]
    assert abs(expected[STEPS - 1][4]) > 1e-3  # a margin: model and reference differ
    for rows, got_weights in ranks.run(
        num_ranks,
        train_preferences,
        preference_recipe(folder, layout, **CHANGES[reference], **PRECISE),
    ):
        assert_same(rows, expected, got_weights, weights)


def assert_same(
    rows: list[list[float]],
    expected: list[list[float]],
    got_weights: dict[str, Tensor],
    weights: dict[str, Tensor],
) -> None:
    for got, want in zip(rows, expected, strict=True):
        assert got == pytest.approx(want, rel=1e-9, abs=1e-12)
    for name, expected_weights in weights.items():
        torch.testing.assert_close(
            got_weights[name], expected_weights, rtol=1e-8, atol=1e-11, msg=name
        )


@pytest.mark.long
def test_a_folded_schedule_trains_as_one_process(ranks: RankPool, folder: Path) -> None:
    """The first rank has the head as well as the embeddings, and backward passes are split."""
    config = preference_recipe(folder)["model"]["config"] | {"num_hidden_layers": 4}
    deep = {"model": {"config": config}, "training": {"gradient_accumulation_steps": 4}} | PRECISE
    expected, weights = ranks.run(1, train_preferences, preference_recipe(folder, **deep))[0]
    for rows, got_weights in ranks.run(
        2,
        train_preferences,
        preference_recipe(folder, "pp=2,schedule=zbv,virtual_stages=2", **deep),
    ):
        assert_same(rows, expected, got_weights, weights)


def test_a_run_logs_rewards_and_resumes_from_its_checkpoint(folder: Path) -> None:
    document = preference_recipe(
        folder, data={"validation_fraction": 0.2}, checkpoint={"every_steps": 2}
    )
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(document))
    assert shardwright(["train", str(recipe), "--set", "training.max_steps=2"]) == ExitCode.DONE
    assert shardwright(["train", str(recipe), "--resume"]) == ExitCode.DONE
    log = read_events(folder / "run")
    steps = select_surviving_steps(log)
    assert [step.step for step in steps] == [1, 2, 3]
    assert steps[0].loss == pytest.approx(0.693147, abs=1e-5)
    assert steps[0].reward_margin == pytest.approx(0.0, abs=1e-6)
    assert steps[2].reward_margin is not None
    # The reference of the resumed run is the initial model of the first run.
    assert steps[2].reward_margin > 0.0
    assert log.filter_by_type(EvaluationEvent)[-1].reward_accuracy is not None
