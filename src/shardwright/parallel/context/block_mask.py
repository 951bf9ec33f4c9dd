"""Visibility between chunks of a row: attention tiles to compute, masks of partly visible ones.

A chunk's queries see all of an earlier chunk, nothing of it (another document, outside the
window), or some of it. Invisible tiles are not computed; fully visible ones need no mask.
Windows and chunks are known on the host. For documents the ids at the ends of the chunks are
enough, because a document is contiguous. They are read in host memory; if the host does not have
them, it waits for the device once per forward pass.

Legend: B sequences, T tokens of the row, L queries, S keys, C chunks of the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardwright.parallel.context.attention_kernels import TileVisibility


class Visibility(Enum):
    """Visibility of one chunk's keys to another chunk's queries."""

    NONE = "nothing"
    FULL = "all"
    CAUSAL = "causal"
    PARTIAL = "part"


class AttentionTile(NamedTuple):
    """Tile of queries and keys, as slices of the given chunks, with its visibility.

    Tiles of which nothing is visible do not exist. If `has_self_keys`, the queries' own chunks are
    among the keys, so that each query sees at least itself.
    """

    query_slice: slice
    key_slice: slice
    visibility: Visibility
    has_self_keys: bool


@dataclass(eq=False)
class RowChunks:
    """The rows of one forward pass, split into equal chunks that ranks share.

    Not frozen: the compiler would specialise compiled code to every field of a frozen dataclass.

    Attributes:
        chunk_tokens: tokens of a chunk.
        chunks_RN: chunks of each rank, in its order, on the host.
        document_ids_BT: document ids of whole rows; None if each row is one document.
        shared_documents_2CC: by chunk of queries and earlier (or the same) chunk of keys, on the
            host: do they share a document in any row, are they one document in every row. None
            without documents.
    """

    chunk_tokens: int
    chunks_RN: Tensor
    document_ids_BT: Tensor | None = None
    shared_documents_2CC: Tensor | None = None

    @staticmethod
    def from_documents(
        num_tokens: int,
        chunks: Sequence[Sequence[int]],
        document_ids_BT: Tensor | None,
        host_document_ids_BT: np.ndarray | None = None,
    ) -> RowChunks:
        """Build the chunks of rows and compare the documents at their ends.

        Args:
            chunks: chunks of each rank, as many for each.
            host_document_ids_BT: the same ids in host memory; None reads them from the device.
        """
        by_rank = tuple(tuple(chunks_of_rank) for chunks_of_rank in chunks)
        chunk_tokens = num_tokens // sum(map(len, by_rank))
        if document_ids_BT is None:
            row = RowChunks(chunk_tokens, torch.tensor(by_rank))
            row.chunks_by_rank = by_rank
            return row
        if host_document_ids_BT is None:
            host_document_ids_BT = document_ids_BT.cpu().numpy()
        first_BC = host_document_ids_BT[:, ::chunk_tokens]
        last_BC = host_document_ids_BT[:, chunk_tokens - 1 :: chunk_tokens]
        share_CC = (first_BC[:, :, None] == last_BC[:, None, :]).any(0)
        np.fill_diagonal(share_CC, True)  # whatever ends within a chunk, its tokens see themselves
        same_CC = (last_BC[:, :, None] == first_BC[:, None, :]).all(0)
        shared_documents_2CC = torch.from_numpy(np.stack((share_CC, same_CC)))
        row = RowChunks(chunk_tokens, torch.tensor(by_rank), document_ids_BT, shared_documents_2CC)
        # Not read back from the tensors, which have no values in a rehearsal on fake tensors.
        row.chunks_by_rank = by_rank
        row._shared_documents = (share_CC.tolist(), same_CC.tolist())
        return row

    @cached_property
    def chunks_by_rank(self) -> tuple[tuple[int, ...], ...]:
        """Chunks of each rank, in its order."""
        return tuple(map(tuple, self.chunks_RN.tolist()))

    @property
    def num_chunks(self) -> int:
        """Number of chunks of a row."""
        return self.chunks_RN.numel()

    @cached_property
    def _shared_documents(self) -> tuple[list[list[bool]], list[list[bool]]] | None:
        if self.shared_documents_2CC is None:
            return None
        in_any_row, in_every_row = self.shared_documents_2CC.tolist()
        return in_any_row, in_every_row

    def find_visibility(self, query: int, key: int, window: int | None) -> Visibility:
        """Find the visibility of chunk `key` to the queries of chunk `query`.

        A window counts the tokens that a token sees, itself included.
        """
        if key > query:
            return Visibility.NONE
        documents = self._shared_documents
        share, same = (
            (True, True)
            if documents is None
            else (documents[0][query][key], documents[1][query][key])
        )
        distance = (query - key) * self.chunk_tokens
        last_token = self.chunk_tokens - 1
        nearest, furthest = (
            (0, last_token) if query == key else (distance - last_token, distance + last_token)
        )
        if not share or (window is not None and nearest >= window):
            return Visibility.NONE
        if not same or (window is not None and furthest >= window):
            return Visibility.PARTIAL
        return Visibility.CAUSAL if query == key else Visibility.FULL

    def token_indices(self, chunks: Sequence[int], device: torch.device) -> Tensor:
        """Return the positions in the row of these chunks' tokens."""
        offsets = torch.arange(self.chunk_tokens, device=device)
        return torch.cat([offsets + chunk * self.chunk_tokens for chunk in chunks])

    def list_tiles(
        self, queries: Sequence[int], keys: Sequence[int], window: int | None
    ) -> list[AttentionTile]:
        """List the tiles between concatenated chunks, the queries' own chunks first."""
        visibilities = [
            [self.find_visibility(query, key, window) for key in keys] for query in queries
        ]
        if tuple(queries) == tuple(keys) and self._is_causal(visibilities):
            everything = self._slice_chunks(0, len(queries))
            return [AttentionTile(everything, everything, Visibility.CAUSAL, has_self_keys=True)]
        return self.list_diagonal_tiles(queries, keys, window) + self.list_off_diagonal_tiles(
            queries, keys, window
        )

    def list_diagonal_tiles(
        self, queries: Sequence[int], keys: Sequence[int], window: int | None
    ) -> list[AttentionTile]:
        """List the tiles of each query chunk with itself, if it is among the keys."""
        slots = {chunk: self._slice_chunks(slot, slot + 1) for slot, chunk in enumerate(keys)}
        return [
            AttentionTile(
                self._slice_chunks(slot, slot + 1),
                slots[query],
                self.find_visibility(query, query, window),
                has_self_keys=True,
            )
            for slot, query in enumerate(queries)
            if query in slots
        ]

    def list_off_diagonal_tiles(
        self, queries: Sequence[int], keys: Sequence[int], window: int | None
    ) -> list[AttentionTile]:
        """List the tiles of each query chunk with earlier chunks; equal neighbours are joined."""
        blocks = []
        for slot, query in enumerate(queries):
            visibilities = [
                Visibility.NONE if key == query else self.find_visibility(query, key, window)
                for key in keys
            ]
            for visibility, run in groupby(range(len(keys)), visibilities.__getitem__):
                joined_slots = list(run)
                if visibility is not Visibility.NONE:
                    blocks.append(
                        AttentionTile(
                            self._slice_chunks(slot, slot + 1),
                            self._slice_chunks(joined_slots[0], joined_slots[-1] + 1),
                            visibility,
                            has_self_keys=False,
                        )
                    )
        return _join_tiles(blocks)

    @staticmethod
    def _is_causal(visibilities: Sequence[Sequence[Visibility]]) -> bool:
        """True if ascending chunks see each other by causality alone and form one square tile."""
        expected_rows = (
            [Visibility.FULL] * slot
            + [Visibility.CAUSAL]
            + [Visibility.NONE] * (len(visibilities) - slot - 1)
            for slot in range(len(visibilities))
        )
        return all(
            list(row) == expected for row, expected in zip(visibilities, expected_rows, strict=True)
        )

    def _slice_chunks(self, first: int, end: int) -> slice:
        return slice(first * self.chunk_tokens, end * self.chunk_tokens)

    def build_visibility(
        self,
        tile: AttentionTile,
        query_indices_L: Tensor,
        key_indices_S: Tensor,
        window: int | None,
    ) -> TileVisibility:
        """Build a tile's visibility; a mask exists only while its tile is computed."""
        q_L = query_indices_L[tile.query_slice]
        k_S = key_indices_S[tile.key_slice]
        visible_BLS = None
        if tile.visibility is Visibility.PARTIAL:
            distance_LS = q_L[:, None] - k_S
            visible_BLS = (
                (distance_LS >= 0)[None]
                if window is None
                else ((distance_LS >= 0) & (distance_LS < window))[None]
            )
            if self.document_ids_BT is not None:
                ids_BT = self.document_ids_BT
                visible_BLS = visible_BLS & (
                    ids_BT[:, q_L][:, :, None] == ids_BT[:, k_S][:, None, :]
                )
        return TileVisibility(
            tile.visibility is Visibility.CAUSAL, visible_BLS, tile.query_slice, k_S
        )


def _join_tiles(tiles: Sequence[AttentionTile]) -> list[AttentionTile]:
    """Join tiles of adjacent queries that see all of the same keys."""
    joined: list[AttentionTile] = []
    for block in sorted(
        tiles,
        key=lambda block: (block.key_slice.start, block.key_slice.stop, block.query_slice.start),
    ):
        previous = joined[-1] if joined else None
        if (
            previous is not None
            and block.visibility is previous.visibility is Visibility.FULL
            and block.key_slice == previous.key_slice
            and block.query_slice.start == previous.query_slice.stop
        ):
            joined[-1] = previous._replace(
                query_slice=slice(previous.query_slice.start, block.query_slice.stop)
            )
        else:
            joined.append(block)
    return joined
