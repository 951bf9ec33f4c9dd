"""Calibration: the request of rates to measure on this cluster, and the profile made of them.

The examination reduces or omits problems that take too long
(`examination.ExaminationRequest.budget_seconds`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch

from shardwright.checkpoint.run_folder import RunFolder
from shardwright.config import Recipe
from shardwright.config.run import DeviceKind
from shardwright.data.data_cache import find_cache_root
from shardwright.doctor.diagnosis import Diagnosis
from shardwright.doctor.examination import CALIBRATION_SECONDS, ExaminationRequest
from shardwright.doctor.rates.device_rates import MatmulShape
from shardwright.doctor.rates.planner_lookups import (
    find_catalog_name,
    list_default_lookups,
    list_recipe_lookups,
)
from shardwright.doctor.rates.tier_rates import build_tiers, choose_scratch_folder
from shardwright.doctor.storage import OutputFolder
from shardwright.errors import InputError
from shardwright.hardware import (
    AttentionRate,
    CollectiveRate,
    ElementwiseRate,
    MatmulRate,
    MeasuredProfile,
    ScaledProductRate,
)
from shardwright.hardware.collective_rate import CollectiveKind
from shardwright.layout import Layout
from shardwright.version import __version__

_COLLECTIVE_FIELDS = tuple(each.name for each in fields(CollectiveRate))


def build_request(
    recipe: Recipe | None,
    layout: Layout,
    *,
    device: DeviceKind = "auto",
    timeout_seconds: float = 60.0,
    should_calibrate: bool = False,
    budget_seconds: float = CALIBRATION_SECONDS,
) -> ExaminationRequest:
    """Build the request of an examination.

    It contains the layout's groups, the recipe's folders or the default ones and, for a
    calibration, the planner's lookups.
    """
    request = ExaminationRequest(
        layout=layout,
        folders=list_output_folders(recipe),
        device=device,
        timeout_seconds=timeout_seconds,
        inter_link_name=None if recipe is None or recipe.cluster is None else recipe.cluster.link,
        scratch_folder=choose_scratch_folder(recipe, should_calibrate=should_calibrate),
        budget_seconds=budget_seconds,
    )
    if not should_calibrate:
        return request
    device_kind = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    lookups = (
        list_default_lookups(device_kind)
        if recipe is None
        else list_recipe_lookups(recipe, layout, device_kind)
    )
    return replace(request, **lookups.as_request_fields())


def list_output_folders(recipe: Recipe | None) -> tuple[OutputFolder, ...]:
    """List the local folders that a run of the recipe writes to, or the default folders."""
    if recipe is None:
        return (
            OutputFolder("runs", "runs", True),
            OutputFolder("data cache", str(find_cache_root(None)), False),
        )
    run = RunFolder.from_recipe(recipe)
    folders = [OutputFolder("run folder", str(run.path), True)]
    if isinstance(run.checkpoints, Path) and recipe.checkpoint.dir is not None:
        folders.append(OutputFolder("checkpoints", str(run.checkpoints), True))
    return (
        *folders,
        OutputFolder("data cache", str(find_cache_root(recipe.data.cache_dir)), False),
    )


def build_profile(diagnosis: Diagnosis, request: ExaminationRequest) -> MeasuredProfile:
    """Build the measured profile: median of the ranks' rates, slowest group of each collective.

    Raises:
        InputError: nothing was measured, because the examination stopped before.
    """
    rates = diagnosis.rates
    memory = [
        rate["bytes_per_second"] for rate in rates.get("copies", ()) if rate["kind"] == "memory"
    ]
    if not memory or not diagnosis.memory_bytes:
        raise InputError(
            "there is no profile to write: the examination stopped early",
            field="--calibrate",
            remedy="Fix the findings that fail first",
        )
    products: dict[MatmulShape, list[float]] = {}
    for rate in rates["products"]:
        products.setdefault((rate["precision"], rate["m"], rate["n"], rate["k"]), []).append(
            rate["flops_per_second"]
        )
    attention: dict[tuple[str, int, int], list[tuple[float, float]]] = {}
    for rate in rates.get("attention", ()):
        rate_pair = (rate["forward_flops_per_second"], rate["backward_flops_per_second"])
        attention_key = (rate["precision"], rate["row_tokens"], rate["head_dim"])
        attention.setdefault(attention_key, []).append(rate_pair)
    elementwise: dict[tuple[str, int, int], list[tuple[float, float]]] = {}
    for rate in rates.get("elementwise", ()):
        rate_pair = (rate["forward_bytes_per_second"], rate["backward_bytes_per_second"])
        elementwise_key = (rate["precision"], rate["tokens"], rate["width"])
        elementwise.setdefault(elementwise_key, []).append(rate_pair)
    handoffs = [rate["seconds"] for rate in rates.get("handoffs", ())]
    collectives: dict[tuple[CollectiveKind, int, int, int], CollectiveRate] = {}
    for rate in rates["collectives"]:
        found = CollectiveRate(**{name: rate[name] for name in _COLLECTIVE_FIELDS if name in rate})
        key = (found.kind, found.num_ranks, found.ranks_per_node, found.message_bytes)
        if key not in collectives or found.seconds > collectives[key].seconds:
            collectives[key] = found
    return MeasuredProfile(
        accelerator=diagnosis.device_name or diagnosis.device_kind,
        catalog_name=find_catalog_name(diagnosis.device_kind, diagnosis.device_name),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        memory_bytes=diagnosis.memory_bytes,
        memory_bytes_per_second=median(memory),
        matmuls=tuple(
            MatmulRate(*shape, median(shape_rates)) for shape, shape_rates in products.items()
        ),
        collectives=tuple(collectives.values()),
        attention=tuple(
            AttentionRate(*key, *map(median, zip(*pairs, strict=True)))
            for key, pairs in attention.items()
        ),
        elementwise=tuple(
            ElementwiseRate(*key, *map(median, zip(*pairs, strict=True)))
            for key, pairs in elementwise.items()
        ),
        handoff_seconds=median(handoffs) if handoffs else None,
        tiers=build_tiers(rates, diagnosis.device_kind),
        num_cores=_find_fewest_cores(diagnosis),
        scaled_products=_build_scaled_rates(rates.get("scaled_products", ())),
        software={
            "shardwright": __version__,
            "torch": torch.__version__,
            "layout": str(request.layout),
        },
    )


def _build_scaled_rates(rates: Iterable[dict[str, Any]]) -> tuple[ScaledProductRate, ...]:
    ratios: dict[tuple[str, int], list[float]] = {}
    for rate in rates:
        if rate["kernel_flops_per_second"] is not None:
            ratios.setdefault((rate["recipe"], rate["side"]), []).append(
                rate["kernel_flops_per_second"] / rate["bf16_flops_per_second"]
            )
    return tuple(ScaledProductRate(*key, median(values)) for key, values in ratios.items())


def _find_fewest_cores(diagnosis: Diagnosis) -> float | None:
    counts = [each.numbers["cores"] for each in diagnosis.findings if "cores" in each.numbers]
    return min(counts, default=None)
