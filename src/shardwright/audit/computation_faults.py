"""Wrong computations that transformers' class is made to repeat, for a diagnosis.

Ranks that share rows split them by columns (context and sequence parallelism), split heads, or
split the vocabulary. A fault says which gradient is then lost, or which values are mixed.

Shapes: B rows that the class gets, T their tokens, R recorded rows of C columns, H heads,
D a head's size, N tokens of a micro-batch, E experts, K experts of a token, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.config.data import IGNORED_LABEL
from shardwright.model.hf.hf_module import replace_attention


class FaultNotApplicable(Exception):
    """A fault that this model or these rows cannot have."""


class TokenPlaces(NamedTuple):
    """Places, in the recorded rows, of the tokens of the rows that the class gets.

    Attributes:
        rows: Recorded row of each of the class's rows, [B].
        columns: Column of each token, [B, T]; -1 where the class's row is padded.
        num_rows: R.
        num_columns: C.
        has_padding: True if recorded rows have padding, which the class does not get.
    """

    rows: Tensor
    columns: Tensor
    num_rows: int
    num_columns: int
    has_padding: bool

    def number_parts(self, degree: int, is_mirrored: bool = False) -> Tensor:
        """Number the part of the columns that each token is in, [B, T].

        Columns are split into `degree` pieces; if `is_mirrored` into twice as many, of which a part
        has one and its mirror image from the end.
        """
        num_pieces = degree * (2 if is_mirrored else 1)
        size = -(-self.num_columns // num_pieces)
        piece = self.columns.clamp(min=0) // size
        return torch.minimum(piece, num_pieces - 1 - piece) if is_mirrored else piece


@dataclass(frozen=True)
class ComputationFault:
    """A wrong computation of ranks that share rows, or of experts with a capacity.

    `kind` is a key of `FAULT_MISTAKES`; `degree` the number of ranks that split columns, heads or
    the vocabulary; `is_mirrored` whether a rank has a piece and its mirror image.

    Where gradients between queries and keys are lost, those between queries of part n and keys of
    part n + `offset` are the only ones that are kept, or lost if `loses_offset`.

    The other fields belong to experts: the tokens of a micro-batch that an expert takes are at
    most `capacity_factor` times the mean, chosen in an order; `renormalises` scales the weights of
    the experts that are left to a sum of 1.
    """

    kind: str
    degree: int = 1
    is_mirrored: bool = False
    offset: int = 0
    loses_offset: bool = False
    capacity_factor: float = 0.0
    renormalises: bool = False

    def describe(self) -> str:
        """Return the settings in words."""
        if self.capacity_factor:
            return f"capacity factor {self.capacity_factor:g}"
        if self.kind not in ("keys", "queries", "keys and queries"):
            return f"{self.degree} ranks"
        unit = "pair" if self.is_mirrored else "piece"
        pieces = f"{self.degree} {'pairs of mirrored pieces' if self.is_mirrored else 'pieces'}"
        owner = f"{unit} n + {self.offset}" if self.offset else f"{unit} n"
        verb = "lost" if self.loses_offset else "left"
        return (
            f"rows in {pieces}: of queries in {unit} n, gradients with keys in {owner} are {verb}"
        )


FAULT_MISTAKES = {
    "keys": ("key_gradients_lost",),
    "queries": ("query_gradients_lost",),
    "keys and queries": ("key_gradients_lost", "query_gradients_lost"),
    "heads": ("heads_mixed",),
    "heads and tokens": ("heads_and_tokens_mixed",),
    "head input": ("head_gradient_not_summed",),
    "logits": ("vocabulary_gradients_lost",),
    "smoothing": ("labels_smoothed_by_parts",),
    "capacity by position": ("tokens_dropped",),
    "capacity by probability": ("tokens_dropped",),
    "capacity by logit": ("tokens_dropped_by_logits",),
    "capacity of parts": ("tokens_dropped_by_parts",),
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
        with _limit_capacity(routers, fault, places):
            yield
    elif fault.kind == "head input":
        with _split_head(module, fault, places):
            yield
    elif fault.kind in ("logits", "smoothing"):
        yield
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


@contextlib.contextmanager
def _limit_capacity(
    routers: Sequence[nn.Module], fault: ComputationFault, places: TokenPlaces
) -> Iterator[None]:
    """Drop tokens that exceed the capacity of an expert: their weight becomes 0."""

    def limit(_router: nn.Module, _inputs: Any, output: Any) -> Any:
        if not (isinstance(output, tuple) and len(output) == 3):
            raise FaultNotApplicable
        logits, weights, experts = output
        if logits.shape[0] != places.columns.numel() or weights.shape != experts.shape:
            raise FaultNotApplicable
        fits = _choose_tokens(fault, places, logits.detach(), experts).gather(1, experts)
        weights = weights * fits
        if fault.renormalises:
            smallest = torch.finfo(weights.dtype).eps
            weights = weights / weights.sum(1, keepdim=True).clamp(min=smallest)
        return logits, weights, experts

    if not routers or places.has_padding:
        raise FaultNotApplicable
    handles = [router.register_forward_hook(limit) for router in routers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _choose_tokens(
    fault: ComputationFault, places: TokenPlaces, logits: Tensor, experts: Tensor
) -> Tensor:
    """Return True where an expert takes a token, [N, E].

    Args:
        fault: The order of tokens, and the capacity.
        places: Places of the N tokens.
        logits: [N, E].
        experts: Experts of each token, [N, K].
    """
    is_real = places.columns.flatten() >= 0
    is_chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts, True)
    is_chosen &= is_real[:, None]
    num_tokens = places.num_rows * places.num_columns
    mean = num_tokens * experts.shape[1] / logits.shape[1]
    capacity = max(1, int(-(-fault.capacity_factor * mean // 1)))
    if fault.kind in ("capacity by position", "capacity of parts"):
        order = (places.rows[:, None] * places.num_columns + places.columns).flatten()
        order = torch.where(is_real, order, num_tokens).argsort(stable=True)
        numbers = torch.zeros_like(logits, dtype=torch.int64)
        if fault.kind == "capacity by position":
            numbers[order] = is_chosen[order].cumsum(0) - 1
            return is_chosen & (numbers < capacity)
        parts = places.number_parts(fault.degree).flatten()
        for part in range(fault.degree):
            is_part = is_chosen & (parts == part)[:, None]
            numbers[order] = torch.where(
                is_part[order], is_part[order].cumsum(0) - 1, numbers[order]
            )
        return is_chosen & (numbers < -(-capacity // fault.degree))
    scores = logits if fault.kind == "capacity by logit" else logits.softmax(1)
    # Tokens of other experts have score 0, as where chosen scores are scattered into zeros.
    scores = torch.where(is_chosen, scores, 0.0)
    scores[~is_real] = -torch.inf
    best = scores.topk(min(capacity, int(is_real.sum())), dim=0).indices
    return is_chosen & torch.zeros_like(is_chosen).scatter(0, best, True)
