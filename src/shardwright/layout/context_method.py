"""Split of a row over context ranks, and the choice of the attention method. No torch.

A row of T tokens is split into equal chunks. A causal query in the last chunk sees the whole
row, one in the first sees almost nothing; so for `ring` and `all_gather` a rank has one chunk
from the front and its mirror image from the back (zigzag), which balances the work. For
`ulysses` every rank computes whole rows of some heads and has one chunk of tokens.

In packed rows a query sees its own document only. With `cp_split: work` a row has more chunks.
`parallel.context.row_split` assigns them to ranks so that all ranks have the same attention work.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm
from typing import Literal, Protocol

from shardwright.errors import LayoutError
from shardwright.layout.degrees import Layout

ContextMethod = Literal["ring", "all_gather", "ulysses"]

MAX_ULYSSES_RANKS = 8
"""Largest tp x cp (adjacent ranks) for which `auto` chooses the all-to-all: the size of most
nodes."""


MAX_CHUNKS_PER_RANK = 8
"""Chunks of each rank with `cp_split: work`. In simulated packed rows (8 ranks, 16,384 tokens,
documents of 1,000 to 16,000) the slowest rank is then within 7% of the mean."""
_MIN_CHUNK_TOKENS = 8
"""Fewest tokens of such a chunk: smaller tiles take longer to start than to compute."""


class AttentionSizes(Protocol):
    """Sizes of a model's attention on which the method depends; a `ModelShape` has them."""

    @property
    def num_heads(self) -> int:
        """Query heads of a layer."""

    @property
    def num_kv_heads(self) -> int:
        """Key-value heads of a layer."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Attention window of each layer, in tokens; None for a layer without one."""


@dataclass(frozen=True)
class ContextChoice:
    """The method that a layout's `cp_method` resolves to, and the reason in one line."""

    method: ContextMethod
    reason: str


def assign_chunks(method: ContextMethod, degree: int) -> tuple[tuple[int, ...], ...]:
    """Return the chunks of the row that each of `degree` ranks has, in its order.

    >>> assign_chunks("ring", 2), assign_chunks("ulysses", 2)
    (((0, 3), (1, 2)), ((0,), (1,)))
    """
    if method == "ulysses":
        return tuple((rank,) for rank in range(degree))
    return tuple((rank, 2 * degree - 1 - rank) for rank in range(degree))


def count_chunks(method: ContextMethod, degree: int) -> int:
    """Return the number of equal chunks of a row."""
    return degree if method == "ulysses" else 2 * degree


def count_chunks_by_work(degree: int, num_tokens: int) -> int:
    """Return the number of equal chunks of a row of `num_tokens` with `cp_split: work`.

    >>> count_chunks_by_work(2, 4096), count_chunks_by_work(2, 24)
    (16, 4)
    """
    for per_rank in (MAX_CHUNKS_PER_RANK, MAX_CHUNKS_PER_RANK // 2):
        num_chunks = per_rank * degree
        if num_tokens % num_chunks == 0 and num_tokens // num_chunks >= _MIN_CHUNK_TOKENS:
            return num_chunks
    return 2 * degree


def choose_context_method(
    layout: Layout, sizes: AttentionSizes, sequence_length: int
) -> ContextChoice:
    """Resolve `cp_method` for a model and rows of `sequence_length` tokens."""
    if layout.cp_method != "auto":
        return ContextChoice(layout.cp_method, "set by layout.cp_method")
    cp = layout.cp
    ranks = layout.tp * layout.cp
    problem = _find_head_problem(layout, sizes)
    if problem is None and sizes.num_kv_heads >= ranks <= MAX_ULYSSES_RANKS:
        return ContextChoice(
            "ulysses", f"heads divide by {cp}, and the {ranks} ranks of tp x cp fit in one node"
        )
    why_not = (
        f"{ranks} ranks of tp x cp may not fit in one node"
        if ranks > MAX_ULYSSES_RANKS
        else f"heads are not divisible by {cp}"
    )
    chunk = sequence_length // (2 * cp)
    num_narrow = sum(window is not None and window <= chunk for window in sizes.windows)
    if 2 * num_narrow > len(sizes.windows):
        reason = (
            f"most layers have windows of at most a chunk ({chunk} tokens), too little work to "
            "overlap a ring's transfers with"
        )
        return ContextChoice("all_gather", f"{why_not}; {reason}")
    return ContextChoice("ring", f"{why_not}; transfers overlap with attention")


def check_context_parallel(
    layout: Layout, sizes: AttentionSizes, sequence_length: int
) -> ContextChoice:
    """Return the context method, after checking that it can split this model's heads and rows.

    Raises:
        LayoutError: the degree does not divide heads or tokens; names the nearest value that
            does.
    """
    choice = choose_context_method(layout, sizes, sequence_length)
    if layout.cp == 1:
        return choice
    if layout.cp_split == "work" and choice.method == "ulysses":
        raise LayoutError(
            "only ring and all_gather split rows by work, and the method is ulysses "
            f"({choice.reason})",
            field="layout.cp_split",
            got="work",
            allowed="zigzag",
            remedy="Remove it (ranks of ulysses do the same work), or set cp_method: ring",
        )
    if choice.method == "ulysses":
        problem = _find_head_problem(layout, sizes)
        if problem is not None:
            smaller = range(min(layout.cp - 1, sizes.num_heads // layout.tp), 0, -1)
            nearest = next(
                cp for cp in smaller if _find_head_problem(replace(layout, cp=cp), sizes) is None
            )
            raise LayoutError(
                problem,
                field="layout.cp",
                got=layout.cp,
                remedy=f"The nearest degree that works is {nearest}; "
                "cp_method ring and all_gather do not split heads",
            )
    check_row_length(choice.method, layout, sequence_length)
    return choice


def check_row_length(method: ContextMethod, layout: Layout, num_tokens: int) -> None:
    """Check that a row splits into equal chunks (of equal shares, under sequence parallelism).

    Raises:
        LayoutError: it does not; names the nearest lengths that do.
    """
    divisor = count_chunks(method, layout.cp)
    divisor_text = "cp" if method == "ulysses" else "2 x cp"
    if layout.tp > 1 and layout.sequence_parallel:
        divisor = lcm(divisor, layout.cp * layout.tp)
        divisor_text += ", and by cp x tp under sequence parallelism: by"
    if num_tokens % divisor == 0 and num_tokens > 0:
        return
    below = num_tokens // divisor * divisor
    above = -(-max(num_tokens, 1) // divisor) * divisor
    raise LayoutError(
        f"{method} splits a row into equal chunks, and {num_tokens} tokens are not divisible by "
        f"{divisor_text} = {divisor}",
        field="training.sequence_length",
        got=num_tokens,
        allowed=f"a multiple of {divisor}",
        remedy=f"The nearest that works is {below or above}" + (f" or {above}" if below else ""),
    )


def _find_head_problem(layout: Layout, sizes: AttentionSizes) -> str | None:
    """Return why the all-to-all cannot split the heads of a tensor-parallel rank, or None."""
    num_local_heads = sizes.num_heads // layout.tp
    num_local_kv_heads = max(1, sizes.num_kv_heads // layout.tp)
    per_rank = "" if layout.tp == 1 else f" (on each of {layout.tp} tensor-parallel ranks)"
    if num_local_heads % layout.cp:
        return (
            f"ulysses splits heads, and {num_local_heads} heads{per_rank} are not divisible by "
            f"{layout.cp} context ranks"
        )
    if num_local_kv_heads % layout.cp and layout.cp % num_local_kv_heads:
        return (
            f"ulysses cannot distribute {num_local_kv_heads} key-value heads{per_rank} evenly over "
            f"{layout.cp} context ranks"
        )
    return None
