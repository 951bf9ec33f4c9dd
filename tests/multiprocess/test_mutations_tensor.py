"""Known wrong gradients of tensor parallelism are put back one at a time; the verifier must fail on
each.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.architecture import read_recipe_shape
from shardwright.layout import Layout
from shardwright.verify.cases import VerificationCase
from shardwright.verify.cell import MutationContext
from shardwright.verify.verification import VerificationReport, verify
from tests.multiprocess import mutations_tensor as m
from tests.multiprocess.bugs import ModelBug as Bug
from tests.multiprocess.bugs import assert_caught, assert_clean
from tests.multiprocess.models import GPT2, QWEN3, recipe_of
from tests.multiprocess.mutations import nothing
from tests.multiprocess.pool import RankPool
from tests.multiprocess.test_tensor import HEADS
from tests.multiprocess.test_tensor_loss import on_one_process, on_ranks
from tests.reference.cases import CASES

TP = Layout(tp=2)
WHOLE_STREAM = Layout(tp=2, sequence_parallel=False)
SHARED_HEADS = Layout(tp=4)
ZERO = Layout(tp=2, dp_shard=2, zero_stage=2)

PLAIN = VerificationCase(1, documents=False)
ACCUMULATED = VerificationCase(2)
DROPPING = VerificationCase(1, "full", dropout=True)
QWEN = QWEN3 | {"intermediate_size": 28}
OLMO = CASES["olmo2"]


BUGS = [
    Bug(m.loss_counts_every_rank, HEADS, TP, PLAIN, "loss"),
    Bug(m.normalised_over_the_own_vocabulary, HEADS, TP, PLAIN, "gradient"),
    Bug(m.head_without_its_backward_sum, HEADS, TP, PLAIN, "gradient"),
    Bug(m.head_without_its_backward_sum, HEADS, WHOLE_STREAM, PLAIN, "gradient"),
    Bug(m.norms_of_tokens_are_not_summed, HEADS, TP, PLAIN, "gradient"),
    Bug(m.final_norm_is_not_summed, HEADS, ZERO, PLAIN, "gradient"),
    Bug(m.summed_before_the_last_micro_batch, HEADS, TP, ACCUMULATED, "gradient"),
    Bug(m.norms_on_heads_are_summed_with_tokens_only, QWEN, WHOLE_STREAM, PLAIN, "gradient"),
    Bug(m.shared_key_value_heads_are_not_summed, HEADS, SHARED_HEADS, PLAIN, "gradient"),
    Bug(m.statistics_of_the_own_heads, OLMO, TP, PLAIN, "gradient"),
    Bug(m.bias_on_every_share, GPT2, TP, ACCUMULATED, "gradient"),
    Bug(m.input_gradient_keeps_the_own_share, HEADS, WHOLE_STREAM, PLAIN, "gradient"),
    Bug(m.input_gradient_keeps_the_own_share, HEADS, TP, PLAIN, "gradient"),
    Bug(m.cut_parameters_taken_for_copies, HEADS, TP, PLAIN, "norm"),
    Bug(m.copies_counted_by_every_rank, HEADS, TP, PLAIN, "norm"),
    Bug(m.heads_number_themselves_locally, HEADS, TP, DROPPING, "gradient"),
    Bug(m.tokens_number_themselves_locally, HEADS, TP, DROPPING, "gradient"),
]


def _verify(
    ranks: RankPool,
    config: dict[str, Any],
    layout: Layout,
    case: VerificationCase,
    mutation: MutationContext,
) -> VerificationReport:
    recipe = recipe_of(config)
    return verify(
        recipe,
        read_recipe_shape(recipe),
        [layout],
        [case],
        ["float64"],
        sequence_length=12,
        pool=ranks,
        mutation=mutation,
    )


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.mutation.__name__}-{bug.layout}")
def test_the_verifier_sees(ranks: RankPool, bug: Bug) -> None:
    assert_caught(_verify(ranks, bug.config, bug.layout, bug.case, bug.mutation), bug.caught_by)


CELLS = {(bug.config["model_type"], str(bug.layout), str(bug.case)): bug for bug in BUGS}


@pytest.mark.parametrize(
    "cell", CELLS.values(), ids=lambda bug: f"{bug.config['model_type']}-{bug.layout}-{bug.case}"
)
def test_without_a_bug_the_same_cells_pass(ranks: RankPool, cell: Bug) -> None:
    assert_clean(_verify(ranks, cell.config, cell.layout, cell.case, nothing))


def smoothed_wrongly() -> list[Tensor]:
    """The loss and its gradients with bug 8."""
    with m.smoothing_over_the_own_vocabulary():
        return on_ranks(255, torch.float64, False, {"label_smoothing": 0.2})


def test_the_losses_test_sees_smoothing_over_the_own_vocabulary(ranks: RankPool) -> None:
    wanted = on_one_process(255, torch.float64, False, {"label_smoothing": 0.2})
    for _, gradient, weight_gradient in ranks.run(2, smoothed_wrongly):
        assert float((gradient - wanted[1]).norm() / wanted[1].norm()) > 1e-3
        assert float((weight_gradient - wanted[2]).norm() / wanted[2].norm()) > 1e-3
