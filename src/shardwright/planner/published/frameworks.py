"""Conventions of other training frameworks, and defaults where published rows are silent.

Sources are the frameworks' documentation and code at the time of the measurements: nanotron
v0.5; Megatron-Core 0.8 to 0.15 under NeMo; Megatron-LM of 2020 and 2021; Megatron-DeepSpeed of
BigScience; Composer 0.14 to 0.22 (llm-foundry); torchtitan; litgpt of 2023.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shardwright.config.recipe import RecomputeKind
from shardwright.layout.degrees import ZeroStage
from shardwright.planner.published.conventions import FrameworkConventions
from shardwright.planner.time.operation_passes import FEW_PASSES, AdapterPasses, ElementwisePasses


@dataclass(frozen=True)
class FrameworkDefaults:
    """Conventions of one training framework, and its defaults where a row is silent.

    `links` maps accelerator generations to the network of its published runs, by names of the
    hardware catalogue.
    """

    conventions: FrameworkConventions
    unpolled_conventions: FrameworkConventions | None = None
    """Conventions of runs whose host runs ahead of the device, if they differ
    (`row_conventions`)."""
    polling_conventions: FrameworkConventions | None = None
    """Conventions of pipelines of a release that polled for messages."""
    conventions_since_2025: FrameworkConventions | None = None
    """Conventions of releases that run on the accelerators of 2025 (H200, Blackwell), if they
    differ."""
    zero_stage: ZeroStage = 1
    should_replicate_adapted: bool = False
    """With adapters each rank replicates the frozen model, unless a row states that it is
    sharded."""
    zero_stage_in_pipeline: ZeroStage | None = None
    """Effective stage under pp if stage 3 is stated: torchtitan then gathers once per step and
    does not reshard between passes."""
    recompute: RecomputeKind = "none"
    is_recompute_variable: bool = False
    """True if published recipes choose recomputation by available memory, so that silence does
    not mean the default."""
    quantised_recompute: RecomputeKind | None = None
    """Default for QLoRA, if different."""
    multi_device_recompute: RecomputeKind | None = None
    """Default on several devices, if different: litgpt's FSDP strategy uses full
    recomputation."""
    flash_attention: bool = True
    has_hopper_attention: bool = False
    """Attention on Hopper is cuDNN's kernel, which was written for it (Transformer Engine). Others
    ran kernels written for Ampere (FlashAttention-2, Triton's)."""
    has_flash_attention_2: bool = False
    """Attention is FlashAttention-2, by itself or as PyTorch's. On Ampere the fitted trainers ran
    its predecessor, on Hopper also Triton's kernel (llm-foundry)."""
    should_offload_activations: bool = False
    """Inputs of recomputed blocks are on the host unless a row says otherwise."""
    has_interleaved_schedule: bool = False
    """True if published pipelines have several stages per rank when a row does not state the
    number."""
    sequence_parallel: bool = True
    links: Mapping[str, str] = field(default_factory=dict, hash=False)


_MIXED_PRECISION = FrameworkConventions(weight_bytes=2.0, master_bytes=4.0, stage_rule="even")
"""Half-precision weights and fp32 master weights that are sharded with the optimizer
states."""

_FUSED_SOFTMAX_BYTES = 13.0
"""Bytes per attention score of Megatron's fused scale, mask and softmax kernel, all in half
precision: scores written and read, weights written, read and written by dropout with a one-byte
mask, and read by the second matmul."""

_DOUBLE_QUANTISED_BYTES = 0.5 + 1.0 / 64 + 4.0 / (64 * 256)
"""Bytes per NF4 element with quantised scales: 8 bits per scale, and an fp32 one per 256 of
them (arXiv 2305.14314)."""

_EAGER_LOGIT_BYTES = 14.0
"""Bytes per logit of the loss in transformers: bf16 logits, an fp32 copy, their log-softmax,
and its gradient."""

_EAGER_PASSES = ElementwisePasses(18, 38, 10, 15, is_exact=True)
"""Passes of `LlamaRMSNorm` and `apply_rotary_pos_emb` (transformers, modeling_llama.py), operation
by operation: a norm casts to fp32, squares, averages, scales, casts back and multiplies."""

_HUGGING_FACE = FrameworkConventions(
    "huggingface",
    elementwise_passes=_EAGER_PASSES,
    num_gated_tensors=4.0,
    num_norm_tensors=4.0,
    logit_bytes=_EAGER_LOGIT_BYTES,
    nf4_bytes=_DOUBLE_QUANTISED_BYTES,
    unquantised_bytes=4.0,
    should_drop_frozen_inputs=True,
    has_foreach_update=True,
)


def use_pure_bf16(conventions: FrameworkConventions) -> FrameworkConventions:
    """Return conventions with weights, gradients and states in bf16 only, without a second copy
    of the weights: 8 bytes per parameter."""
    return replace(
        conventions,
        weight_bytes=2.0,
        master_bytes=0.0,
        gradient_bytes=2.0,
        update_copy_bytes=0.0,
        has_half_precision_states=True,
    )


# Gradients are summed in fp32 (optim/gradient_accumulator.py) and have bf16 buckets without
# zero_stage 1. With it there is no DDP that would overlap their sum (trainer.py, `make_ddp` and
# `reduce_scatter=False`), but the update gathers all weights into one tensor (distributed.py,
# `all_gather_coalesced`). A gate's activation is saved with gate and up. Gathered inputs and
# gathered gradients have one persistent buffer each (parallel/tensor_parallel/functional.py).
# Logits: bf16, an fp32 copy, and its exponentials (models/llama.py).
_NANOTRON = replace(
    _MIXED_PRECISION,
    name="nanotron",
    stage_rule="running_sum",
    gradient_bytes=6.0,
    reduce_bytes=4.0,
    has_unsharded_gradients=True,
    num_gated_tensors=4.0,
    logit_bytes=10.0,
    num_sequence_buffers=2.0,
    should_save_gathered_sequence=False,
    has_unsharded_sums=True,
)

# Selective recomputation saves every second matmul of a block, and attention's output: in a
# Llama, queries, values, gate and the branch's result, which the compiler recognises as unused.
_TORCHTITAN = FrameworkConventions(
    "torchtitan",
    gather_bytes=2.0,
    reduce_bytes=4.0,
    selective_share=0.49,
    eager_selective_share=0.58,
    has_separate_gradient_stream=True,
    logit_bytes=14.0,
    sharded_logit_bytes=22.0,
    should_save_fp4_matmuls=False,
    should_defer_stage_2=True,
    stage_rule="even",
)

FRAMEWORK_DEFAULTS: dict[str, FrameworkDefaults] = {
    "nanotron": FrameworkDefaults(
        _NANOTRON,
        # torch 2.1 does not reuse the input of a reduce-scatter until an event shows that NCCL's
        # stream has read it. A CUDA stream queues 1,024 launches, and a layer's forward pass has
        # about 40 with two reduce-scatters.
        # In all public commits a stage ends where its cost exceeds its share. Pipelines that polled
        # show that, but the memory of all others with a tie is that of one layer less.
        unpolled_conventions=replace(
            _NANOTRON, num_unreleased_sequences=51.0, stage_rule="running_sum_reached"
        ),
        # Sleeps of `P2P._send_meta` and `_recv_meta` (branch nouamane/bench2, 2024-12-27).
        polling_conventions=replace(_NANOTRON, poll_seconds=0.1),
        links={"Hopper": "efa-p5"},
    ),
    "megatron-core": FrameworkDefaults(
        # Gradients are summed in fp32 with bf16, but NVIDIA's performance recipes disable that
        # (`build_conventions`).
        replace(
            _MIXED_PRECISION,
            name="megatron-core",
            should_recompute_attention_only=True,
            gradient_bytes=4.0,
            reduce_bytes=4.0,
            has_unsharded_gradients=True,
            has_node_dispatch=True,
        ),
        is_recompute_variable=True,
        has_hopper_attention=True,
        has_interleaved_schedule=True,
    ),
    "megatron-lm": FrameworkDefaults(
        replace(
            _MIXED_PRECISION,
            name="megatron-lm",
            should_recompute_attention_only=True,
            gradient_bytes=4.0,
            reduce_bytes=4.0,
            has_unsharded_gradients=True,
            score_bytes=_FUSED_SOFTMAX_BYTES,
        ),
        zero_stage=0,
        recompute="full",
        flash_attention=False,
        sequence_parallel=False,
    ),
    "megatron-deepspeed": FrameworkDefaults(
        # The reduction flattens up to 5e8 gradients at a time, the step those of a shard, which it
        # casts to fp32 (runtime/zero/stage_1_and_2.py), each into one tensor. Its BF16_Optimizer
        # keeps bf16 gradients and their fp32 sums, which it flattens likewise
        # (runtime/pipe/engine.py). NCCL creates a communicator for each pair of stages that send,
        # and the check for overflows one for a model copy (runtime/pipe/topology.py).
        replace(
            _MIXED_PRECISION,
            name="megatron-deepspeed",
            should_recompute_attention_only=True,
            gradient_bytes=2.0,
            has_separate_gradient_sum=True,
            update_copy_bytes=6.0,
            reduced_elements=5e8,
            has_pipeline_grid=True,
            reduce_bytes=2.0,
            has_unsharded_gradients=True,
            score_bytes=_FUSED_SOFTMAX_BYTES,
        ),
        recompute="full",
        flash_attention=False,
        sequence_parallel=False,
    ),
    "aleph": FrameworkDefaults(
        # Logits: local and gathered in bf16, an fp32 copy, exponentials, gradient, and the
        # gradient in bf16 twice.
        replace(
            _MIXED_PRECISION,
            name="aleph",
            stage_rule="weighed",  # by parameters, including embedding and head
            gradient_bytes=2.0,
            reduce_bytes=2.0,
            has_unsharded_gradients=True,
            should_gather_logits=True,
            logit_bytes=20.0,
            num_gated_tensors=4.0,
            num_rotary_tensors=2.0,
            num_norm_tensors=5.0,
        ),
        sequence_parallel=False,
    ),
    "llm-foundry": FrameworkDefaults(
        FrameworkConventions("llm-foundry", gather_bytes=2.0, reduce_bytes=4.0, logit_bytes=6.0),
        zero_stage=3,
    ),
    "torchtitan": FrameworkDefaults(
        # Logits in bf16 and fp32, their exponentials and gradient. With a sharded vocabulary,
        # the shifted logits and the log-softmax are separate tensors. Since 2025 the compiled
        # loss stores two of these. Pipelines sum unsharded fp32 gradients until the last
        # micro-batch.
        _TORCHTITAN,
        conventions_since_2025=replace(
            _TORCHTITAN,
            logit_bytes=5.0,
            sharded_logit_bytes=None,
            has_separate_gradient_stream=False,
        ),
        zero_stage=3,
        zero_stage_in_pipeline=2,
        recompute="selective",
    ),
    "litgpt": FrameworkDefaults(
        FrameworkConventions(
            "litgpt",
            weight_bytes=2.0,
            gradient_bytes=2.0,
            num_gated_tensors=4.0,
            num_norm_tensors=3.0,
            should_load_unsharded=True,
            nf4_bytes=_DOUBLE_QUANTISED_BYTES,
        ),
        zero_stage=3,
        multi_device_recompute="full",
        sequence_parallel=False,
        has_flash_attention_2=True,
    ),
    "deepspeed": FrameworkDefaults(
        # Hugging Face's models; the step flattens and casts as Megatron-DeepSpeed does. Defaults
        # of stage3_max_live_parameters, stage3_max_reuse_distance and sub_group_size: a billion.
        replace(
            _MIXED_PRECISION,
            name="deepspeed",
            gradient_bytes=2.0,
            update_copy_bytes=6.0,
            update_group_elements=1e9,
            reduce_bytes=2.0,
            gather_bytes=2.0,
            max_live_elements=1e9,
            elementwise_passes=_EAGER_PASSES,
            num_gated_tensors=4.0,
            num_norm_tensors=4.0,
            logit_bytes=_EAGER_LOGIT_BYTES,
        ),
        zero_stage=3,
        recompute="full",
        has_flash_attention_2=True,
    ),
    "huggingface": FrameworkDefaults(
        # Trainer, TRL, PEFT and Accelerate: fp32 weights under autocast, whose casts live until
        # the backward pass. RMS norms work on an fp32 copy, which is saved; so is a gate's
        # activation. Preparing a model for QLoRA casts everything unquantised to fp32 (peft's
        # prepare_model_for_kbit_training).
        _HUGGING_FACE,
        zero_stage=3,
        should_replicate_adapted=True,
        quantised_recompute="full",
        sequence_parallel=False,
        has_flash_attention_2=True,
    ),
    "llama-factory": FrameworkDefaults(
        # Its README states 18 bytes per parameter for full tuning of 7B with mixed precision,
        # and 8 for "pure_bf16".
        replace(_HUGGING_FACE, name="llama-factory", unquantised_bytes=None),
        zero_stage=3,
        should_replicate_adapted=True,
        recompute="full",
        sequence_parallel=False,
        has_flash_attention_2=True,
    ),
    "axolotl": FrameworkDefaults(
        # `bf16: true` loads and trains weights in bf16. Its examples recompute, and materialise
        # all logits.
        use_pure_bf16(replace(_HUGGING_FACE, name="axolotl")),
        zero_stage=3,
        should_replicate_adapted=True,
        recompute="full",
        sequence_parallel=False,
        has_flash_attention_2=True,
    ),
    "torchtune": FrameworkDefaults(
        # `dtype: bf16` applies to weights, gradients and states. The loss projects, casts and
        # reduces an eighth of the rows at a time (LinearCrossEntropyLoss): bf16, fp32 and
        # log-softmax of those logits.
        use_pure_bf16(
            FrameworkConventions(
                "torchtune",
                num_gated_tensors=4.0,
                num_norm_tensors=3.0,
                logit_bytes=10.0 / 8,
                nf4_bytes=_DOUBLE_QUANTISED_BYTES,
                should_drop_frozen_inputs=True,
            )
        ),
        zero_stage=3,
        recompute="full",
        sequence_parallel=False,
        has_flash_attention_2=True,
    ),
    "automodel": FrameworkDefaults(
        # NeMo Automodel: transformers' models in bf16 under FSDP2, with its own kernels for
        # norms, gates and the loss. One Triton kernel computes and scales both matmuls of an
        # adapter (components/_peft/lora_kernel.py); the sum with the matrix's output stays.
        # Experts are exchanged by DeepEP (BackendConfig.enable_deepep). Recipes set
        # `activation_checkpointing` where memory requires it, and pipelines do not reshard after
        # the forward pass (examples/benchmark/configs).
        use_pure_bf16(
            FrameworkConventions(
                "automodel",
                nf4_bytes=_DOUBLE_QUANTISED_BYTES,
                logit_bytes=4.0,
                adapter_passes=AdapterPasses(1, 4, 5, 2, 2, 4),
                has_node_dispatch=True,
            )
        ),
        zero_stage=3,
        zero_stage_in_pipeline=2,
        is_recompute_variable=True,
        has_hopper_attention=True,
        should_replicate_adapted=True,
    ),
    "unsloth": FrameworkDefaults(
        # Its own kernels save no copies, the loss overwrites bf16 logits with their gradient,
        # and block inputs are offloaded to the host. The second matmul of an adapter adds its
        # scaled result to the matrix's output in place (kernels/fast_lora.py), backward too.
        replace(
            _HUGGING_FACE,
            name="unsloth",
            elementwise_passes=FEW_PASSES,
            adapter_passes=AdapterPasses(1, 2, 3, 2, 2, 6),
            num_gated_tensors=3.0,
            num_norm_tensors=2.0,
            logit_bytes=4.0,
            unquantised_bytes=None,
        ),
        recompute="full",
        sequence_parallel=False,
        should_offload_activations=True,
        has_flash_attention_2=True,
    ),
    "gpt-neox": FrameworkDefaults(
        replace(
            _MIXED_PRECISION,
            name="gpt-neox",
            gradient_bytes=2.0,
            update_copy_bytes=6.0,
            reduced_elements=5e8,
            has_pipeline_grid=True,
            reduce_bytes=2.0,
            has_unsharded_gradients=True,
        ),
        recompute="full",
        sequence_parallel=False,
    ),
    "internevo": FrameworkDefaults(
        # Release of July 2023, with FlashAttention 1.0.5. Each tensor has a rank that updates it
        # (solver/optimizer/hybrid_zero_optim.py, `_partition_param_list`).
        replace(
            _MIXED_PRECISION,
            name="internevo",
            gradient_bytes=2.0,
            reduce_bytes=2.0,
            has_unsharded_gradients=True,
            has_owner_broadcasts=True,
        ),
        sequence_parallel=False,
    ),
    "colossalai": FrameworkDefaults(
        # Gemini stores gradients in the memory of their weights: 14 bytes per parameter.
        replace(
            _MIXED_PRECISION,
            name="colossalai",
            gradient_bytes=0.0,
            reduce_bytes=2.0,
            gather_bytes=2.0,
            logit_bytes=_EAGER_LOGIT_BYTES,
        ),
        zero_stage=3,
        recompute="full",
        sequence_parallel=False,
        has_flash_attention_2=True,
    ),
}
