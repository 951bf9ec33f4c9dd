"""NF4-quantised frozen matrices: their selection and byte layout. Torch-free.

A matrix `[.., rows, columns]` becomes bytes `[.., rows, packed_width(columns)]`: in each row
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

from shardwright.architecture.adapters import ADAPTED_ROLES
from shardwright.architecture.parameters import Codes, ParameterSpec

BLOCK = 64
"""Elements of a row that share a scale."""
SCALE_BYTES = 4


def code_width(columns: int) -> int:
    """Compute the bytes of a row's codes."""
    return -(-columns // 2)


def packed_width(columns: int) -> int:
    """Compute the bytes of a row: codes and scales.

    >>> packed_width(4096) * 8 / 4096
    4.5
    """
    return code_width(columns) + SCALE_BYTES * -(-columns // BLOCK)


def columns_of(num_bytes: int, whole: int) -> int:
    """Count the columns in `num_bytes` of a row of `whole` columns, or of a shard of it.

    A shard consists of whole blocks.

    >>> columns_of(packed_width(100), 100), columns_of(packed_width(128), 256)
    (100, 128)
    """
    block_bytes = packed_width(BLOCK)
    return whole if num_bytes == packed_width(whole) else num_bytes // block_bytes * BLOCK


def pack_parameters(specs: Iterable[ParameterSpec]) -> Iterator[ParameterSpec]:
    """Yield the model's parameters with the blocks' projections, experts included, as bytes."""
    for spec in specs:
        if spec.role in ADAPTED_ROLES and spec.part is None and not spec.is_bias:
            shape = (*spec.shape[:-1], packed_width(spec.shape[-1]))
            yield replace(spec, shape=shape, init=Codes(), stored=(), packed=spec)
        else:
            yield spec
