"""Context parallelism: attention of local queries over tokens that other ranks hold.

Legend: B sequences, T tokens of the row, H query heads, K key/value heads, L tokens of this
rank, E head_dim.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.errors import LayoutError
from shardwright.layout import Layout
from shardwright.layout.context_method import (
    ContextMethod,
    assign_chunks,
    check_row_length,
    count_chunks_by_work,
)
from shardwright.model.attention.fused_attention import AttentionSettings, LayerKernel, attend_fused
from shardwright.model.dropout import Dropout
from shardwright.model.forward_context import ForwardContext
from shardwright.parallel.context.attention_kernels import ScoreSettings
from shardwright.parallel.context.block_mask import RowChunks
from shardwright.parallel.context.ring_attention import RowAttentionSettings, RowRanks
from shardwright.parallel.context.row_attention import attend_row
from shardwright.parallel.context.row_split import assign_chunks_by_work, count_visible_keys
from shardwright.parallel.context.ulysses import exchange_to_heads, exchange_to_tokens
from shardwright.parallel.mesh import Mesh
from shardwright.placement import Placement

logger = logging.getLogger(__name__)


def build_context_parallel(placement: Placement, mesh: Mesh | None) -> ContextParallel | None:
    """Build the context parallelism of a model; None if one rank has whole rows.

    Logs the method and the reason for it.
    """
    choice = placement.context
    group = None if mesh is None or choice is None else mesh.group("cp")
    if mesh is None or choice is None or group is None:
        return None
    logger.info(
        "context parallelism: %s over %d ranks: %s%s",
        choice.method,
        placement.layout.cp,
        choice.reason,
        "; rows are split by the work of their documents"
        if placement.layout.cp_split == "work"
        else "",
    )
    return ContextParallel(
        placement.layout,
        choice.method,
        group,
        windows=placement.shape.windows,
        tensor_rank=mesh.coordinates["tp"],
        device_type=mesh.device_type,
    )


class ContextParallel:
    """`model.parallel_hooks.ContextParallelHooks` by one of three methods.

    Supports every mask, soft cap, sink and dropout of the model.
    """

    def __init__(
        self,
        layout: Layout,
        method: ContextMethod,
        group: dist.ProcessGroup,
        *,
        windows: tuple[int | None, ...],
        tensor_rank: int,
        device_type: str,
    ) -> None:
        self.layout = layout
        self.method = method
        self.has_whole_rows = method == "ulysses"
        self.group = group
        self.tensor_rank = tensor_rank
        self.rank = dist.get_rank(group)
        self.degree = group.size()
        self.chunks = assign_chunks(method, self.degree)
        self.windows = windows
        self.device = torch.device(device_type)
        # Under Ulysses each rank attends over whole rows, of its share of the heads.
        self.row_ranks = (
            RowRanks(None) if method == "ulysses" else RowRanks(group, method == "all_gather")
        )

    def count_local_tokens(self, num_tokens: int) -> int:
        """Count this rank's tokens of a row of `num_tokens`.

        Raises:
            LayoutError: the row cannot be split into equal chunks.
        """
        check_row_length(self.method, self.layout, num_tokens)
        return num_tokens // self.degree

    def split_rows(
        self,
        num_tokens: int,
        document_ids_BT: Tensor | None,
        host_document_ids_BT: np.ndarray | None = None,
    ) -> RowChunks:
        """Split the rows of a forward pass into chunks, and read which share documents.

        Raises:
            LayoutError: the rows cannot be split into equal chunks.
        """
        check_row_length(self.method, self.layout, num_tokens)
        chunks = ((0,),) if self.has_whole_rows else self.chunks
        if self.layout.cp_split == "work" and document_ids_BT is not None:
            if host_document_ids_BT is None:
                host_document_ids_BT = document_ids_BT.cpu().numpy()
            num_chunks = count_chunks_by_work(self.degree, num_tokens)
            work_C = count_visible_keys(host_document_ids_BT, self.windows, num_chunks)
            chunks = assign_chunks_by_work(work_C, self.degree)
        return RowChunks.from_documents(num_tokens, chunks, document_ids_BT, host_document_ids_BT)

    def find_local_tokens(self, row_chunks: RowChunks) -> Tensor:
        """Return this rank's positions in a row, in its order, `[L]`."""
        if self.has_whole_rows:
            num_tokens = row_chunks.chunk_tokens // self.degree
            return torch.arange(num_tokens, device=self.device) + self.rank * num_tokens
        return row_chunks.token_indices(row_chunks.chunks_by_rank[self.rank], self.device)

    def select_local_tokens(self, x_BT: np.ndarray, row_chunks: RowChunks) -> np.ndarray:
        """Select this rank's tokens of rows in host memory, `[B, L]`, in its order."""
        if self.has_whole_rows:
            return np.split(x_BT, self.degree, axis=1)[self.rank]
        pieces = np.split(x_BT, row_chunks.num_chunks, axis=1)
        own = row_chunks.chunks_by_rank[self.rank]
        return np.concatenate([pieces[chunk] for chunk in own], axis=1)

    def attend(
        self,
        terms: AttentionSettings,
        q_BHLE: Tensor,
        k_BKLE: Tensor,
        v_BKLE: Tensor,
        context: ForwardContext,
        dropout: Dropout | None,
    ) -> Tensor:
        """Compute attention of this rank's queries over the whole row, `[B, H, L, E]`.

        Raises:
            LayoutError: Generation with a cache, which context parallelism does not support.
        """
        if context.cache is not None:
            raise LayoutError(
                "generation does not support context parallelism",
                field="layout.cp",
                got=self.degree,
                allowed="1",
                remedy="Generate from a checkpoint of this run without context parallelism",
            )
        settings = RowAttentionSettings(
            ranks=self.row_ranks,
            row_chunks=context.row_chunks,
            scores=ScoreSettings(
                scale=terms.scale,
                soft_cap=terms.soft_cap,
                dropout=dropout if terms.dropout_rate > 0.0 else None,
                dropout_rate=terms.dropout_rate,
                first_head=self.tensor_rank * q_BHLE.shape[1],
            ),
            window=terms.window,
            is_explicit=context.has_explicit_attention,
        )
        if self.method != "ulysses":
            return attend_row(q_BHLE, k_BKLE, v_BKLE, terms.sinks_H, settings)
        layer_kernel = context.kernels[terms.window]
        return self._attend_by_heads((q_BHLE, k_BKLE, v_BKLE), terms, settings, layer_kernel)

    def _attend_by_heads(
        self,
        parts: tuple[Tensor, Tensor, Tensor],
        settings: AttentionSettings,
        row_attention: RowAttentionSettings,
        layer_kernel: LayerKernel,
    ) -> Tensor:
        """Attend over whole rows for this rank's share of the heads, between two all-to-alls."""
        num_heads = parts[0].shape[1] // self.degree
        first = self.rank * num_heads
        scores = replace(row_attention.scores, first_head=row_attention.scores.first_head + first)
        if scores.dropout is not None:
            assert scores.dropout.row_keys_BT is not None
            scores = replace(scores, dropout=Dropout(scores.dropout.row_keys_BT))
        row_attention = replace(row_attention, scores=scores)
        sinks_H = None if settings.sinks_H is None else settings.sinks_H[first : first + num_heads]
        q_BHTE, k_BKTE, v_BKTE = exchange_to_heads(parts, self.group)
        if layer_kernel.kernel in ("varlen", "flex"):
            settings = replace(settings, sinks_H=sinks_H)
            out_BHTE = attend_fused(q_BHTE, k_BKTE, v_BKTE, layer_kernel, settings)
        else:
            out_BHTE = attend_row(q_BHTE, k_BKTE, v_BKTE, sinks_H, row_attention)
        return exchange_to_tokens(out_BHTE, self.group)
