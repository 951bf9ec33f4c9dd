"""Loads of experts that a run logged: means over layers and steps, and predictions with them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import shardwright as sw
from shardwright.cli.main import run
from shardwright.config.recipe import Recipe
from shardwright.errors import ExitCode, InputError
from shardwright.layout import Layout
from shardwright.planner.candidate import Candidate
from shardwright.planner.expert_loads import (
    NUM_STEPS,
    ExpertRankLoads,
    compute_rank_loads,
    read_logged_loads,
)
from shardwright.planner.memory.feed_forward_activations import compute_feed_forward_bytes
from shardwright.planner.model_costs import ModelFacts, get_model_facts
from shardwright.planner.predictor import Predictor
from shardwright.planner.rates.efficiency import Efficiency
from shardwright.telemetry.event_log import EventWriter
from tests.unit.planner import models
from tests.unit.telemetry.samples import make_step_event

EP_2 = Layout(dp_shard=4, ep=2, zero_stage=1)
EVEN = (10,) * 8
SKEWED = (40, 0, 0, 0, 10, 10, 10, 10)


SECTIONS: dict[str, Any] = {
    "model": {"config": models.CONFIGS["qwen3_moe"]},
    "data": {"sources": "text.txt"},
    "training": {
        "sequence_length": 256, "global_batch_size": 8, "max_steps": 10, "learning_rate": 1e-4,
    },
}  # fmt: skip


def build_recipe(**sections: Any) -> Recipe:
    return sw.load_recipe(SECTIONS | sections)


def write_run(folder: Path, *steps: tuple[tuple[int, ...], ...] | None) -> Path:
    with EventWriter(folder) as writer:
        for number, tokens in enumerate(steps, start=1):
            writer.append(make_step_event(number, expert_load=1.0, expert_tokens=tokens))
    return folder


def test_a_rank_has_the_tokens_of_consecutive_experts() -> None:
    loads = compute_rank_loads([[(4, 2, 1, 1), (1, 1, 3, 3)], [(2, 2, 2, 2), (0, 0, 0, 8)]])
    assert loads.num_steps == 2
    assert [num_ranks for num_ranks, _ in loads.ratios] == [1, 2, 4]
    assert loads.get_ratio(1) == 1
    assert loads.get_ratio(2) == pytest.approx((6 / 4 + 6 / 4 + 1 + 8 / 4) / 4)
    assert loads.get_ratio(4) == pytest.approx((4 / 2 + 3 / 2 + 1 + 8 / 2) / 4)
    assert loads.describe() == (
        "loads of experts: mean of 2 logged steps; busiest rank / even share: 1.50 over 2, "
        "2.12 over 4 ranks"
    )


def test_experts_receive_at_most_their_capacity() -> None:
    loads = compute_rank_loads([[SKEWED]], capacity_factor=1.5)
    assert loads.get_ratio(8) == 1.5
    assert loads.get_ratio(2) == 1.0, "15 of the 40 tokens, and 40 on the other rank"
    assert compute_rank_loads([[SKEWED]]).get_ratio(8) == 4.0


def test_layers_without_tokens_are_left_out() -> None:
    assert compute_rank_loads([[(0,) * 8, SKEWED]]).get_ratio(8) == 4.0


def predict(layout: Layout, loads: ExpertRankLoads | None) -> Any:
    facts = get_model_facts(models.read_shape("qwen3_moe"))
    predictor = Predictor(facts, models.make_cluster(4), Efficiency())
    return predictor.predict(Candidate(layout, 256, 2, 1, expert_loads=loads))


def test_the_busiest_rank_sets_the_time_and_the_memory_of_experts() -> None:
    loads = compute_rank_loads([[SKEWED]])
    assert loads.get_ratio(4) == 2.0
    ep_4 = replace(EP_2, ep=4)
    even = predict(ep_4, None)
    skewed = predict(ep_4, loads)
    assert predict(ep_4, compute_rank_loads([[EVEN]])) == replace(
        even, candidate=replace(even.candidate, expert_loads=compute_rank_loads([[EVEN]]))
    )
    exchange = even.time.expert + even.time.hidden_expert
    assert skewed.time.expert + skewed.time.hidden_expert > 1.7 * exchange > 0  # latency stays
    assert skewed.time.compute > even.time.compute
    assert skewed.memory.activations > even.memory.activations
    assert skewed.model_flops_per_step == even.model_flops_per_step
    for same in ("tensor", "data", "optimizer"):
        assert getattr(skewed.time, same) == getattr(even.time, same)
    assert skewed.memory.weights == even.memory.weights


def test_saved_bytes_of_experts_are_those_of_the_busiest_rank() -> None:
    facts = ModelFacts(models.read_shape("qwen3_moe"))
    kind = next(kind for kind in facts.kinds if kind.shape.sparse)
    even, skewed = (
        compute_feed_forward_bytes(
            facts, kind, Candidate(EP_2, 256, 2, expert_loads=loads)
        )
        for loads in (None, ExpertRankLoads(1, ((1, 1.0), (2, 1.5))))
    )  # fmt: skip
    router = 2 * 512 * 8 * 4
    assert skewed[0] - router == pytest.approx(1.5 * (even[0] - router))
    assert skewed[1:] == pytest.approx([1.5 * each for each in even[1:]])


def test_without_expert_parallelism_loads_change_nothing() -> None:
    layout = replace(EP_2, ep=1)
    assert predict(layout, compute_rank_loads([[SKEWED]])).time == predict(layout, None).time


def test_the_newest_logged_steps_of_a_run_are_read(tmp_path: Path) -> None:
    steps = [(SKEWED,) * 3] * 5 + [None, (EVEN,) * 3] * NUM_STEPS
    recipe = build_recipe()
    loads = read_logged_loads(write_run(tmp_path, *steps), recipe, models.read_shape("qwen3_moe"))
    assert loads.num_steps == NUM_STEPS
    assert loads.get_ratio(8) == 1.0
    capped = build_recipe(moe={"capacity_factor": 1.25})
    folder = write_run(tmp_path / "skewed", (SKEWED,) * 3)
    assert read_logged_loads(folder, capped, models.read_shape("qwen3_moe")).get_ratio(8) == 1.25


@pytest.mark.parametrize(
    ("model", "steps", "message"),
    [
        ("llama", [(EVEN,) * 3], "the recipe's model has no experts"),
        ("qwen3_moe", [None, None], "the run logged no loads of experts"),
        ("qwen3_moe", [(EVEN,) * 2], "2 sparse layers of 8 experts"),
        ("qwen3_moe", [((1, 1),) * 3], "3 sparse layers of 2 experts"),
    ],
)
def test_a_run_without_loads_of_this_models_experts_is_refused(
    model: str, steps: list[Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="--expert-load") as error:
        read_logged_loads(write_run(tmp_path, *steps), build_recipe(), models.read_shape(model))
    assert message in str(error.value)


def test_a_missing_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no events to read"):
        read_logged_loads(tmp_path / "none", build_recipe(), models.read_shape("qwen3_moe"))


def test_the_command_plans_with_the_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        json.dumps(SECTIONS | {"layout": {"dp_shard": 4, "ep": 4, "zero_stage": 1}}),
        encoding="utf-8",
    )
    words = ["plan", str(recipe), "--cluster", "4xA100-80GB"]
    assert run([*words, "--json"]) == ExitCode.DONE
    even = json.loads(capsys.readouterr().out)
    words += ["--expert-load", str(write_run(tmp_path / "run", (SKEWED,) * 3))]
    assert run([*words, "--json"]) == ExitCode.DONE
    skewed = json.loads(capsys.readouterr().out)
    assert even["expert_loads"] is None
    assert skewed["expert_loads"].startswith("loads of experts: mean of 1 logged steps")
    own, skewed_own = (each["as_the_recipe_has_it"] for each in (even, skewed))
    assert skewed_own["step_seconds"]["expert"] > own["step_seconds"]["expert"]
    assert run(words) == ExitCode.DONE
    assert skewed["expert_loads"] in " ".join(capsys.readouterr().out.split())
