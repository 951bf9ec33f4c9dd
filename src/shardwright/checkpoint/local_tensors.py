"""Local parts of tensors as boxes of the whole tensor; plain tensors are replicated."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from shardwright.checkpoint.boxes import Box, DimSplit, build_full_box, compute_boxes
from shardwright.checkpoint.storage_path import BLOCK_BYTES
from shardwright.errors import CheckpointError
from shardwright.layout import ParameterBox
from shardwright.numerics import get_local_tensor

DTYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.uint16: "U16", torch.int16: "I16",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.uint32: "U32", torch.int32: "I32",
    torch.float32: "F32", torch.uint64: "U64", torch.int64: "I64", torch.float64: "F64",
    torch.complex64: "C64",
}  # fmt: skip
"""Names of torch's dtypes in safetensors files."""


@dataclass(frozen=True)
class LocalSlice:
    """One box of a tensor and its local values, a view of the rank's storage."""

    box: Box
    values: torch.Tensor


@dataclass(frozen=True, eq=False)
class ParameterShard:
    """Local part of a tensor of `shape` with boxes from the parameter's descriptor."""

    local: torch.Tensor
    shape: tuple[int, ...]
    boxes: tuple[ParameterBox, ...]
    is_offloaded: bool = False
    """True if a background save writes it from where it is: it does not change until then."""


@dataclass(frozen=True)
class LocalTensor:
    """Dtype and global shape of a tensor, and the slices of it on this rank."""

    dtype: str
    shape: tuple[int, ...]
    slices: tuple[LocalSlice, ...]
    is_offloaded: bool = False


def describe_local_tensor(name: str, tensor: torch.Tensor | ParameterShard) -> LocalTensor:
    """Describe this rank's part of `tensor`.

    Raises:
        CheckpointError: not a tensor, a dtype that cannot be stored, or a Partial placement
            (unreduced sums).
    """
    if isinstance(tensor, ParameterShard):
        return _describe_shard(name, tensor)
    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError(
            "not a tensor", field=name, got=type(tensor).__name__, remedy="Pass it among the values"
        )
    if tensor.dtype not in DTYPE_NAMES:
        raise CheckpointError("this dtype cannot be stored", field=name, got=tensor.dtype)
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        pieces = (LocalSlice(build_full_box(shape), tensor.detach()),) if tensor.numel() else ()
        return LocalTensor(DTYPE_NAMES[tensor.dtype], shape, pieces)
    boxes = _compute_dtensor_boxes(name, tensor)
    with torch.no_grad():
        local = tensor.to_local()
    return LocalTensor(DTYPE_NAMES[tensor.dtype], shape, tuple(_split_local(name, local, boxes)))


def _describe_shard(name: str, shard: ParameterShard) -> LocalTensor:
    """Describe the boxes of a part as views of its local tensor."""
    local = get_local_tensor(shard.local.detach())
    if local.dtype not in DTYPE_NAMES:
        raise CheckpointError("this dtype cannot be stored", field=name, got=local.dtype)
    pieces = []
    for box in shard.boxes:
        values = local
        for dim, (start, length) in enumerate(box.local_bounds):
            values = values.narrow(dim, start, length)
        if values.numel():
            pieces.append(
                LocalSlice(
                    Box(
                        tuple(start for start, _ in box.global_bounds),
                        tuple(length for _, length in box.global_bounds),
                    ),
                    values,
                )
            )
    return LocalTensor(
        DTYPE_NAMES[local.dtype], shard.shape, tuple(pieces), is_offloaded=shard.is_offloaded
    )


def _compute_dtensor_boxes(name: str, tensor: DTensor) -> list[Box]:
    """Compute the boxes of the local part; a strided shard may have several."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return []
    splits = []
    for axis, (placement, index) in enumerate(zip(tensor.placements, coordinate, strict=True)):
        if placement.is_partial():
            raise CheckpointError(
                "contains sums that were not reduced",
                field=name,
                got=placement,
                allowed="Shard or Replicate",
            )
        if placement.is_replicate():
            continue
        # torch's _StridedShard (FSDP2 over a dimension sharded by tensor parallelism) has a
        # split_factor; Shard has none.
        dim = int(getattr(placement, "dim"))  # noqa: B009
        stride = int(getattr(placement, "split_factor", 1))
        splits.append(DimSplit(dim, tensor.device_mesh.size(axis), index, stride))
    return compute_boxes(tuple(tensor.shape), splits)


def _split_local(name: str, local: torch.Tensor, boxes: list[Box]) -> Iterator[LocalSlice]:
    """Yield views of the local tensor, which contains its boxes in order of their indices."""
    if sum(box.num_elements for box in boxes) != local.numel():
        raise CheckpointError(
            "the size of the local part does not match its placements",
            field=name,
            got=tuple(local.shape),
            allowed=" ".join(map(str, boxes)),
        )
    starts = [sorted({box.offsets[dim] for box in boxes}) for dim in range(local.dim())]
    lengths = [{box.offsets[dim]: box.lengths[dim] for box in boxes} for dim in range(local.dim())]
    for box in boxes:
        view = local
        for dim, offset in enumerate(box.offsets):
            position = sum(lengths[dim][start] for start in starts[dim] if start < offset)
            view = view.narrow(dim, position, box.lengths[dim])
        yield LocalSlice(box, view)


@torch.no_grad()
def find_non_finite(tensors: Mapping[str, LocalTensor]) -> list[str]:
    """List the tensors that contain NaN or infinity on this rank, by name.

    Raises:
        OSError: an offloaded tensor, which may be in a mapped file, cannot be read.
    """
    # The extremes need no memory of the tensor's size. A NaN is both of them.
    extremes = []
    for name, tensor in tensors.items():
        for piece in tensor.slices:
            values = piece.values
            if tensor.is_offloaded:
                _load_pages(values)
            if values.is_complex():
                values = torch.view_as_real(values)
            if values.is_floating_point():
                if values.element_size() == 1:
                    values = values.float()
                extremes.append((name, torch.stack(torch.aminmax(values)).isfinite().all()))
    return sorted({name for name, is_finite in extremes if not is_finite})


@dataclass(frozen=True)
class HostCopy:
    """Copy of a tensor's bytes in row-major order, in consecutive pieces of host memory."""

    pieces: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.nbytes for piece in self.pieces)


def view_bytes(values: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes in row-major order, `[N]`; a copy if it is not contiguous."""
    return values.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def iterate_blocks(
    values: torch.Tensor | HostCopy, *, is_offloaded: bool = False
) -> Iterator[memoryview]:
    """Yield a tensor's bytes in row-major order; device memory is copied block by block.

    Raises:
        OSError: a block of an offloaded tensor, which may be in a mapped file, cannot be read.
    """
    if isinstance(values, HostCopy):
        pieces = values.pieces
    else:
        if is_offloaded and not values.is_contiguous():
            _load_pages(values)
        pieces = (view_bytes(values),)
    for piece in pieces:
        for start in range(0, piece.numel(), BLOCK_BYTES):
            block = piece[start : start + BLOCK_BYTES].cpu()
            if is_offloaded:
                _load_pages(block)
            yield block.numpy().data


_MADV_POPULATE_READ = 22


def _load_pages(values: torch.Tensor) -> None:
    """Read the pages of a tensor into memory; no effect before Linux 5.14.

    The first access to a mapped page that the disk cannot read would end the process by SIGBUS.
    The system call returns an error instead.

    Raises:
        OSError: a page cannot be read.
    """
    span = sum(
        (size - 1) * stride for size, stride in zip(values.shape, values.stride(), strict=True)
    )
    start = values.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    end = values.data_ptr() + (span + 1) * values.element_size()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(
        ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_POPULATE_READ
    ) and ctypes.get_errno() in (errno.EFAULT, errno.EIO):
        raise OSError(
            errno.EIO,
            f"offload: offloaded states could not be read from disk: {os.strerror(errno.EIO)}",
        )
