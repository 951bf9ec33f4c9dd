"""Offloaded states, weights and activations on CUDA devices under every layout: after five steps
weights, moments and step counts have the bits of a resident run, for every optimizer, tier and
place of the update; gradients have those of resident activations.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.config import Recipe
from shardwright.training.checks.run_checks import validate_run
from shardwright.verification.rank_pool import RankPool
from tests.hostcuda import device
from tests.multiprocess.test_offload import (
    ACTIVATION_LAYOUTS,
    LAYOUTS,
    RULES,
    build_activation_sections,
    build_recipe,
    find_differences,
    find_gradient_differences,
)

ON_HOST = ("adamw", "adamw_8bit", "sgd")
"""Optimizers that the host can update."""
OFFLOADS = {
    f"{subject}{'' if parameters == 'none' else f', weights {parameters}'}, updated on {place}": (
        {"optimizer": subject, "update_on": place}
        | ({} if parameters == "none" else {"parameters": parameters})
    )
    for subject in ("host", "disk")
    for parameters in ("none", "host", "disk")
    for place in ("device", "host")
}
"""Tier of the moments, tier of the weights, place of the update."""
SHORT = (
    ("zero0", "sgd", "disk, updated on host"),
    ("zero1", "sgd", "disk, weights disk, updated on host"),
    ("zero2", "adamw_8bit", "host, weights disk, updated on host"),
    ("zero3", "adafactor", "host, weights host, updated on device"),
    ("tp2", "muon", "disk, updated on device"),
    ("cp2", "adamw", "disk, weights host, updated on host"),
    ("pp2 x zero1", "adafactor", "host, updated on device"),
    ("ep2", "adamw_8bit", "disk, weights disk, updated on device"),
    ("adapters", "adamw", "host, weights disk, updated on device"),
    ("adapters on NF4", "adamw", "host, weights host, updated on host"),
    ("frozen", "sgd", "disk, weights host, updated on device"),
    ("zero3", "adamw", "host, updated on host"),
)
"""Each layout, optimizer and offloading at least once."""


def build_device_recipe(folder: Path, sections: dict[str, Any]) -> Recipe:
    return build_recipe(folder, sections | {"run": {"dir": str(folder / "run"), "device": "cuda"}})


def compare_on_device(
    recipe: Recipe, world_size: int, offloads: list[dict[str, Any]]
) -> tuple[list[str], list[str]]:
    """Return what differs on this rank, and violations of the order of streams."""
    with torch.cuda.device(torch.distributed.get_rank()):
        return find_differences(recipe, world_size, offloads), device.list_violations()


def compare(
    ranks: RankPool, folder: Path, name: str, rule: str, offloads: list[dict[str, Any]]
) -> None:
    recipe = build_device_recipe(folder, LAYOUTS[name] | {"optimizer": RULES[rule]})
    world_size = 4 if "pp2" in name else 2
    validate_run(recipe, world_size)  # tokenises once
    found = ranks.run(world_size, compare_on_device, recipe, world_size, offloads)
    assert found == [([], [])] * world_size


@pytest.mark.parametrize(("name", "rule", "offload"), SHORT)
def test_five_steps_have_the_bits_of_a_resident_run(
    device_ranks: RankPool, tmp_path: Path, name: str, rule: str, offload: str
) -> None:
    compare(device_ranks, tmp_path, name, rule, [OFFLOADS[offload]])


@pytest.mark.long
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_five_steps_have_the_bits_of_a_resident_run_with_every_offloading(
    device_ranks: RankPool, tmp_path: Path, name: str, rule: str
) -> None:
    offloads = [
        offload
        for offload in OFFLOADS.values()
        if rule in ON_HOST or offload["update_on"] == "device"
    ]
    compare(device_ranks, tmp_path, name, rule, offloads)


def compare_gradients(recipe: Recipe, world_size: int, tier: str) -> tuple[list[str], list[str]]:
    """Return the gradients that differ on this rank, and violations of the order of streams."""
    with torch.cuda.device(torch.distributed.get_rank()):
        return find_gradient_differences(recipe, world_size, tier), device.list_violations()


SHORT_ACTIVATIONS = (
    ("zero3", "none", "host"),
    ("tp2", "selective", "host"),
    ("cp2", "full", "host"),
    ("ep2", "none", "host"),
    ("adapters", "full", "disk"),
    ("adapters on NF4", "selective", "host"),
    ("pp2", "none", "host"),
    ("pp2 interleaved", "full", "host"),
)
"""Each layout without a split backward pass; `test_activation_offload` has those with one."""


@pytest.mark.parametrize(
    ("name", "recompute", "tier"),
    [
        pytest.param(*cell, marks=[] if cell in SHORT_ACTIVATIONS else pytest.mark.long)
        for cell in (
            (name, recompute, tier)
            for name in ACTIVATION_LAYOUTS
            for recompute in ("none", "selective", "full")
            for tier in ("host", "disk")
        )
    ],
)
def test_gradients_have_the_bits_of_resident_activations(
    device_ranks: RankPool, tmp_path: Path, name: str, recompute: str, tier: str
) -> None:
    recipe = build_device_recipe(tmp_path, build_activation_sections(name, recompute))
    validate_run(recipe, 2)  # tokenises once
    assert device_ranks.run(2, compare_gradients, recipe, 2, tier) == [([], [])] * 2
