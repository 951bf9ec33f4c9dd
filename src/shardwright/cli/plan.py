"""`shardwright plan`: rank the layouts of a recipe on a cluster by predicted speed."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwright.cli.options import JsonOutput, Overrides, ProfilePath, RecipePath
from shardwright.cli.output.json_output import print_json
from shardwright.cli.output.page_output import (
    HtmlOutput,
    ShouldOverwrite,
    check_new_file,
    write_page,
    write_text,
)
from shardwright.config import load_recipe
from shardwright.errors import InputError, LayoutError

if TYPE_CHECKING:
    from shardwright.config import Recipe
    from shardwright.hardware import Cluster
    from shardwright.planner.planning_result import PlanningResult
    from shardwright.planner.prediction import Prediction

_MAX_DIGITS = 18
"""Digits of a GPU count; int() refuses more than 4,300."""


ClusterOption = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="GPUS",
        help="Devices of one node, e.g. 8xH100-80GB, or 4xCPU for ranks on this machine; default "
        "the recipe's cluster. An unknown name lists the known ones.",
    ),
]
ClusterNodeCount = Annotated[int, typer.Option("--nodes", min=1, help="Number of nodes.")]
LinkName = Annotated[
    str | None,
    typer.Option(
        "--link",
        help="Link between nodes: ib400, eth100, ... Default: the usual link for the device.",
    ),
]
TopOption = Annotated[int, typer.Option("--top", min=1, max=100, help="Number of layouts to show.")]
GpuCounts = Annotated[
    str | None,
    typer.Option(
        "--gpus", metavar="N,N,...", help="Also predict throughput for these numbers of GPUs."
    ),
]
PrecisionName = Annotated[
    str | None,
    typer.Option(
        "--precision",
        help="Plan for this precision instead of the recipe's, e.g. fp8. nvfp4 is experimental.",
    ),
]
LoraRank = Annotated[
    int | None,
    typer.Option(
        "--lora",
        min=1,
        metavar="RANK",
        help="Predict training with low-rank adapters (LoRA) of this rank.",
    ),
]
QuantisedOption = Annotated[
    bool, typer.Option("--quantised", help="With --lora: store the frozen weights in NF4 (QLoRA).")
]
EmitOption = Annotated[
    str | None,
    typer.Option(
        "--emit",
        metavar="SYSTEM",
        help=(
            "Write the chosen layout for deepspeed, accelerate, torchtitan or megatron, "
            "instead of the table."
        ),
    ),
]
EmitOutput = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="FILE", help="With --emit: write to this file, and print the table too."
    ),
]
MeasuredStepsOption = Annotated[
    bool,
    typer.Option(
        "--measured-steps/--no-measured-steps",
        help="Correct predictions with step times that `tune` measured on the same hardware.",
    ),
]
DataOption = Annotated[
    bool,
    typer.Option(
        "--data",
        help=(
            "Predict times from the row lengths and documents of the recipe's data. The data is "
            "prepared if it is not cached. Measured step times are not used."
        ),
    ),
]
ExpertLoadOption = Annotated[
    Path | None,
    typer.Option(
        "--expert-load",
        metavar="RUN",
        help=(
            "Predict with the expert loads that this run of the model logged, instead of equal "
            "loads. Measured step times are not used."
        ),
    ),
]
ExplainOption = Annotated[bool, typer.Option("--explain", help="Explain the choice, with numbers.")]


def plan_command(
    recipe: RecipePath,
    cluster: ClusterOption = None,
    nodes: ClusterNodeCount = 1,
    link: LinkName = None,
    profile: ProfilePath = None,
    overrides: Overrides = None,
    top: TopOption = 10,
    gpus: GpuCounts = None,
    precision: PrecisionName = None,
    lora: LoraRank = None,
    quantised: QuantisedOption = False,
    emit: EmitOption = None,
    out: EmitOutput = None,
    overwrite: ShouldOverwrite = False,
    measured_steps: MeasuredStepsOption = True,
    data: DataOption = False,
    expert_load: ExpertLoadOption = None,
    why: ExplainOption = False,
    html: HtmlOutput = None,
    json_output: JsonOutput = False,
) -> None:
    """Rank a recipe's layouts by predicted tokens/s, with a breakdown of memory and time.

    Nothing is started, and no data is read without --data.
    """
    started = time.perf_counter()
    _check_emit(emit, out)
    check_new_file(out, should_overwrite=overwrite)
    loaded_recipe = load_recipe(recipe, overrides or [])
    # Imported here: the catalogue and the planner take time that `--help` does not need.
    from shardwright import api
    from shardwright.planner.cluster_choice import choose_cluster
    from shardwright.planner.peer_copy_costs import predict_recipe_copies

    target = choose_cluster(loaded_recipe, cluster, num_nodes=nodes, link=link, profile=profile)
    result = api.plan(
        loaded_recipe,
        target,
        num_layouts=top,
        precision=precision,
        lora_rank=lora,
        is_quantised=quantised,
        gpu_counts=_parse_gpu_counts(gpus),
        should_explain=why,
        should_use_measured_steps=measured_steps,
        should_read_data=data,
        expert_load_run=expert_load,
    )
    corrections = _list_corrections(result, target)
    if json_output or (emit is not None and out is None):
        sys.stderr.writelines(f"{line}\n" for line in corrections)
    seconds = time.perf_counter() - started
    peer_copies = predict_recipe_copies(loaded_recipe, result.chosen, target)
    if html is not None:
        from shardwright.report.plan_page import render_plan

        write_page(html, render_plan(loaded_recipe.name, target, result))
    emitted = (
        None
        if emit is None or result.chosen is None
        else _emit_layout(emit, loaded_recipe, result.chosen, target.num_nodes, out)
    )
    if json_output:
        costs = None if peer_copies is None else asdict(peer_copies)
        content = _build_json(result, loaded_recipe, target)
        print_json(content | {"emitted": emitted, "seconds": seconds, "peer_copies": costs})
        _print_warning(result)
    elif emitted is not None and out is None:
        _print_precision_reason(result)
        sys.stdout.write(emitted["text"])
        _print_warning(result)
    else:
        from shardwright.cli.output.plan_table import print_plan

        print_plan(
            result, loaded_recipe, target, num_layouts=top, seconds=seconds, corrections=corrections
        )
        if peer_copies is not None:
            assert result.chosen is not None
            sys.stdout.write(f"{peer_copies.describe(result.chosen.time.step)}\n")
    if result.chosen is None:
        raise _build_no_layout_error(result, target)


def _list_corrections(result: PlanningResult, cluster: Cluster) -> list[str]:
    """List the sentences about data and measurements that changed the predictions, or should."""
    correction = result.correction_summary
    lines = (
        _describe_guess(cluster),
        cluster.core_shortage and f"warning: {cluster.core_shortage}",
        correction
        if result.num_measured_steps is None
        else f"{correction}; --no-measured-steps plans without them",
        result.row_summary,
        *(split.describe() for split in result.context_splits),
        result.expert_summary,
    )
    return [line for line in lines if line is not None]


def _describe_guess(cluster: Cluster) -> str | None:
    """Say that no rate of CPU ranks was measured; None on GPUs, and with a measured profile."""
    if cluster.accelerator.kind != "cpu" or cluster.profile is not None:
        return None
    source = cluster.rates_source
    if cluster.num_host_cores is None:
        source = f"data sheet of {cluster.accelerator.name}, a whole socket for each rank"
        if cluster.num_nodes > 1:
            source += " (`cpu` means this machine on one node only)"
    return (
        f"rates: {source}; `shardwright doctor --calibrate` measures them, and "
        "--profile plans with them"
    )


def _build_no_layout_error(result: PlanningResult, cluster: Cluster) -> LayoutError:
    problem = "no layout fits" if result.effort.num_too_large else "no layout is possible"
    memory_gib = cluster.accelerator.memory_bytes / 2**30
    return LayoutError(
        f"{problem} on {cluster.name}",
        field="--cluster",
        got=f"{cluster.num_gpus} GPUs of {memory_gib:.0f} GiB",
        remedy=result.remedy,
    )


def _print_precision_reason(result: PlanningResult) -> None:
    if result.precision_reason is not None:
        sys.stderr.write(f"precision auto: {result.precision_reason}\n")


def _print_warning(result: PlanningResult) -> None:
    """Print on standard error the table's warning that the chosen layout barely fits."""
    warning = _describe_warning(result.chosen)
    if warning is not None:
        sys.stderr.write(f"warning: {warning}\n")


def _describe_warning(chosen: Prediction | None) -> str | None:
    if chosen is None or chosen.warning is None:
        return None
    return f"the chosen layout {chosen.warning}"


def _check_emit(system: str | None, out: Path | None) -> None:
    """Refuse an unknown system before planning starts."""
    if system is not None:
        from shardwright.convert.conversion import check_system

        check_system(system)
    elif out is not None:
        raise InputError(
            "there is no configuration to write",
            field="--out",
            got=str(out),
            remedy="Name the system, e.g. --emit deepspeed",
        )


def _emit_layout(
    system: str, recipe: Recipe, chosen: Prediction, num_nodes: int, out: Path | None
) -> dict[str, Any]:
    """Return the chosen layout as another system's configuration; print its notes on standard
    error."""
    from shardwright.config.adapter_section import AdapterSection, QuantizeKind
    from shardwright.convert.conversion import emit
    from shardwright.convert.emitted_config import EmitRequest
    from shardwright.planner.auto_layout import apply_candidate
    from shardwright.plans import resolve_degrees

    candidate = chosen.candidate
    resolved = apply_candidate(recipe, candidate)
    if candidate.adapter is not None:
        quantize: QuantizeKind | None = "nf4" if candidate.adapter.quantised else None
        resolved = resolved.model_copy(
            update={"adapters": AdapterSection(rank=candidate.adapter.rank, quantize=quantize)}
        )
    precision = resolved.precision.model_copy(update={"kind": candidate.precision})
    resolved = resolved.model_copy(update={"precision": precision})
    emitted = emit(
        system,
        EmitRequest(
            resolved,
            *resolve_degrees(resolved, chosen.num_gpus),
            "optimizer" if candidate.offload == "optimizer_disk" else candidate.offload,
            num_nodes,
        ),
    )
    for note in emitted.notes:
        sys.stderr.write(f"not expressed: {note}\n")
    if out is not None:
        write_text(out, emitted.text)
    return {
        "system": system,
        "text": emitted.text,
        "notes": list(emitted.notes),
        "out": None if out is None else str(out),
    }


def _parse_gpu_counts(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    numbers = [number.strip() for number in text.split(",")]
    if not all(
        number.isdecimal() and len(number) <= _MAX_DIGITS and int(number) > 0 for number in numbers
    ):
        raise InputError(
            "expected numbers of GPUs", field="--gpus", got=text, allowed="e.g. 8,16,32,64"
        )
    return tuple(sorted({int(number) for number in numbers}))


def _describe_cluster(cluster: Cluster) -> dict[str, Any]:
    return {
        "name": cluster.name,
        "num_gpus": cluster.num_gpus,
        "memory_bytes": cluster.accelerator.memory_bytes,
        "rates": cluster.rates_source,
    }


def _build_json(result: PlanningResult, recipe: Recipe, cluster: Cluster) -> dict[str, Any]:
    from shardwright.planner.uncertainty import INTERVAL_SHARE, MIN_FIT_PROBABILITY

    steps = recipe.training.max_steps

    def describe(prediction: Prediction | None) -> dict[str, Any] | None:
        if prediction is None:
            return None
        fields: dict[str, Any] = prediction.as_dict()
        if steps is not None:
            fields |= {
                "days": prediction.compute_days(steps),
                "gpu_hours": prediction.compute_gpu_hours(steps),
            }
        return fields

    return {
        "recipe": recipe.name,
        "cluster": _describe_cluster(cluster),
        "num_steps": steps,
        "chosen": describe(result.chosen),
        "interval_share": INTERVAL_SHARE,
        "evidence": result.uncertainty.evidence,
        "rows": result.row_summary,
        "context_splits": [split._asdict() for split in result.context_splits],
        "expert_loads": result.expert_summary,
        "min_fit_probability": MIN_FIT_PROBABILITY,
        "memory_error_share": result.uncertainty.memory_margin,
        "alternatives": [prediction.candidate.describe() for prediction in result.alternatives],
        "warning": _describe_warning(result.chosen),
        "layouts": [describe(prediction) for prediction in result.predictions],
        "as_the_recipe_has_it": describe(result.recipe_prediction),
        "why_not_as_the_recipe_has_it": result.recipe_conflict,
        "rejected": [
            {
                "name": each.name,
                "reason": each.reason,
                "needed_bytes": each.needed_bytes,
                "change": each.change,
                "changed": describe(each.changed_prediction),
            }
            for each in result.rejections
        ],
        "scaling": [
            {
                "num_gpus": point.num_gpus,
                "efficiency": point.efficiency,
                "chosen": describe(point.prediction),
            }
            for point in result.scale_points
        ],
        "explanation": list(result.explanation),
        "search": asdict(result.effort),
        "precision_reason": result.precision_reason,
        "recompute_choice": result.recompute_choice and result.recompute_choice.as_dict(),
        "product_rates": result.product_rates,
        "missing_kernels": result.missing_kernels,
        "omissions": list(result.omissions),
        "remedy": result.remedy,
        "num_measured_steps": result.num_measured_steps,
    }
