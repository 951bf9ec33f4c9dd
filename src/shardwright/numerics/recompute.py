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
from shardwright.layout.saved_results import SavedResults
from shardwright.numerics.packed_results import PackFunction, create_packing_contexts

RecomputeRunner = Callable[..., Any]
ResultNameReader = Callable[[], str | None]
"""() -> name of the results that the block computes now (`layout.saved_results`)."""

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


def _choose_full_policy(_ctx: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    is_saved = operation.name() in _COUNTING_OPERATION_NAMES
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


def build_saved_results_runner(
    saved_results: SavedResults, get_result_name: ResultNameReader, pack: PackFunction | None = None
) -> RecomputeRunner:
    """Build `run(function, *args) -> output` that saves the input and some results.

    Results are those of matrix products and attention kernels inside a named part of the block.
    `pack` and the rest are as for `build_recompute_runner`.
    """

    def is_in_policy(operation: Any) -> bool:
        if operation.name() in _COUNTING_OPERATION_NAMES:
            return True
        return _is_saved(operation) and get_result_name() in saved_results

    return _build_selective_runner(is_in_policy, pack, f"keep {', '.join(sorted(saved_results))}")


def _build_selective_runner(
    is_saved: Callable[[Any], bool], pack: PackFunction | None, policy_name: str
) -> RecomputeRunner:
    """Build a runner that saves the results of the operations for which `is_saved` is True.

    Args:
        policy_name: different for different `is_saved`.
    """

    def choose_policy(_ctx: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if is_saved(operation):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    create_contexts = partial(create_selective_checkpoint_contexts, choose_policy)

    def run(function: Callable[..., Any], *args: Any) -> Any:
        # torch.compile does not compare policies, only the values that it reads: without the name,
        # blocks with different policies would share the first one's graph.
        assert policy_name
        contexts = create_contexts
        if pack is not None and not torch.compiler.is_compiling():
            contexts = partial(create_packing_contexts, is_saved, pack)
        return checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
        )

    return run


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
    if kind == "selective":
        return _build_selective_runner(_is_saved, pack, kind)
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}

    def run(function: Callable[..., Any], *args: Any) -> Any:
        if torch.compiler.is_compiling():
            contexts = partial(create_selective_checkpoint_contexts, _choose_full_policy)
            return checkpoint(function, *args, **(options | {"context_fn": contexts}))
        return checkpoint(function, *args, **options)

    return run
