"""Low-rank adapters: initial values, and merging into the adapted matrix.

Legend: F out, D in, R rank, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardwright.architecture import AdapterShape, ParameterSpec, RowNormsInit
from shardwright.architecture.parameter_spec import AdapterPart
from shardwright.model.weight_init import DimRanges, initialise_parameter

_MAX_CHUNK_ELEMENTS = 1 << 24
"""Matrix elements for which row norms are computed at a time."""


def compute_row_norms(
    weight_FD: Tensor, a_RD: Tensor | None = None, b_FR: Tensor | None = None, scale: float = 0.0
) -> Tensor:
    """Compute the norms of the rows of W + scale x B A, `[F]`, in fp32 or fp64.

    Works on chunks of rows, so that no second W is in memory.
    """
    wide = torch.promote_types(weight_FD.dtype, torch.float32)
    step = max(1, _MAX_CHUNK_ELEMENTS // max(1, weight_FD.shape[1]))
    lengths = []
    for first in range(0, weight_FD.shape[0], step):
        rows = weight_FD[first : first + step].to(wide)
        if a_RD is not None and b_FR is not None:
            # Into a tensor of its own: selective recomputation would save the result of a product,
            # and the norms need no gradient.
            update = rows.new_empty(rows.shape)
            torch.mm(b_FR[first : first + step].to(wide), a_RD.to(wide), out=update)
            rows = update.mul_(scale).add_(rows)
        lengths.append(torch.linalg.vector_norm(rows, dim=1))
    return torch.cat(lengths)


def merge_adapter(
    weight: Tensor, read: Callable[[AdapterPart], Tensor], adapters: AdapterShape, *, in_out: bool
) -> Tensor:
    """Merge an adapter into W; the result is in fp32 or fp64 and in W's layout.

    Args:
        read: returns the whole tensor of `lora_A`, `lora_B` or `lora_magnitude_vector`.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    update = adapters.scale * (read("lora_B").to(wide) @ read("lora_A").to(wide))
    merged = (weight.transpose(-1, -2) if in_out else weight).to(wide) + update
    if adapters.kind == "dora":
        merged = (
            merged * (read("lora_magnitude_vector").to(wide) / compute_row_norms(merged))[:, None]
        )
    return merged.transpose(-1, -2) if in_out else merged


def initialise_adapter(
    spec: ParameterSpec,
    seed: int,
    narrow: DimRanges | None,
    *,
    dtype: torch.dtype,
    read_matrix: Callable[[str, Sequence[tuple[int, int]]], Tensor],
    in_out: bool,
) -> Tensor:
    """Compute the initial values of an adapter's part, or of a slice of it.

    They depend on its name and the seed; a DoRA magnitude depends on the adapted matrix.

    Args:
        read_matrix: returns a slice of a frozen matrix, as in the forward pass, from its name
            and (start, length) per dim.
        in_out: True if the matrix is stored `[in, out]`.
    """
    if not isinstance(spec.init, RowNormsInit):
        return initialise_parameter(spec, seed, dtype=dtype, narrow=narrow)
    assert spec.adapted_matrix is not None
    rows = (0, spec.shape[0]) if narrow is None or narrow[0] is None else narrow[0]
    columns = (0, spec.adapted_matrix.shape[0 if in_out else 1])
    # Whole rows, even if the matrix is sharded: initial values must not depend on the layout.
    matrix = read_matrix(spec.adapted_matrix.name, (columns, rows) if in_out else (rows, columns))
    return compute_row_norms(matrix.t() if in_out else matrix).to(dtype)
