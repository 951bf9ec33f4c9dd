"""A rank's part of a tensor that torch may shard."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def get_local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
