"""`shardwright doctor`: check that a machine, a cluster or a recipe is ready for a long run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from shardwright.cli.options import JsonOutput, Overrides
from shardwright.cli.output.json_output import fail_check, print_json
from shardwright.cli.output.page_output import HtmlOutput, check_output_file, write_page
from shardwright.config import load_recipe
from shardwright.config.layout import LayoutSection
from shardwright.config.recipe_loading import parse_layout
from shardwright.config.run import DeviceKind
from shardwright.errors import CheckFailed, InputError
from shardwright.launch.rank_environment import RankEnvironment, detect_rank_environment
from shardwright.layout import Layout, resolve_layout
from shardwright.plans import resolve_precision
from shardwright.units import format_items

if TYPE_CHECKING:
    from shardwright.config import Recipe
    from shardwright.doctor.diagnosis import Diagnosis
    from shardwright.doctor.examination import ExaminationRequest
    from shardwright.doctor.finding import Finding


NumRanksOption = Annotated[
    int | None,
    typer.Option(
        "--nproc",
        min=1,
        help="Ranks to start on this machine; default one per GPU, or two on a CPU.",
    ),
]
RecipeOption = Annotated[
    Path | None,
    typer.Option(
        "--recipe", help="Also check this recipe's folders and the process groups of its layout."
    ),
]
LayoutOption = Annotated[
    str | None,
    typer.Option(
        "--layout",
        metavar="DEGREES",
        help=(
            "Layout whose groups are tested, e.g. tp=2,dp_shard=4; default: one group of all ranks."
        ),
    ),
]
CalibrateOption = Annotated[
    Path | None,
    typer.Option(
        "--calibrate",
        metavar="OUT",
        help="Measure rates and write a profile for `plan --profile OUT`.",
    ),
]
ChecklistOption = Annotated[
    Path | None,
    typer.Option(
        "--checklist",
        metavar="RECIPE",
        help="Only check that this recipe has what a long run needs; measure nothing.",
    ),
]
DeviceOption = Annotated[str, typer.Option("--device", help="Device: auto, cpu or cuda.")]
Budget = Annotated[
    float | None,
    typer.Option(
        "--budget",
        min=1.0,
        help=(
            "Time limit for --calibrate in seconds, by default 120; "
            "measurements that do not fit are skipped and listed."
        ),
    ),
]
TimeoutOption = Annotated[
    float,
    typer.Option("--timeout", min=1.0, help="Seconds to wait for a peer or a measurement."),
]


def doctor_command(
    nproc: NumRanksOption = None,
    recipe: RecipeOption = None,
    layout: LayoutOption = None,
    overrides: Overrides = None,
    calibrate: CalibrateOption = None,
    budget: Budget = None,
    checklist: ChecklistOption = None,
    device: DeviceOption = "auto",
    timeout: TimeoutOption = 60.0,
    html: HtmlOutput = None,
    json_output: JsonOutput = False,
) -> None:
    """Check software, devices, hosts, links and peers. Each check passes, warns or fails.

    The exit code is 1 if any check fails.

    Starts ranks on this machine, or runs as a rank of torchrun or srun, on any number of nodes.
    """
    _check_options(device, recipe, calibrate, budget, checklist)
    kind = cast(DeviceKind, device)
    if checklist is not None:
        _check_recipe(checklist, overrides, layout, nproc, html=html, json_output=json_output)
        return
    if overrides and recipe is None:
        raise InputError("there is no recipe to change", field="--set", remedy="Add --recipe")
    loaded_recipe = None if recipe is None else load_recipe(recipe, overrides or [], layout)
    section = _choose_layout_section(loaded_recipe, layout)
    ranks = detect_rank_environment()
    degrees = _resolve_layout(section, _choose_world_size(nproc, ranks, section, device))
    # Torch is imported after the recipe is validated, so that errors in it appear at once.
    from shardwright.doctor.diagnosis import examine
    from shardwright.doctor.examination import CALIBRATION_SECONDS
    from shardwright.doctor.rates.cluster_profile import build_request
    from shardwright.launch.auto_layout import choose_planned_precision

    if loaded_recipe is not None:
        loaded_recipe = resolve_precision(loaded_recipe, choose_planned_precision(loaded_recipe))
    budget_seconds = CALIBRATION_SECONDS if budget is None else budget
    request = build_request(
        loaded_recipe,
        degrees,
        device=kind,
        timeout_seconds=timeout,
        should_calibrate=calibrate is not None,
        budget_seconds=budget_seconds,
    )
    is_writer = ranks is None or ranks.rank == 0
    for option, file in (("--calibrate", calibrate), ("--html", html)):
        if is_writer and file is not None:
            check_output_file(file, option=option)
    if calibrate is not None and is_writer:
        sys.stderr.write(
            "Measuring rates for the planner: "
            f"at most {budget_seconds:g} s in addition to the usual checks\n"
        )
    diagnosis = examine(request, degrees.world_size)
    if diagnosis is None:  # rank 0 prints the results
        return
    if ranks is not None and ranks.rank != 0:
        # This rank could not reach rank 0, so it must report the failure itself.
        raise CheckFailed(
            "; ".join(f"{f.value}. {f.remedy}" for f in diagnosis.findings if f.verdict == "fail")
        )
    _print_diagnosis(diagnosis, request, calibrate, html=html, json_output=json_output)


def _check_options(
    device: str,
    recipe: Path | None,
    calibrate: Path | None,
    budget: float | None,
    checklist: Path | None,
) -> None:
    if device not in get_args(DeviceKind):
        raise InputError(
            "not a device type", field="--device", got=device, allowed="auto, cpu or cuda"
        )
    if budget is not None and calibrate is None:
        raise InputError(
            "it limits --calibrate, which is not given",
            field="--budget",
            got=budget,
            remedy="Add --calibrate OUT, or remove --budget",
        )
    if checklist is not None and (recipe is not None or calibrate is not None):
        raise InputError(
            "--checklist measures nothing, so it excludes this option",
            field="--checklist",
            got="--recipe" if recipe is not None else "--calibrate",
            remedy="Remove one of them",
        )


def _choose_world_size(
    nproc: int | None, ranks: RankEnvironment | None, section: LayoutSection | None, device: str
) -> int:
    """Return the launcher's number of ranks, else --nproc, else this machine's default."""
    if ranks is None:
        return nproc or _count_default_ranks(section, device)
    if nproc not in (None, ranks.world_size):
        raise InputError(
            f"a launcher has already started {ranks.world_size} ranks",
            field="--nproc",
            got=nproc,
            remedy="Remove --nproc",
        )
    return ranks.world_size


def _choose_layout_section(recipe: Recipe | None, layout: str | None) -> LayoutSection | None:
    """Return the layout to check; None if all ranks form one group."""
    if recipe is not None:
        if recipe.layout.auto:
            raise InputError(
                "`auto` is not resolved yet",
                field="layout",
                got="auto",
                remedy="Name the degrees with --layout, or calibrate first and let `plan` choose",
            )
        return recipe.layout
    return None if layout is None else LayoutSection.model_validate(parse_layout(layout))


def _count_default_ranks(section: LayoutSection | None, device: str) -> int:
    """Return one rank per GPU; on a CPU the ranks of the layout, and at least two with two
    cores."""
    import torch

    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.device_count()
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    minimum = min(2, cores)
    if section is None:
        return minimum
    model_ranks = section.tp * section.pp * section.cp
    layout_ranks = model_ranks * (section.dp_replicate or 1) * (section.dp_shard or 1)
    return layout_ranks if layout_ranks >= minimum else layout_ranks * minimum


def _resolve_layout(section: LayoutSection | None, world_size: int) -> Layout:
    if section is None:
        return Layout(dp_shard=world_size, zero_stage=3) if world_size > 1 else Layout()
    return resolve_layout(section, world_size)


def _print_diagnosis(
    diagnosis: Diagnosis,
    request: ExaminationRequest,
    calibrate: Path | None,
    *,
    html: Path | None,
    json_output: bool,
) -> None:
    from shardwright.cli.output.console import open_console
    from shardwright.cli.output.doctor_table import print_findings
    from shardwright.doctor.rates.cluster_profile import build_profile
    from shardwright.hardware import save_profile
    from shardwright.report.diagnosis_page import render_diagnosis

    console = open_console(stderr=json_output)
    content = diagnosis.as_dict()
    print_findings(diagnosis.findings, console)
    if html is not None:
        ranks = format_items(diagnosis.world_size, "rank")
        device_name = diagnosis.device_name or diagnosis.device_kind
        lead = f"{ranks} of {device_name}, layout {diagnosis.layout or 'single rank'}"
        write_page(html, render_diagnosis("Doctor", lead, diagnosis.findings))
    if calibrate is not None:
        profile = build_profile(diagnosis, request)
        try:
            save_profile(profile, calibrate)
        except OSError as error:
            raise InputError(
                f"cannot be written: {error.strerror}", field="--calibrate", got=str(calibrate)
            ) from error
        content |= {"profile": str(calibrate)}
        counts = (
            f"{len(profile.matmuls)} products, {len(profile.attention)} attention lengths and "
            f"{len(profile.collectives)} collectives"
        )
        console.print(f"Measured {counts}. To plan with them (in a recipe: cluster.profile):")
        console.print(
            f"  shardwright plan RECIPE --cluster ... --profile {calibrate}", soft_wrap=True
        )
    _finish(content, diagnosis.findings, json_output=json_output)


def _check_recipe(
    path: Path,
    overrides: list[str] | None,
    layout: str | None,
    nproc: int | None,
    *,
    html: Path | None,
    json_output: bool,
) -> None:
    loaded_recipe = load_recipe(path, overrides or [], layout)
    from shardwright.cli.output.console import open_console
    from shardwright.cli.output.doctor_table import print_findings
    from shardwright.doctor.checklist import check_recipe
    from shardwright.report.diagnosis_page import render_diagnosis

    world_size = nproc or _count_default_ranks(
        None if loaded_recipe.layout.auto else loaded_recipe.layout, "auto"
    )
    findings = check_recipe(loaded_recipe, world_size, str(path))
    print_findings(findings, open_console(stderr=json_output))
    if html is not None:
        write_page(
            html,
            render_diagnosis(
                f"Checklist: {loaded_recipe.name}", f"{path} on {world_size} ranks", findings
            ),
        )
    content = {
        "schema_version": 1,
        "recipe": loaded_recipe.name,
        "world_size": world_size,
        "findings": [f.as_dict() for f in findings],
    }
    _finish(content, findings, json_output=json_output)


def _finish(
    content: dict[str, object], findings: tuple[Finding, ...], *, json_output: bool
) -> None:
    failed = [finding for finding in findings if finding.verdict == "fail"]
    if json_output:
        print_json(content)
    if failed:
        names = ", ".join(f"{finding.section}: {finding.name}" for finding in failed)
        fail_check(
            f"{len(failed)} of {len(findings)} checks fail ({names})", json_output=json_output
        )
