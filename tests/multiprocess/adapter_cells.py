"""Cells that the tests of adapters verify against one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from shardwright.architecture import read_recipe_shape
from shardwright.config import Recipe
from shardwright.layout import Layout
from shardwright.verification.cases import VerificationCase, VerificationDtype
from shardwright.verification.cell import MutationContext
from shardwright.verification.verification import VerificationReport, verify
from tests.multiprocess.models import build_recipe
from tests.multiprocess.pool import RankPool


class AdapterCell(NamedTuple):
    """Model with adapters, layout and case."""

    config: dict[str, Any]
    adapters: dict[str, Any]
    layout: Layout
    case: VerificationCase

    def __str__(self) -> str:
        """Return the id of the test."""
        settings = "-".join(
            str(value) for value in self.adapters.values() if not isinstance(value, tuple)
        )
        return f"{self.config['model_type']}-{settings}-{self.layout}-{self.case.recompute}"

    @property
    def recipe(self) -> Recipe:
        """Recipe of the model with its adapters."""
        return build_recipe(self.config, adapters=self.adapters)


def verify_adapter_cell(
    ranks: RankPool,
    cell: AdapterCell,
    dtypes: tuple[VerificationDtype, ...],
    mutation: MutationContext | None = None,
) -> VerificationReport:
    """Verify the cell's adapters against one process with the same base."""
    shape = read_recipe_shape(cell.recipe)
    case = replace(cell.case, tied=shape.tied_embeddings)
    return verify(
        cell.recipe,
        shape,
        [cell.layout],
        [case],
        list(dtypes),
        sequence_length=12,
        pool=ranks,
        mutation=mutation,
    )
