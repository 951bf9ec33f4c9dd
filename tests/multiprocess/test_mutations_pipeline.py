"""Known wrong gradients of pipelines are put back one at a time; the verifier must fail on each."""

from __future__ import annotations

import pytest

from shardwright.architecture import read_recipe_shape
from shardwright.layout import Layout
from shardwright.verify.cases import VerificationCase
from shardwright.verify.cell import MutationContext
from shardwright.verify.verification import VerificationReport, verify
from tests.multiprocess import mutations_pipeline as m
from tests.multiprocess.bugs import Bug, assert_caught, assert_clean
from tests.multiprocess.models import LLAMA, recipe_of
from tests.multiprocess.mutations import nothing
from tests.multiprocess.pool import RankPool

PLAIN = VerificationCase(4, tied=False)
TIED = VerificationCase(4, tied=True)
PIPE = Layout(pp=2)
SPLIT = Layout(pp=2, schedule="zb_h1")
SHARDED = Layout(pp=2, dp_shard=2, zero_stage=1)
SHARDED_SPLIT = Layout(pp=2, dp_shard=2, zero_stage=2, schedule="zb_h1")


BUGS = [
    Bug(m.every_stage_rescales, PIPE, PLAIN, "gradient"),
    Bug(m.pipeline_forgets_the_normaliser, PIPE, PLAIN, "gradient"),
    Bug(m.norm_of_the_own_stage, PIPE, PLAIN, "norm"),
    Bug(m.restart_wipes_gradients, PIPE, PLAIN, "gradient"),
    Bug(m.tied_copies_go_apart, PIPE, TIED, "gradient"),
    Bug(m.tied_copies_count_twice, PIPE, TIED, "norm"),
    Bug(m.weight_gradients_are_dropped, SPLIT, PLAIN, "gradient"),
    Bug(m.weight_gradients_are_not_reduced, SHARDED_SPLIT, PLAIN, "gradient"),
    Bug(m.stages_do_not_reduce_last, SHARDED, PLAIN, "gradient"),
    Bug(m.messages_change_places, Layout(pp=2, schedule="gpipe"), PLAIN, "gradient"),
    Bug(m.documents_of_another_micro_batch, PIPE, PLAIN, "gradient"),
    Bug(
        m.layers_are_numbered_by_stage,
        PIPE,
        VerificationCase(2, tied=False, dropout=True),
        "gradient",
    ),
]


def _verify(ranks: RankPool, bug: Bug, mutation: MutationContext) -> VerificationReport:
    recipe = recipe_of(LLAMA | {"num_hidden_layers": 4})
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


CELLS = list(dict.fromkeys((bug.layout, bug.case) for bug in BUGS))


@pytest.mark.parametrize(("layout", "case"), CELLS, ids=str)
def test_the_same_cells_pass_without_a_bug(
    ranks: RankPool, layout: Layout, case: VerificationCase
) -> None:
    assert_clean(_verify(ranks, Bug(nothing, layout, case, ""), nothing))
