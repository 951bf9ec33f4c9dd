"""Known wrong gradients of context parallelism are put back one at a time; the verifier must fail
on each.
"""

from __future__ import annotations

import pytest

from shardwright.architecture import read_recipe_shape
from shardwright.layout import Layout
from shardwright.verify.cases import VerificationCase
from shardwright.verify.cell import MutationContext
from shardwright.verify.verification import VerificationReport, verify
from tests.multiprocess import mutations_context as m
from tests.multiprocess.bugs import Bug, assert_caught, assert_clean
from tests.multiprocess.models import LLAMA, recipe_of
from tests.multiprocess.mutations import nothing
from tests.multiprocess.pool import RankPool

RING = Layout(cp=2, cp_method="ring")
RING_OF_3 = Layout(cp=3, cp_method="ring", zero_stage=2)
GATHER = Layout(cp=2, cp_method="all_gather", zero_stage=3)
ULYSSES = Layout(cp=2, cp_method="ulysses")

PLAIN = VerificationCase(1, documents=False)
DOCUMENTS = VerificationCase(1)
DROPPING = VerificationCase(1, dropout=True)


BUGS = [
    Bug(m.context_ranks_average_their_means, RING, PLAIN, "gradient"),
    Bug(m.normaliser_forgets_context, GATHER, PLAIN, "gradient"),
    Bug(m.normaliser_counts_context_twice, ULYSSES, PLAIN, "gradient"),
    Bug(m.the_reported_loss_counts_context_twice, RING, PLAIN, "loss"),
    Bug(m.the_loss_is_multiplied_by_context, RING, PLAIN, "gradient"),
    Bug(m.keys_get_no_gradient_from_other_ranks, RING, PLAIN, "gradient"),
    Bug(m.keys_get_no_gradient_from_other_ranks, GATHER, PLAIN, "gradient"),
    Bug(m.gradients_stop_one_rank_short_of_home, RING_OF_3, PLAIN, "gradient"),
    Bug(m.queries_get_their_gradient_from_some_keys, GATHER, PLAIN, "gradient"),
    Bug(m.blocks_go_back_by_their_own_log_sum_exp, RING, PLAIN, "gradient"),
    Bug(m.ulysses_mixes_heads, ULYSSES, PLAIN, "loss"),
    Bug(m.gradients_divided_by_context, RING, PLAIN, "gradient"),
    Bug(m.dropout_by_the_place_in_the_share, RING, DROPPING, "loss"),
    Bug(m.documents_see_each_other, RING, DOCUMENTS, "loss"),
    Bug(m.documents_see_each_other, ULYSSES, DOCUMENTS, "gradient"),
    Bug(m.positions_of_the_own_share, RING, PLAIN, "loss"),
    Bug(m.blind_queries_count, RING, DOCUMENTS, "gradient"),
]


def _verify(
    ranks: RankPool, layout: Layout, case: VerificationCase, mutation: MutationContext
) -> VerificationReport:
    recipe = recipe_of(LLAMA)
    return verify(
        recipe,
        read_recipe_shape(recipe),
        [layout],
        [case],
        ["float64"],
        sequence_length=24,
        pool=ranks,
        mutation=mutation,
    )


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.mutation.__name__}-{bug.layout}")
def test_the_verifier_sees(ranks: RankPool, bug: Bug) -> None:
    assert_caught(_verify(ranks, bug.layout, bug.case, bug.mutation), bug.caught_by)


@pytest.mark.parametrize(
    ("layout", "case"), sorted({(bug.layout, bug.case) for bug in BUGS}, key=str), ids=str
)
def test_without_a_bug_the_same_cells_pass(
    ranks: RankPool, layout: Layout, case: VerificationCase
) -> None:
    assert_clean(_verify(ranks, layout, case, nothing))
