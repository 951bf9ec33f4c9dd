"""Verification of all combinations of layout, case and dtype on worker ranks; its report."""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from shardwright.architecture import ModelShape
from shardwright.architecture.frozen_names import match_frozen
from shardwright.config import Recipe
from shardwright.config.training import OptimizerSection
from shardwright.errors import InputError, LayoutError, RankFailed
from shardwright.layout import Layout
from shardwright.numerics.compilation import find_compiler_obstacle
from shardwright.optim import check_block_boundaries, require_torchao
from shardwright.placement import has_micro_batch_scales
from shardwright.plans import BatchPlan, Plan
from shardwright.training.checks.offload_checks import check_offload_layout
from shardwright.verification.cases import VerificationCase, VerificationDtype
from shardwright.verification.cell import MutationContext, verify_cell
from shardwright.verification.comparison import ComparisonResult, find_worst
from shardwright.verification.compiled_code import CompiledCode, choose_compiled_code
from shardwright.verification.grid import (
    GRID_SEQUENCE_LENGTH,
    GridCell,
    group_by_reference,
    read_grid_shape,
)
from shardwright.verification.offload_cell import verify_offload
from shardwright.verification.rank_pool import RankPool
from shardwright.verification.reference import VerificationProblem, write_reference
from shardwright.verification.rule_cell import (
    add_rule_reference,
    needs_rule_reference,
    should_verify_rule,
    verify_rule,
)

SCHEMA_VERSION = 1
MICRO_BATCH_SIZE = 2


@dataclass(frozen=True)
class CellResult:
    """Worst findings over all ranks of one layout, case and dtype, or why there are none."""

    layout: Layout
    case: VerificationCase
    dtype: VerificationDtype
    findings: tuple[ComparisonResult, ...]
    failure: str | None
    seconds: float
    is_compiled: bool = False
    """True if the layout's blocks were compiled."""

    @property
    def passed(self) -> bool:
        """True if every comparison passed and there was at least one."""
        return (
            self.failure is None
            and bool(self.findings)
            and all(finding.passed for finding in self.findings)
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {
            "layout": str(self.layout),
            "world_size": self.layout.world_size,
            "case": asdict(self.case),
            "dtype": self.dtype,
            "compiled": self.is_compiled,
            "passed": self.passed,
            "failure": self.failure,
            "seconds": round(self.seconds, 3),
            "findings": [
                asdict(f) | {"error": _encode_number(f.error), "passed": f.passed}
                for f in self.findings
            ],
        }


def _encode_number(number: float) -> float | str:
    """Encode inf and nan, which JSON lacks, as text."""
    return number if abs(number) < float("inf") else str(number)


@dataclass(repr=False)
class VerificationReport:
    """Model, sequence length and results of a verification."""

    shape: ModelShape
    sequence_length: int
    compiled_code: CompiledCode
    cells: list[CellResult] = field(default_factory=list)

    def __repr__(self) -> str:
        failed = [cell for cell in self.cells if not cell.passed]
        lines = [f"{len(self.cells) - len(failed)} of {len(self.cells)} cells equal one process"]
        for cell in failed:
            reason = cell.failure or ", ".join(
                f"{finding.quantity} of {finding.subject}: error {finding.error:.2e}"
                for finding in cell.findings
                if not finding.passed
            )
            lines.append(f"{cell.layout}, {cell.dtype}, {cell.case}: {reason}")
        return "\n".join(lines)

    @property
    def passed(self) -> bool:
        """True if every cell passed and there was at least one."""
        return bool(self.cells) and all(cell.passed for cell in self.cells)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "schema_version": SCHEMA_VERSION,
            "passed": self.passed,
            "model": {
                "family": self.shape.family,
                "num_layers": self.shape.num_layers,
                "hidden_size": self.shape.hidden_size,
                "num_parameters": self.shape.num_parameters,
            },
            "sequence_length": self.sequence_length,
            "micro_batch_size": MICRO_BATCH_SIZE,
            "compiled_blocks": {
                "dtypes": self.compiled_code.dtypes,
                "reason": self.compiled_code.reason,
            },
            "fused_pointwise": self.compiled_code.pointwise.kind,
            "cells": [cell.as_dict() for cell in self.cells],
        }


@dataclass(frozen=True)
class GridCellResult:
    """Cell of the grid and its result; None if the model does not support the layout."""

    cell: GridCell
    result: CellResult | None

    @property
    def passed(self) -> bool:
        """True if the cell passed or its layout was refused."""
        return self.result is None or self.result.passed

    def as_dict(self) -> dict[str, Any]:
        """Return cell and result as JSON values."""
        cell: dict[str, Any] = {
            "model": self.cell.model,
            "layout": str(self.cell.layout),
            "offload": self.cell.offload.tiers,
            "refused": self.cell.refusal,
        }
        return cell if self.result is None else cell | self.result.as_dict()


def verify_grid(
    cells: Iterable[GridCell],
    pool: RankPool,
    *,
    on_row: Callable[[GridCellResult], None],
) -> list[GridCellResult]:
    """Run cells of the grid, each in its dtype; layouts that read the same batch share a reference.

    Args:
        on_row: called with every row when it is finished.
    """
    rows = []
    obstacle = find_compiler_obstacle(torch.device("cpu"))
    if obstacle is not None:
        cells = [replace(cell, refusal=obstacle) if cell.is_compiled else cell for cell in cells]
    with tempfile.TemporaryDirectory(prefix="shardwright-verify-") as folder:
        path = Path(folder, "reference.safetensors")
        for group in group_by_reference(cells):
            first = group[0]
            case = first.case
            problem = VerificationProblem(
                shape=read_grid_shape(first.model, first.num_layers),
                frozen_names=frozenset(),
                attention="auto",
                optimizer=OptimizerSection(),
                batch=BatchPlan(
                    GRID_SEQUENCE_LENGTH,
                    MICRO_BATCH_SIZE,
                    case.accumulation,
                    first.layout.data_ranks,
                ),
                case=case,
                dtype=first.dtype,
                seed=0,
                low_precision=first.low_precision,
            )
            if any(cell.refusal is None for cell in group):
                pool.run(1, write_reference, problem, path)
            for cell in group:
                result = None
                if cell.refusal is None:
                    own = replace(problem, offload=cell.offload, is_compiled=cell.is_compiled)
                    result = _run_cell(own, own.build_plan(cell.layout), path, pool, None)
                row = GridCellResult(cell, result)
                rows.append(row)
                on_row(row)
    return rows


def verify(
    recipe: Recipe,
    shape: ModelShape,
    layouts: Sequence[Layout],
    cases: Sequence[VerificationCase],
    dtypes: Sequence[VerificationDtype],
    *,
    sequence_length: int,
    pool: RankPool,
    on_result: Callable[[CellResult], None] = lambda _cell: None,
    mutation: MutationContext | None = None,
) -> VerificationReport:
    """Verify every combination of layout, case and dtype.

    Args:
        recipe: source of attention, compilation, optimizer, offloading, seed and frozen
            parameters, not of the data.
        shape: the recipe's model, possibly shrunk.
        sequence_length: tokens per row.
        dtypes: dtypes to compute in; quantised products are always verified in float64.
        pool: pool that runs the ranks.
        on_result: called with every result when it is finished.
        mutation: known bug on every rank but not in the reference, for tests of the verifier.

    Raises:
        InputError: the model or a layout cannot run.
    """
    shape.check_sequence_length(sequence_length)
    low_precision = recipe.precision.low_precision
    if low_precision is not None:
        # Sums in fp32 differ in their last bits, which could round to other codes.
        low_precision = low_precision.model_copy(update={"compute": "fp64", "emulate": True})
        dtypes = ["float64"]
        if has_micro_batch_scales(low_precision):
            cases = _select_single_micro_batches(cases, layouts, low_precision.recipe)
    code = choose_compiled_code(recipe, shape, dtypes)
    report = VerificationReport(shape, sequence_length, code)
    base = VerificationProblem(
        shape=shape,
        frozen_names=match_frozen(recipe.model.freeze, shape),
        attention=recipe.model.attention,
        optimizer=recipe.optimizer,
        batch=BatchPlan(sequence_length, MICRO_BATCH_SIZE, 1, 1),
        case=cases[0],
        dtype=dtypes[0],
        seed=recipe.seed,
        low_precision=low_precision,
        is_balanced=recipe.data.assignment == "work",
        offload=recipe.offload.replace_idle_host(),
        pointwise=code.pointwise,
    )
    groups = list(_list_problems(base, layouts, cases, dtypes, code))
    _check_plans(recipe, {plan.layout: plan for _, plans in groups for plan in plans}.values())
    with tempfile.TemporaryDirectory(prefix="shardwright-verify-") as folder:
        for problem, plans in groups:
            path = Path(folder, "reference.safetensors")
            pool.run(1, write_reference, problem, path)
            if needs_rule_reference(problem):
                pool.run(1, add_rule_reference, problem, str(path))
            for plan in plans:
                cell = _run_cell(problem, plan, path, pool, mutation)
                report.cells.append(cell)
                on_result(cell)
    return report


def _check_plans(recipe: Recipe, plans: Iterable[Plan]) -> None:
    """Check that the recipe's offloading and optimizer can run under every plan."""
    has_blocks = recipe.optimizer.name == "adamw_8bit"
    if has_blocks:
        require_torchao()
    for plan in plans:
        check_offload_layout(recipe, plan)
        if has_blocks:
            check_block_boundaries(
                plan.placement.parameters, plan.layout, recipe.optimizer.block_size
            )


def _list_problems(
    base: VerificationProblem,
    layouts: Sequence[Layout],
    cases: Sequence[VerificationCase],
    dtypes: Sequence[VerificationDtype],
    code: CompiledCode,
) -> Iterator[tuple[VerificationProblem, list[Plan]]]:
    """Yield each reference to compute with its plans: those of equally many data ranks and
    micro-batches, of which a pipeline schedule may need more than the case has."""
    for data_ranks in dict.fromkeys(layout.data_ranks for layout in layouts):
        group = [layout for layout in layouts if layout.data_ranks == data_ranks]
        for dtype in dtypes:
            for case in cases:
                by_case: dict[VerificationCase, list[Layout]] = defaultdict(list)
                for layout in group:
                    by_case[case.fit_schedule(layout)].append(layout)
                for own_case, same in by_case.items():
                    problem = replace(
                        base,
                        batch=replace(
                            base.batch,
                            data_ranks=data_ranks,
                            gradient_accumulation_steps=own_case.accumulation,
                        ),
                        case=own_case,
                        dtype=dtype,
                        is_compiled=dtype in code.dtypes,
                    )
                    yield problem, [problem.build_plan(layout) for layout in same]


def _select_single_micro_batches(
    cases: Sequence[VerificationCase], layouts: Sequence[Layout], recipe: str
) -> list[VerificationCase]:
    """Select the cases with one micro-batch: the reference computes a step's rows in one batch.

    Raises:
        LayoutError: a pipeline schedule needs more.
    """
    for layout in layouts:
        number = VerificationCase(1).fit_schedule(layout).accumulation
        if number > 1:
            raise LayoutError(
                f"{recipe} scales span the tokens of a micro-batch, so steps of one micro-batch "
                f"are verified, and this schedule needs {number}",
                field="layout.schedule",
                got=layout.schedule,
                allowed="gpipe, 1f1b, zb_h1 or zbv",
                remedy="Verify one of these, or precision.fp8.recipe: rowwise_with_gw_hp",
            )
    return [case for case in cases if case.accumulation == 1]


def _run_cell(
    problem: VerificationProblem,
    plan: Plan,
    path: Path,
    pool: RankPool,
    mutation: MutationContext | None,
) -> CellResult:
    layout = plan.layout
    start = time.perf_counter()
    findings: tuple[ComparisonResult, ...] = ()
    failure: str | None = None
    try:
        calls: list[tuple[Callable[..., list[ComparisonResult]], Path]] = [(verify_cell, path)]
        if should_verify_rule(problem):
            calls.append((verify_rule, path))
        if problem.offload.is_enabled:
            calls.append((verify_offload, path.parent))
        for function, place in calls:
            by_rank = pool.run(layout.world_size, function, problem, plan, str(place), mutation)
            findings += tuple(find_worst(same) for same in zip(*by_rank, strict=True))
    except RankFailed as error:
        if isinstance(error.__cause__, InputError):
            raise error.__cause__ from None
        failure = str(error)
    return CellResult(
        layout,
        problem.case,
        problem.dtype,
        findings,
        failure,
        time.perf_counter() - start,
        problem.is_compiled,
    )
