"""Low-rank adapters: what they begin with, what they add to a matrix, and which modules have one.

Legend: F out, D in, R rank, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardwright.architecture import AdapterShape, ParameterSpec, RowNorms
from shardwright.architecture.parameters import AdapterPart
from shardwright.model.init import Narrow, initialise

_ROWS_AT_ONCE = 1 << 24
"""Elements of a matrix whose rows are measured at a time."""


def row_norms(weight_FD: Tensor, a_RD: Tensor | None = None, b_FR: Tensor | None = None, scale: float = 0.0) -> Tensor:
    """Lengths of the rows of W + scale x B A, `[F]`, in fp32 at least; a part of the rows at a time, so no second W is held."""
    wide = torch.promote_types(weight_FD.dtype, torch.float32)
    step = max(1, _ROWS_AT_ONCE // max(1, weight_FD.shape[1]))
    lengths = []
    for first in range(0, weight_FD.shape[0], step):
        rows = weight_FD[first : first + step].to(wide)
        if a_RD is not None and b_FR is not None:
            rows = rows + scale * (b_FR[first : first + step].to(wide) @ a_RD.to(wide))
        lengths.append(torch.linalg.vector_norm(rows, dim=1))
    return torch.cat(lengths)


def merged_weight(weight: Tensor, read: Callable[[AdapterPart], Tensor], adapters: AdapterShape, *, in_out: bool) -> Tensor:
    """W with its adapter put in, in fp32 at least and lying as W lies.

    Args:
        read: `lora_A`, `lora_B` (and `lora_magnitude_vector`) to the whole tensor.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    update = adapters.scale * (read("lora_B").to(wide) @ read("lora_A").to(wide))
    merged = (weight.transpose(-1, -2) if in_out else weight).to(wide) + update
    if adapters.kind == "dora":
        merged = merged * (read("lora_magnitude_vector").to(wide) / row_norms(merged))[:, None]
    return merged.transpose(-1, -2) if in_out else merged


def begin(
    spec: ParameterSpec,
    seed: int,
    narrow: Narrow | None,
    *,
    dtype: torch.dtype,
    read_matrix: Callable[[str, Sequence[tuple[int, int]]], Tensor],
    in_out: bool,
) -> Tensor:
    """What a part of an adapter is before the first step, or a slice of it: by name and seed, a magnitude by its matrix.

    Args:
        read_matrix: (name, (start, length) per dimension) to that slice of a frozen matrix, as the forward pass holds it.
        in_out: whether the matrix lies `[in, out]`.
    """
    if not isinstance(spec.init, RowNorms):
        return initialise(spec, seed, dtype=dtype, narrow=narrow)
    assert spec.beside is not None
    rows = (0, spec.shape[0]) if narrow is None or narrow[0] is None else narrow[0]
    columns = (0, spec.beside.shape[0 if in_out else 1])
    # Whole rows, however ranks cut the matrix: the start must not depend on the layout.
    matrix = read_matrix(spec.beside.name, (columns, rows) if in_out else (rows, columns))
    return row_norms(matrix.t() if in_out else matrix).to(dtype)
