"""Activation recomputation: the results that a block saves for its backward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from shardwright.config.recipe import RecomputeKind
from shardwright.layout.saved_results import SavedResults
from shardwright.numerics.packed_results import (
    DetachedResult,
    PackFunction,
    create_packing_contexts,
)

RecomputeRunner = Callable[..., Any]
ResultNameReader = Callable[[], str | None]
"""() -> name of the results that the block computes now (`layout.saved_results`)."""

_Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""Contexts of a block's forward pass and of its recomputation."""

ContextsFactory = Callable[[frozenset[Any], PackFunction], _Contexts]

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
        "shardwright::exchange_padded_counts",
        "shardwright::plan_deep_ep_exchange",
        "shardwright::plan_token_exchange",
        "shardwright::sort_received",
        "shardwright::take_first",
    }
)
"""Operators of compiled code whose results every kind of recomputation saves.

They exchange numbers of rows, and all but `exchange_padded_counts` read them on the host. Repeated,
the host would wait again, and a graph would have two symbols for one size. The results are a few
bytes per row.
"""

_SAVED_OPERATION_NAMES = frozenset(
    {
        "aten::_scaled_mm",
        "aten::_scaled_mm_v2",
        "aten::_scaled_grouped_mm_v2",
        "shardwright::grouped_product",
        "shardwright::scaled_product_by_expert",
        "shardwright::multiply_arriving",
        "shardwright::gather_and_multiply",
        "shardwright::row_attention",
        "torch_attn::_varlen_attn",
        "flex_attention",
        "inductor_compiled_code",
    }
)
"""Names of operators that are registered when their modules are imported: our own, torch's for
documents, and FlexAttention, in compiled code and compiled by itself."""


_COMMUNICATING_OPERATION_NAMES = frozenset(
    {"shardwright::launch_gathers", "shardwright::multiply_and_sum"}
)
"""Operators of compiled code whose results are those of collectives."""


_checkpoint = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


class SavedCommunication(NamedTuple):
    """Results of communication inside a block that its recomputation keeps."""

    names: frozenset[str | None]
    """Names of the kept results, in the sense of `get_result_name`."""
    get_result_name: ResultNameReader
    create_contexts: ContextsFactory
    """(names, pack) -> contexts of the forward pass and of its recomputation. They keep results
    outside compiled code, where the policy cannot."""
    partial_products: frozenset[str]
    """Names of operations that no policy keeps inside the name `partial_product`: only their sum
    over ranks is needed again."""


def _is_saved(operation: Any) -> bool:
    return operation in _SAVED_OPERATIONS or operation.name() in (
        _SAVED_OPERATION_NAMES | _COUNTING_OPERATION_NAMES
    )


def build_saved_results_runner(
    saved_results: SavedResults,
    get_result_name: ResultNameReader,
    pack: PackFunction | None = None,
    communication: SavedCommunication | None = None,
) -> RecomputeRunner:
    """Build `run(function, *args) -> output` that saves the input and some results.

    Results are those of matrix products and attention kernels inside a named part of the block.
    The other arguments are as for `build_recompute_runner`.
    """

    def is_in_policy(operation: Any) -> bool:
        return _is_saved(operation) and get_result_name() in saved_results

    policy_name = f"keep {', '.join(sorted(saved_results))}"
    return _build_selective_runner(is_in_policy, pack, policy_name, communication)


def _build_rule(
    is_saved: Callable[[Any], bool], communication: SavedCommunication | None
) -> Callable[[Any], bool]:
    """Build the function that tells whether an operation's results are kept."""

    def should_save(operation: Any) -> bool:
        if operation.name() in _COUNTING_OPERATION_NAMES:
            return True
        if communication is None:
            return is_saved(operation)
        name = communication.get_result_name()
        if (
            operation.namespace == "_c10d_functional"
            or operation.name() in _COMMUNICATING_OPERATION_NAMES
        ):
            return name in communication.names
        if name == "partial_product" and operation.name() in communication.partial_products:
            return False
        return is_saved(operation)

    return should_save


def _build_policy(should_save: Callable[[Any], bool]) -> Callable[..., CheckpointPolicy]:
    """Build a policy of torch's selective checkpoints."""

    def choose_policy(_ctx: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if should_save(operation):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return choose_policy


def _checkpoint_or_raise(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Run a checkpointed function; leave torch's hooks and contexts if it raises an error.

    torch 2.11 leaves them open: later code of the process would run under them.
    """
    errors: list[BaseException] = []
    is_forward = True

    def run(*args: Any) -> Any:
        try:
            return function(*args)
        except BaseException as error:
            if not is_forward:  # torch ends a recomputation early by an exception
                raise
            errors.append(error)
            return None

    output = _checkpoint(run, *args, **options)
    is_forward = False
    if errors:
        raise errors.pop()
    return output


def _build_selective_runner(
    is_saved: Callable[[Any], bool],
    pack: PackFunction | None,
    policy_name: str,
    communication: SavedCommunication | None,
) -> RecomputeRunner:
    """Build a runner that saves the results of the operations for which `is_saved` is True.

    Args:
        policy_name: different for different `is_saved`.
    """

    should_save = _build_rule(is_saved, communication)
    create_compiled_contexts = partial(
        create_selective_checkpoint_contexts, _build_policy(should_save)
    )

    def create_eager_contexts() -> _Contexts:
        contexts = create_packing_contexts(should_save, pack or DetachedResult)
        if communication is None:
            return contexts
        outer = communication.create_contexts(communication.names, pack or DetachedResult)
        return _join_contexts(outer, contexts)

    def run(function: Callable[..., Any], *args: Any) -> Any:
        # torch.compile does not compare policies, only the values that it reads: without the name,
        # blocks with different policies would share the first one's graph.
        assert policy_name
        if torch.compiler.is_compiling():
            return _checkpoint(function, *args, context_fn=create_compiled_contexts)
        return _checkpoint_or_raise(function, *args, context_fn=create_eager_contexts)

    return run


class _Joined(AbstractContextManager[None]):
    """Two contexts, one inside the other."""

    def __init__(
        self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]
    ) -> None:
        self._outer = outer
        self._inner = inner

    def __enter__(self) -> None:
        self._outer.__enter__()
        self._inner.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._inner.__exit__(kind, error, trace)
        self._outer.__exit__(kind, error, trace)


def _join_contexts(outer: _Contexts, inner: _Contexts) -> _Contexts:
    return _Joined(outer[0], inner[0]), _Joined(outer[1], inner[1])


def build_recompute_runner(
    kind: RecomputeKind,
    pack: PackFunction | None = None,
    communication: SavedCommunication | None = None,
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
        communication: results of communication that are kept; None repeats it.
    """
    if kind == "none":
        return None
    if kind == "selective":
        return _build_selective_runner(_is_saved, pack, kind, communication)
    return _build_full_runner(communication)


def _build_full_runner(communication: SavedCommunication | None) -> RecomputeRunner:
    policy = _build_policy(_build_rule(lambda _operation: False, communication))
    eager_contexts: dict[str, Any] = {}
    if communication is not None:
        eager_contexts["context_fn"] = partial(
            communication.create_contexts, communication.names, DetachedResult
        )

    def run(function: Callable[..., Any], *args: Any) -> Any:
        if torch.compiler.is_compiling():
            contexts = partial(create_selective_checkpoint_contexts, policy)
            return _checkpoint(function, *args, context_fn=contexts)
        return _checkpoint_or_raise(function, *args, **eager_contexts)

    return run
