"""`shardwright verify`: check that layouts compute the same gradients as one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwright.cli.options import JsonOutput, Overrides
from shardwright.cli.output.json_output import fail_check, print_json
from shardwright.config import load_recipe
from shardwright.errors import InputError
from shardwright.worker_processes import interrupt_on_termination

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from shardwright.config import Recipe
    from shardwright.plans import PrecisionChoice
    from shardwright.verification.verification import CellResult, VerificationReport


_DEFAULT_NUM_PROCESSES = 4
_DEFAULT_MAX_RANKS = 16

OptionalRecipePath = Annotated[
    Path | None, typer.Argument(metavar="RECIPE", help="YAML recipe; not with --all.")
]
Layouts = Annotated[
    list[str] | None,
    typer.Option(
        "--layout",
        metavar="DEGREES",
        help=(
            "Layout to verify, e.g. zero_stage=3. Repeatable. Default: all data-parallel layouts."
        ),
    ),
]
MaxProcessesOption = Annotated[
    int,
    typer.Option(
        "--nproc", min=2, max=64, help="Maximum number of ranks, all on this machine's CPU."
    ),
]
Dtypes = Annotated[
    list[str] | None,
    typer.Option("--dtype", metavar="DTYPE", help="float32 or float64. Repeatable. Default: both."),
]
NumLayers = Annotated[
    int | None,
    typer.Option("--num-layers", min=1, help="Reduce the model to this number of layers."),
]
HiddenSize = Annotated[
    int | None,
    typer.Option(
        "--hidden-size", min=1, help="Reduce the model's width, with its heads and feed-forward."
    ),
]
SequenceLength = Annotated[
    int | None,
    typer.Option(
        "--sequence-length", min=4, help="Tokens per row; default the recipe's, at most 32."
    ),
]
FullOption = Annotated[
    bool,
    typer.Option(
        "--full",
        help=(
            "Verify all combinations of accumulation, recompute, tying and dropout, "
            "instead of three cases."
        ),
    ),
]
AllOption = Annotated[
    bool,
    typer.Option(
        "--all",
        help=(
            "Verify small models of three families under all kinds of parallelism and their "
            "combinations, in float32; one cell of each kind compiles its blocks."
        ),
    ),
]
MaxRanksOption = Annotated[
    int, typer.Option("--max-ranks", min=2, help="With --all: maximum number of ranks of a layout.")
]


def verify_command(
    recipe: OptionalRecipePath = None,
    layouts: Layouts = None,
    overrides: Overrides = None,
    nproc: MaxProcessesOption = _DEFAULT_NUM_PROCESSES,
    dtype: Dtypes = None,
    num_layers: NumLayers = None,
    hidden_size: HiddenSize = None,
    sequence_length: SequenceLength = None,
    full: FullOption = False,
    should_verify_all: AllOption = False,
    max_ranks: MaxRanksOption = _DEFAULT_MAX_RANKS,
    json_output: JsonOutput = False,
) -> None:
    """Compare each layout's loss, raw gradients, gradient norm and updated weights with
    one process, and a run with the recipe's offloading with the same run without it.

    Layouts compile what a run of the recipe compiles on this machine (model.compile).
    Exit code 1 if any of them differs.
    """
    if should_verify_all:
        _refuse_options(
            {
                "RECIPE": recipe,
                "--layout": layouts,
                "--set": overrides,
                "--nproc": None if nproc == _DEFAULT_NUM_PROCESSES else nproc,
                "--dtype": dtype,
                "--num-layers": num_layers,
                "--hidden-size": hidden_size,
                "--sequence-length": sequence_length,
                "--full": full,
            },
            "has no effect with --all, which verifies built-in models in cases of its own",
            "Remove it, or remove --all",
        )
        with interrupt_on_termination():
            _verify_all(max_ranks, json_output)
        return
    _refuse_options(
        {"--max-ranks": None if max_ranks == _DEFAULT_MAX_RANKS else max_ranks},
        "applies to --all only",
        "Use --nproc, or add --all",
    )
    if recipe is None:
        raise InputError(
            "missing recipe",
            field="RECIPE",
            remedy="Give a YAML file, or verify small models with --all",
        )
    loaded_recipe = load_recipe(recipe, overrides or [])
    # Torch is imported after the recipe is validated, so that errors in it appear at once.
    from shardwright import api
    from shardwright.cli.output.console import open_console
    from shardwright.verification.cases import choose_dtypes

    dtypes = choose_dtypes(dtype or ())
    console = open_console(stderr=json_output)

    with interrupt_on_termination(), console.status("starting ranks") as status:
        report = api.verify(
            loaded_recipe,
            layouts or (),
            max_ranks=nproc,
            dtypes=dtypes,
            num_layers=num_layers,
            hidden_size=hidden_size,
            sequence_length=sequence_length,
            is_full=full,
            on_start=lambda choice: _print_settings(choice, loaded_recipe, dtypes, console),
            on_result=lambda cell: status.update(
                f"verified {cell.layout} in {cell.dtype}: {cell.case}"
            ),
        )
    _print_report(report, console)
    if json_output:
        print_json(report.as_dict())
    if not report.passed:
        failed = sum(not cell.passed for cell in report.cells)
        _fail(failed, len(report.cells), json_output=json_output)


def _fail(num_failed: int, num_cells: int, *, json_output: bool) -> None:
    message = f"{num_failed} of {num_cells} cells differ from one process"
    fail_check(message, json_output=json_output)


def _print_settings(
    choice: PrecisionChoice | None, recipe: Recipe, dtypes: Sequence[str], console: Console
) -> None:
    """Print how the verification differs from a run of the recipe."""
    if choice is not None:
        console.print(
            f"precision {choice}; gradients are compared in {' and '.join(dtypes)} nevertheless"
        )
    if "host" in (recipe.offload.parameters, recipe.offload.activations):
        console.print(
            "offload: nothing moves to host on a CPU: weights and activations go to disk here"
        )


def _refuse_options(options: Mapping[str, object], problem: str, remedy: str) -> None:
    """Raise an InputError for the first option that is set."""
    for name, value in options.items():
        if value:
            raise InputError(problem, field=name, got=str(value), remedy=remedy)


def _verify_all(max_ranks: int, json_output: bool) -> None:
    """Verify every cell of the grid; print each as a row when it is done."""
    from shardwright.cli.output.console import open_console
    from shardwright.verification.grid import list_cells
    from shardwright.verification.rank_pool import RankPool
    from shardwright.verification.verification import GridCellResult, verify_grid

    console = open_console(stderr=json_output)

    def print_row(row: GridCellResult) -> None:
        cell = row.cell
        result = row.result
        compiled = ["compiled"] if cell.is_compiled else []
        section = cell.low_precision
        products = [] if section is None else [section.recipe]
        case = ", ".join([str(cell.case), *sorted(cell.offload_properties), *compiled, *products])
        description = f"{cell.model:6} {cell.layout!s:62} {case:56}"
        if result is None:
            console.print(f"{description} refused: {cell.refusal}", style="dim", soft_wrap=True)
            return
        error = max(
            (finding.error for finding in result.findings if finding.allowed > 0.0),
            default=float("nan"),
        )
        outcome = (
            f"{error:.1e} pass"
            if row.passed
            else f"{error:.1e} FAIL {result.failure or _describe_failures(result)}"
        )
        console.print(f"{description} {outcome}", style="" if row.passed else "red", soft_wrap=True)

    with RankPool(timeout_seconds=300.0) as pool:
        rows = verify_grid(list_cells(max_ranks), pool, on_row=print_row)
    run = [row for row in rows if row.result is not None]
    failed = [row for row in rows if not row.passed]
    console.print(
        f"{len(run)} cells run, {len(run) - len(failed)} passed; "
        f"{len(rows) - len(run)} layouts refused by the recipe's validation; "
        f"blocks compiled in {sum(row.cell.is_compiled for row in run)} cells"
    )
    if json_output:
        print_json({"passed": not failed, "cells": [row.as_dict() for row in rows]})
    if failed:
        _fail(len(failed), len(run), json_output=json_output)


def _describe_failures(result: CellResult) -> str:
    """Describe in one line what failed in a cell."""
    return "; ".join(
        f"{f.quantity}, {f.subject}: {f.error:.2e}" for f in result.findings if not f.passed
    )


def _print_report(report: VerificationReport, console: Console) -> None:
    """Print one row per layout and dtype, with the result closest to its limit, then all
    failures."""
    from rich.table import Table

    from shardwright.cli.output.console import print_table

    shape = report.shape
    console.print(
        f"{shape.family}: {shape.num_layers} layers, hidden size {shape.hidden_size}, "
        f"{shape.num_parameters:,} parameters; "
        f"rows of {report.sequence_length} tokens"
    )
    code = report.compiled_code
    console.print(str(code))
    if code.pointwise.kind != "none":
        console.print(str(code.pointwise))
    table = Table(
        "layout", "dtype", "closest to its limit", "error", "cases", box=None, pad_edge=False
    )
    table.columns[2].overflow = "fold"
    for layout, dtype in dict.fromkeys((cell.layout, cell.dtype) for cell in report.cells):
        cells = [cell for cell in report.cells if (cell.layout, cell.dtype) == (layout, dtype)]
        table.add_row(
            str(layout).replace(",", ", "), dtype, *_find_worst(cells), _format_verdict(cells)
        )
    print_table(console, table)
    for cell in report.cells:
        description = f"{cell.layout}, {cell.dtype}, {cell.case}"
        for finding in cell.findings:
            if not finding.passed:
                text = (
                    f"{finding.quantity}, {finding.subject}: error {finding.error:.2e}, "
                    f"allowed {finding.allowed:.0e}"
                )
                console.print(f"fails: {description}: {text}", style="red")
        if cell.failure:
            console.print(f"fails: {description}: {cell.failure}", style="red")


def _find_worst(cells: list[CellResult]) -> tuple[str, str]:
    """Return the comparison that came closest to its limit, and its error."""
    compared = [finding for cell in cells for finding in cell.findings if finding.allowed > 0.0]
    if not compared:
        return "", ""
    worst = max(compared, key=lambda finding: finding.severity)
    return f"{worst.quantity}: {worst.subject}", f"{worst.error:.1e}"


def _format_verdict(cells: list[CellResult]) -> Text:
    from rich.text import Text

    failed = sum(not cell.passed for cell in cells)
    return (
        Text(f"{failed} of {len(cells)} fail", "red")
        if failed
        else Text(f"{len(cells)} pass", "green")
    )
