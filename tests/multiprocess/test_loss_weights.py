"""Loss weights of tokens: one normaliser, the sum of weights over all ranks and micro-batches,
under every cut; and its bugs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest

from shardwright.architecture import read_recipe_shape
from shardwright.data.loader import MicroBatch
from shardwright.layout import Layout
from shardwright.train.step import TokenObjective
from shardwright.verify.cases import VerificationCase, VerificationDtype
from shardwright.verify.cell import MutationContext
from shardwright.verify.verification import VerificationReport, verify
from tests.multiprocess.bugs import assert_caught, assert_clean
from tests.multiprocess.models import recipe_of
from tests.multiprocess.pool import RankPool
from tests.multiprocess.test_tensor import HEADS

LAYOUTS = [
    Layout(dp_replicate=2),
    Layout(dp_shard=2, zero_stage=3),
    Layout(tp=2),
    Layout(cp=2),
    Layout(pp=2),
]


def run(
    ranks: RankPool,
    layouts: list[Layout],
    dtype: VerificationDtype = "float32",
    mutation: MutationContext | None = None,
) -> VerificationReport:
    """Hold weighted losses under layouts to one process."""
    recipe = recipe_of(HEADS)
    shape = read_recipe_shape(recipe)
    case = VerificationCase(2, tied=shape.tied_embeddings, weights=True)
    return verify(
        recipe, shape, layouts, [case], [dtype], sequence_length=12, pool=ranks, mutation=mutation
    )


def test_weights_under_a_cut(ranks: RankPool) -> None:
    assert_clean(run(ranks, [Layout(dp_shard=2, zero_stage=3)]))


@pytest.mark.long
def test_weights_under_every_cut(ranks: RankPool) -> None:
    assert_clean(run(ranks, LAYOUTS, "float64"))


@contextmanager
def tokens_are_counted() -> Iterator[None]:
    """The weighted sum is divided by the number of tokens."""
    with patch.object(TokenObjective, "count", lambda _self, batch: batch.num_supervised):
        yield


@contextmanager
def labels_lose_their_weights() -> Iterator[None]:
    """The loss is that of plain tokens, divided by the sum of weights."""
    original = MicroBatch.build_model_arguments
    with patch.object(
        MicroBatch,
        "build_model_arguments",
        lambda self: {k: v for k, v in original(self).items() if k != "weights_BT"},
    ):
        yield


@pytest.mark.parametrize("mutation", [tokens_are_counted, labels_lose_their_weights])
def test_wrong_weights_are_found_out(ranks: RankPool, mutation: MutationContext) -> None:
    assert_caught(run(ranks, [Layout(dp_replicate=2)], mutation=mutation), "gradient")
