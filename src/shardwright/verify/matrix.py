"""All cells of a verification: for each layout, each case, each dtype; run on worker ranks, told as one report."""

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
    """One layout in one case and dtype: the worst finding of each kind over all ranks, or why there is none."""

    layout: Layout
    case: Case
    dtype: Dtype
    findings: tuple[Finding, ...]
    failure: str | None
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether every comparison passed."""
        return self.failure is None and bool(self.findings) and all(finding.passed for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """JSON."""
        return {
            "layout": str(self.layout),
            "world_size": self.layout.world_size,
            "case": asdict(self.case),
            "dtype": self.dtype,
            "passed": self.passed,
            "failure": self.failure,
            "seconds": round(self.seconds, 3),
            "findings": [asdict(f) | {"error": _as_json(f.error), "passed": f.passed} for f in self.findings],
        }


def _as_json(number: float) -> float | str:
    """JSON has neither inf nor nan."""
    return number if abs(number) < float("inf") else str(number)


@dataclass
class Report:
    """What was verified and what came out."""

    shape: ModelShape
    sequence_length: int
    cells: list[CellResult] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every cell passed, and there was one."""
        return bool(self.cells) and all(cell.passed for cell in self.cells)

    def as_dict(self) -> dict[str, Any]:
        """JSON."""
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
    """A cell of the whole matrix and what came out; no result where the recipe's rule refuses the layout for the model."""

    cell: Cell
    result: CellResult | None

    @property
    def passed(self) -> bool:
        """Whether it passed; a refusal is no failure."""
        return self.result is None or self.result.passed

    def as_dict(self) -> dict[str, Any]:
        """JSON."""
        told: dict[str, Any] = {"model": self.cell.model, "layout": str(self.cell.layout), "refused": self.cell.refusal}
        return told if self.result is None else told | self.result.as_dict()


def verify_grid(
    cells: Iterable[Cell], pool: RankPool, *, dtype: Dtype = "float32", told: Callable[[GridRow], None]
) -> list[GridRow]:
    """Run cells of the whole matrix; one reference serves all layouts that read the same batch.

    Args:
        told: gets every row as it comes.
    """
    rows = []
    with tempfile.TemporaryDirectory(prefix="shardwright-verify-") as folder:
        path = Path(folder, "reference.safetensors")
        for (model, case, data_ranks), alike in by_reference(cells).items():
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
            if any(cell.refusal is None for cell in alike):
                pool.run(1, write_reference, problem, path)
            for cell in alike:
                row = GridRow(cell, _run_cell(problem, cell.layout, path, pool, None) if cell.refusal is None else None)
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
    """Run every cell.

    Args:
        recipe: its attention, optimizer, seed and frozen parameters are used; its data and batch are not.
        shape: its model, cut down perhaps.
        sequence_length: tokens per row.
        pool: where ranks run.
        told: gets every result as it comes.
        mutation: for tests of the verifier: a bug that every rank puts in, and the reference does not.

    Raises:
        InputError: the model or a layout cannot be run at all.
    """
    shape.check_sequence_length(sequence_length)
    for layout in layouts:
        check(shape, layout, sequence_length)
        if recipe.optimizer.name == "adamw_8bit":
            require_torchao()
            check_blocks(place(shape, layout, stages_of(shape, layout, sequence_length)), layout, recipe.optimizer.block_size)
    report = Report(shape, sequence_length)
    frozen = match_frozen(recipe.model.freeze, [spec.name for spec in shape.parameters()]) if recipe.model.freeze else frozenset()
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
    """Each reference to compute, with the layouts that share it: those with equally many data ranks."""
    for data_ranks in dict.fromkeys(layout.data_ranks for layout in layouts):
        alike = [layout for layout in layouts if layout.data_ranks == data_ranks]
        for dtype in dtypes:
            for case in cases:
                batch = replace(base.batch, data_ranks=data_ranks, gradient_accumulation_steps=case.accumulation)
                yield replace(base, batch=batch, case=case, dtype=dtype), alike


def _run_cell(problem: Problem, layout: Layout, path: Path, pool: RankPool, mutation: Mutation | None) -> CellResult:
    began = time.perf_counter()
    findings: tuple[Finding, ...] = ()
    failure: str | None = None
    try:
        by_rank = pool.run(layout.world_size, verify_cell, problem, layout, str(path), mutation)
        findings = tuple(_worst_of(same) for same in zip(*by_rank, strict=True))
    except RankFailed as error:
        if isinstance(error.__cause__, InputError):
            raise error.__cause__ from None
        failure = str(error)
    return CellResult(layout, problem.case, problem.dtype, findings, failure, time.perf_counter() - began)


def _worst_of(findings: Sequence[Finding]) -> Finding:
    """The finding of the rank that is furthest off."""
    return max(findings, key=lambda finding: finding.severity)
