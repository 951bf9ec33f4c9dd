"""Table of the known bugs: the patch that adds each, and the cell that must detect it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from shardwright.layout import Layout
from shardwright.verification.cases import VerificationCase
from shardwright.verification.cell import MutationContext
from tests.multiprocess import models
from tests.multiprocess.mutations import (
    buffers,
    clip,
    context,
    data,
    experts,
    offload,
    pipeline,
    reductions,
    tensor,
)
from tests.reference.cases import CASES


class BugModel(NamedTuple):
    """Model of a cell, and the tokens per row."""

    name: str
    config: dict[str, Any]
    sequence_length: int = 12


class Bug(NamedTuple):
    """Known bug, the cell that must detect it, and the comparison that does.

    `number` is the bug's number in docs/silent-bugs.md; None for bugs without one.
    """

    number: int | None
    patch: MutationContext
    model: BugModel
    layout: Layout
    case: VerificationCase
    detected_in: str
    offload: dict[str, Any] = {}  # noqa: RUF012 - a NamedTuple's default; nothing changes it


LLAMA = BugModel("llama", models.LLAMA)
LONG_LLAMA = BugModel("llama-24-tokens", models.LLAMA, sequence_length=24)
DEEP_LLAMA = BugModel("llama-4-layers", models.LLAMA | {"num_hidden_layers": 4})
TENSOR_LLAMA = BugModel("llama-even", models.TENSOR_LLAMA)
QWEN3 = BugModel("qwen3", models.QWEN3 | {"intermediate_size": 28})
OLMO2 = BugModel("olmo2", CASES["olmo2"])
GPT2 = BugModel("gpt2", models.GPT2)
MIXTRAL = BugModel("mixtral", models.MIXTRAL)
GPT_OSS = BugModel("gpt_oss", models.GPT_OSS)
DEEPSEEK = BugModel("deepseek_v3", models.DEEPSEEK)

DDP = Layout(dp_replicate=2, bucket_size_bytes=2048)
ZERO_1 = Layout(dp_shard=2, zero_stage=1)
ZERO_2 = Layout(dp_shard=2, zero_stage=2)
ZERO_3 = Layout(dp_shard=2, zero_stage=3)
ZERO_3_OF_3 = Layout(dp_shard=3, zero_stage=3)
HYBRID = Layout(dp_replicate=2, dp_shard=2, zero_stage=2)
RING = Layout(cp=2, cp_method="ring")
RING_OF_3 = Layout(cp=3, cp_method="ring", zero_stage=2)
GATHER = Layout(cp=2, cp_method="all_gather", zero_stage=3)
ULYSSES = Layout(cp=2, cp_method="ulysses")
EP = Layout(dp_shard=2, ep=2, zero_stage=1)
EP_ONCE = Layout(dp_shard=2, ep=2, expert_dispatch="once_per_rank", zero_stage=1)
EP_PADDED = Layout(dp_shard=2, ep=2, expert_dispatch="padded", expert_row_limit=2.0, zero_stage=1)
EP_CROWDED = replace(EP_PADDED, expert_row_limit=1.0)
EP_AND_REPLICAS = Layout(dp_shard=4, ep=2, zero_stage=2)
EP_OF_CONTEXT = Layout(cp=2, ep=2, cp_method="all_gather")
PIPE = Layout(pp=2)
GPIPE = Layout(pp=2, schedule="gpipe")
SPLIT = Layout(pp=2, schedule="zb_h1")
SHARDED = Layout(pp=2, dp_shard=2, zero_stage=1)
SHARDED_SPLIT = Layout(pp=2, dp_shard=2, zero_stage=2, schedule="zb_h1")
TP = Layout(tp=2)
TP_4 = Layout(tp=4)
TP_ZERO_2 = Layout(tp=2, dp_shard=2, zero_stage=2)
WHOLE_STREAM = Layout(tp=2, sequence_parallel=False)

PLAIN = VerificationCase(1, documents=False)
DOCUMENTS = VerificationCase(1)
ACCUMULATED = VerificationCase(2)
TIED = VerificationCase(2, tied=True)
DROPPING = VerificationCase(2, "full", dropout=True)
CONTEXT_DROPPING = VerificationCase(1, dropout=True)
TENSOR_DROPPING = VerificationCase(1, "full", dropout=True)
LOSSES = VerificationCase(2, "full", router_losses=True)
CAPACITY = VerificationCase(1, capacity_factor=0.6)
PIPELINED = VerificationCase(4, tied=False)
PIPELINED_TIED = VerificationCase(4, tied=True)
PIPELINED_DROPPING = VerificationCase(2, tied=False, dropout=True)

ON_DISK = {"optimizer": "disk", "parameters": "disk", "activations": "disk", "buffer_bytes": 4096}

BUGS: dict[str, list[Bug]] = {
    "data": [
        Bug(1, reductions.average_means_of_micro_batches, LLAMA, DDP, ACCUMULATED, "gradient"),
        Bug(2, reductions.divide_by_tokens_of_own_rank, LLAMA, ZERO_3, PLAIN, "gradient"),
        Bug(4, reductions.omit_axis_from_normaliser, LLAMA, HYBRID, PLAIN, "gradient"),
        Bug(5, reductions.report_loss_of_own_rank, LLAMA, HYBRID, PLAIN, "loss"),
        Bug(6, reductions.report_no_tokens_for_a_batch, LLAMA, ZERO_2, ACCUMULATED, "gradient"),
        Bug(10, reductions.divide_by_accumulation_twice, LLAMA, ZERO_1, ACCUMULATED, "gradient"),
        Bug(11, reductions.skip_final_scaling, LLAMA, DDP, PLAIN, "gradient"),
        Bug(2, reductions.average_gradients_in_ddp, LLAMA, DDP, PLAIN, "gradient"),
        Bug(2, reductions.average_gradients_in_fsdp, LLAMA, ZERO_3, PLAIN, "gradient"),
        Bug(17, reductions.skip_sum_over_replicas, LLAMA, HYBRID, ACCUMULATED, "gradient"),
        Bug(22, reductions.skip_reduction_of_single_buckets, LLAMA, DDP, PLAIN, "gradient"),
        Bug(23, reductions.reduce_before_last_micro_batch, LLAMA, DDP, ACCUMULATED, "gradient"),
        Bug(23, reductions.reduce_before_last_micro_batch, LLAMA, HYBRID, ACCUMULATED, "gradient"),
        Bug(44, reductions.drop_gradient_of_tied_head, LLAMA, ZERO_3, TIED, "gradient"),
        Bug(29, clip.compute_norm_of_own_shard, LLAMA, ZERO_3, PLAIN, "norm"),
        Bug(None, clip.count_replicas_in_norm, LLAMA, HYBRID, PLAIN, "norm"),
        Bug(30, clip.compute_norm_of_half_the_layers, LLAMA, DDP, PLAIN, "norm"),
        Bug(31, clip.clip_per_parameter_group, LLAMA, ZERO_2, PLAIN, "weights after AdamW"),
        Bug(32, clip.leave_clip_coefficient_unbounded, LLAMA, DDP, PLAIN, "weights after AdamW"),
        Bug(32, clip.clip_by_squared_norm, LLAMA, ZERO_3, PLAIN, "weights after AdamW"),
        Bug(32, clip.clip_infinite_gradients, LLAMA, ZERO_1, PLAIN, "all ranks skip"),
        Bug(32, clip.decide_skips_per_rank, LLAMA, DDP, PLAIN, "all ranks skip"),
        Bug(33, clip.divide_by_zero_norm, LLAMA, DDP, PLAIN, "weights unchanged"),
        Bug(33, clip.divide_by_zero_tokens, LLAMA, ZERO_3, PLAIN, "weights unchanged"),
        Bug(34, clip.exhaust_gradient_iterator, LLAMA, DDP, PLAIN, "weights after AdamW"),
        Bug(37, buffers.share_buffer_between_buckets, LLAMA, DDP, PLAIN, "gradient"),
        Bug(38, buffers.alias_gradient_and_parameter, LLAMA, ZERO_3, PLAIN, "gradient"),
        Bug(38, buffers.keep_stale_gathered_parameters, LLAMA, ZERO_2, PLAIN, "loss"),
        Bug(39, buffers.sum_padding_into_norm, LLAMA, ZERO_3_OF_3, PLAIN, "norm"),
        Bug(41, buffers.scale_matrices_only, LLAMA, ZERO_1, PLAIN, "weights after AdamW"),
        Bug(43, buffers.keep_loss_scale_in_update, LLAMA, ZERO_3, PLAIN, "norm under clipping"),
        Bug(42, buffers.clear_accumulated_gradients, LLAMA, DDP, ACCUMULATED, "gradient"),
        Bug(42, buffers.clear_accumulated_gradients, LLAMA, ZERO_2, ACCUMULATED, "gradient"),
        Bug(43, buffers.skip_zero_grad, LLAMA, DDP, PLAIN, "weights after SGD"),
        Bug(43, buffers.skip_zero_grad, LLAMA, ZERO_3, PLAIN, "weights after SGD"),
        Bug(45, data.key_dropout_by_row_of_batch, LLAMA, DDP, DROPPING, "gradient"),
        Bug(45, data.key_dropout_by_rank, LLAMA, ZERO_3, DROPPING, "gradient"),
        Bug(45, data.redraw_dropout_in_recompute, LLAMA, ZERO_2, DROPPING, "gradient"),
        Bug(46, data.key_dropout_by_local_layer, LLAMA, ZERO_3, DROPPING, "gradient"),
        Bug(47, data.ignore_document_boundaries, LLAMA, ZERO_3, ACCUMULATED, "gradient"),
        Bug(49, data.schedule_first_group_only, LLAMA, ZERO_1, PLAIN, "learning rates"),
        Bug(49, data.merge_parameter_groups, LLAMA, ZERO_3, PLAIN, "weights after AdamW"),
        Bug(50, data.read_same_data_on_every_rank, LLAMA, DDP, PLAIN, "gradient"),
        Bug(50, data.freeze_cursor, LLAMA, ZERO_3, PLAIN, "weights after SGD"),
        Bug(50, data.scale_learning_rate_by_ranks, LLAMA, DDP, PLAIN, "learning rates"),
    ],
    "context": [
        Bug(3, context.average_means_of_context_ranks, LONG_LLAMA, RING, PLAIN, "gradient"),
        Bug(4, context.omit_context_from_normaliser, LONG_LLAMA, GATHER, PLAIN, "gradient"),
        Bug(4, context.count_context_twice_in_normaliser, LONG_LLAMA, ULYSSES, PLAIN, "gradient"),
        Bug(5, context.count_context_twice_in_reported_loss, LONG_LLAMA, RING, PLAIN, "loss"),
        Bug(7, context.multiply_loss_by_context, LONG_LLAMA, RING, PLAIN, "gradient"),
        Bug(19, context.drop_key_gradients_of_other_ranks, LONG_LLAMA, RING, PLAIN, "gradient"),
        Bug(19, context.drop_key_gradients_of_other_ranks, LONG_LLAMA, GATHER, PLAIN, "gradient"),
        Bug(19, context.stop_ring_one_rank_early, LONG_LLAMA, RING_OF_3, PLAIN, "gradient"),
        Bug(19, context.overwrite_query_gradients, LONG_LLAMA, GATHER, PLAIN, "gradient"),
        Bug(19, context.use_log_sum_exp_of_block, LONG_LLAMA, RING, PLAIN, "gradient"),
        Bug(20, context.mix_heads_in_ulysses, LONG_LLAMA, ULYSSES, PLAIN, "loss"),
        Bug(21, context.divide_gradients_by_context, LONG_LLAMA, RING, PLAIN, "gradient"),
        Bug(45, context.key_dropout_by_local_position, LONG_LLAMA, RING, CONTEXT_DROPPING, "loss"),
        Bug(47, context.ignore_document_boundaries, LONG_LLAMA, RING, DOCUMENTS, "loss"),
        Bug(47, context.ignore_document_boundaries, LONG_LLAMA, ULYSSES, DOCUMENTS, "gradient"),
        Bug(47, context.count_positions_locally, LONG_LLAMA, RING, PLAIN, "loss"),
        Bug(None, context.merge_queries_without_keys, LONG_LLAMA, RING, DOCUMENTS, "gradient"),
    ],
    "experts": [
        Bug(24, experts.average_experts_over_ep, MIXTRAL, EP, PLAIN, "gradient"),
        Bug(24, experts.average_experts_over_efsdp, MIXTRAL, EP_AND_REPLICAS, PLAIN, "gradient"),
        Bug(25, experts.sum_experts_over_ep, MIXTRAL, EP, PLAIN, "gradient"),
        Bug(25, experts.reduce_experts_in_ddp, MIXTRAL, EP_OF_CONTEXT, PLAIN, "gradient"),
        Bug(26, experts.scale_router_losses_by_accumulation, MIXTRAL, EP, LOSSES, "gradient"),
        Bug(26, experts.scale_router_losses_by_ranks, MIXTRAL, EP, LOSSES, "gradient"),
        Bug(26, experts.balance_own_tokens, MIXTRAL, EP_OF_CONTEXT, LOSSES, "gradient"),
        Bug(26, experts.add_router_losses_on_every_tensor_rank, MIXTRAL, TP, LOSSES, "gradient"),
        Bug(27, experts.count_tokens_twice_in_recompute, MIXTRAL, EP, LOSSES, "routers"),
        Bug(28, experts.fill_capacity_in_wrong_order, MIXTRAL, EP, CAPACITY, "gradient"),
        Bug(28, experts.fill_capacity_per_rank, MIXTRAL, EP_OF_CONTEXT, CAPACITY, "gradient"),
        Bug(None, experts.detach_router, MIXTRAL, EP, PLAIN, "gradient"),
        Bug(None, experts.drop_gradients_of_dispatched_tokens, MIXTRAL, EP, PLAIN, "gradient"),
        Bug(None, experts.lose_gradients_of_sent_weights, MIXTRAL, EP_ONCE, PLAIN, "gradient"),
        Bug(None, experts.ignore_rows_beyond_limit, MIXTRAL, EP_CROWDED, PLAIN, "gradient"),
        Bug(None, experts.sum_padding_into_bias, GPT_OSS, EP_PADDED, PLAIN, "gradient"),
        Bug(
            None, experts.update_balance_biases_per_rank, DEEPSEEK, EP, LOSSES, "weights after SGD"
        ),
    ],
    "offload": [
        Bug(None, patch, DEEP_LLAMA, ZERO_3, PLAIN, f"{quantity} with offloading", offload=ON_DISK)
        for patch, quantity in (
            (offload.lose_writes_of_one_bucket, "moments"),
            (offload.lose_updates_of_weights, "weights"),
            (offload.forget_scale_of_gradients, "weights"),
            (offload.read_saved_tensors_early, "norms"),
        )
    ]
    + [
        Bug(
            None,
            offload.read_weights_before_their_update,
            DEEP_LLAMA,
            ZERO_3,
            PLAIN,
            "losses with offloading",
            offload={"optimizer": "disk", "buffer_bytes": 4096},
        )
    ],
    "pipeline": [
        Bug(10, pipeline.rescale_in_every_stage, DEEP_LLAMA, PIPE, PIPELINED, "gradient"),
        Bug(11, pipeline.omit_normaliser_in_pipeline, DEEP_LLAMA, PIPE, PIPELINED, "gradient"),
        Bug(30, pipeline.compute_norm_of_own_stage, DEEP_LLAMA, PIPE, PIPELINED, "norm"),
        Bug(42, pipeline.clear_gradients_on_restart, DEEP_LLAMA, PIPE, PIPELINED, "gradient"),
        Bug(44, pipeline.keep_tied_gradients_apart, DEEP_LLAMA, PIPE, PIPELINED_TIED, "gradient"),
        Bug(44, pipeline.count_tied_copies_twice, DEEP_LLAMA, PIPE, PIPELINED_TIED, "norm"),
        Bug(None, pipeline.drop_deferred_products, DEEP_LLAMA, SPLIT, PIPELINED, "gradient"),
        Bug(
            None, pipeline.skip_reduction_after_w, DEEP_LLAMA, SHARDED_SPLIT, PIPELINED, "gradient"
        ),
        Bug(23, pipeline.reduce_stage_too_early, DEEP_LLAMA, SHARDED, PIPELINED, "gradient"),
        Bug(
            None, pipeline.swap_messages_of_micro_batches, DEEP_LLAMA, GPIPE, PIPELINED, "gradient"
        ),
        Bug(
            47, pipeline.use_documents_of_first_micro_batch, DEEP_LLAMA, PIPE, PIPELINED, "gradient"
        ),
        Bug(45, pipeline.number_layers_by_stage, DEEP_LLAMA, PIPE, PIPELINED_DROPPING, "gradient"),
    ],
    "tensor": [
        Bug(9, tensor.count_every_rank_in_loss, TENSOR_LLAMA, TP, PLAIN, "loss"),
        Bug(None, tensor.normalise_over_own_vocabulary, TENSOR_LLAMA, TP, PLAIN, "gradient"),
        Bug(18, tensor.skip_backward_sum_of_head, TENSOR_LLAMA, TP, PLAIN, "gradient"),
        Bug(18, tensor.skip_backward_sum_of_head, TENSOR_LLAMA, WHOLE_STREAM, PLAIN, "gradient"),
        Bug(12, tensor.skip_sum_of_layer_norms, TENSOR_LLAMA, TP, PLAIN, "gradient"),
        Bug(13, tensor.skip_sum_of_final_norm, TENSOR_LLAMA, TP_ZERO_2, PLAIN, "gradient"),
        Bug(14, tensor.sum_before_last_micro_batch, TENSOR_LLAMA, TP, ACCUMULATED, "gradient"),
        Bug(15, tensor.sum_head_norms_with_tokens_only, QWEN3, WHOLE_STREAM, PLAIN, "gradient"),
        Bug(16, tensor.skip_sum_of_shared_key_value_heads, TENSOR_LLAMA, TP_4, PLAIN, "gradient"),
        Bug(15, tensor.compute_statistics_of_own_heads, OLMO2, TP, PLAIN, "gradient"),
        Bug(None, tensor.add_bias_on_every_rank, GPT2, TP, ACCUMULATED, "gradient"),
        Bug(
            None,
            tensor.skip_backward_sum_of_feed_forward,
            TENSOR_LLAMA,
            WHOLE_STREAM,
            PLAIN,
            "gradient",
        ),
        Bug(None, tensor.skip_backward_sum_of_feed_forward, TENSOR_LLAMA, TP, PLAIN, "gradient"),
        Bug(29, tensor.treat_sharded_parameters_as_replicas, TENSOR_LLAMA, TP, PLAIN, "norm"),
        Bug(35, tensor.count_replicas_on_every_tensor_rank, TENSOR_LLAMA, TP, PLAIN, "norm"),
        Bug(45, tensor.number_heads_locally, TENSOR_LLAMA, TP, TENSOR_DROPPING, "gradient"),
        Bug(45, tensor.number_tokens_locally, TENSOR_LLAMA, TP, TENSOR_DROPPING, "gradient"),
    ],
}
"""Bugs by the parallelism that they concern."""
