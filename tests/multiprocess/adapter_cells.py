"""What the tests of adapters share: a cell, and holding it to one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from shardwright.architecture import read_recipe_shape
from shardwright.config import Recipe
from shardwright.layout import Layout
from shardwright.verify.cases import VerificationCase, VerificationDtype
from shardwright.verify.cell import MutationContext
from shardwright.verify.verification import VerificationReport, verify
from tests.multiprocess.models import recipe_of
from tests.multiprocess.pool import RankPool


class AdapterCell(NamedTuple):
    """A model with adapters, a layout and a way of computing."""

    config: dict[str, Any]
    adapters: dict[str, Any]
    layout: Layout
    case: VerificationCase

    def __str__(self) -> str:
        """What pytest calls it."""
        told = "-".join(
            str(value) for value in self.adapters.values() if not isinstance(value, tuple)
        )
        return f"{self.config['model_type']}-{told}-{self.layout}-{self.case.recompute}"

    @property
    def recipe(self) -> Recipe:
        """The recipe of the model and its adapters."""
        return recipe_of(self.config, adapters=self.adapters)


def hold(
    ranks: RankPool,
    cell: AdapterCell,
    dtypes: tuple[VerificationDtype, ...],
    mutation: MutationContext | None = None,
) -> VerificationReport:
    """Hold the cell's adapters against one process with the same base."""
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
