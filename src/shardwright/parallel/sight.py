"""Which chunks of a row see which: the blocks that attention has to compute, and the masks of those that are seen in part.

A chunk's queries see all of an earlier chunk, or nothing (another document, outside the window), or some of it. What nobody sees
is not computed; what is seen whole takes no mask. Windows and chunks are numbers; of documents, the ids at the chunks' ends say
enough, because a document lies in one piece, and reading those waits for the device once in a forward pass.

Legend: B sequences, T tokens of the row, L queries, S keys, C chunks of the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from shardwright.parallel.blocks import Seen


class Sight(Enum):
    """What the queries of one chunk see of the keys of another."""

    NOTHING = "nothing"
    ALL = "all"
    CAUSAL = "causal"
    PART = "part"


class Block(NamedTuple):
    """Queries and keys by where they lie in the chunks given, and what is seen between them; never nothing.

    `own`: the queries' own chunks are among the keys, so that each query sees at least itself.
    """

    queries: slice
    keys: slice
    sight: Sight
    own: bool


@dataclass(frozen=True, eq=False)
class Row:
    """The rows of one forward pass in equal chunks.

    Attributes:
        chunk_tokens: tokens of a chunk.
        document_ids_BT: of whole rows; None is one document each.
        sharing: by chunk of queries and earlier (or the same) chunk of keys: (do they share a document in any row, are they of one
            document in every row); None without documents.
    """

    chunk_tokens: int
    document_ids_BT: Tensor | None = None
    sharing: tuple[tuple[tuple[bool, bool], ...], ...] | None = None

    @staticmethod
    def of(num_tokens: int, num_chunks: int, document_ids_BT: Tensor | None) -> Row:
        """The row and what its chunks share."""
        chunk_tokens = num_tokens // num_chunks
        if document_ids_BT is None:
            return Row(chunk_tokens)
        first_BC, last_BC = document_ids_BT[:, ::chunk_tokens], document_ids_BT[:, chunk_tokens - 1 :: chunk_tokens]
        share_CC = (first_BC[:, :, None] == last_BC[:, None, :]).any(0)
        share_CC.fill_diagonal_(True)  # whatever ends within a chunk, its tokens see themselves
        same_CC = (last_BC[:, :, None] == first_BC[:, None, :]).all(0)
        share, same = torch.stack((share_CC, same_CC)).tolist()
        sharing = tuple(tuple(zip(some, every, strict=True)) for some, every in zip(share, same, strict=True))
        return Row(chunk_tokens, document_ids_BT, sharing)

    def sight(self, query: int, key: int, window: int | None) -> Sight:
        """What chunk `query` sees of chunk `key`; a window counts the tokens that a token sees, itself included."""
        if key > query:
            return Sight.NOTHING
        share, same = (True, True) if self.sharing is None else self.sharing[query][key]
        apart, last = (query - key) * self.chunk_tokens, self.chunk_tokens - 1
        nearest, furthest = (0, last) if query == key else (apart - last, apart + last)
        if not share or (window is not None and nearest >= window):
            return Sight.NOTHING
        if not same or (window is not None and furthest >= window):
            return Sight.PART
        return Sight.CAUSAL if query == key else Sight.ALL

    def places(self, chunks: Sequence[int], device: torch.device) -> Tensor:
        """Places in the row of the tokens of these chunks."""
        each = torch.arange(self.chunk_tokens, device=device)
        return torch.cat([each + chunk * self.chunk_tokens for chunk in chunks])

    def blocks(self, queries: Sequence[int], keys: Sequence[int], window: int | None) -> list[Block]:
        """Blocks between chunks that lie one after another; those of the queries' own chunks come first."""
        sights = [[self.sight(query, key, window) for key in keys] for query in queries]
        if tuple(queries) == tuple(keys) and self._is_causal(sights):
            everything = self._slots(0, len(queries))
            return [Block(everything, everything, Sight.CAUSAL, own=True)]
        return self.own_blocks(queries, keys, window) + self.other_blocks(queries, keys, window)

    def own_blocks(self, queries: Sequence[int], keys: Sequence[int], window: int | None) -> list[Block]:
        """Each query chunk with itself, where it is among the keys."""
        slots = {chunk: self._slots(slot, slot + 1) for slot, chunk in enumerate(keys)}
        return [
            Block(self._slots(slot, slot + 1), slots[query], self.sight(query, query, window), own=True)
            for slot, query in enumerate(queries)
            if query in slots
        ]

    def other_blocks(self, queries: Sequence[int], keys: Sequence[int], window: int | None) -> list[Block]:
        """Each query chunk with those before it. Slots that see alike are joined into few large blocks."""
        blocks = []
        for slot, query in enumerate(queries):
            sights = [Sight.NOTHING if key == query else self.sight(query, key, window) for key in keys]
            for sight, run in groupby(range(len(keys)), sights.__getitem__):
                seen = list(run)
                if sight is not Sight.NOTHING:
                    blocks.append(Block(self._slots(slot, slot + 1), self._slots(seen[0], seen[-1] + 1), sight, own=False))
        return _join_queries(blocks)

    @staticmethod
    def _is_causal(sights: Sequence[Sequence[Sight]]) -> bool:
        """Whether chunks in ascending order see themselves and each other by causality alone: then they are one square."""
        wanted = ([Sight.ALL] * slot + [Sight.CAUSAL] + [Sight.NOTHING] * (len(sights) - slot - 1) for slot in range(len(sights)))
        return all(list(row) == want for row, want in zip(sights, wanted, strict=True))

    def _slots(self, first: int, end: int) -> slice:
        return slice(first * self.chunk_tokens, end * self.chunk_tokens)

    def seen(self, block: Block, query_places_L: Tensor, key_places_S: Tensor, window: int | None) -> Seen:
        """The block as the kernels take it; a mask is made here, and lives as long as its block is computed."""
        q_L, k_S = query_places_L[block.queries], key_places_S[block.keys]
        visible_BLS = None
        if block.sight is Sight.PART:
            back_LS = q_L[:, None] - k_S
            visible_BLS = (back_LS >= 0)[None] if window is None else ((back_LS >= 0) & (back_LS < window))[None]
            if self.document_ids_BT is not None:
                ids_BT = self.document_ids_BT
                visible_BLS = visible_BLS & (ids_BT[:, q_L][:, :, None] == ids_BT[:, k_S][:, None, :])
        return Seen(block.sight is Sight.CAUSAL, visible_BLS, block.queries, k_S)


def _join_queries(blocks: Sequence[Block]) -> list[Block]:
    """Neighbouring queries that see all of the same keys, in one block."""
    joined: list[Block] = []
    for block in sorted(blocks, key=lambda block: (block.keys.start, block.keys.stop, block.queries.start)):
        before = joined[-1] if joined else None
        if (
            before is not None
            and block.sight is before.sight is Sight.ALL
            and block.keys == before.keys
            and block.queries.start == before.queries.stop
        ):
            joined[-1] = before._replace(queries=slice(before.queries.start, block.queries.stop))
        else:
            joined.append(block)
    return joined
