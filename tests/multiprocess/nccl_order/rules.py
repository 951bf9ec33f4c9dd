"""Refusals of NCCL for calls that gloo accepts: dtypes, reductions, tensors with gaps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

DTYPES = frozenset(
    getattr(torch, name)
    for name in (
        "bool", "uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64",
        "float8_e4m3fn", "float8_e5m2",
    )
)  # fmt: skip
"""Dtypes of torch's table `ncclDataType` (NCCLUtils), without those of AMD's devices."""
REDUCTIONS = frozenset(["SUM", "AVG", "PRODUCT", "MIN", "MAX", "PREMUL_SUM"])
_COPIED_DTYPES = frozenset([torch.float8_e4m3fn, torch.float8_e5m2])
"""Dtypes that torch sends as bytes, so that only copies of them are right."""


class RefusedByNccl(RuntimeError):
    """NCCL refuses the call, or computes something else."""


def check_tensors(kind: str, tensors: Iterable[Tensor]) -> None:
    """Raise `RefusedByNccl` for a dtype that NCCL lacks and for a tensor that is not dense."""
    for tensor in tensors:
        if tensor.dtype not in DTYPES:
            raise RefusedByNccl(f"{kind}: NCCL has no data type for {tensor.dtype}")
        if not tensor.is_contiguous():
            raise RefusedByNccl(f"{kind}: tensors must be contiguous, not {tensor.stride()}")


def check_reduction(kind: str, tensors: Iterable[Tensor], options: Any) -> None:
    """Raise `RefusedByNccl` for a reduction that NCCL lacks or computes on other numbers."""
    operation = dist.ReduceOp.SUM if options is None else options.reduceOp
    name = str(getattr(operation, "op", operation)).rpartition(".")[2]
    if name not in REDUCTIONS:
        raise RefusedByNccl(f"{kind}: cannot use ReduceOp.{name} with NCCL")
    for tensor in tensors:
        if tensor.dtype in _COPIED_DTYPES:
            raise RefusedByNccl(f"{kind}: NCCL reduces the bytes of {tensor.dtype}")
