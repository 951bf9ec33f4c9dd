"""Activation recompute: what a block keeps for its backward pass and what it computes again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwright.config.schema import RecomputeKind

Runner = Callable[..., Any]

_aten = torch.ops.aten
_KEPT: frozenset[Any] = frozenset(
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
"""Operations whose results `selective` keeps: nearly all of a block's FLOPs. Norms, activations, rotations and casts are
cheap to run again and hold the larger part of the bytes."""


_KEPT_BY_NAME = frozenset({"shardwright::grouped_product"})
"""Our own products, which register themselves when the model's room is imported."""


def _policy(_ctx: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    kept = operation in _KEPT or operation.name() in _KEPT_BY_NAME
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def recompute_runner(kind: RecomputeKind) -> Runner | None:
    """How to run a block: `run(function, *args) -> output`, or None to run it plainly.

    `full` keeps a block's inputs only; `selective` also keeps the results of matrix products and attention. Random state is not
    saved and restored: dropout here is a function of seed, step and token (stateless), so running twice gives the same mask.
    Gradients equal those without recompute bit by bit. With torch.compile this goes inside what is compiled: the compiler reads the
    policy, whereas a policy around compiled code sees no operations, keeps nothing and makes the block run three times.
    """
    if kind == "none":
        return None
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if kind == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)

    def run(function: Callable[..., Any], *args: Any) -> Any:
        return checkpoint(function, *args, **options)

    return run
