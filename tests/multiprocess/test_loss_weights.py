"""Loss weights of tokens: the normaliser is the sum of weights over all ranks and micro-
batches; and its known bugs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest

from shardwright.architecture import read_recipe_shape
from shardwright.data.loader import MicroBatch
from shardwright.layout import Layout
from shardwright.training.step import TokenObjective
from shardwright.verification.cases import VerificationCase, VerificationDtype
from shardwright.verification.cell import MutationContext
from shardwright.verification.verification import VerificationReport, verify
from tests.multiprocess.assertions import assert_clean, assert_detected
from tests.multiprocess.models import TENSOR_LLAMA, build_recipe
from tests.multiprocess.pool import RankPool

LAYOUTS = [
    Layout(dp_replicate=2),
    Layout(dp_shard=2, zero_stage=3),
    Layout(tp=2),
    Layout(cp=2),
    Layout(pp=2),
]


def verify_layouts(
    ranks: RankPool,
    layouts: list[Layout],
    dtype: VerificationDtype = "float32",
    mutation: MutationContext | None = None,
) -> VerificationReport:
    """Verify weighted losses under layouts against one process."""
    recipe = build_recipe(TENSOR_LLAMA)
    shape = read_recipe_shape(recipe)
    case = VerificationCase(2, tied=shape.tied_embeddings, weights=True)
    return verify(
        recipe, shape, layouts, [case], [dtype], sequence_length=12, pool=ranks, mutation=mutation
    )


def test_weights_when_sharded(ranks: RankPool) -> None:
    assert_clean(verify_layouts(ranks, [Layout(dp_shard=2, zero_stage=3)]))


@pytest.mark.long
def test_weights_under_every_layout(ranks: RankPool) -> None:
    assert_clean(verify_layouts(ranks, LAYOUTS, "float64"))


@contextmanager
def divide_by_num_tokens() -> Iterator[None]:
    """Divide the weighted sum by the number of tokens."""
    with patch.object(TokenObjective, "count", lambda _self, batch: batch.num_supervised):
        yield


@contextmanager
def drop_weights_of_labels() -> Iterator[None]:
    """Compute the loss of unweighted tokens, divided by the sum of weights."""
    original = MicroBatch.build_model_arguments
    with patch.object(
        MicroBatch,
        "build_model_arguments",
        lambda self: {k: v for k, v in original(self).items() if k != "weights_BT"},
    ):
        yield


@pytest.mark.parametrize("mutation", [divide_by_num_tokens, drop_weights_of_labels])
def test_the_verifier_detects_wrong_weights(ranks: RankPool, mutation: MutationContext) -> None:
    assert_detected(verify_layouts(ranks, [Layout(dp_replicate=2)], mutation=mutation), "gradient")
