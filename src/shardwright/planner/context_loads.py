"""Attention work of context-parallel ranks that share packed rows.

A query sees its own document only, so ranks with long documents work while others wait. The work
of a chunk of the row is the number of keys that its queries see, and the chunks of a rank are those
that a run assigns (`layout.context_method`, `parallel.context.row_split`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from shardwright.layout.context_method import assign_chunks, count_chunks_by_work
from shardwright.placement.row_assignment import assign_by_work
from shardwright.planner.candidate import AttentionLoads, Candidate
from shardwright.planner.memory.attention_activations import resolve_context_method
from shardwright.planner.model_costs import ModelFacts

DocumentLengths = Sequence[Sequence[int]]
"""Lengths of the documents of each row of a micro-batch, in order; all rows are equally long."""


class ContextWork(NamedTuple):
    """Visible keys of all queries of a context rank in one layer: of the busiest rank, and the mean
    of all ranks. `num_layers` of the model have this window."""

    window: int | None
    num_layers: int
    busiest: int
    mean: float


def has_uneven_contexts(facts: ModelFacts, candidate: Candidate) -> bool:
    """Return True if context ranks may have unequal attention work (not with
    `ulysses`)."""
    return candidate.layout.cp > 1 and resolve_context_method(facts, candidate) != "ulysses"


def count_chunk_keys(documents: Sequence[int], window: int | None, num_chunks: int) -> list[int]:
    """Count the keys that the queries of each chunk of a packed row see, in one layer.

    Args:
        documents: lengths; `num_chunks` divides their sum.
        window: tokens that a token sees, itself included; None for all of its document.

    >>> count_chunk_keys([3, 1], None, 2), count_chunk_keys([4], 2, 2)
    ([3, 4], [3, 4])
    """
    firsts = list(accumulate(documents, initial=0))
    earlier = list(accumulate((_sum_visible(each, window) for each in documents), initial=0))
    chunk_tokens = firsts[-1] // num_chunks
    before_chunk = []
    for token in range(0, firsts[-1] + 1, chunk_tokens):
        document = bisect_right(firsts, token) - 1
        before_chunk.append(earlier[document] + _sum_visible(token - firsts[document], window))
    return [upto - before for before, upto in pairwise(before_chunk)]


def _sum_visible(num_tokens: int, window: int | None) -> int:
    """Sum the keys that the first tokens of a document see."""
    num_growing = num_tokens if window is None else min(num_tokens, window)
    triangle = num_growing * (num_growing + 1) // 2
    return triangle + (0 if window is None else (num_tokens - num_growing) * window)


def assign_context_chunks(
    facts: ModelFacts, candidate: Candidate, documents: DocumentLengths
) -> tuple[tuple[int, ...], ...]:
    """Return the chunks of the rows that each context rank has, as a run assigns them."""
    degree = candidate.layout.cp
    if candidate.layout.cp_split == "zigzag":
        return assign_chunks(resolve_context_method(facts, candidate), degree)
    num_chunks = count_chunks_by_work(degree, sum(documents[0]))
    work = [0] * num_chunks
    for window, num_layers in Counter(facts.shape.windows).items():
        for chunk, keys in enumerate(_sum_rows(documents, window, num_chunks)):
            work[chunk] += num_layers * keys
    return tuple(tuple(sorted(chunks)) for chunks in assign_by_work(work, degree))


def count_context_work(
    facts: ModelFacts, candidate: Candidate, documents: DocumentLengths
) -> tuple[ContextWork, ...]:
    """Count the attention work of the context ranks, by window of the layers. Empty without
    documents, and if all ranks have the same work."""
    if not documents or not has_uneven_contexts(facts, candidate):
        return ()
    chunks_by_rank = assign_context_chunks(facts, candidate, documents)
    num_chunks = sum(map(len, chunks_by_rank))
    works = []
    for window, num_layers in Counter(facts.shape.windows).items():
        keys = _sum_rows(documents, window, num_chunks)
        by_rank = [sum(keys[chunk] for chunk in chunks) for chunks in chunks_by_rank]
        works.append(
            ContextWork(window, num_layers, max(by_rank), sum(by_rank) / candidate.layout.cp)
        )
    return tuple(works)


def compute_attention_loads(works: Sequence[ContextWork]) -> AttentionLoads:
    """Compute the busiest rank's work divided by the mean, for each window that layers have."""
    return tuple((work.window, work.busiest / work.mean) for work in works)


def compute_mean_load(works: Sequence[ContextWork]) -> float:
    """Compute the work of the busiest rank of each layer over the mean, of all layers together."""
    mean = sum(work.num_layers * work.mean for work in works)
    return sum(work.num_layers * work.busiest for work in works) / mean if works else 1.0


def _sum_rows(documents: DocumentLengths, window: int | None, num_chunks: int) -> list[int]:
    """Sum the visible keys of each chunk over the rows."""
    by_row = (count_chunk_keys(row, window, num_chunks) for row in documents)
    return [sum(keys) for keys in zip(*by_row, strict=True)]
