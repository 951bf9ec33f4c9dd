"""Verification of all combinations of layout, case and dtype on worker ranks; its report."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from shardwright.architecture import ModelShape
from shardwright.config import Recipe
from shardwright.config.training import OptimizerSection
from shardwright.errors import InputError, RankFailed
from shardwright.layout import Layout
from shardwright.optim import check_blocks, require_torchao
from shardwright.placement import check, place, stages_of
from shardwright.plan import BatchPlan
from shardwright.train.preflight import match_frozen
from shardwright.verify.cases import Case, Dtype
from shardwright.verify.cell import Finding, Mutation, add_rule_reference, has_rule, verify_cell
from shardwright.verify.grid import SEQUENCE_LENGTH, Cell, by_reference, shape_of_model
from shardwright.verify.oracle import Problem, write_reference
from shardwright.verify.pool import RankPool

SCHEMA_VERSION = 1
MICRO_BATCH_SIZE = 2


@dataclass(frozen=True)
class CellResult:
    """Worst findings over all ranks of one layout, case and dtype, or why there are none."""

    layout: Layout
    case: Case
    dtype: Dtype
    findings: tuple[Finding, ...]
    failure: str | None
    seconds: float

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
            "passed": self.passed,
            "failure": self.failure,
            "seconds": round(self.seconds, 3),
            "findings": [
                asdict(f) | {"error": _as_json(f.error), "passed": f.passed} for f in self.findings
            ],
        }


def _as_json(number: float) -> float | str:
    """Encode inf and nan, which JSON lacks, as text."""
    return number if abs(number) < float("inf") else str(number)


@dataclass
class Report:
    """Model, sequence length and results of a verification."""

    shape: ModelShape
    sequence_length: int
    cells: list[CellResult] = field(default_factory=list)

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
            "cells": [cell.as_dict() for cell in self.cells],
        }


@dataclass(frozen=True)
class GridRow:
    """Cell of the grid and its result; None if the model does not support the layout."""

    cell: Cell
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
            "refused": self.cell.refusal,
        }
        return cell if self.result is None else cell | self.result.as_dict()


def verify_grid(
    cells: Iterable[Cell],
    pool: RankPool,
    *,
    dtype: Dtype = "float32",
    told: Callable[[GridRow], None],
) -> list[GridRow]:
    """Run cells of the grid; layouts that read the same batch share a reference.

    Args:
        told: called with every row when it is finished.
    """
    rows = []
    with tempfile.TemporaryDirectory(prefix="shardwright-verify-") as folder:
        path = Path(folder, "reference.safetensors")
        for (model, case, data_ranks), group in by_reference(cells).items():
            problem = Problem(
                shape=shape_of_model(model),
                frozen=frozenset(),
                attention="auto",
                optimizer=OptimizerSection(),
                batch=BatchPlan(SEQUENCE_LENGTH, MICRO_BATCH_SIZE, case.accumulation, data_ranks),
                case=case,
                dtype=dtype,
                seed=0,
            )
            if any(cell.refusal is None for cell in group):
                pool.run(1, write_reference, problem, path)
            for cell in group:
                row = GridRow(
                    cell,
                    _run_cell(problem, cell.layout, path, pool, None)
                    if cell.refusal is None
                    else None,
                )
                rows.append(row)
                told(row)
    return rows


def verify(
    recipe: Recipe,
    shape: ModelShape,
    layouts: Sequence[Layout],
    cases: Sequence[Case],
    dtypes: Sequence[Dtype],
    *,
    sequence_length: int,
    pool: RankPool,
    told: Callable[[CellResult], None] = lambda _cell: None,
    mutation: Mutation | None = None,
) -> Report:
    """Verify every combination of layout, case and dtype.

    Args:
        recipe: source of attention, optimizer, seed and frozen parameters, not of the data.
        shape: the recipe's model, possibly shrunk.
        sequence_length: tokens per row.
        pool: pool that runs the ranks.
        told: called with every result when it is finished.
        mutation: known bug on every rank but not in the reference, for tests of the verifier.

    Raises:
        InputError: the model or a layout cannot run.
    """
    shape.check_sequence_length(sequence_length)
    for layout in layouts:
        check(shape, layout, sequence_length)
        if recipe.optimizer.name == "adamw_8bit":
            require_torchao()
            check_blocks(
                place(shape, layout, stages_of(shape, layout, sequence_length)),
                layout,
                recipe.optimizer.block_size,
            )
    report = Report(shape, sequence_length)
    frozen = (
        match_frozen(recipe.model.freeze, [spec.name for spec in shape.parameters()])
        if recipe.model.freeze
        else frozenset()
    )
    base = Problem(
        shape=shape,
        frozen=frozen,
        attention=recipe.model.attention,
        optimizer=recipe.optimizer,
        batch=BatchPlan(sequence_length, MICRO_BATCH_SIZE, 1, 1),
        case=cases[0],
        dtype=dtypes[0],
        seed=recipe.seed,
    )
    with tempfile.TemporaryDirectory(prefix="shardwright-verify-") as folder:
        for problem, group in _problems(base, layouts, cases, dtypes):
            path = Path(folder, "reference.safetensors")
            pool.run(1, write_reference, problem, path)
            if has_rule(problem):
                pool.run(1, add_rule_reference, problem, str(path))
            for layout in group:
                cell = _run_cell(problem, layout, path, pool, mutation)
                report.cells.append(cell)
                told(cell)
    return report


def _problems(
    base: Problem, layouts: Sequence[Layout], cases: Sequence[Case], dtypes: Sequence[Dtype]
) -> Iterator[tuple[Problem, list[Layout]]]:
    """Yield each reference to compute with its layouts: those of equally many data ranks."""
    for data_ranks in dict.fromkeys(layout.data_ranks for layout in layouts):
        group = [layout for layout in layouts if layout.data_ranks == data_ranks]
        for dtype in dtypes:
            for case in cases:
                batch = replace(
                    base.batch, data_ranks=data_ranks, gradient_accumulation_steps=case.accumulation
                )
                yield replace(base, batch=batch, case=case, dtype=dtype), group


def _run_cell(
    problem: Problem, layout: Layout, path: Path, pool: RankPool, mutation: Mutation | None
) -> CellResult:
    start = time.perf_counter()
    findings: tuple[Finding, ...] = ()
    failure: str | None = None
    try:
        by_rank = pool.run(layout.world_size, verify_cell, problem, layout, str(path), mutation)
        findings = tuple(_worst_of(same) for same in zip(*by_rank, strict=True))
    except RankFailed as error:
        if isinstance(error.__cause__, InputError):
            raise error.__cause__ from None
        failure = str(error)
    return CellResult(
        layout, problem.case, problem.dtype, findings, failure, time.perf_counter() - start
    )


def _worst_of(findings: Sequence[Finding]) -> Finding:
    """Find the rank's finding with the largest share of its allowed error."""
    return max(findings, key=lambda finding: finding.severity)
