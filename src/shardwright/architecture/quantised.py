"""Frozen matrices held in 4 bits: which, and how their rows lie in bytes. Torch-free.

A matrix `[.., rows, columns]` becomes bytes `[.., rows, packed_width(columns)]`: of a row first the codes, two to a byte, then
an fp32 scale per block of 64 elements. Blocks belong to a row of the whole matrix, the last being what remains, so a cut
between rows never meets one. What is cut is bytes, by the same descriptor as everything else: every layout holds the same base.

Source: Dettmers et al. 2023, QLoRA (arXiv 2305.14314), without its second quantisation (of the scales): 4.5 bits per element.
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
    """Bytes of a row's codes."""
    return -(-columns // 2)


def packed_width(columns: int) -> int:
    """Bytes of a row of a matrix.

    >>> packed_width(4096) * 8 / 4096
    4.5
    """
    return code_width(columns) + SCALE_BYTES * -(-columns // BLOCK)


def columns_of(num_bytes: int, whole: int) -> int:
    """Columns that `num_bytes` of a row hold: all of the `whole`, or what a cut between blocks left.

    >>> columns_of(packed_width(100), 100), columns_of(packed_width(128), 256)
    (100, 128)
    """
    block_bytes = packed_width(BLOCK)
    return whole if num_bytes == packed_width(whole) else num_bytes // block_bytes * BLOCK


def pack_parameters(specs: Iterable[ParameterSpec]) -> Iterator[ParameterSpec]:
    """The parameters of a model with its blocks' projections, experts included, as bytes."""
    for spec in specs:
        if spec.role in ADAPTED_ROLES and spec.part is None and not spec.is_bias:
            shape = (*spec.shape[:-1], packed_width(spec.shape[-1]))
            yield replace(spec, shape=shape, init=Codes(), stored=(), packed=spec)
        else:
            yield spec
