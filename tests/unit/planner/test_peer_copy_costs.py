"""Planned bytes and time of peer copies."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwright.architecture.config_reading import read_config, read_recipe_shape
from shardwright.cli.main import run
from shardwright.config import Recipe
from shardwright.config.recipe_loading import validate_recipe
from shardwright.errors import ExitCode
from shardwright.hardware.catalog_loading import parse_cluster
from shardwright.layout import Layout
from shardwright.planner.peer_copy_costs import (
    PeerCopyCost,
    list_trained_names,
    predict_peer_copies,
)
from shardwright.planner.problem import build_template
from tests.unit.planner.test_offload import CONFIG

STATE_BYTES = 12 * sum(spec.num_elements for spec in read_config(CONFIG).list_parameters())
"""Weights and both moments of AdamW in fp32."""


def build_sections(**sections: Any) -> dict[str, Any]:
    training = {
        "sequence_length": 512,
        "learning_rate": 1e-4,
        "max_steps": 5,
        "global_batch_size": 16,
    }
    elastic = {"max_restarts": 1, "warm_restarts": True, "peer_copies": 1}
    return {
        "model": {"config": CONFIG},
        "data": {"sources": ["nowhere"]},
        "precision": "bf16",
        "training": training,
        "elastic": elastic,
    } | sections


def predict(layout: Layout, nodes: int, recipe: Recipe | None = None) -> PeerCopyCost | None:
    recipe = recipe or validate_recipe(build_sections())
    shape = read_recipe_shape(recipe)
    trained = list_trained_names(shape, recipe.model.freeze)
    candidate = replace(build_template(recipe), layout=layout)
    cluster = parse_cluster(f"{layout.world_size // nodes}xH100-80GB", num_nodes=nodes)
    return predict_peer_copies(shape, candidate, trained, cluster)


def test_muon_has_two_moments_outside_matrices_of_blocks() -> None:
    recipe = validate_recipe(build_sections(optimizer={"name": "muon"}))
    cost = predict(Layout(dp_shard=8, zero_stage=3), 2, recipe)
    assert cost is not None
    names = {"embed_tokens", "norm", "lm_head"}
    specs = read_config(CONFIG).list_parameters()
    others = [spec for spec in specs if any(name in spec.name for name in names)]
    num_elements = sum(spec.num_elements for spec in others)
    state_bytes = 8 * (STATE_BYTES / 12) + 4 * num_elements
    assert cost.own_bytes == pytest.approx(state_bytes / 8)


def test_a_sharded_state_is_sent_and_a_replicated_one_is_not() -> None:
    sharded = predict(Layout(dp_shard=8, zero_stage=3), 2)
    assert sharded is not None
    assert sharded.own_bytes == pytest.approx(STATE_BYTES / 8)
    assert sharded.sent_bytes == sharded.own_bytes
    # Of two steps the own state of four ranks, and those that they keep for others.
    assert sharded.node_bytes == pytest.approx(2 * (4 + 4) * STATE_BYTES / 8)
    assert sharded.covers_node_loss
    cluster = parse_cluster("4xH100-80GB", num_nodes=2)
    assert cluster.inter is not None
    assert sharded.send_seconds == pytest.approx(
        sharded.sent_bytes / cluster.inter.bytes_per_second
    )
    replicated = predict(Layout(dp_replicate=8), 2)
    assert replicated is not None
    assert (replicated.own_bytes, replicated.sent_bytes) == (STATE_BYTES, 0.0)
    assert replicated.node_bytes == 2 * 4 * STATE_BYTES
    hybrid = predict(Layout(dp_replicate=2, dp_shard=4, zero_stage=1), 2)
    assert hybrid is not None
    assert hybrid.sent_bytes == 0.0
    alone = predict(Layout(dp_shard=8, zero_stage=3), 1)
    assert alone is not None
    assert not alone.covers_node_loss
    assert "the loss of the node is not covered" in alone.describe(10.0)
    assert "training waits" in alone.describe(1e-3)
    assert predict(Layout(), 1) is None


def test_frozen_parameters_have_no_moments_and_adapters_no_base() -> None:
    frozen = validate_recipe(build_sections(model={"config": CONFIG, "freeze": ["*embed*"]}))
    cost = predict(Layout(dp_shard=2, zero_stage=3), 1, frozen)
    assert cost is not None
    embedding = CONFIG["vocab_size"] * CONFIG["hidden_size"]
    assert cost.own_bytes == pytest.approx((STATE_BYTES - 8 * embedding) / 2)
    adapters = validate_recipe(build_sections(adapters={"rank": 8}))
    small = predict(Layout(dp_shard=2, zero_stage=3), 1, adapters)
    assert small is not None
    assert small.own_bytes < 0.01 * STATE_BYTES


def test_the_plan_shows_bytes_and_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(build_sections()), encoding="utf-8")
    words = ["plan", str(path), "--cluster", "8xH100-80GB", "--nodes", "2", "--top", "1"]
    assert run(words) == ExitCode.DONE
    assert "peer copies: " in capsys.readouterr().out
    assert run([*words, "--json"]) == ExitCode.DONE
    cost = json.loads(capsys.readouterr().out)["peer_copies"]
    assert cost["node_bytes"] >= 2 * cost["own_bytes"]
    path.write_text(json.dumps(build_sections(elastic={})), encoding="utf-8")
    assert run([*words, "--json"]) == ExitCode.DONE
    assert json.loads(capsys.readouterr().out)["peer_copies"] is None
