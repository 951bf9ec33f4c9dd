"""Predict a benchmark's case with the planner, for comparison with the measurement.

GPUs of the catalogue are predicted from data sheets and the fitted efficiencies. CPU ranks have
no data sheet: the doctor measures the rates that the planner needs right before, of products,
attention and messages.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import chain
from statistics import fmean
from typing import TYPE_CHECKING, Any

from benchmarks.case import Case, read_model_config
from shardwright.architecture import ModelShape, read_config
from shardwright.architecture.adapter_targets import add_adapters
from shardwright.config.adapter_section import AdapterSection
from shardwright.errors import InputError
from shardwright.hardware import Cluster, MeasuredProfile
from shardwright.hardware.catalog_loading import find_accelerator, parse_cluster
from shardwright.hardware.measured_profile import Rate
from shardwright.layout import Layout
from shardwright.planner import Candidate, Predictor
from shardwright.planner.memory_settings import predict_run
from shardwright.planner.model_costs import get_model_facts
from shardwright.planner.problem import build_plan_candidate, describe_adapters
from shardwright.planner.rates.calibration import load_efficiencies

if TYPE_CHECKING:
    from shardwright.doctor.examination import ExaminationRequest
    from shardwright.training.checks.run_checks import ValidatedRun


def build_request(
    runs: Sequence[tuple[ModelShape, Candidate]], layout: Layout
) -> ExaminationRequest:
    """Build one request from the planner's lookups for several runs on CPU ranks.

    They are measured over the groups of `layout`, which has as many ranks as the largest run.
    """
    from shardwright.doctor.examination import CALIBRATION_SECONDS, ExaminationRequest
    from shardwright.doctor.rates.planner_lookups import PlannerLookups, record_lookups

    lookups = [record_lookups(shape, candidate, "cpu") for shape, candidate in runs]
    matmuls, attention, messages, elementwise = (
        list(dict.fromkeys(chain.from_iterable(problems)))
        for problems in zip(*(vars(each).values() for each in lookups), strict=True)
    )
    return ExaminationRequest(
        budget_seconds=len(runs) * CALIBRATION_SECONDS,
        layout=layout,
        device="cpu",
        **PlannerLookups(matmuls, attention, messages, elementwise).as_request_fields(),
    )


def measure_profile(
    runs: Sequence[tuple[ModelShape, Candidate]], layout: Layout
) -> MeasuredProfile | None:
    """Measure the rates of CPU ranks that the planner needs for `runs`; return None with a message
    if they cannot be measured.
    """
    from shardwright.doctor.diagnosis import examine
    from shardwright.doctor.rates.cluster_profile import build_profile

    request = build_request(runs, layout)
    diagnosis = examine(request, layout.world_size)
    assert diagnosis is not None  # None only on ranks of a launcher
    try:
        return build_profile(diagnosis, request)
    except InputError as error:
        failed = [
            f"{finding.name}: {finding.value}"
            for finding in diagnosis.findings
            if finding.verdict == "fail"
        ]
        print(f"no prediction: {error}; {'; '.join(failed)}", file=sys.stderr)
        return None


def combine_profiles(first: MeasuredProfile, second: MeasuredProfile) -> MeasuredProfile:
    """Combine two measurements of the same rates on one machine: the faster of each rate, and the
    mean of times that are means themselves.

    Other work on the machine, and neighbours of a virtual one, slow a measurement and never speed
    one up.
    """
    fields: dict[str, Any] = {}
    for name in ("matmuls", "collectives", "attention", "elementwise"):
        rates = zip(getattr(first, name), getattr(second, name), strict=True)
        fields[name] = tuple(_combine_rates(one, other) for one, other in rates)
    handoffs = [each.handoff_seconds for each in (first, second)]
    fields["handoff_seconds"] = _average(handoffs)
    fields["memory_bytes_per_second"] = max(
        first.memory_bytes_per_second, second.memory_bytes_per_second
    )
    return replace(first, **fields)


def _combine_rates(one: Rate, other: Rate) -> Rate:
    """Combine two measurements of one rate; their shapes must be equal."""
    combined: dict[str, Any] = {}
    for name, value in asdict(one).items():
        found = getattr(other, name)
        if name == "step_seconds":
            combined[name] = _average([value, found])
        elif name.endswith("_per_second"):
            combined[name] = max(value, found)
        elif name.endswith("seconds"):
            combined[name] = None if None in (value, found) else min(value, found)
        else:
            assert value == found, (one, other)
    return replace(one, **combined)


def _average(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def build_cpu_cluster(world_size: int, profile: MeasuredProfile | None) -> Cluster:
    """Return CPU ranks with the rates of `profile`, or of the catalogue's CPU."""
    return parse_cluster(f"{world_size}xCPU", profile=profile)


def find_catalogue_cluster(device_name: str) -> Cluster | None:
    """Return one GPU of the catalogue; print a line and return None if it has none of that name."""
    try:
        return parse_cluster(f"1x{find_accelerator(device_name).name}")
    except InputError as error:
        print(f"no prediction: {error}", file=sys.stderr)
        return None


def read_shape(config: dict[str, Any], lora_rank: int | None) -> ModelShape:
    """Read a model from its config.json, with adapters of all projections if a rank is given."""
    section = None if lora_rank is None else AdapterSection(rank=lora_rank)
    return add_adapters(read_config(config), section)


def build_candidate(case: Case, shape: ModelShape | None = None) -> Candidate:
    """Convert a case to a candidate of the planner; `shape` has the adapters, if any."""
    sharded = case.zero_stage > 0
    layout = Layout(
        dp_shard=case.world_size if sharded else 1,
        dp_replicate=1 if sharded else case.world_size,
        zero_stage=case.zero_stage,  # type: ignore[arg-type]
    )
    return Candidate(
        layout,
        case.sequence_length,
        micro_batch_size=case.micro_batch_size,
        precision=case.precision,
        recompute=case.recompute,
        optimizer=case.optimizer,
        adapter=None if shape is None else describe_adapters(shape),
        offload="optimizer" if case.has_offloaded_moments else "none",
        compile=case.compile,
        working_weights="auto",
        has_bf16_masters=case.has_bf16_weights,
        compile_functions="auto",
        is_loss_chunk_auto=True,
        is_read_ahead_auto=True,
        has_masked_kernels=case.device == "cuda",
        has_fused_functions=case.device == "cuda" and not case.compile,
    )


def predict_step(shape: ModelShape, candidate: Candidate, cluster: Cluster) -> dict[str, Any]:
    """Predict a step as `plan` does: seconds in total and by part, tokens/s of all ranks, bytes of
    tensors and reserved bytes on the fullest rank, and the source of the rates."""
    efficiency = load_efficiencies().get_efficiency(cluster.accelerator)
    found = predict_run(Predictor(get_model_facts(shape), cluster, efficiency), candidate)
    return {
        "step_seconds": found.time.step,
        "tokens_per_second": found.tokens_per_second,
        "parts": {part: seconds for part, seconds in asdict(found.time).items() if seconds},
        "memory_bytes": found.memory.live,
        "reserved_bytes": found.memory.reserved,
        "rates": "measured on these ranks"
        if cluster.profile is not None
        else cluster.accelerator.name,
    }


def predict_row(
    case: Case, cluster: Cluster, config: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Predict a step of a case.

    Args:
        config: config.json of the model; default: that of the case's folder of weights.
    """
    shape = read_shape(config or read_model_config(case), case.lora_rank)
    return predict_step(shape.base_shape, build_candidate(case, shape), cluster)


def predict_validated_run(validated_run: ValidatedRun, cluster: Cluster) -> dict[str, Any]:
    """Predict a step of a run as its plan describes it."""
    candidate = build_plan_candidate(validated_run.recipe, validated_run.plan)
    return predict_step(validated_run.shape.base_shape, candidate, cluster)


def describe_prediction(row: dict[str, Any]) -> str:
    """Return a line for the terminal that compares prediction and measurement."""
    predicted = row["predicted"]
    error = row["tokens_per_second"] / predicted["tokens_per_second"] - 1
    memory = f"{predicted['memory_bytes'] / 2**20:.0f} MiB of tensors"
    if measured := row.get("peak_allocated_bytes"):
        memory += f" (measured is {measured / predicted['memory_bytes'] - 1:+.1%})"
    speed = f"{predicted['tokens_per_second']:.0f} tok/s (measured is {error:+.0%})"
    return f"  predicted: {speed}, {memory}"
