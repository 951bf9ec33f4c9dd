"""Known wrong gradients of sparse models are put back one at a time; the verifier must fail on
each.
"""

from __future__ import annotations

import pytest

from shardwright.architecture import read_recipe_shape
from shardwright.layout import Layout
from shardwright.verify.cases import VerificationCase
from shardwright.verify.cell import MutationContext
from shardwright.verify.verification import VerificationReport, verify
from tests.multiprocess import mutations_experts as m
from tests.multiprocess.bugs import ModelBug as Bug
from tests.multiprocess.bugs import assert_caught, assert_clean
from tests.multiprocess.models import recipe_of
from tests.multiprocess.mutations import nothing
from tests.multiprocess.pool import RankPool
from tests.multiprocess.test_experts import DEEPSEEK, MIXTRAL

EP = Layout(dp_shard=2, ep=2, zero_stage=1)
EP_AND_REPLICAS = Layout(dp_shard=4, ep=2, zero_stage=2)
EP_OF_CONTEXT = Layout(cp=2, ep=2, cp_method="all_gather")

PLAIN = VerificationCase(1, documents=False)
LOSSES = VerificationCase(2, "full", router_losses=True)
CAPACITY = VerificationCase(1, capacity_factor=0.6)


BUGS = [
    Bug(m.experts_averaged_over_ep, MIXTRAL, EP, PLAIN, "gradient"),
    Bug(m.experts_not_divided_as_the_rest, MIXTRAL, EP_AND_REPLICAS, PLAIN, "gradient"),
    Bug(m.experts_summed_over_ep, MIXTRAL, EP, PLAIN, "gradient"),
    Bug(m.experts_in_the_replicas_group, MIXTRAL, EP_OF_CONTEXT, PLAIN, "gradient"),
    Bug(m.router_losses_scaled_by_accumulation, MIXTRAL, EP, LOSSES, "gradient"),
    Bug(m.router_losses_scaled_by_ranks, MIXTRAL, EP, LOSSES, "gradient"),
    Bug(m.balance_of_the_own_tokens, MIXTRAL, EP_OF_CONTEXT, LOSSES, "gradient"),
    Bug(m.router_losses_counted_by_every_tensor_rank, MIXTRAL, Layout(tp=2), LOSSES, "gradient"),
    Bug(m.recompute_counts_twice, MIXTRAL, EP, LOSSES, "routers"),
    Bug(m.capacity_by_logits, MIXTRAL, EP, CAPACITY, "gradient"),
    Bug(m.capacity_of_the_own_tokens, MIXTRAL, EP_OF_CONTEXT, CAPACITY, "gradient"),
    Bug(m.the_router_is_detached, MIXTRAL, EP, PLAIN, "gradient"),
    Bug(m.gradients_do_not_travel_home, MIXTRAL, EP, PLAIN, "gradient"),
    Bug(m.balance_biases_move_by_the_own_tokens, DEEPSEEK, EP, LOSSES, "weights after SGD"),
]


def _verify(ranks: RankPool, bug: Bug, mutation: MutationContext) -> VerificationReport:
    recipe = recipe_of(bug.config)
    shape = read_recipe_shape(recipe)
    return verify(
        recipe,
        shape,
        [bug.layout],
        [bug.case],
        ["float64"],
        sequence_length=12,
        pool=ranks,
        mutation=mutation,
    )


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.mutation.__name__}-{bug.layout}")
def test_the_verifier_sees(ranks: RankPool, bug: Bug) -> None:
    assert_caught(_verify(ranks, bug, bug.mutation), bug.caught_by)


@pytest.mark.parametrize(
    "bug",
    {(str(b.layout), str(b.case)): b for b in BUGS}.values(),
    ids=lambda b: f"{b.layout}-{b.case}",
)
def test_without_a_bug_the_same_cells_pass(ranks: RankPool, bug: Bug) -> None:
    assert_clean(_verify(ranks, bug, nothing))
