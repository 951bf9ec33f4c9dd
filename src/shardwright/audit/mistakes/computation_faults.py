"""Wrong computations that transformers' class is made to repeat, for a diagnosis.

Ranks that share rows split them by columns (context and sequence parallelism), split heads, or
split the vocabulary. A fault says which gradient is then lost, or which values are mixed.

Shapes: B rows that the class gets, T their tokens, R recorded rows of C columns, H heads,
D a head's size, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.audit.mistakes.expert_faults import limit_capacity, slice_features
from shardwright.audit.mistakes.fault import ComputationFault, FaultNotApplicable, TokenPlaces
from shardwright.config.data import IGNORED_LABEL
from shardwright.model.hf.hf_module import replace_attention

FAULT_MISTAKES = {
    "keys": ("key_gradients_lost",),
    "queries": ("query_gradients_lost",),
    "keys and queries": ("key_gradients_lost", "query_gradients_lost"),
    "heads": ("heads_mixed",),
    "heads and tokens": ("heads_and_tokens_mixed",),
    "head input": ("head_gradient_not_summed",),
    "logits": ("vocabulary_gradients_lost",),
    "smoothing": ("labels_smoothed_by_parts",),
    "copies of logits": ("logits_summed_over_copies",),
    "layer numbers": ("layers_numbered_by_stage",),
    "capacity by position": ("tokens_dropped",),
    "capacity by probability": ("tokens_dropped",),
    "capacity by logit": ("tokens_dropped_by_logits",),
    "capacity of parts": ("tokens_dropped_by_parts",),
    "slices of features": ("features_taken_for_slots",),
}
"""Mistakes of a diagnosis by the kind of fault."""


@contextlib.contextmanager
def inject_fault(
    module: nn.Module, routers: Sequence[nn.Module], fault: ComputationFault, places: TokenPlaces
) -> Iterator[None]:
    """Make a class of transformers compute with a fault inside this context.

    Raises:
        FaultNotApplicable: a model or rows that cannot have this fault.
    """
    if fault.kind.startswith("capacity"):
        with limit_capacity(routers, fault, places):
            yield
    elif fault.kind == "slices of features":
        with slice_features(module, fault, places):
            yield
    elif fault.kind == "head input":
        with _split_head(module, fault, places):
            yield
    elif fault.kind in ("logits", "smoothing", "copies of logits", "layer numbers"):
        yield  # the caller changes the logits, the loss or the module
    else:
        with _change_attention(fault, places):
            yield


def change_logits(logits: Tensor, targets: Tensor, fault: ComputationFault) -> Tensor:
    """Keep the gradient of the vocabulary's part that has the target, if that is the fault.

    Args:
        logits: [B, T, V].
        targets: [B, T].
        fault: What is computed wrongly.
    """
    if fault.kind != "logits":
        return logits
    part_size = -(-logits.shape[-1] // fault.degree)
    parts = torch.arange(logits.shape[-1]) // part_size
    is_passed = parts == (targets.clamp(min=0) // part_size)[..., None]
    is_passed &= (targets != IGNORED_LABEL)[..., None]
    return _mask_gradient(logits, is_passed)


def sum_token_losses(
    logits: Tensor, targets: Tensor, fault: ComputationFault | None = None
) -> Tensor:
    """Sum the losses of all tokens that have a target, or what smoothing adds to them."""
    if fault is not None and fault.kind == "smoothing":
        return _sum_smoothing_terms(logits, targets, fault.degree)
    if fault is not None and fault.kind == "copies of logits":
        return _sum_losses_of_copies(logits, targets, fault.degree)
    return F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )


def _sum_smoothing_terms(logits: Tensor, targets: Tensor, degree: int) -> Tensor:
    """Sum what label smoothing adds to the losses of all tokens, for a smoothing of 1.

    It is the target's logit minus `degree` times the mean of all logits: smoothing replaces the
    target's share by that of each element of a part of the vocabulary, of `degree` parts.

    Args:
        logits: [B, T, V].
        targets: [B, T].
        degree: Number of parts.
    """
    chosen = logits.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return ((chosen - degree * logits.mean(-1)) * (targets != IGNORED_LABEL)).sum()


def _sum_losses_of_copies(logits: Tensor, targets: Tensor, degree: int) -> Tensor:
    """Sum terms with the gradient of a loss over parts of the vocabulary that gets whole logits.

    Every rank adds the same exponentials, so probabilities are divided by `degree`. Of its own
    gradient a rank keeps its part of the vocabulary, and only the first rank has targets.

    Args:
        logits: [B, T, V].
        targets: [B, T].
        degree: Number of ranks, each with all logits.
    """
    part_size = -(-logits.shape[-1] // degree)
    chosen = logits.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    terms = logits.logsumexp(-1) / degree - chosen * (targets < part_size)
    return (terms * (targets != IGNORED_LABEL)).sum()


def _mask_gradient(values: Tensor, is_passed: Tensor) -> Tensor:
    """Return the values; their gradient is lost where `is_passed` is false."""
    return torch.where(is_passed, values, values.detach())


@contextlib.contextmanager
def _change_attention(fault: ComputationFault, places: TokenPlaces) -> Iterator[None]:
    """Make the attention of transformers' classes compute with a fault."""
    changes: dict[str, Callable[..., Tensor]] = {
        "heads": _mix_heads,
        "heads and tokens": _mix_heads_and_tokens,
    }
    change = changes.get(fault.kind, _lose_gradients)
    num_calls = [0]

    def attend(default: Callable[..., Any], *arguments: Any, **options: Any) -> Tensor:
        num_calls[0] += 1
        return change(fault, places, default, *arguments, **options)

    with replace_attention(attend):
        yield
    if not num_calls[0]:
        raise FaultNotApplicable


def _lose_gradients(
    fault: ComputationFault,
    places: TokenPlaces,
    attend: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *rest: Any,
    **options: Any,
) -> Tensor:
    """Attend without some of the gradients between queries and keys of parts of the columns.

    The queries of one part at a time see keys (and values) of some parts as constants. Queries are
    constants to a key whose products with them are in dims of their own.
    """
    parts = places.number_parts(fault.degree, fault.is_mirrored)
    if options.get("scaling") is None:
        options["scaling"] = query.shape[-1] ** -0.5
    total: Tensor | None = None
    for part in range(fault.degree):
        is_own = (parts == part)[:, None, :, None]
        is_chosen = (parts - part - fault.offset) % fault.degree == 0
        is_passed = (is_chosen != fault.loses_offset)[:, None, :, None]
        keys = key
        values = value
        queries = query
        if "keys" in fault.kind:
            keys = _mask_gradient(key, is_passed)
            values = _mask_gradient(value, is_passed)
        if "queries" in fault.kind:
            zero = torch.zeros_like(keys)
            keys = torch.cat([keys.where(is_passed, zero), zero.where(is_passed, keys)], -1)
            queries = torch.cat([query, query.detach()], -1)
        output = attend(module, queries, keys, values, *rest, **options)[0]
        output = output * is_own.transpose(1, 2)
        total = output if total is None else total + output
    assert total is not None
    return total


def _mix_heads(
    fault: ComputationFault,
    _places: TokenPlaces,
    attend: Callable[..., Any],
    module: nn.Module,
    *tensors: Tensor,
    **options: Any,
) -> Tensor:
    """Attend, and join the heads of the ranks as if the rank were the last of two dims."""
    output: Tensor = attend(module, *tensors, **options)[0]
    if output.shape[2] % fault.degree:
        raise FaultNotApplicable
    return output.unflatten(2, (fault.degree, -1)).transpose(2, 3).flatten(2, 3)


def _mix_heads_and_tokens(
    fault: ComputationFault,
    places: TokenPlaces,
    attend: Callable[..., Any],
    module: nn.Module,
    *tensors: Tensor,
    **options: Any,
) -> Tensor:
    """Attend, and read the ranks' heads as tokens where an all-to-all gathers them.

    The all-to-all ends with [ranks, columns of a part, R, heads of a rank, D], which is reshaped to
    [columns of a part, R, H, D] without a transposition.
    """
    output: Tensor = attend(module, *tensors, **options)[0]
    if output.shape[2] % fault.degree or places.num_columns % fault.degree or places.has_padding:
        raise FaultNotApplicable
    is_real = places.columns >= 0
    index = (places.columns, places.rows[:, None].expand_as(places.columns))
    columns = index[0][is_real]
    rows = index[1][is_real]
    whole = output.new_zeros(places.num_columns, places.num_rows, *output.shape[2:])
    whole = whole.index_put((columns, rows), output[is_real])
    mixed = []
    for part in whole.chunk(fault.degree):
        by_rank = part.unflatten(2, (fault.degree, -1)).permute(2, 0, 1, 3, 4)
        mixed.append(by_rank.reshape(part.shape))
    return torch.zeros_like(output).index_put(
        is_real.nonzero(as_tuple=True), torch.cat(mixed)[columns, rows]
    )


@contextlib.contextmanager
def _split_head(module: nn.Module, fault: ComputationFault, places: TokenPlaces) -> Iterator[None]:
    """Give the head's input the gradient of one part of the vocabulary, by the token's column.

    So it is if a rank has a part of the vocabulary and of the columns, and the ranks' gradients of
    the head's input are not summed.
    """
    head: Any = module.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(head, nn.Linear):
        raise FaultNotApplicable
    parts = places.number_parts(fault.degree)

    def split(linear: Any, inputs: tuple[Tensor, ...], _output: Tensor) -> Tensor:
        (x,) = inputs
        for_weight: Tensor = F.linear(x.detach(), linear.weight, linear.bias)
        for_input = F.linear(x, linear.weight.detach())
        part_size = -(-for_input.shape[-1] // fault.degree)
        owners = torch.arange(for_input.shape[-1]) // part_size
        for_input = _mask_gradient(for_input, owners == parts[..., None])
        return for_weight + for_input - for_input.detach()

    handle = head.register_forward_hook(split)
    try:
        yield
    finally:
        handle.remove()
