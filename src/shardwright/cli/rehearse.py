"""`shardwright rehearse`: run a layout's training step on fake devices."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, cast

import typer

from shardwright import api
from shardwright.cli.options import JsonOutput, Overrides, RecipePath
from shardwright.cli.output.json_output import fail_check, print_json
from shardwright.config import load_recipe, parse_layout
from shardwright.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from shardwright.config import Recipe
    from shardwright.config.run import DeviceKind
    from shardwright.plans import PrecisionChoice
    from shardwright.rehearsal.rank_rehearsal import RankRehearsal
    from shardwright.rehearsal.rehearsal import Rehearsal

_MAX_PEAK_LINES = 12


def rehearse_command(
    recipe: RecipePath,
    world_size: Annotated[
        int, typer.Option("--world-size", min=1, max=16384, help="Number of ranks.")
    ],
    layout: Annotated[
        str | None,
        typer.Option(
            "--layout", metavar="DEGREES", help="Change the recipe's layout, e.g. tp=8,pp=4."
        ),
    ] = None,
    overrides: Overrides = None,
    device: Annotated[
        str,
        typer.Option(
            "--device",
            help="Rehearse for cpu or cuda; auto uses CUDA if the real ranks would.",
        ),
    ] = "auto",
    each_rank: Annotated[
        bool,
        typer.Option(
            "--each-rank", help="Run every rank, not one per role (default for at most 8 ranks)."
        ),
    ] = False,
    collectives: Annotated[
        bool, typer.Option("--collectives", help="List all collectives of every role, in order.")
    ] = False,
    json_output: JsonOutput = False,
) -> None:
    """Run one optimizer step per role on fake tensors; report peak memory and all collectives.

    Exit code 1 if the ranks' collectives do not match.
    """
    settings = (
        [f"layout.{key}={json.dumps(value)}" for key, value in parse_layout(layout).items()]
        if layout
        else []
    )
    loaded_recipe = load_recipe(recipe, [*(overrides or []), *settings])
    from shardwright.cli.output.console import open_console

    console = open_console(stderr=json_output)
    result = rehearse_and_print(
        loaded_recipe,
        world_size,
        console,
        device=cast("DeviceKind", device),  # `choose_device` checks it
        should_run_each_rank=each_rank,
        should_list_all=collectives,
    )
    if json_output:
        print_json(result.as_dict())
    if result.disagreement is not None:
        fail_check(
            f"the ranks' collectives do not match: {result.disagreement}", json_output=json_output
        )


def rehearse_and_print(
    recipe: Recipe,
    world_size: int,
    console: Console,
    *,
    device: DeviceKind = "auto",
    should_run_each_rank: bool = False,
    should_list_all: bool = False,
) -> Rehearsal:
    """Rehearse a recipe on `world_size` ranks and print its memory and collectives."""

    def print_precision(choice: PrecisionChoice | None) -> None:
        if choice is not None:
            console.print(f"precision {choice}")

    with console.status("starting") as status:
        result = api.rehearse(
            recipe,
            world_size,
            device=device,
            should_run_each_rank=should_run_each_rank or None,
            on_start=print_precision,
            on_report=lambda report: status.update(
                f"rehearsed rank {report.rank} in {report.seconds:.0f} s"
            ),
        )
    _print_rehearsal(result, console, should_list_all=should_list_all)
    return result


def _print_collectives(result: Rehearsal, console: Console) -> None:
    """Print every collective and message of each rehearsed rank, in order."""
    for report in result.reports:
        console.print(f"rank {report.rank}")
        for position, call in enumerate(report.collectives):
            where = (
                f"with rank {call.peer}"
                if call.peer is not None
                else f"over {result.find_axes(report, call.ranks)} {call.ranks}"
            )
            console.print(
                f"  {position:5} {call.kind:14} {format_bytes(call.num_bytes):>10} "
                f"{call.dtype:9} {where}"
            )


def _print_rehearsal(result: Rehearsal, console: Console, *, should_list_all: bool) -> None:
    from rich.table import Column, Table

    from shardwright.cli.output.console import print_table

    layout = result.plan.layout
    devices = "CUDA ranks" if result.device == "cuda" else "ranks"
    console.print(f"{layout} on {layout.world_size} {devices}")
    headers = (
        "rank",
        "stage",
        "role size",
        "weights",
        "gradients",
        "optimizer",
        "peak",
        "collectives",
    )
    table = Table(
        *(Column(head, justify="right", no_wrap=True) for head in headers), box=None, pad_edge=False
    )
    for role, report in zip(result.roles, result.reports, strict=True):
        sizes = (
            report.weights_bytes,
            report.gradients_bytes,
            report.optimizer_bytes,
            report.peak_bytes,
        )
        table.add_row(
            str(role.rank),
            str(role.stage),
            str(len(role.ranks)),
            *map(format_bytes, sizes),
            str(len(report.collectives)),
        )
    print_table(console, table)
    worst = max(result.reports, key=lambda report: report.peak_bytes)
    if worst.total_offloaded_bytes:
        console.print(
            f"\noffloaded by rank {worst.rank}, at most: "
            f"{format_bytes(worst.offloaded_bytes)} of optimizer states, "
            f"{format_bytes(worst.offloaded_activation_bytes)} of saved tensors, "
            f"{format_bytes(worst.offloaded_parameter_bytes)} of weights; "
            f"{format_bytes(worst.host_bytes)} in host memory, "
            f"{format_bytes(worst.disk_bytes)} on disk"
        )
    _print_peak(worst, console)
    _print_traffic(result, worst, console)
    _print_run_micro_batches(result, console)
    for line in result.assumptions:
        console.print(f"assumption: {line}")
    if should_list_all:
        _print_collectives(result, console)
    if result.disagreement is None:
        console.print("all collectives match: same order, same sizes, every send has a receive")


def _print_run_micro_batches(result: Rehearsal, console: Console) -> None:
    """Print how many micro-batches were run, if others only repeat them."""
    number = result.plan.batch.gradient_accumulation_steps
    fewest, most = result.num_run_micro_batches
    if fewest < number:
        run = f"{fewest} to {most}" if fewest < most else str(most)
        console.print(
            f"{number} micro-batches, of which {run} were run: the others repeat the same "
            "collectives and changes of memory"
        )


def _print_peak(report: RankRehearsal, console: Console) -> None:
    from rich.table import Table

    from shardwright.cli.output.console import print_table

    table = Table(
        "bytes",
        "tensors",
        "allocated in",
        "by",
        "at",
        title=f"\nmemory at the peak of rank {report.rank}",
        box=None,
        pad_edge=False,
    )
    table.title_justify = "left"
    table.title_style = "bold"
    table.columns[3].overflow = "fold"
    table.columns[4].overflow = "fold"
    for part in report.contributions[:_MAX_PEAK_LINES]:
        origin = part.origin
        table.add_row(
            format_bytes(part.num_bytes),
            str(part.num_tensors),
            origin.kind,
            origin.operator,
            origin.source_line,
        )
    rest = report.contributions[_MAX_PEAK_LINES:]
    if rest:
        table.add_row(
            format_bytes(sum(p.num_bytes for p in rest)),
            str(sum(p.num_tensors for p in rest)),
            "other",
            "",
            "",
        )
    print_table(console, table)


def _print_traffic(result: Rehearsal, report: RankRehearsal, console: Console) -> None:
    from rich.table import Table

    from shardwright.cli.output.console import print_table

    traffic = result.compute_traffic(report)
    if not traffic:
        return
    headers = ("over", "collective", "calls", "sent")
    table = Table(
        *headers,
        title=f"\ncommunication of rank {report.rank} in one step",
        box=None,
        pad_edge=False,
    )
    table.title_justify = "left"
    table.title_style = "bold"
    for (axis, kind), (calls, sent) in sorted(traffic.items(), key=lambda item: -item[1][1]):
        table.add_row(axis, kind, str(calls), format_bytes(sent))
    print_table(console, table)
