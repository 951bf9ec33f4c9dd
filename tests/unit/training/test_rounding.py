"""Counts of saturated and flushed quantised operands: by kind of layer, in events, and warnings."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import pytest
import torch

from shardwright.config.low_precision import LowPrecisionRecipe
from shardwright.errors import CheckpointError
from shardwright.model.products import fp8, nvfp4
from shardwright.model.products.operand import get_widest_blocks
from shardwright.model.products.scaled_product import ScaledProducts
from shardwright.telemetry.event_log import SkippedStepEvent, StepEvent, WarningEvent, read_events
from shardwright.training.checks.run_checks import validate_run
from shardwright.training.metrics.rounding import RoundingMonitor, RoundingReport, read_rounding
from shardwright.training.run import train
from tests.unit.training.finished import CONFIG
from tests.unit.training.test_run_checks import build_recipe

KINDS = {"a": "attention", "b": "mlp", "c": "mlp"}


def test_counts_are_summed_by_kind() -> None:
    table = [0, 1, 0, 10, 0, 2, 5, 20, 3, 4, 2, 20]
    report = read_rounding([float(number) for number in table], list(KINDS), KINDS)
    assert report.saturated == {"attention": 0, "mlp": 3}
    assert report.flushed == {"attention": 0.1, "mlp": 0.15}
    assert report.nonfinite == {"attention": 0, "mlp": 7}
    assert report.saturated_weights == ("c",)
    assert report.nonfinite_weights == ("b", "c")


def test_persistent_saturation_is_named_once() -> None:
    monitor = RoundingMonitor()
    clean = RoundingReport({}, {}, {}, (), ())
    wrong = RoundingReport({}, {}, {}, ("c",), ())
    warnings = [monitor.observe(each) for each in (wrong, wrong, clean, wrong, wrong, wrong, wrong)]
    assert [len(each) for each in warnings] == [0, 0, 0, 0, 0, 1, 0]
    named = warnings[5]
    assert "operands of c saturated in 3 logged steps" in named[0]
    assert "precision.fp8.exclude" in named[0]


def test_overflow_is_named_in_the_first_logged_step_that_has_it() -> None:
    monitor = RoundingMonitor("nvfp4")
    clean = RoundingReport({}, {}, {}, (), ())
    one = RoundingReport({}, {}, {}, (), ("b",))
    two = RoundingReport({}, {}, {}, (), ("b", "c"))
    warnings = [monitor.observe(each) for each in (clean, one, one, two, clean, two)]
    assert [len(each) for each in warnings] == [0, 1, 0, 1, 0, 1]
    assert "operands of b were infinite or NaN" in warnings[1][0]
    assert "operands of c were" in warnings[3][0]
    assert "operands of b and 1 more were" in warnings[5][0]
    assert "precision.nvfp4.exclude" in warnings[1][0]


@pytest.mark.parametrize(
    "precision",
    [
        {"kind": "fp8", "fp8": {"compute": "fp32"}},
        {"kind": "nvfp4", "nvfp4": {"compute": "fp32", "experimental": True}},
    ],
    ids=["fp8", "nvfp4"],
)
def test_a_run_logs_an_overflow(tmp_path: Path, precision: dict[str, Any]) -> None:
    """One infinite activation in the second step reaches the event and a warning."""
    wide = {"hidden_size": 64, "intermediate_size": 64, "max_position_embeddings": 32}
    recipe = build_recipe(tmp_path, precision=precision, model={"config": CONFIG | wide})
    compute = ScaledProducts.compute_output
    num_calls = Counter[str]()

    def overflow(self: ScaledProducts, x_MK: Any, w_NK: Any) -> Any:
        num_calls[self.name] += 1
        if "down_proj" in self.name and num_calls[self.name] == 3:
            x_MK = x_MK.clone()
            x_MK[0, 0] = torch.inf
        return compute(self, x_MK, w_NK)

    with mock.patch.object(ScaledProducts, "compute_output", overflow):
        train(recipe)
    events = list(read_events(tmp_path / "run/events.jsonl"))
    skipped = [event.step for event in events if isinstance(event, SkippedStepEvent)]
    assert len(skipped) == 1
    for step in (event for event in events if isinstance(event, StepEvent)):
        assert step.fp8_nonfinite is not None
        assert set(step.fp8_nonfinite) == {"attention", "mlp"}
        assert (step.fp8_nonfinite["mlp"] > 0) == (step.step in skipped)
    warnings = [e for e in events if isinstance(e, WarningEvent) and "infinite or NaN" in e.message]
    assert [warning.step for warning in warnings] == skipped


@pytest.mark.parametrize(
    ("precision", "is_stale"),
    [
        ({"kind": "fp8", "fp8": {"compute": "fp32"}}, False),
        ({"kind": "fp8", "fp8": {"compute": "fp32"}}, True),
        ({"kind": "nvfp4", "nvfp4": {"compute": "fp32", "experimental": True}}, False),
        ({"kind": "nvfp4", "nvfp4": {"compute": "fp32", "experimental": True}}, True),
    ],
)
def test_a_run_logs_its_rounding(tmp_path: Path, precision: dict[str, Any], is_stale: bool) -> None:
    wide = {"hidden_size": 64, "intermediate_size": 64, "max_position_embeddings": 32}
    recipe = build_recipe(tmp_path, precision=precision, model={"config": CONFIG | wide})
    module = fp8 if precision["kind"] == "fp8" else nvfp4
    quantise = module.quantise

    def quantise_stale(values: Any, scaling: Any, maxima: Any = None, *key: Any) -> Any:
        own = fp8.compute_block_maxima(values, get_widest_blocks(scaling))
        return quantise(values, scaling, own / 8, *key)

    with mock.patch.object(module, "quantise", quantise_stale if is_stale else quantise):
        train(recipe)
    events = list(read_events(tmp_path / "run/events.jsonl"))
    steps = [event for event in events if isinstance(event, StepEvent)]
    assert all(set(step.fp8_flushed or {}) == {"attention", "mlp"} for step in steps)
    assert all((max((step.fp8_saturated or {}).values()) > 0) == is_stale for step in steps)
    warnings = [e.message for e in events if isinstance(e, WarningEvent)]
    assert any("saturated in 3 logged steps" in message for message in warnings) == is_stale


def test_a_run_continues_in_another_precision_by_name(tmp_path: Path) -> None:
    config = CONFIG | {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    training = {"sequence_length": 32, "global_batch_size": 4, "micro_batch_size": 2}

    def build(kind: str, max_steps: int) -> Any:
        return build_recipe(
            tmp_path,
            precision={"kind": kind},
            training=training | {"learning_rate": 1e-2, "max_steps": max_steps},
            model={"config": config | {"max_position_embeddings": 32}},
        )

    train(build("bf16", 1))
    with pytest.raises(CheckpointError, match=r"precision: saved 'bf16', now 'fp8 \(row"):
        train(build("fp8", 2), resume=True)
    train(build("fp8", 2), resume=True, allow_drift=["precision"])
    train(build("fp32", 3), resume=True, allow_drift=["precision"])
    events = read_events(tmp_path / "run/events.jsonl")
    steps = [event for event in events if isinstance(event, StepEvent)]
    assert [(each.step, each.fp8_flushed is not None) for each in steps] == [
        (1, False),
        (2, True),
        (3, False),
    ]
    values = json.loads((tmp_path / "run/checkpoints/step-00000003/values.json").read_text())
    quantised = "fp8 (rowwise_with_gw_hp, attention, mlp, experts, bf16)"
    assert values["drift"] == [
        {"step": 1, "field": "precision", "saved": "bf16", "current": quantised},
        {"step": 2, "field": "precision", "saved": quantised, "current": "fp32"},
    ]


@pytest.mark.parametrize(
    ("recipe", "row_multiple"), [("rowwise_with_gw_hp", 8), ("mxfp8", 32), ("tensorwise", None)]
)
def test_rows_have_whole_blocks_or_are_full(
    tmp_path: Path, recipe: str, row_multiple: int | None
) -> None:
    sections: dict[str, Any] = {
        "precision": {"kind": "fp8", "fp8": {"recipe": recipe}},
        "model": {
            "config": CONFIG
            | {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32}
            | {"max_position_embeddings": 32}
        },
    }
    run = validate_run(build_recipe(tmp_path, **sections), 1)
    assert run.plan.batch.row_multiple == row_multiple
    assert run.drift_fields["precision"] == f"fp8 ({recipe}, attention, mlp, experts, bf16)"
    if recipe == "tensorwise":
        sections["precision"]["fp8"]["fast_accumulation"] = ["output", "input_gradient"]
        changed = validate_run(build_recipe(tmp_path, **sections), 1).drift_fields["precision"]
        assert "fast accumulation of output and input_gradient" in changed


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=() if name in ("rowwise_with_gw_hp", "nvfp4") else pytest.mark.long,
        )
        for name in get_args(LowPrecisionRecipe)
    ],
)
def test_a_resumed_run_continues_bit_by_bit(tmp_path: Path, name: LowPrecisionRecipe) -> None:
    training = {
        "sequence_length": 128 if name == "blockwise" else 32,
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "learning_rate": 1e-2,
        "schedule": "constant",
    }
    precision: dict[str, Any] = {"kind": "fp8", "fp8": {"recipe": name, "compute": "fp32"}}
    if name == "nvfp4":
        precision = {"kind": name, name: {"experimental": True, "compute": "fp32"}}
    wide = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 128}
    config = CONFIG | wide | {"max_position_embeddings": 128, "num_hidden_layers": 1}

    def build(run: str, max_steps: int) -> Any:
        section = training | {"max_steps": max_steps}
        sections = {"precision": precision, "training": section, "model": {"config": config}}
        return build_recipe(tmp_path, run=run, **sections)

    train(build("whole", 3))
    train(build("parts", 2))
    train(build("parts", 3), resume=True)
    losses = [
        [e.loss for e in read_events(tmp_path / run / "events.jsonl") if isinstance(e, StepEvent)]
        for run in ("whole", "parts")
    ]
    assert len(losses[0]) == 3
    assert losses[0] == losses[1]
