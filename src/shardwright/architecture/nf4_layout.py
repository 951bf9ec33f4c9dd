"""NF4-quantised frozen matrices: their selection and byte layout. Torch-free.

A matrix `[.., rows, columns]` becomes bytes `[.., rows, compute_row_bytes(columns)]`: in each row
first the codes, two per byte, then an fp32 scale per block of 64 elements. Blocks lie within a
row of the whole matrix (the last one may be shorter), so sharding by rows never splits a block.
The bytes are sharded like any other parameter, so the quantised base is the same in every
layout.

Source: Dettmers et al. 2023, QLoRA (arXiv 2305.14314), without its second quantisation (of the
scales): 4.5 bits per element.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from shardwright.architecture.adapter_shape import ADAPTABLE_ROLES
from shardwright.architecture.parameter_spec import ParameterSpec, QuantisedCodesInit

BLOCK_ELEMENTS = 64
"""Elements of a row that share a scale."""
SCALE_BYTES = 4


def compute_code_bytes(columns: int) -> int:
    """Compute the bytes of a row's codes."""
    return -(-columns // 2)


def compute_row_bytes(columns: int) -> int:
    """Compute the bytes of a row: codes and scales.

    >>> compute_row_bytes(4096) * 8 / 4096
    4.5
    """
    return compute_code_bytes(columns) + SCALE_BYTES * -(-columns // BLOCK_ELEMENTS)


def count_columns(num_bytes: int, num_columns: int) -> int:
    """Count the columns in `num_bytes` of a row of `num_columns` columns, or of a shard of it.

    A shard consists of whole blocks.

    >>> count_columns(compute_row_bytes(100), 100), count_columns(compute_row_bytes(128), 256)
    (100, 128)
    """
    block_bytes = compute_row_bytes(BLOCK_ELEMENTS)
    return (
        num_columns
        if num_bytes == compute_row_bytes(num_columns)
        else num_bytes // block_bytes * BLOCK_ELEMENTS
    )


def pack_parameters(specs: Iterable[ParameterSpec]) -> Iterator[ParameterSpec]:
    """Yield the model's parameters with the blocks' projections, experts included, as bytes."""
    for spec in specs:
        if spec.role in ADAPTABLE_ROLES and spec.adapter_part is None and not spec.is_bias:
            shape = (*spec.shape[:-1], compute_row_bytes(spec.shape[-1]))
            yield replace(
                spec, shape=shape, init=QuantisedCodesInit(), file_patterns=(), packed_matrix=spec
            )
        else:
            yield spec
