"""A rehearsal that counts repeated micro-batches equals one that runs them all."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
import torch
from rich.console import Console
from tests.unit.planner import models

from shardwright import api
from shardwright.architecture import read_recipe_shape
from shardwright.cli.rehearse import rehearse_and_print
from shardwright.config.recipe_loading import validate_recipe
from shardwright.layout import Layout
from shardwright.plans import BatchPlan, build_plan
from shardwright.rehearsal import rank_rehearsal
from shardwright.rehearsal.rank_rehearsal import RankRehearsal, rehearse_rank
from shardwright.rehearsal.repeated_micro_batches import list_units, shorten_step
from shardwright.training.step import TokenObjective

TOKENS = 64
SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 128}


def rehearse(
    layout: Layout,
    num_micro_batches: int,
    *,
    model: str = "llama",
    num_layers: int = 2,
    rank: int = 0,
    recompute: str = "none",
    is_whole: bool = False,
    **sections: Any,
) -> RankRehearsal:
    config = models.CONFIGS[model] | SMALL | {"num_hidden_layers": num_layers}
    recipe = validate_recipe(
        {
            "model": {"config": config, "loss_chunk_tokens": 32},
            "data": {"sources": ["nowhere"]},
            "precision": {"kind": "bf16"},
            "training": {"sequence_length": TOKENS, "learning_rate": 1e-3, "max_steps": 1},
            **sections,
        }
    )
    plan = build_plan(
        read_recipe_shape(recipe),
        layout,
        BatchPlan(TOKENS, 1, num_micro_batches, layout.data_ranks),
        recipe.precision,
        recompute,  # type: ignore[arg-type]
    )
    report = rehearse_rank(recipe, plan, rank, should_run_each_micro_batch=is_whole)
    return replace(report, seconds=0.0)


FSDP = Layout(dp_shard=2, zero_stage=3)
LONG = pytest.mark.long
CASES = [
    pytest.param(Layout(), {}, marks=LONG),
    pytest.param(Layout(dp_replicate=2), {}, marks=LONG),
    (Layout(dp_shard=2, zero_stage=1), {"num_layers": 1}),
    pytest.param(FSDP, {"recompute": "full"}, marks=LONG),
    (Layout(dp_shard=2, ep=2, zero_stage=3), {"model": "qwen3_moe", "recompute": "selective"}),
    (FSDP, {"num_layers": 1, "offload": {"activations": "host", "optimizer": "host"}}),
    (Layout(), {"offload": {"parameters": "host"}, "recompute": "full"}),
    (Layout(tp=2), {"num_layers": 1, "adapters": {"rank": 4}}),
    pytest.param(FSDP, {"data": {"sources": ["nowhere"], "packing": "documents"}}, marks=LONG),
    pytest.param(Layout(pp=2), {}, marks=LONG),
    (Layout(pp=2, dp_shard=2, zero_stage=2), {"rank": 3, "recompute": "full"}),
    pytest.param(
        Layout(pp=2, schedule="interleaved_1f1b", virtual_stages=2), {"num_layers": 4}, marks=LONG
    ),
    (Layout(pp=2, dp_shard=2, zero_stage=3, schedule="zb_h1"), {"rank": 2}),
    (Layout(pp=2, schedule="zbv"), {"num_layers": 4, "offload": {"activations": "host"}}),
    pytest.param(
        Layout(pp=2, schedule="dualpipev"),
        {"num_layers": 4, "adapters": {"rank": 4}},
        marks=LONG,
    ),
    pytest.param(Layout(pp=2, dp_shard=2, ep=2, zero_stage=1), {"model": "qwen3_moe"}, marks=LONG),
]
NUM_MICRO_BATCHES = {"interleaved_1f1b": 12, "dualpipev": 9, "zbv": 8}


@pytest.mark.parametrize(("layout", "options"), CASES, ids=str)
def test_counted_micro_batches_equal_run_ones(layout: Layout, options: dict[str, Any]) -> None:
    number = NUM_MICRO_BATCHES.get(layout.schedule, 7)
    whole = rehearse(layout, number, is_whole=True, **options)
    counted = rehearse(layout, number, **options)
    assert whole.num_run_micro_batches == number
    assert counted.num_run_micro_batches < number
    assert replace(counted, num_run_micro_batches=number) == whole


def test_micro_batches_that_differ_are_all_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class GrowingObjective(TokenObjective):
        """Keeps a tensor of every micro-batch until the update."""

        def __init__(self) -> None:
            self.tensors: list[torch.Tensor] = []

        def arguments(self, batch: Any) -> dict[str, Any]:
            self.tensors.append(torch.empty(1000))
            return super().arguments(batch)

    monkeypatch.setattr(rank_rehearsal, "_build_objective", lambda *_: GrowingObjective())
    report = rehearse(Layout(), 6, num_layers=1)
    assert report.num_run_micro_batches == 6
    assert report == rehearse(Layout(), 6, num_layers=1, is_whole=True)
    parts = [part for part in report.contributions if "arguments" in part.origin.source_line]
    assert [part.num_tensors for part in parts] == [6]


def test_preference_tuning_runs_all_micro_batches() -> None:
    """It keeps log-probabilities of every micro-batch."""
    sections = {"adapters": {"rank": 4}, "preference": {"kind": "dpo"}}
    assert rehearse(Layout(), 6, num_layers=1, **sections).num_run_micro_batches == 6


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(
    "schedule", ["1f1b", "interleaved_1f1b", "zb_h1", "zbv", "dualpipev", "gpipe"]
)
def test_a_whole_step_follows_from_a_shorter_one(schedule: str, num_ranks: int) -> None:
    virtual_stages = 2 if schedule == "interleaved_1f1b" else None
    layout = Layout(pp=num_ranks, schedule=schedule, virtual_stages=virtual_stages)
    for rank in range(num_ranks):
        step = shorten_step(layout, rank, 32)
        if schedule == "gpipe":
            assert step is None
            continue
        assert step is not None
        units = list_units(layout, rank, step.num_micro_batches)
        period = (32 - step.num_micro_batches) // step.num_omitted
        body = units[step.end - step.length : step.end]
        whole = [
            *units[: step.end],
            *(unit.shift(i * period) for i in range(1, step.num_omitted + 1) for unit in body),
            *(unit.shift(step.num_omitted * period) for unit in units[step.end :]),
        ]
        assert whole == list_units(layout, rank, 32)


def test_few_micro_batches_are_all_run() -> None:
    assert [shorten_step(Layout(), 0, number) for number in (1, 5)] == [None, None]
    assert shorten_step(Layout(), 0, 6) is not None


def test_the_report_says_how_many_micro_batches_were_run() -> None:
    config = models.CONFIGS["llama"] | SMALL | {"num_hidden_layers": 1}
    training = {"sequence_length": TOKENS, "micro_batch_size": 1, "learning_rate": 1e-3}
    recipe = validate_recipe(
        {
            "model": {"config": config},
            "data": {"sources": ["nowhere"]},
            "precision": "fp32",
            "training": training | {"gradient_accumulation_steps": 8, "max_steps": 1},
            "run": {"device": "cpu"},
        }
    )
    console = Console(file=StringIO(), width=200)
    result = rehearse_and_print(recipe, 1, console)
    assert isinstance(console.file, StringIO)
    assert "8 micro-batches, of which 5 were run: the others repeat" in console.file.getvalue()
    assert result.as_dict()["roles"][0]["num_run_micro_batches"] == 5
    whole = api.rehearse(recipe, 1, should_run_each_micro_batch=True)
    assert whole.num_run_micro_batches == (8, 8)
