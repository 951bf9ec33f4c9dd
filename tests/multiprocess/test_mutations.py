"""Known wrong gradients are put back one at a time; the verifier must fail on each, where
docs/silent-bugs.md says it does.
"""

from __future__ import annotations

import pytest

from shardwright.architecture import read_recipe_shape
from shardwright.layout import Layout
from shardwright.verify.cases import VerificationCase
from shardwright.verify.cell import MutationContext
from shardwright.verify.verification import VerificationReport, verify
from tests.multiprocess import mutations as m
from tests.multiprocess import mutations_buffers as buffers
from tests.multiprocess import mutations_clip as clip
from tests.multiprocess import mutations_data as data
from tests.multiprocess.bugs import Bug, assert_caught, assert_clean
from tests.multiprocess.models import LLAMA, recipe_of
from tests.multiprocess.pool import RankPool

DDP = Layout(dp_replicate=2, bucket_size_bytes=2048)
ZERO_1 = Layout(dp_shard=2, zero_stage=1)
ZERO_2 = Layout(dp_shard=2, zero_stage=2)
ZERO_3 = Layout(dp_shard=2, zero_stage=3)
HYBRID = Layout(dp_replicate=2, dp_shard=2, zero_stage=2)

PLAIN = VerificationCase(accumulation=1, documents=False)
ACCUMULATED = VerificationCase(accumulation=2)
TIED = VerificationCase(accumulation=2, tied=True)
DROPPING = VerificationCase(accumulation=2, recompute="full", dropout=True)


BUGS = [
    Bug(m.mean_of_means_over_accumulation, DDP, ACCUMULATED, "gradient"),
    Bug(m.tokens_counted_per_rank, ZERO_3, PLAIN, "gradient"),
    Bug(m.normaliser_forgets_an_axis, HYBRID, PLAIN, "gradient"),
    Bug(m.loss_of_the_own_rank, HYBRID, PLAIN, "loss"),
    Bug(m.a_batch_reports_no_tokens, ZERO_2, ACCUMULATED, "gradient"),
    Bug(m.rescaled_by_accumulation, ZERO_1, ACCUMULATED, "gradient"),
    Bug(m.final_scaling_skipped, DDP, PLAIN, "gradient"),
    Bug(m.gradients_averaged_by_ddp, DDP, PLAIN, "gradient"),
    Bug(m.gradients_averaged_by_fsdp, ZERO_3, PLAIN, "gradient"),
    Bug(m.replicas_not_summed, HYBRID, ACCUMULATED, "gradient"),
    Bug(m.a_bucket_of_one_is_not_reduced, DDP, PLAIN, "gradient"),
    Bug(m.last_micro_batch_after_the_reduction, DDP, ACCUMULATED, "gradient"),
    Bug(m.last_micro_batch_after_the_reduction, HYBRID, ACCUMULATED, "gradient"),
    Bug(m.embedding_counted_once, ZERO_3, TIED, "gradient"),
    Bug(clip.norm_of_the_own_shard, ZERO_3, PLAIN, "norm"),
    Bug(clip.norm_counts_copies, HYBRID, PLAIN, "norm"),
    Bug(clip.norm_of_some_layers, DDP, PLAIN, "norm"),
    Bug(clip.clipped_per_group, ZERO_2, PLAIN, "weights after AdamW"),
    Bug(clip.clip_also_enlarges, DDP, PLAIN, "weights after AdamW"),
    Bug(clip.clip_by_the_square, ZERO_3, PLAIN, "weights after AdamW"),
    Bug(clip.infinite_gradients_are_clipped, ZERO_1, PLAIN, "skips together"),
    Bug(clip.each_rank_decides_to_skip, DDP, PLAIN, "skips together"),
    Bug(clip.zero_norm_divides, DDP, PLAIN, "stands still"),
    Bug(clip.no_tokens_divide, ZERO_3, PLAIN, "stands still"),
    Bug(clip.clip_eats_an_iterator, DDP, PLAIN, "weights after AdamW"),
    Bug(buffers.buckets_share_a_buffer, DDP, PLAIN, "gradient"),
    Bug(buffers.gradients_alias_parameters, ZERO_3, PLAIN, "gradient"),
    Bug(buffers.stale_parameters_are_kept, ZERO_2, PLAIN, "loss"),
    Bug(buffers.padding_is_summed, Layout(dp_shard=3, zero_stage=3), PLAIN, "norm"),
    Bug(buffers.some_gradients_keep_the_loss_scale, ZERO_1, PLAIN, "weights after AdamW"),
    Bug(buffers.loss_scale_is_not_divided, ZERO_3, PLAIN, "norm under clipping"),
    Bug(buffers.accumulated_gradients_are_wiped, DDP, ACCUMULATED, "gradient"),
    Bug(buffers.accumulated_gradients_are_wiped, ZERO_2, ACCUMULATED, "gradient"),
    Bug(buffers.gradients_are_not_dropped, DDP, PLAIN, "weights after SGD"),
    Bug(buffers.gradients_are_not_dropped, ZERO_3, PLAIN, "weights after SGD"),
    Bug(data.dropout_depends_on_the_place_in_the_batch, DDP, DROPPING, "gradient"),
    Bug(data.dropout_depends_on_the_rank, ZERO_3, DROPPING, "gradient"),
    Bug(data.dropout_differs_when_recomputed, ZERO_2, DROPPING, "gradient"),
    Bug(data.layers_number_themselves_locally, ZERO_3, DROPPING, "gradient"),
    Bug(data.documents_see_each_other, ZERO_3, ACCUMULATED, "gradient"),
    Bug(data.one_group_keeps_its_learning_rate, ZERO_1, PLAIN, "learning rates"),
    Bug(data.groups_collide, ZERO_3, PLAIN, "weights after AdamW"),
    Bug(data.every_rank_reads_the_same, DDP, PLAIN, "gradient"),
    Bug(data.the_cursor_stands_still, ZERO_3, PLAIN, "weights after SGD"),
    Bug(data.schedule_steps_once_per_rank, DDP, PLAIN, "learning rates"),
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
        sequence_length=12,
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
    assert_clean(_verify(ranks, layout, case, m.nothing))
