"""Planning of offloaded optimizer states: bytes per tier, time of the transfers, `layout: auto`."""

from __future__ import annotations

from typing import Any

import pytest

from shardwright.config import Recipe
from shardwright.config.recipe_loading import validate_recipe
from shardwright.errors import LayoutError
from shardwright.hardware.catalog_loading import parse_cluster
from shardwright.planner.auto_layout import choose_layout
from shardwright.planner.model_costs import get_model_facts
from shardwright.planner.predictor import Predictor
from shardwright.planner.problem import build_template, read_planning_shape
from shardwright.planner.rates.efficiency import Efficiency

NUM_PARAMETERS = 5_928_861_696
STATE_BYTES = 8 * NUM_PARAMETERS
CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 28, "num_attention_heads": 32, "max_position_embeddings": 4096,
}  # fmt: skip


def build_recipe(**sections: Any) -> Recipe:
    return validate_recipe(
        {
            "model": {"config": CONFIG},
            "data": {"sources": ["nowhere"]},
            "precision": "bf16",
            "training": {
                "sequence_length": 512,
                "learning_rate": 1e-4,
                "max_steps": 5,
                "global_batch_size": 8,
            },
        }
        | sections
    )


def test_states_move_from_the_device_to_another_tier_and_take_the_time_of_their_transfer() -> None:
    recipe = build_recipe()
    shape = read_planning_shape(recipe)
    predictor = Predictor(get_model_facts(shape), parse_cluster("1xH100-80GB"), Efficiency())
    resident, host, disk = (
        predictor.predict(build_template(build_recipe(offload={"optimizer": tier})))
        for tier in ("none", "host", "disk")
    )
    assert resident.memory.offloaded == 0.0
    assert resident.memory.optimizer == pytest.approx(STATE_BYTES, rel=1e-3)
    for prediction in (host, disk):
        assert prediction.memory.offloaded == resident.memory.optimizer
        assert prediction.memory.optimizer == 3 * 64 * 2**20
        assert resident.memory.total - prediction.memory.total >= 0.9 * STATE_BYTES
        assert prediction.candidate.is_runnable
    assert resident.time.optimizer < host.time.optimizer < disk.time.optimizer
    assert host.time.optimizer == pytest.approx(STATE_BYTES / 25e9, rel=0.01)
    assert disk.time.optimizer == pytest.approx(STATE_BYTES / 1e9, rel=0.01)
    assert host.time.compute == resident.time.compute


def test_offloading_to_the_host_frees_no_memory_of_a_cpu() -> None:
    recipe = build_recipe(offload={"optimizer": "host"}, run={"device": "cpu"})
    assert build_template(recipe).offload == "none"


def test_layout_auto_offloads_only_if_nothing_else_fits_and_the_recipe_does_not_decide() -> None:
    small = parse_cluster("1xH100-80GB")
    chosen, prediction = choose_layout(build_recipe(layout="auto"), small, 1)
    assert chosen.offload.optimizer == "host"
    assert "offload optimizer" in prediction.candidate.describe()
    with pytest.raises(LayoutError, match="no layout that the recipe allows fits"):
        choose_layout(build_recipe(layout="auto", offload={"optimizer": "none"}), small, 1)
    recipe = build_recipe(layout="auto", offload={"optimizer": "disk"})
    assert choose_layout(recipe, small, 1)[0].offload == recipe.offload
    chosen, _ = choose_layout(build_recipe(layout="auto"), parse_cluster("8xH100-80GB"), 8)
    assert not chosen.offload.is_enabled
