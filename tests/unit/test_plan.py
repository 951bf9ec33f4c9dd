"""Batch sizes: any two determine the third, contradictions are errors; number of steps of a run."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.architecture import read_config
from shardwright.config.recipe_loading import build_recipe
from shardwright.config.training import PrecisionSection, TrainingSection
from shardwright.errors import DataError, InputError, ScheduleError
from shardwright.layout import Layout
from shardwright.plans import BatchPlan, build_plan, count_steps, resolve_batch, resolve_degrees

size = st.integers(1, 9)


def make_training(**keys: int) -> TrainingSection:
    return TrainingSection(sequence_length=8, max_steps=1, learning_rate=1e-3, **keys)


@given(size, size, size)
def test_any_two_batch_sizes_determine_the_third(micro: int, accumulation: int, ranks: int) -> None:
    total = micro * accumulation * ranks
    all_keys = {
        "micro_batch_size": micro,
        "gradient_accumulation_steps": accumulation,
        "global_batch_size": total,
    }
    for omitted in all_keys:
        two_keys = {key: value for key, value in all_keys.items() if key != omitted}
        batch = resolve_batch(make_training(**two_keys), ranks)
        assert (
            batch.micro_batch_size,
            batch.gradient_accumulation_steps,
            batch.global_batch_size,
        ) == (micro, accumulation, total)


@pytest.mark.parametrize(
    ("keys", "ranks", "message"),
    [
        (
            {"micro_batch_size": 2, "gradient_accumulation_steps": 3, "global_batch_size": 10},
            2,
            "2 x 2 data ranks x accumulation 3 = 12",
        ),
        (
            {"micro_batch_size": 4, "global_batch_size": 10},
            1,
            "10 is not a multiple of micro 4 x 1 data ranks = 4",
        ),
        ({"global_batch_size": 3}, 2, "3 is not a multiple of 2 data ranks"),
        ({"gradient_accumulation_steps": 3}, 2, "number of sequences per step is not set"),
    ],
)
def test_contradictions_show_the_arithmetic(keys: dict[str, int], ranks: int, message: str) -> None:
    with pytest.raises(InputError) as caught:
        resolve_batch(make_training(**keys), ranks)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        ({"max_steps": 7}, 7),
        ({"num_epochs": 2}, 20),
        ({"num_epochs": 0.5}, 5),
        ({"num_epochs": 2, "max_steps": 7}, 7),
    ],
)
def test_a_run_ends_at_the_first_limit(training: dict[str, float], expected: int) -> None:
    assert (
        count_steps(
            TrainingSection(sequence_length=8, learning_rate=1e-3, **training),
            num_samples=100,
            global_batch_size=10,
        )
        == expected
    )


def test_too_few_samples_for_one_step_are_an_error() -> None:
    with pytest.raises(DataError, match="do not fill one global batch of 10"):
        count_steps(
            TrainingSection(sequence_length=8, learning_rate=1e-3, num_epochs=1),
            num_samples=9,
            global_batch_size=10,
        )


@pytest.mark.parametrize("layout", ["schedule=nonsense", "schedule=nonsense,pp=2"])
def test_an_unknown_schedule_is_an_error_with_and_without_pipeline_stages(layout: str) -> None:
    recipe = build_recipe(
        {
            "model": {"config": {}},
            "data": {"sources": "text.txt"},
            "training": {
                "sequence_length": 8,
                "max_steps": 1,
                "learning_rate": 1e-3,
                "micro_batch_size": 1,
            },
        },
        layout=layout,
    )
    with pytest.raises(ScheduleError, match=r"neither a known schedule nor a file \(got nonsense"):
        resolve_degrees(recipe, 2)


def test_a_plan_is_json_with_its_stages_and_its_context_method() -> None:
    shape = read_config(
        {
            "model_type": "llama",
            "vocab_size": 61,
            "hidden_size": 24,
            "intermediate_size": 20,
            "num_hidden_layers": 5,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 16,
        }
    )
    layout = Layout(pp=2, cp=4)
    plan = build_plan(shape, layout, BatchPlan(16, 1, 2, 1), PrecisionSection(kind="bf16"))
    content = json.loads(json.dumps(plan.as_dict()))
    assert [(stage["rank"], stage["first_layer"]) for stage in content["stages"]] == [
        (0, 0),
        (1, 3),
    ]
    assert content["context_method"]["method"] == "ring"
    assert content["precision"]["kind"] == "bf16"
    plain = build_plan(shape, Layout(), BatchPlan(16, 1, 2, 1), PrecisionSection(kind="bf16"))
    assert not {"stages", "context_method"} & set(plain.as_dict())
