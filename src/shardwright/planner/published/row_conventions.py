"""Conventions of a published row: its framework release's, modified by its notes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from shardwright.hardware import Node
from shardwright.layout import Layout
from shardwright.planner.published.conventions import FrameworkConventions
from shardwright.planner.published.framework_names import is_performance_recipe
from shardwright.planner.published.frameworks import (
    FRAMEWORK_DEFAULTS,
    FrameworkDefaults,
    use_pure_bf16,
)
from shardwright.planner.published.host_update import HOST_MEMORY_BYTES_PER_SECOND
from shardwright.planner.published.moe_recipes import has_all_to_all
from shardwright.planner.published.row_layout import read_integer
from shardwright.planner.time.operation_passes import FEW_PASSES, AdapterPasses

_ZERO_3_OF_2021_PATTERN = r"2104\.04473|megatron-lm"
"""Paper that measured DeepSpeed's ZeRO-3 of 2021, which gathered one tensor at a time. Later
releases gather a bucket at a time."""

_GPTQ_BYTES = 0.5 + 2.5 / 128
"""Bytes per weight of GPTQ: 4 bits, and an fp16 scale and a 4-bit zero per 128 weights. Preparing
the model does not cast the rest to fp32 (peft's prepare_model_for_kbit_training)."""
_GPTQ_DEQUANTISATION_BYTES = 16.5
"""Bytes moved per GPTQ weight with 128 rows or more (auto_gptq/nn_modules/qlinear/
qlinear_cuda_old.py): words of 32 bits are shifted once per weight and written (4.5), cast to 8 bits
(5), masked (2), zeros subtracted (2), and scaled in fp16 (3)."""


_RECENT_TORCH = 8
"""Minor version of the torch 2 with which a trainer's release is one since 2025."""


def build_conventions(
    row: Mapping[str, str], framework: FrameworkDefaults, layout: Layout, node: Node
) -> FrameworkConventions:
    """Return the conventions of a row's framework release, modified by the row's
    notes."""
    accelerator = node.accelerator
    is_recent = (
        "Blackwell" in accelerator.generation
        or accelerator.name.startswith("H200")
        or int(row["notes.torch_release"] or 0) >= _RECENT_TORCH
    )
    of_release = framework.conventions_since_2025 if is_recent else None
    of_release = of_release or _choose_release(row, framework, layout)
    conventions = of_release or framework.conventions
    if conventions.name == "nanotron":
        conventions = _describe_nanotron(row, conventions, layout)
    if conventions.name == "huggingface" and re.search(
        r"(?i)zero|deepspeed|\bds", row["notes.sharding"]
    ):
        conventions = FRAMEWORK_DEFAULTS["deepspeed"].conventions
    if row["notes.half_weights"] and not conventions.has_half_precision_states:
        conventions = use_pure_bf16(conventions)
    if accelerator.generation in HOST_MEMORY_BYTES_PER_SECOND:
        bandwidth = HOST_MEMORY_BYTES_PER_SECOND[accelerator.generation]
        conventions = replace(conventions, host_memory_bytes_per_second=bandwidth)
    conventions = _describe_fine_tuning(row, conventions)
    if conventions.name == "megatron-core" and is_performance_recipe(
        row["notes.framework"], row["source"]
    ):
        conventions = replace(conventions, gradient_bytes=2.0, reduce_bytes=2.0)
    if conventions.name == "megatron-core" and has_all_to_all(row, node):
        conventions = replace(conventions, has_node_dispatch=False)
    if row["notes.dispatch"]:
        conventions = replace(conventions, has_node_dispatch=True)
    if conventions.name == "deepspeed" and re.search(
        _ZERO_3_OF_2021_PATTERN, row["source"].lower()
    ):
        conventions = replace(
            conventions, should_gather_per_tensor=True, elementwise_passes=FEW_PASSES
        )
    if row["notes.gradients"] and conventions.gradient_bytes:
        unsummed_bytes = (
            conventions.gradient_bytes if conventions.has_separate_gradient_sum else 0.0
        )
        gradient_bytes = max(conventions.gradient_bytes, 4.0 + unsummed_bytes)
        conventions = replace(conventions, gradient_bytes=gradient_bytes, reduce_bytes=4.0)
    return conventions


def _describe_fine_tuning(
    row: Mapping[str, str], conventions: FrameworkConventions
) -> FrameworkConventions:
    """Return conventions with the kernels, precisions and updates of a row's notes."""
    if row["notes.chunked_loss"].lower() == "liger" and conventions.elementwise_passes.is_exact:
        # transformers' `use_liger_kernel` also replaces norms, rotary embeddings and gates, each by
        # one kernel that saves its inputs (liger_kernel/transformers/monkey_patch.py).
        conventions = replace(
            conventions,
            elementwise_passes=FEW_PASSES,
            num_norm_tensors=2.0,
            num_gated_tensors=3.0,
        )
    if row["notes.no_autocast"] and conventions.name == "huggingface":
        conventions = _describe_uncast(row, conventions)
    if row["notes.sharding"].lower() == "fsdp" and conventions.name in _FSDP_1_TRAINERS:
        # `_accumulate_sharded_grad` and `prepare_gradient_for_optim` of torch.distributed.fsdp.
        conventions = replace(conventions, has_device_gradient_shards=True)
    if row["notes.padding_mask"]:
        conventions = replace(conventions, has_padding_mask=True)
    if row["notes.mixed_precision"] == "PURE":
        conventions = replace(conventions, reduce_bytes=2.0)
    if row["notes.gptq"]:
        conventions = replace(
            conventions,
            nf4_bytes=_GPTQ_BYTES,
            dequantisation_bytes=_GPTQ_DEQUANTISATION_BYTES,
            unquantised_bytes=None,
        )
    if row["notes.paged"]:
        conventions = replace(conventions, has_paged_states=True)
    if row["notes.fused_update"]:
        conventions = replace(conventions, gradient_bytes=0.0)  # one gradient at a time
    if "RMS kernel" in row["notes.kernel"]:
        # The fused kernel's input and output.
        conventions = replace(conventions, num_norm_tensors=2.0)
    return conventions


_FSDP_1_TRAINERS = ("huggingface", "llama-factory", "axolotl")
"""Trainers whose rows mean PyTorch's first FSDP by the name alone."""

_UNCAST_ADAPTER_PASSES = AdapterPasses(9.5, 14, 14.5, 14, 7, 10)
"""Bytes of PEFT's fp32 adapters between 16-bit products, over two (peft 0.14,
tuners/lora/layer.py, `Linear.forward`).

Forward: the input is cast to fp32 (6), dropped (9, with a mask) and read (4); the second product is
written (4), scaled (8), added (10) and cast (6). Backward, at the output: casts to fp32 and back
(12), scale (8), two products (8). At the input: two products (8), dropout (9), cast (6), sum (6).
"""
_FP32_ADAPTER_PASSES = AdapterPasses(3.25, 8, 7.25, 4, 6, 7)
"""The same next to 4-bit products with fp32 activations, over four (tuners/lora/bnb.py,
`Linear4bit.forward`). Nothing is cast, and the result is cloned (8)."""


def _describe_uncast(
    row: Mapping[str, str], conventions: FrameworkConventions
) -> FrameworkConventions:
    """Return the conventions of a trainer that runs transformers without autocast, and computes the
    loss itself.

    PEFT casts adapters to fp32 (`autocast_adapter_dtype`), so that their operations run in fp32.
    Each saves its input after dropout, and the mask. Three tensors of logits are alive at the loss,
    in the precision of the activations: forward the logits, a copy without the last token, and
    log-probabilities; backward these and their gradients before and after the softmax.
    """
    is_fp32 = row["precision"] == "fp32"
    return replace(
        conventions,
        logit_bytes=12.0 if is_fp32 else 6.0,
        adapter_input_bytes=5.0,
        adapter_passes=_FP32_ADAPTER_PASSES if is_fp32 else _UNCAST_ADAPTER_PASSES,
    )


def _describe_nanotron(
    row: Mapping[str, str], conventions: FrameworkConventions, layout: Layout
) -> FrameworkConventions:
    """Return nanotron's conventions for a row's attention and ZeRO stage.

    Without grouped heads, queries are a view of a tensor with keys and values, whose rotated copies
    are other tensors (models/llama.py, `CausalSelfAttention`), and attention saves the view.
    """
    if read_integer(row, "kv_heads") in (None, read_integer(row, "heads")):
        conventions = replace(conventions, num_rotary_tensors=1.0)
    if layout.zero_stage == 1:
        conventions = replace(conventions, gradient_bytes=4.0, has_flat_gather=True)
    return conventions


def _choose_release(
    row: Mapping[str, str], framework: FrameworkDefaults, layout: Layout
) -> FrameworkConventions | None:
    """Return the conventions of the release that measured a row of nanotron's table, or None for
    those of the trainer.

    Its script (scripts/scaling_benchmarks.py) repeats pipelines that are older than a certain job.
    No column states which rows polled for messages. By their time, these did: all pipelines on 512
    GPUs, those with tensor parallelism over four nodes, those with more than one sequence per
    micro-batch on 256 GPUs, and those with one, ZeRO-0 and 4 to 16 model copies on fewer. By their
    memory, the host did not run ahead on 512 GPUs without a pipeline, except with tensor
    parallelism over four nodes.
    """
    num_gpus = layout.world_size
    spans_four_nodes = layout.tp > 16
    if layout.pp == 1:
        runs_ahead = num_gpus < 512 or spans_four_nodes
        return framework.unpolled_conventions if runs_ahead else None
    if (read_integer(row, "micro_batch") or 1) > 1:
        has_polled = num_gpus >= 256
    else:
        has_few_copies = 2 < layout.data_ranks < 32
        has_polled = num_gpus >= 512 or (
            8 < num_gpus <= 128 and layout.zero_stage == 0 and has_few_copies
        )
    if has_polled or spans_four_nodes:
        return framework.polling_conventions
    return framework.unpolled_conventions
