"""NF4 quantisation of frozen matrices.

NF4 has 16 values, quantiles of a normal distribution scaled to [-1, 1]; a block of 64 elements
is scaled by its largest magnitude. `architecture.nf4_layout` defines the layout of the bytes. If
rows are multiples of the block, codes and scales are those of bitsandbytes.

Legend: D in, F out, P bytes of a row, K blocks of a row.

Source: Dettmers et al. 2023, QLoRA (arXiv 2305.14314), section 3 and appendix E; the table is
bitsandbytes'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from shardwright.architecture import ParameterSpec
from shardwright.architecture.nf4_layout import BLOCK_ELEMENTS, compute_code_bytes

NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_MAX_CHUNK_ELEMENTS = 1 << 24
"""Matrix elements converted at a time, which need about ten times their packed bytes."""

SliceReader = Callable[[str, Sequence[tuple[int, int]]], Tensor]
"""(parameter name, (start, length) per dim) -> slice of the parameter."""


def pack(values: Tensor) -> Tensor:
    """Quantise whole rows `[.., rows, columns]` to bytes `[.., rows, P]`; computed in fp32.

    >>> packed = pack(torch.tensor([[0.5, -1.0, 0.0, 0.25]]))
    >>> packed.shape[-1], unpack(packed, 4, torch.float32)[0, 1:3].tolist()
    (6, [-1.0, 0.0])
    """
    rows = values.shape[:-1].numel()
    flat = values.reshape(rows, values.shape[-1])
    packed = [_pack_rows(part) for part in flat.split(_count_chunk_rows(flat))]
    return torch.cat(packed).unflatten(0, values.shape[:-1])


def _pack_rows(values_FD: Tensor) -> Tensor:
    columns = values_FD.shape[1]
    blocks_FKB = F.pad(values_FD.float(), (0, -columns % BLOCK_ELEMENTS)).unflatten(
        1, (-1, BLOCK_ELEMENTS)
    )
    scales_FK = blocks_FKB.abs().amax(-1)
    table = torch.tensor(NF4_VALUES, device=values_FD.device)
    scaled_FKB = blocks_FKB / scales_FK.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    codes_FD = torch.bucketize(scaled_FKB, (table[1:] + table[:-1]) / 2).to(torch.uint8).flatten(1)
    bytes_FC = (codes_FD[:, ::2] << 4 | codes_FD[:, 1::2])[:, : compute_code_bytes(columns)]
    return torch.cat([bytes_FC, scales_FK.view(torch.uint8)], dim=1)


def unpack(packed: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Dequantise bytes `[.., rows, P]` to values `[.., rows, columns]`: in fp32, then cast.

    In compiled code it is an operator: the table would else be a constant that every call copies
    to the device.
    """
    is_fused = (packed.device.type, dtype) in _fused_unpack and not isinstance(packed, FakeTensor)
    if is_fused or torch.compiler.is_compiling():
        values: Tensor = _unpack_operator(packed, columns, dtype)
        return values
    return _unpack_separately(packed, columns, dtype)


def _unpack_separately(packed: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    flat_FP = packed.reshape(-1, packed.shape[-1])
    rows = _count_chunk_rows(flat_FP)
    if flat_FP.shape[0] <= rows:
        values_FD = _unpack_rows(flat_FP, columns, dtype)
    else:
        values_FD = torch.cat([_unpack_rows(part, columns, dtype) for part in flat_FP.split(rows)])
    return values_FD.view(*packed.shape[:-1], columns)


@torch.library.custom_op("shardwright::unpack_nf4", mutates_args=())
def _unpack_operator(packed: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Dequantise in one pass if it is compiled and takes these rows.

    It takes rows of whole blocks, and no sizes of 1, for each of which torch would compile a graph,
    as it would in inference mode.
    """
    function = _fused_unpack.get((packed.device.type, dtype))
    num_blocks, remainder = divmod(columns, BLOCK_ELEMENTS)
    has_words = packed.is_contiguous() and packed.storage_offset() % 4 == 0
    num_rows = packed.shape[:-1].numel()
    has_sizes = remainder == 0 and has_words and min(num_blocks, num_rows) > 1
    if function is None or not has_sizes or torch.is_inference_mode_enabled():
        return _unpack_separately(packed, columns, dtype)
    parts = _split_rows(packed.view(num_rows, packed.shape[-1]))
    values_FD: Tensor = function(*parts, _get_byte_table(packed), dtype)
    return values_FD.view(*packed.shape[:-1], columns)


@_unpack_operator.register_fake
def _fake_unpack(packed: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    return packed.new_empty((*packed.shape[:-1], columns), dtype=dtype)


def _unpack_rows(packed_FP: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    width = compute_code_bytes(columns)
    # A copy even of one row, whose stride need not be a multiple of four bytes.
    scales = packed_FP[:, width:].clone(memory_format=torch.contiguous_format)
    scales_FK = scales.view(torch.float32)
    pairs_FC2 = F.embedding(packed_FP[:, :width].int(), _get_byte_table(packed_FP))
    values_FD = F.pad(pairs_FC2.flatten(1), (0, scales_FK.shape[1] * BLOCK_ELEMENTS - 2 * width))
    return (
        (values_FD.unflatten(1, (-1, BLOCK_ELEMENTS)) * scales_FK[..., None])
        .to(dtype)
        .flatten(1)[:, :columns]
    )


CompileFunction = Callable[
    [str, Callable[..., Any], Callable[..., Any], Callable[[torch.device], Sequence[Any]]],
    Callable[..., Any],
]
"""Chooser between a function and its compiled form (`numerics.function_compiler`)."""

_fused_unpack: dict[tuple[str, torch.dtype], Callable[..., Tensor]] = {}
"""Compiled dequantisations of this process by type of device and dtype."""


def compile_unpack(
    device: torch.device, dtype: torch.dtype, compile_function: CompileFunction
) -> None:
    """Compile the dequantisation to a dtype into one pass, if the compiler can for the device."""
    function = compile_function(
        f"NF4 ({str(dtype).removeprefix('torch.')})",
        _unpack_blocks,
        _unpack_blocks,
        partial(_make_sample, dtype),
    )
    _fused_unpack.pop((device.type, dtype), None)
    if function is not _unpack_blocks:
        _fused_unpack[device.type, dtype] = function


def _split_rows(packed_FP: Tensor) -> tuple[Tensor, Tensor]:
    """View rows of whole blocks as their codes `[F, K, bytes]` and scales `[F, K]`.

    Their numbers are marked as varying between calls: all sizes share a graph.
    """
    code_bytes = BLOCK_ELEMENTS // 2
    num_blocks = packed_FP.shape[1] // (code_bytes + 4)
    codes_FKC = packed_FP[:, : num_blocks * code_bytes].unflatten(1, (num_blocks, code_bytes))
    scales_FK = packed_FP.view(torch.float32)[:, -num_blocks:]
    for tensor in (codes_FKC, scales_FK):
        for dim in (0, 1):
            torch._dynamo.mark_dynamic(tensor, dim)
    return codes_FKC, scales_FK


def _unpack_blocks(
    codes_FKC: Tensor, scales_FK: Tensor, table: Tensor, dtype: torch.dtype
) -> Tensor:
    values_FKC2 = F.embedding(codes_FKC.int(), table) * scales_FK[..., None, None]
    return values_FKC2.to(dtype).flatten(1)


def _make_sample(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """Make packed rows with all bytes, and scales of all sizes."""
    generator = torch.Generator().manual_seed(0)
    # On a GPU the compiler times tile sizes on the sample; a small one takes the time of a launch.
    num_rows = 23 if device.type == "cpu" else 8209
    values = torch.randn(num_rows, 5 * BLOCK_ELEMENTS, generator=generator)
    values *= 10.0 ** (torch.rand(values.shape, generator=generator) * 12 - 10)
    packed = pack(values).to(device)
    return *_split_rows(packed), _get_byte_table(packed), dtype


_byte_tables: dict[torch.device, Tensor] = {}
"""Tables by device: a copy to a GPU at each product would make the host wait for it."""


def _get_byte_table(packed: Tensor) -> Tensor:
    """Return the two values of every byte, `[256, 2]`, on the device of `packed`."""
    if isinstance(packed, FakeTensor):
        return _build_byte_table(packed.device)
    table = _byte_tables.get(packed.device)
    if table is None:
        # Usable in backward passes, even if first built for generation.
        with torch.inference_mode(False):
            table = _byte_tables[packed.device] = _build_byte_table(packed.device)
    return table


def _build_byte_table(device: torch.device) -> Tensor:
    """Build the two values of every byte; the first is in the upper 4 bits."""
    table = torch.tensor(NF4_VALUES, device=device)
    return torch.stack([table.repeat_interleave(16), table.repeat(16)], dim=1)


def _count_chunk_rows(matrix: Tensor) -> int:
    return max(1, _MAX_CHUNK_ELEMENTS // max(1, matrix.shape[-1]))


def read_packed_slice(
    matrix: ParameterSpec, narrow: Sequence[tuple[int, int]], read: SliceReader
) -> Tensor:
    """Read a slice of a matrix's bytes, by quantising whole rows of the matrix.

    Args:
        narrow: slice of the bytes, (start, length) per dim.
        read: returns a slice of the matrix by its name.
    """
    start, length = narrow[-1]
    rows = read(matrix.name, (*narrow[:-1], (0, matrix.shape[-1])))
    return pack(rows)[..., start : start + length]


def read_dequantised_slice(
    matrix: ParameterSpec, narrow: Sequence[tuple[int, int]], read: SliceReader, dtype: torch.dtype
) -> Tensor:
    """Read a slice of a matrix, quantised and dequantised as in the forward pass."""
    columns = matrix.shape[-1]
    start, length = narrow[-1]
    rows = read(matrix.name, (*narrow[:-1], (0, columns)))
    return unpack(pack(rows), columns, dtype)[..., start : start + length]
