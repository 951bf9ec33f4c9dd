"""Visibility between chunks of a row: attention tiles to compute, masks of partly visible ones.

A chunk's queries see all of an earlier chunk, nothing of it (another document, outside the
window), or some of it. Invisible tiles are not computed; fully visible ones need no mask.
Windows and chunks are known on the host. For documents the ids at the ends of the chunks are
enough, because a document is contiguous; reading them makes the host wait for the device once
per forward pass.

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
    """Visibility of one chunk's keys to another chunk's queries."""

    NOTHING = "nothing"
    ALL = "all"
    CAUSAL = "causal"
    PART = "part"


class Block(NamedTuple):
    """Tile of queries and keys, as slices of the given chunks, with its visibility.

    Tiles of which nothing is visible do not exist. If `own`, the queries' own chunks are among
    the keys, so that each query sees at least itself.
    """

    queries: slice
    keys: slice
    sight: Sight
    own: bool


@dataclass(frozen=True, eq=False)
class Row:
    """The rows of one forward pass, split into equal chunks.

    Attributes:
        chunk_tokens: tokens of a chunk.
        document_ids_BT: document ids of whole rows; None if each row is one document.
        sharing: by chunk of queries and earlier (or the same) chunk of keys: (do they share a
            document in any row, are they one document in every row); None without documents.
    """

    chunk_tokens: int
    document_ids_BT: Tensor | None = None
    sharing: tuple[tuple[tuple[bool, bool], ...], ...] | None = None

    @staticmethod
    def of(num_tokens: int, num_chunks: int, document_ids_BT: Tensor | None) -> Row:
        """Build the chunks of rows and compare the documents at their ends."""
        chunk_tokens = num_tokens // num_chunks
        if document_ids_BT is None:
            return Row(chunk_tokens)
        first_BC = document_ids_BT[:, ::chunk_tokens]
        last_BC = document_ids_BT[:, chunk_tokens - 1 :: chunk_tokens]
        share_CC = (first_BC[:, :, None] == last_BC[:, None, :]).any(0)
        share_CC.fill_diagonal_(True)  # whatever ends within a chunk, its tokens see themselves
        same_CC = (last_BC[:, :, None] == first_BC[:, None, :]).all(0)
        share, same = torch.stack((share_CC, same_CC)).tolist()
        sharing = tuple(
            tuple(zip(in_any_row, in_every_row, strict=True)) for in_any_row, in_every_row in zip(share, same, strict=True)
        )
        return Row(chunk_tokens, document_ids_BT, sharing)

    def sight(self, query: int, key: int, window: int | None) -> Sight:
        """Find the visibility of chunk `key` to the queries of chunk `query`.

        A window counts the tokens that a token sees, itself included.
        """
        if key > query:
            return Sight.NOTHING
        share, same = (True, True) if self.sharing is None else self.sharing[query][key]
        distance = (query - key) * self.chunk_tokens
        last_token = self.chunk_tokens - 1
        nearest, furthest = (0, last_token) if query == key else (distance - last_token, distance + last_token)
        if not share or (window is not None and nearest >= window):
            return Sight.NOTHING
        if not same or (window is not None and furthest >= window):
            return Sight.PART
        return Sight.CAUSAL if query == key else Sight.ALL

    def places(self, chunks: Sequence[int], device: torch.device) -> Tensor:
        """Return the positions in the row of these chunks' tokens."""
        offsets = torch.arange(self.chunk_tokens, device=device)
        return torch.cat([offsets + chunk * self.chunk_tokens for chunk in chunks])

    def blocks(self, queries: Sequence[int], keys: Sequence[int], window: int | None) -> list[Block]:
        """List the tiles between concatenated chunks; those of the queries' own chunks first."""
        visibilities = [[self.sight(query, key, window) for key in keys] for query in queries]
        if tuple(queries) == tuple(keys) and self._is_causal(visibilities):
            everything = self._slots(0, len(queries))
            return [Block(everything, everything, Sight.CAUSAL, own=True)]
        return self.own_blocks(queries, keys, window) + self.other_blocks(queries, keys, window)

    def own_blocks(self, queries: Sequence[int], keys: Sequence[int], window: int | None) -> list[Block]:
        """List the tiles of each query chunk with itself, if it is among the keys."""
        slots = {chunk: self._slots(slot, slot + 1) for slot, chunk in enumerate(keys)}
        return [
            Block(self._slots(slot, slot + 1), slots[query], self.sight(query, query, window), own=True)
            for slot, query in enumerate(queries)
            if query in slots
        ]

    def other_blocks(self, queries: Sequence[int], keys: Sequence[int], window: int | None) -> list[Block]:
        """List the tiles of each query chunk with earlier chunks; equal neighbours are joined."""
        blocks = []
        for slot, query in enumerate(queries):
            visibilities = [Sight.NOTHING if key == query else self.sight(query, key, window) for key in keys]
            for visibility, run in groupby(range(len(keys)), visibilities.__getitem__):
                joined_slots = list(run)
                if visibility is not Sight.NOTHING:
                    blocks.append(
                        Block(
                            self._slots(slot, slot + 1), self._slots(joined_slots[0], joined_slots[-1] + 1), visibility, own=False
                        )
                    )
        return _join_queries(blocks)

    @staticmethod
    def _is_causal(sights: Sequence[Sequence[Sight]]) -> bool:
        """True if ascending chunks see each other by causality alone and form one square tile."""
        expected_rows = (
            [Sight.ALL] * slot + [Sight.CAUSAL] + [Sight.NOTHING] * (len(sights) - slot - 1) for slot in range(len(sights))
        )
        return all(list(row) == expected for row, expected in zip(sights, expected_rows, strict=True))

    def _slots(self, first: int, end: int) -> slice:
        return slice(first * self.chunk_tokens, end * self.chunk_tokens)

    def seen(self, block: Block, query_places_L: Tensor, key_places_S: Tensor, window: int | None) -> Seen:
        """Build a tile's visibility; a mask exists only while its tile is computed."""
        q_L = query_places_L[block.queries]
        k_S = key_places_S[block.keys]
        visible_BLS = None
        if block.sight is Sight.PART:
            distance_LS = q_L[:, None] - k_S
            visible_BLS = (distance_LS >= 0)[None] if window is None else ((distance_LS >= 0) & (distance_LS < window))[None]
            if self.document_ids_BT is not None:
                ids_BT = self.document_ids_BT
                visible_BLS = visible_BLS & (ids_BT[:, q_L][:, :, None] == ids_BT[:, k_S][:, None, :])
        return Seen(block.sight is Sight.CAUSAL, visible_BLS, block.queries, k_S)


def _join_queries(blocks: Sequence[Block]) -> list[Block]:
    """Join tiles of adjacent queries that see all of the same keys."""
    joined: list[Block] = []
    for block in sorted(blocks, key=lambda block: (block.keys.start, block.keys.stop, block.queries.start)):
        previous = joined[-1] if joined else None
        if (
            previous is not None
            and block.sight is previous.sight is Sight.ALL
            and block.keys == previous.keys
            and block.queries.start == previous.queries.stop
        ):
            joined[-1] = previous._replace(queries=slice(previous.queries.start, block.queries.stop))
        else:
            joined.append(block)
    return joined
