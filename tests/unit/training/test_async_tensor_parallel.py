"""Checks of `layout.async_tensor_parallel` before a run, and the meaning of `auto`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from shardwright.errors import RecipeError
from shardwright.layout import Layout
from shardwright.placement.compilation import CompileChoice
from shardwright.planner.candidate import Candidate
from shardwright.planner.model_costs import ModelFacts
from shardwright.planner.rates.efficiency import Efficiency
from shardwright.planner.time.communication import NetworkModel, build_groups
from shardwright.planner.time.compute import LayerSeconds
from shardwright.planner.time.traffic import compute_layer_traffic
from shardwright.training.checks import async_tensor_parallel
from shardwright.training.checks.async_tensor_parallel import find_fused_obstacle
from shardwright.training.checks.run_checks import validate_run
from tests.unit.planner import models
from tests.unit.training.finished import CONFIG
from tests.unit.training.test_run_checks import build_recipe

COMPILED = CompileChoice(True, "test")
WIDE = CONFIG | {"hidden_size": 128, "intermediate_size": 128, "max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("overlap", "sections", "message"),
    [
        ("chunked", {"layout": {"tp": 1}}, "without tensor parallelism"),
        ("chunked", {"adapters": {"rank": 2, "dropout": 0.1}}, r"with adapters\.dropout products"),
        ("chunked", {"adapters": {"rank": 2, "kind": "dora"}}, r"with adapters\.kind dora"),
        (
            "chunked",
            {"adapters": {"rank": 2, "quantize": "nf4"}, "model": {"config": WIDE}},
            "of quantised matrices",
        ),
        (
            "chunked",
            {"precision": {"kind": "fp8", "fp8": {"recipe": "tensorwise", "emulate": True}}},
            "fp8 products do not overlap",
        ),
        ("fused", {}, "symmetric memory needs CUDA, and the device is a CPU.*chunked"),
        ("fused", {"layout": {"sequence_parallel": False}}, "sequence_parallel is false"),
    ],
)
def test_an_overlap_that_cannot_run_is_refused_and_auto_has_the_reason(
    tmp_path: Path, overlap: str, sections: dict[str, Any], message: str
) -> None:
    def build(overlap: str) -> Any:
        layout = {"tp": 2, "async_tensor_parallel": overlap} | sections.get("layout", {})
        recipe = build_recipe(tmp_path, **sections | {"layout": layout})
        return validate_run(recipe, layout["tp"])

    with pytest.raises(RecipeError, match=rf"layout\.async_tensor_parallel: .*{message}"):
        build(overlap)
    if overlap == "chunked" or not sections:
        plan = build("auto").plan
        assert plan.layout.async_tensor_parallel == "none"
        assert plan.async_tensor_parallel_reason is not None
        assert plan.as_dict()["async_tensor_parallel_reason"] == plan.async_tensor_parallel_reason


def test_compiled_blocks_overlap(tmp_path: Path) -> None:
    recipe = build_recipe(tmp_path, layout={"tp": 2, "async_tensor_parallel": "chunked"})
    plan = validate_run(recipe, 2, auto_compilation=COMPILED).plan
    assert plan.layout.async_tensor_parallel == "chunked"
    assert plan.is_compiled


def test_fused_kernels_need_symmetric_memory(tmp_path: Path) -> None:
    plan = validate_run(build_recipe(tmp_path, layout={"tp": 2}), 2).plan
    assert async_tensor_parallel._has_fused_kernels()
    with patch.object(torch.cuda, "device_count", return_value=1):
        assert "2 ranks share a layer, and this node has 1" in str(
            find_fused_obstacle(plan, has_cuda=True)
        )
    with patch.object(torch.cuda, "device_count", return_value=2):
        with patch.object(torch.cuda, "can_device_access_peer", return_value=False):
            assert "device 0 cannot access the memory of device 1" in str(
                find_fused_obstacle(plan, has_cuda=True)
            )
        with patch.object(torch.cuda, "can_device_access_peer", return_value=True):
            assert find_fused_obstacle(plan, has_cuda=True) is None
            compiled = replace(plan, is_compiled=True)
            assert find_fused_obstacle(compiled, has_cuda=True) is None
            budget = replace(compiled, recompute="auto")
            assert "recompute within a budget" in str(find_fused_obstacle(budget, has_cuda=True))
            with patch.object(async_tensor_parallel, "_has_fused_kernels", return_value=False):
                assert "PyTorch 2.7 or later" in str(find_fused_obstacle(plan, has_cuda=True))


def test_the_planner_hides_communication_behind_products() -> None:
    facts = ModelFacts(models.read_shape("llama"))
    network = NetworkModel(models.make_cluster(8), Efficiency())
    seconds = LayerSeconds(1e-3, 2e-3, 0.0, 1e-3, 0.0, 0.0)
    traffic = {}
    for overlap in ("none", "chunked", "fused"):
        layout = Layout(tp=2, async_tensor_parallel=overlap)
        groups = build_groups(layout)
        for name, given in (("slow", seconds), ("fast", replace(seconds, forward=1e-9))):
            candidate = Candidate(layout, 128, 2)
            traffic[overlap, name] = compute_layer_traffic(
                facts, facts.kinds[0], candidate, network, groups, given
            )[0]
    total = traffic["none", "slow"].tensor
    assert traffic["none", "slow"].hidden == 0.0
    assert traffic["chunked", "slow"].hidden == pytest.approx(0.75 * total)
    assert traffic["fused", "slow"].hidden == pytest.approx(0.5 * total)
    assert traffic["chunked", "fast"].hidden == pytest.approx(1e-9)
    assert traffic["chunked", "fast"].exposed == pytest.approx(total - 1e-9)
