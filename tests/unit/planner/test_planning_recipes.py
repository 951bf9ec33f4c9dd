"""The planning recipes load, and their models have the published numbers of parameters."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.architecture import read_config
from shardwright.config.recipe_loading import load_recipe

RECIPES = Path(__file__).parents[3] / "recipes"


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("llama2-13b", 13_015_864_320),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("mixtral-8x7b", 46_702_792_704),
    ],
)
def test_architectures_are_the_published_ones(name: str, num_parameters: int) -> None:
    config = load_recipe(RECIPES / f"{name}.yaml").model.config
    assert config is not None
    assert read_config(config).num_parameters == num_parameters


def test_deepseek_v3_has_its_size_without_the_prediction_layer() -> None:
    config = load_recipe(RECIPES / "deepseek-v3.yaml").model.config
    assert config is not None
    assert read_config(config).num_parameters / 1e9 == pytest.approx(671.03, abs=0.01)


def test_the_worked_example_has_the_documented_settings() -> None:
    recipe = load_recipe(RECIPES / "llama2-13b.yaml")
    training = recipe.training
    assert (training.sequence_length, training.global_batch_size) == (4096, 64)
    assert training.max_steps == 2_400_000 // 64
    assert (training.learning_rate, training.batch_scaling, training.base_batch_size) == (
        2e-5,
        "linear",
        32,
    )
