"""Tensor and sequence parallelism: what the decoder asks of the other ranks that hold a share of the same layer.

Legend: B sequences, T tokens, D hidden, V vocabulary rows of this rank, R ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardwright.numerics import VocabularyShard
from shardwright.parallel import collectives


def vocabulary_shard(vocab_size: int, group: dist.ProcessGroup) -> VocabularyShard:
    """This rank's rows of a vocabulary that is cut as `torch.chunk` cuts: the last ranks may have fewer, but never none."""
    chunk = -(-vocab_size // group.size())
    first = chunk * dist.get_rank(group)
    num_rows = min(chunk, vocab_size - first)

    def gather_over(tensor: Tensor) -> Tensor:
        gathered = tensor.new_empty((group.size(), *tensor.shape))
        dist.all_gather_into_tensor(gathered.flatten(0, 1), tensor.contiguous(), group=group)
        return gathered

    def whole(logits: Tensor) -> Tensor:
        # Slices must be equal; what is filled up lies behind the last row.
        padded = F.pad(logits, (0, chunk - num_rows))
        return collectives.gather_copies(padded, -1, group)[..., :vocab_size]

    return VocabularyShard(first, vocab_size, gather_over, whole)
