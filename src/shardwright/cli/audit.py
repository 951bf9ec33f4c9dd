"""`shardwright audit`: compare a recorded step of any trainer with one process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwright.cli.options import JsonOutput
from shardwright.cli.output.json_output import fail_check, print_json
from shardwright.cli.output.page_output import (
    ShouldOverwrite,
    check_new_file,
    write_page,
    write_text,
)
from shardwright.errors import InputError

if TYPE_CHECKING:
    from shardwright.audit.check import AuditReport

NUM_SHOWN = 8
"""Number of parameters in the terminal's table."""

app = typer.Typer(
    help="Compare a recorded step of any trainer with one process, and name what is wrong.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

RecordFolder = Annotated[
    Path,
    typer.Argument(
        metavar="DIR", help="Folder that the recorder wrote, or one step's folder in it."
    ),
]
StepOption = Annotated[
    int | None, typer.Option("--step", help="Recorded step; needed if there are several.")
]
ModelFolder = Annotated[
    Path | None,
    typer.Option(
        "--model",
        metavar="PATH",
        help="Hugging Face folder with the weights before the step. Default: the recorded weights.",
    ),
]
ObjectiveOption = Annotated[
    str,
    typer.Option(
        "--objective",
        metavar="NAME",
        help="Definition of the loss: mean_tokens (sum over the supervised tokens of the global "
        "batch, divided by their number), mean_micro_batches, mean_ranks, sum_tokens or dpo (mean "
        "over the pairs of the global batch).",
    ),
]
BetaOption = Annotated[float | None, typer.Option("--beta", help="Beta of the DPO loss.")]
SmoothingOption = Annotated[
    float, typer.Option("--label-smoothing", help="Label smoothing of the DPO loss.")
]
ReferenceOption = Annotated[
    Path | None,
    typer.Option(
        "--reference",
        metavar="PATH",
        help="Hugging Face folder of the reference model of the DPO loss. Default: recorded "
        "log-probabilities, else the model without its adapters.",
    ),
]
DtypeOption = Annotated[
    str, typer.Option("--dtype", help="Precision of the recomputation: float32 or float64.")
]
PageOutput = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE", help="Also write an HTML page with all parameters."),
]
RecorderOutput = Annotated[
    Path, typer.Option("--out", metavar="FILE", help="Python file to write.")
]


@app.command("check")
def check_command(
    folder: RecordFolder,
    step: StepOption = None,
    model: ModelFolder = None,
    objective: ObjectiveOption = "mean_tokens",
    beta: BetaOption = None,
    label_smoothing: SmoothingOption = 0.0,
    reference: ReferenceOption = None,
    dtype: DtypeOption = "float32",
    json_output: JsonOutput = False,
    out: PageOutput = None,
) -> None:
    """Recompute a recorded step in one process; compare results.

    On the CPU. Results are loss, gradients, norm, clip and update.
    Exit code 1 if any of them differs, 2 if the folder is incomplete or does not fit the model.
    """
    # Imported here: torch takes seconds, which `--help` does not need.
    from shardwright.audit.check import check_recorded_step
    from shardwright.audit.page import render_audit
    from shardwright.audit.preference import PreferenceSettings
    from shardwright.cli.output.console import open_console

    preference = None
    if beta is not None:
        preference = PreferenceSettings(beta, label_smoothing, reference)
    elif reference is not None or label_smoothing:
        raise InputError(
            "--reference and --label-smoothing apply only to the DPO loss, which needs --beta",
            field="--beta",
            remedy="Give --objective dpo and --beta as the trainer has it",
        )
    console = open_console(stderr=json_output)
    with console.status("computing the step in one process"):
        report = check_recorded_step(
            folder,
            step=step,
            model_path=model,
            objective=objective,
            dtype=dtype,
            preference=preference,
        )
    if out is not None:
        write_page(out, render_audit(report), option="--out")
    for line in describe_report(report):
        console.print(line, soft_wrap=True)
    if out is not None:
        console.print(f"page: {out}")
    if json_output:
        print_json(report.as_dict(), allow_nan=False)
    if not report.passed:
        num_wrong = sum(not result.passed for result in report.parameters)
        fail_check(
            f"{num_wrong} of {len(report.parameters)} gradients and "
            f"{sum(not finding.passed for finding in report.findings)} of "
            f"{len(report.findings)} other comparisons differ from one process",
            json_output=json_output,
        )


@app.command("recorder")
def recorder_command(
    out: RecorderOutput = Path("recorder.py"),
    overwrite: ShouldOverwrite = False,
) -> None:
    """Write the recorder as one Python file.

    It needs only torch and safetensors.
    """
    from importlib import resources

    # `recorder.py` is the default: a file of that name may be the user's own.
    check_new_file(out, should_overwrite=overwrite)
    source = resources.files("shardwright.audit").joinpath("recorder.py")
    write_text(out, source.read_text(encoding="utf-8"))
    sys.stdout.write(f"recorder: {out}\n")


def describe_report(report: AuditReport) -> list[str]:
    """Describe a report in lines: what was compared, what differs, and why."""
    lines = [
        f"step {report.step}: {report.num_ranks} ranks, {report.num_micro_batches} micro-batches, "
        f"{report.num_terms:,} {report.term_unit}; {report.objective}, {report.dtype}",
        f"loss {report.expected_loss:.6g} in one process",
    ]
    num_wrong = sum(not result.passed for result in report.parameters)
    if num_wrong:
        lines.append(
            f"gradients: {num_wrong} of {len(report.parameters)} differ; relative difference "
            f"{report.residual:.2e}"
        )
        for result in report.worst_parameters[:NUM_SHOWN]:
            if not result.passed:
                lines.append(
                    f"  {result.name}: {result.error:.2e}, rounding explains {result.allowed:.0e}"
                )
    else:
        worst = report.worst_parameters[0]
        lines.append(
            f"gradients: all {len(report.parameters)} equal those of one process; worst "
            f"{worst.name}: {worst.error:.1e}, rounding explains {worst.allowed:.0e}"
        )
    if report.projections is not None:
        lines.append(
            f"  by {report.projections} random projections; relative standard error of a norm "
            f"{(2 * report.projections) ** -0.5:.1%}"
        )
    for finding in report.findings:
        verdict = "equal" if finding.passed else "DIFFERS"
        numbers = f"error {finding.error:.1e}, allowed {finding.allowed:.0e}"
        lines.append(f"{finding.quantity}: {verdict} ({finding.subject}; {numbers})")
    lines += [f"not checked: {reason}" for reason in report.unchecked]
    for diagnosis in report.diagnoses:
        for mistake in diagnosis.mistakes:
            lines += [f"diagnosis: {mistake.title}", f"  fix: {mistake.remedy}"]
            lines += [f"  seen: {link}" for link in mistake.links]
        subject = f"{diagnosis.subject}: " if diagnosis.subject else ""
        lines.append(
            f"  {subject}residual {diagnosis.residual_before:.1e} without, "
            f"{diagnosis.residual_after:.1e} with it"
        )
        if diagnosis.note:
            lines.append(f"  {diagnosis.note}")
        for keys in diagnosis.alternatives:
            lines.append(f"  the same on this step: {', '.join(keys)}")
    if not report.passed and not report.diagnoses:
        lines.append("diagnosis: none of the known mistakes reproduces this difference")
    return lines
