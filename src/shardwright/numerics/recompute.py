"""Activation recomputation: the results that a block saves for its backward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from shardwright.config.recipe import RecomputeKind
from shardwright.numerics.packed_results import PackFunction, create_packing_contexts

RecomputeRunner = Callable[..., Any]

_aten = torch.ops.aten
_SAVED_OPERATIONS: frozenset[Any] = frozenset(
    {
        _aten.mm.default,
        _aten.bmm.default,
        _aten.addmm.default,
        _aten.baddbmm.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_attention_math.default,
    }
)
"""Operations whose results `selective` saves: nearly all of a block's FLOPs.

Norms, activations, rotations and casts are cheap to recompute and make up most of the bytes.
"""


_COUNTING_OPERATION_NAMES = frozenset(
    {
        "shardwright::exchange_counts",
        "shardwright::sort_received",
        "shardwright::take_first",
    }
)
"""Operators of compiled code whose results every kind of recomputation saves.

They read on the host how many rows experts get. Repeated, the host would wait again, and a graph
would have two symbols for one size. The results are a few bytes per row.
"""

_SAVED_OPERATION_NAMES = frozenset(
    {
        "aten::_scaled_mm",
        "aten::_scaled_mm_v2",
        "shardwright::grouped_product",
        "shardwright::row_attention",
        "torch_attn::_varlen_attn",
        "flex_attention",
        "inductor_compiled_code",
    }
)
"""Names of operators that are registered when their modules are imported: our own, torch's for
documents, and FlexAttention, in compiled code and compiled by itself."""


def _is_saved(operation: Any) -> bool:
    return operation in _SAVED_OPERATIONS or operation.name() in (
        _SAVED_OPERATION_NAMES | _COUNTING_OPERATION_NAMES
    )


def _choose_policy(_ctx: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_saved(operation) else CheckpointPolicy.PREFER_RECOMPUTE


def _choose_full_policy(_ctx: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    is_saved = operation.name() in _COUNTING_OPERATION_NAMES
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


def build_recompute_runner(
    kind: RecomputeKind, pack: PackFunction | None = None
) -> RecomputeRunner | None:
    """Build `run(function, *args) -> output` for blocks; None without recomputation.

    `full` saves a block's inputs only; `selective` also saves the results of matrix products
    and attention. The random state is not saved and restored: dropout is a function of seed,
    step and token, so running twice gives the same mask. Gradients equal those without
    recomputation bit by bit. With torch.compile the runner goes inside the compiled function:
    the compiler reads the policy, whereas a policy around compiled code sees no operations,
    saves nothing and makes the block run three times.

    Args:
        pack: function through which the results that `selective` saves are stored, outside
            compiled code. Autograd's hooks see all other saved tensors, but not these.
    """
    if kind == "none":
        return None
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if kind == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _choose_policy)

    def run(function: Callable[..., Any], *args: Any) -> Any:
        if pack is not None and kind == "selective" and not torch.compiler.is_compiling():
            contexts = partial(create_packing_contexts, _is_saved, pack)
            return checkpoint(function, *args, **(options | {"context_fn": contexts}))
        if kind == "full" and torch.compiler.is_compiling():
            contexts = partial(create_selective_checkpoint_contexts, _choose_full_policy)
            return checkpoint(function, *args, **(options | {"context_fn": contexts}))
        return checkpoint(function, *args, **options)

    return run
