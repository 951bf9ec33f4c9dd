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


_SAVED_OPERATION_NAMES = frozenset(
    {
        "shardwright::grouped_product",
        "shardwright::row_attention",
        "torch_attn::_varlen_attn",
        "flex_attention",
        "inductor_compiled_code",
    }
)
"""Names of operators that are registered when their modules are imported: our own, torch's for
documents, and FlexAttention, in compiled code and compiled by itself."""


def _choose_policy(_ctx: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    is_saved = operation in _SAVED_OPERATIONS or operation.name() in _SAVED_OPERATION_NAMES
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


def build_recompute_runner(kind: RecomputeKind) -> RecomputeRunner | None:
    """Build `run(function, *args) -> output` for blocks; None without recomputation.

    `full` saves a block's inputs only; `selective` also saves the results of matrix products
    and attention. The random state is not saved and restored: dropout is a function of seed,
    step and token, so running twice gives the same mask. Gradients equal those without
    recomputation bit by bit. With torch.compile the runner goes inside the compiled function:
    the compiler reads the policy, whereas a policy around compiled code sees no operations,
    saves nothing and makes the block run three times.
    """
    if kind == "none":
        return None
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if kind == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _choose_policy)

    def run(function: Callable[..., Any], *args: Any) -> Any:
        return checkpoint(function, *args, **options)

    return run
