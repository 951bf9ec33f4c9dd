"""`shardwright schedule`: check, simulate and draw a pipeline schedule. Needs no model, no
torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwright.cli.options import JsonOutput
from shardwright.cli.output.json_output import print_json
from shardwright.cli.output.page_output import HtmlOutput, write_page, write_text
from shardwright.errors import ScheduleError

if TYPE_CHECKING:
    from shardwright.schedule import ActionTimes, Schedule, ScheduleStatistics, Timeline

_MAX_PASSES = 500_000
"""Maximum number of forward passes over all stages; this many take about a minute."""

ScheduleArgument = Annotated[
    str,
    typer.Argument(
        metavar="NAME|FILE",
        help=(
            "gpipe, 1f1b, interleaved_1f1b, zb_h1, zbv, dualpipev, "
            "or a file with one row of actions per rank."
        ),
    ),
]
Ranks = Annotated[
    int | None,
    typer.Option(
        "--ranks",
        "--stages",
        min=1,
        help="Number of pipeline ranks, for a NAME. --stages is the former spelling.",
    ),
]
MicroBatches = Annotated[
    int | None, typer.Option("--micro-batches", min=1, help="Micro-batches per step, for a NAME.")
]
VirtualStages = Annotated[
    int | None,
    typer.Option(
        "--virtual-stages", min=1, help="Stages per rank, for interleaved_1f1b; default 2."
    ),
]
TimesOption = Annotated[
    str,
    typer.Option(
        "--times",
        metavar="F,I,W[,SEND]",
        help=(
            "Times per micro-batch on one rank: forward, input gradients, "
            "weight gradients; and per message."
        ),
    ),
]
Svg = Annotated[
    Path | None,
    typer.Option("--svg", metavar="FILE", help="Also draw the schedule to this SVG file."),
]
AsText = Annotated[
    bool, typer.Option("--text", help="Print only the actions, in the format of FILE.")
]


def schedule_command(
    name: ScheduleArgument,
    ranks: Ranks = None,
    micro_batches: MicroBatches = None,
    virtual_stages: VirtualStages = None,
    times: TimesOption = "1,1,1",
    svg: Svg = None,
    html: HtmlOutput = None,
    text: AsText = False,
    as_json: JsonOutput = False,
) -> None:
    """Check that a pipeline schedule is complete and free of deadlocks; show bubble and
    activations."""
    from shardwright.schedule import (
        PIPELINE_SCHEDULES,
        build_schedule,
        check_schedule,
        load_schedule_file,
        simulate,
        write_schedule,
    )
    from shardwright.schedule.svg_chart import draw_svg

    if text and as_json:
        raise ScheduleError(
            "--text and --json both use standard output",
            field="--text",
            remedy="Remove one of them",
        )
    if name in PIPELINE_SCHEDULES:
        if ranks is None or micro_batches is None:
            raise ScheduleError(
                f"{name} needs --ranks and --micro-batches",
                field="schedule",
                remedy="Add e.g. --ranks 4 --micro-batches 8",
            )
        _check_size(ranks, micro_batches, virtual_stages)
        schedule = build_schedule(name, ranks, micro_batches, virtual_stages)
    else:
        schedule = load_schedule_file(name)
        _check_consistent(schedule, ranks, micro_batches, virtual_stages)
    proof = check_schedule(schedule)
    timeline = simulate(schedule, _parse_times(times, schedule))
    if svg is not None:
        write_text(svg, draw_svg(timeline), option="--svg")
    if html is not None:
        from shardwright.report.plan_page import render_schedule

        write_page(html, render_schedule(schedule, proof, timeline))
    if text:
        sys.stdout.write(write_schedule(schedule))
        return
    if as_json:
        print_json(_build_json(schedule, proof, timeline))
    _print_schedule(schedule, proof, timeline, is_drawn=not as_json)


def _check_size(ranks: int, micro_batches: int, virtual_stages: int | None) -> None:
    """Refuse a schedule that would take minutes to build and check."""
    passes = ranks * micro_batches * (virtual_stages or 1)
    if passes > _MAX_PASSES:
        raise ScheduleError(
            "too large to build and check",
            field="--ranks x --micro-batches x --virtual-stages",
            got=f"{passes:,}",
            allowed=f"at most {_MAX_PASSES:,}",
            remedy="Use fewer micro-batches; the schedule looks the same",
        )


def _check_consistent(
    schedule: Schedule, ranks: int | None, micro_batches: int | None, virtual_stages: int | None
) -> None:
    per_rank = schedule.num_stages / schedule.num_ranks
    for option, got, expected in (
        ("--ranks", ranks, schedule.num_ranks),
        ("--micro-batches", micro_batches, schedule.num_micro_batches),
        ("--virtual-stages", virtual_stages, per_rank),
    ):
        if got is not None and got != expected:
            raise ScheduleError(
                f"contradicts schedule {schedule.name}, which has {expected:g}",
                field=option,
                got=got,
                allowed=f"{expected:g}",
                remedy="Remove it",
            )


def _parse_times(text: str, schedule: Schedule) -> ActionTimes:
    """Parse times of a rank's whole share of the model; its stages take equal parts of them."""
    from shardwright.schedule import ActionTimes

    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if (
        len(numbers) not in (3, 4)
        or not all(number == 0 or 1e-9 <= number <= 1e9 for number in numbers)
        or not sum(numbers[:3])
    ):
        raise ScheduleError(
            "expected three or four numbers, each 0 or from 1e-9 to 1e9",
            field="--times",
            got=text,
            allowed="F,I,W or F,I,W,SEND: 1,1,1,0.1",
        )
    share = schedule.num_ranks / schedule.num_stages
    forward, inputs, weights = (number * share for number in numbers[:3])
    return ActionTimes.uniform(
        schedule.num_stages,
        forward,
        inputs,
        weights,
        transfer=numbers[3] if len(numbers) == 4 else 0.0,
    )


def _build_json(
    schedule: Schedule, proof: ScheduleStatistics, timeline: Timeline
) -> dict[str, Any]:
    p = schedule.num_ranks
    m = schedule.num_micro_batches
    return {
        "name": schedule.name,
        "num_ranks": p,
        "num_stages": schedule.num_stages,
        "num_micro_batches": m,
        "rank_of_stage": list(schedule.rank_of_stage),
        "step_time": timeline.step_seconds,
        "utilisation": timeline.utilisation,
        "one_stage_utilisation": m / (m + p - 1),
        "bubble": timeline.bubble_fraction,
        "peak_activations": list(proof.peak_activations),
        "num_transfers": proof.num_transfers,
        "rows": [[str(action) for action in row] for row in schedule.rows],
    }


def _print_schedule(
    schedule: Schedule, proof: ScheduleStatistics, timeline: Timeline, *, is_drawn: bool
) -> None:
    """Print drawing and numbers on standard output; with JSON, only the warning on standard
    error."""
    from shardwright.cli.output.console import open_console

    p = schedule.num_ranks
    m = schedule.num_micro_batches
    console = open_console(stderr=not is_drawn)
    if is_drawn:
        from shardwright.schedule.terminal_chart import draw_terminal

        console.print(f"{schedule}: complete, in order, no deadlock")
        console.print(draw_terminal(timeline, console.width), soft_wrap=True, end="")
        lines = [
            (
                "utilisation",
                f"{timeline.utilisation:.1%}; "
                f"m / (m + p - 1) = {m} / {m + p - 1} = {m / (m + p - 1):.1%}",
            ),
            ("bubble", f"{timeline.bubble_fraction:.1%} of the computation time"),
            (
                "step",
                f"{timeline.step_seconds:g} units of time, "
                f"{timeline.step_seconds * timeline.utilisation:g} of them computation",
            ),
            (
                "activations",
                f"at most {' '.join(map(str, proof.peak_activations))} on ranks 0 to "
                f"{p - 1}, {_name_activation_unit(schedule)}",
            ),
            ("messages", f"{proof.num_transfers} per step"),
        ]
        for label, text in lines:
            console.print(f"{label:<12} {text}", soft_wrap=True)
    if (warning := schedule.describe_low_utilisation()) is not None:
        console.print(f"warning: {warning}", style="yellow", soft_wrap=True)


def _name_activation_unit(schedule: Schedule) -> str:
    share = schedule.num_stages // schedule.num_ranks
    return (
        "in micro-batches" if share == 1 else f"in micro-batches x stages ({share} stages per rank)"
    )
