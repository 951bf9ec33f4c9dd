"""Choose the settings and the number of layers with which a case fits a device, by the planner."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

from benchmarks.gpu_case import CaseDoesNotFitError, GpuCase
from benchmarks.predicted import build_candidate, read_shape
from shardwright.hardware import Cluster
from shardwright.planner import predict
from shardwright.planner.rates.calibration import load_efficiencies

_LAYER_STEP = 2
"""Families with windows alternate two kinds of layers."""


def fit_case(case: GpuCase, cluster: Cluster | None, device: str, precision: str) -> GpuCase:
    """Return the case with the first of its settings that fit, with as many layers as fit if the
    shape leaves their number open.

    Raises:
        CaseDoesNotFitError: none fits, or there is no cluster to predict on.
    """
    if cluster is None:
        raise CaseDoesNotFitError(
            "no prediction of memory: the catalogue lacks this device, or shardwright does not run"
        )
    num_layers = case.shape.config["num_hidden_layers"]
    lowest = _LAYER_STEP if case.shape.has_fitted_layers else num_layers
    reasons = []
    for settings in case.shape.settings:
        fitted = replace(case, settings=settings)
        options = ", ".join(fitted.list_options())
        if settings.optimizer == "adamw_8bit" and importlib.util.find_spec("torchao") is None:
            reasons.append(f"{options}: not installed: torchao")
            continue
        for number in range(num_layers, lowest - 1, -_LAYER_STEP):
            fitted = replace(fitted, num_layers=number)
            if is_fitting(fitted, cluster, device, precision):
                return fitted
        reasons.append(f"{options}: does not fit")
    raise CaseDoesNotFitError("; ".join(reasons))


def is_fitting(case: GpuCase, cluster: Cluster, device: str, precision: str) -> bool:
    """Return True if the high end of the predicted memory is within what a process may use."""
    shape = read_shape(case.config, case.shape.lora_rank)
    candidate = build_candidate(case.build_case("shardwright", "", device, precision), shape)
    efficiency = load_efficiencies().get_efficiency(cluster.accelerator)
    prediction = predict(shape.base_shape, candidate, cluster, efficiency)
    return prediction.fits and not prediction.is_tight
