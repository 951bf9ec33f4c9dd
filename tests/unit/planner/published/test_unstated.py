"""Rows that leave out the accelerator's memory or the model's sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.errors import InputError
from shardwright.planner.memory.attention_activations import choose_planned_kernel
from shardwright.planner.model_costs import get_model_facts
from shardwright.planner.published.measurements import (
    PublishedRun,
    extract_configuration,
    read_published_run,
)
from tests.unit.planner.published.rows import ROW

UNSIZED = dict.fromkeys(
    ("params_b", "layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab"), ""
)


def read(**fields: str) -> PublishedRun:
    return read_published_run("row", extract_configuration(ROW | fields))


@pytest.mark.parametrize("name", ["A100", "A100 40/80GB", "A100 (memory not stated)", "8x A100?"])
def test_an_unstated_memory_is_that_of_the_most_common_form(name: str) -> None:
    run = read(gpu=name)
    assert run.cluster.accelerator.name == "A100-80GB-SXM"
    (assumption,) = run.assumptions
    assert assumption.endswith("not stated: A100-80GB-SXM")


@pytest.mark.parametrize("name", ["A100-40GB", "H100 80 GB", "RTX 4090"])
def test_a_stated_or_unique_memory_is_no_assumption(name: str) -> None:
    assert read(gpu=name).assumptions == ()


def test_another_memory_than_the_family_has_is_refused() -> None:
    with pytest.raises(InputError, match="not in the catalogue"):
        read(gpu="H100-64GB")


@pytest.mark.parametrize(
    ("sizes", "billions"),
    [
        ({"params_b": "7.0"}, 7.0),
        ({"model_name": "nobody-knows-350M"}, 0.35),
        ({"params_b": "7.0", "layers": "24"}, 7.0),
        ({"params_b": "7.0", "layers": "24", "hidden": "4096", "vocab": "32000"}, 7.0),
        ({"params_b": "30", "layers": "48", "hidden": "2048", "num_experts": "128"}, 30.0),
        ({"model_name": "nobody-30B-A3B", "layers": "48", "num_experts": "128"}, 30.0),
    ],
)
def test_an_unknown_model_has_the_stated_number_of_parameters(
    sizes: dict[str, str], billions: float
) -> None:
    shape = read(**{"model_name": "nobody-knows", **UNSIZED, **sizes}).shape
    # Without a vocabulary, a small model's embedding is a large share of it.
    assert shape.num_parameters / 1e9 == pytest.approx(billions, rel=0.06 if billions > 1 else 0.3)


@pytest.mark.parametrize(
    ("sizes", "expected"), [({"layers": "32"}, (32, 4096)), ({"hidden": "4096"}, (32, 4096))]
)
def test_depth_and_width_follow_from_each_other(
    sizes: dict[str, str], expected: tuple[int, int]
) -> None:
    shape = read(**{"model_name": "nobody-knows", **UNSIZED, **sizes}).shape
    assert (shape.num_layers, shape.hidden_size) == expected


def test_a_row_without_any_size_is_refused() -> None:
    with pytest.raises(InputError, match="neither the model's name nor this column"):
        read(**{"model_name": "nobody-knows", **UNSIZED})


def test_other_trainers_have_fused_attention_for_sinks_and_windows() -> None:
    run = read(
        model_name="gpt-oss-20b", **UNSIZED, tp="1", pp="1", gpu="H100", recompute="none", notes=""
    )
    facts = get_model_facts(run.shape)
    assert run.shape.attention_sinks
    assert choose_planned_kernel(facts, run.candidate, 128) != "explicit"
    assert choose_planned_kernel(facts, run.candidate, None) != "explicit"
    eager = replace(run.candidate, flash_attention=False)
    assert choose_planned_kernel(facts, eager, None) == "explicit"
