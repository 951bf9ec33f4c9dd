"""Tensor and sequence parallelism: the decoder's hooks between ranks that share its layers.

The products of a block come in pairs: the first is sharded over its outputs (heads, features),
the second over its inputs, so that two collectives a pair are enough in each direction. If the
residual stream is sharded over tokens, they are an all-gather before and a reduce-scatter
after; otherwise an all-reduce on one side of each pass. The bytes sent are the same.
`shardwright.placement` states how each parameter is sharded; parameters are plain tensors of
this rank's shape (docs/decisions/0035-tensor-parallel-without-dtensor.md).

Legend: B sequences, L tokens of this context rank, S tokens of the residual stream (L, or this
rank's share of L), D hidden, V vocabulary rows of this rank, R ranks.

Source: Shoeybi et al. 2019, Megatron-LM, section 3; Korthikanti et al. 2022, Reducing
Activation Recomputation, section 4.2.2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardwright.layout import Layout
from shardwright.model.result_names import STATISTICS, name_results
from shardwright.numerics import VocabularyShard
from shardwright.parallel import collectives
from shardwright.parallel.mesh import Mesh
from shardwright.parallel.pipelined.products import PipelinedProducts


def build_tensor_parallel(layout: Layout, mesh: Mesh | None) -> TensorParallel | None:
    """Build a layout's tensor parallelism; None for a single tensor-parallel rank."""
    group = None if mesh is None else mesh.group("tp")
    if group is None:
        return None
    kind = layout.async_tensor_parallel
    pipeline = None
    if kind in ("chunked", "fused"):
        pipeline = PipelinedProducts(group, kind, layout.sequence_parallel)
    return TensorParallel(group, layout.sequence_parallel, pipeline)


@dataclass(frozen=True)
class TensorParallel:
    """The ranks of one tensor-parallel group; implements `TensorParallelHooks`."""

    group: dist.ProcessGroup
    sequence_parallel: bool
    pipeline: PipelinedProducts | None = None

    @property
    def rank(self) -> int:
        """Position in the group: the share of heads, features and tokens that this rank has."""
        return dist.get_rank(self.group)

    @property
    def degree(self) -> int:
        """Ranks of the group."""
        return self.group.size()

    def without_sequence_parallel(self) -> TensorParallel:
        """Return the same ranks with a replicated residual stream and blocking communication."""
        return replace(self, sequence_parallel=False, pipeline=None)

    def prepare_input(self, x_BSD: Tensor) -> Tensor:
        """Return all tokens `[B, L, D]`, for products sharded over outputs; sums gradients."""
        if self.sequence_parallel:
            with name_results("gathered"):
                return collectives.all_gather(x_BSD, 1, self.group)
        return collectives.copy_to_all(x_BSD, self.group)

    def reduce_output(self, share_BLD: Tensor) -> Tensor:
        """Sum the ranks' shares; return this rank's tokens of it, or all of it, `[B, S, D]`.

        May overwrite `share_BLD`.
        """
        if self.sequence_parallel:
            return collectives.reduce_scatter(share_BLD, 1, self.group)
        return collectives.all_reduce(share_BLD, self.group)

    def select_local_tokens(self, x_BL: Tensor) -> Tensor:
        """Return the residual stream's tokens of a replicated tensor, `[B, S, ...]`, as a view."""
        if not self.sequence_parallel:
            return x_BL
        length = x_BL.shape[1] // self.degree
        return x_BL.narrow(1, self.rank * length, length)

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """Sum a statistic over features that are sharded over the ranks."""
        with name_results(STATISTICS):
            return collectives.all_reduce_shared(x, self.group)

    def embed(
        self, ids_BL: Tensor, weight_VD: Tensor, vocab_size: int, padding_row: int | None
    ) -> Tensor:
        """Look up embeddings `[B, L, D]` of ids whose rows this rank has; others are zero.

        Rows on other ranks get no gradient here.
        """
        shard = build_vocabulary_shard(vocab_size, self.group)
        num_rows = weight_VD.shape[0]
        rows_BL, own_BL = shard.map_labels_to_rows(ids_BL, num_rows)
        padding = None if padding_row is None else padding_row - shard.first_row
        if padding is not None and not 0 <= padding < num_rows:
            padding = None
        return F.embedding(rows_BL, weight_VD, padding).masked_fill(~own_BL[..., None], 0.0)

    def shard_vocabulary(self, vocab_size: int) -> VocabularyShard:
        """Return this rank's rows of the head."""
        return build_vocabulary_shard(vocab_size, self.group)


def build_vocabulary_shard(vocab_size: int, group: dist.ProcessGroup) -> VocabularyShard:
    """Return this rank's rows of a vocabulary that is sharded as by `torch.chunk`.

    The last ranks may have fewer rows, but never none.
    """
    chunk = -(-vocab_size // group.size())
    first = chunk * dist.get_rank(group)
    num_rows = min(chunk, vocab_size - first)

    def gather_ranks(tensor: Tensor) -> Tensor:
        return collectives.stack_ranks(tensor, group)

    def gather_logits(logits: Tensor) -> Tensor:
        # Slices must be equal, so the last ones are padded beyond the last row.
        padded = F.pad(logits, (0, chunk - num_rows))
        return collectives.all_gather_copies(padded, -1, group)[..., :vocab_size]

    return VocabularyShard(first, vocab_size, gather_ranks, gather_logits)
