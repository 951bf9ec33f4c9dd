"""Host memory into which a background save copies a rank's state before it is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch

from shardwright.checkpoint.local_tensors import HostCopy, view_bytes

_CHUNK_BYTES = 64 * 1024**2


class HostBuffer:
    """Host memory in chunks, which successive saves reuse.

    Allocating memory costs more than the copy (a page fault every 4 KiB, and pinning if there
    is a GPU). PyTorch rounds a pinned allocation up to a power of two, so one buffer could take
    twice the state's size. Chunks whose sizes are powers of two lose nothing: together they
    exceed the state by less than one chunk.
    """

    def __init__(self, chunk_bytes: int = _CHUNK_BYTES) -> None:
        """Build an empty buffer; `chunk_bytes` is a power of two."""
        assert chunk_bytes.bit_count() == 1
        self._chunk_bytes = chunk_bytes
        self._chunks: list[torch.Tensor] = []
        self._is_pinned = False

    def copy_tensors(
        self, tensors: Sequence[torch.Tensor], ready_event: torch.cuda.Event | None = None
    ) -> list[HostCopy]:
        """Return copies of the tensors' bytes, valid until the next call.

        Copies from a GPU are asynchronous, on a stream separate from training's, and start
        after the event `ready_event`.
        """
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        self._reserve(sum(tensor.nbytes for tensor in tensors), is_pinned=device is not None)
        copies = []
        start = 0
        with torch.no_grad(), use_copy_stream(device, ready_event):
            for tensor in tensors:
                pieces = tuple(self._iterate_pieces(start, tensor.nbytes))
                sources = view_bytes(tensor).split([piece.numel() for piece in pieces])
                for piece, source in zip(pieces, sources, strict=True):
                    piece.copy_(source, non_blocking=device is not None)
                copies.append(HostCopy(pieces))
                start += tensor.nbytes
        return copies

    def reserve_copies(self, sizes_bytes: Sequence[int]) -> list[HostCopy]:
        """Return memory for tensors of these sizes, which the caller fills; as `copy_tensors`."""
        self._reserve(sum(sizes_bytes), is_pinned=False)
        starts = accumulate(sizes_bytes, initial=0)
        return [
            HostCopy(tuple(self._iterate_pieces(start, size)))
            for start, size in zip(starts, sizes_bytes, strict=False)
        ]

    def list_pieces(self, num_bytes: int) -> list[torch.Tensor]:
        """List the first bytes of the buffer, in pieces whose sizes follow from `num_bytes`."""
        return list(self._iterate_pieces(0, num_bytes))

    def _reserve(self, num_bytes: int, *, is_pinned: bool) -> None:
        """Allocate chunks for `num_bytes`: all of the same size but the last, which is smaller."""
        if is_pinned != self._is_pinned:
            self._chunks.clear()
            self._is_pinned = is_pinned
        missing_bytes = num_bytes - sum(chunk.numel() for chunk in self._chunks)
        if missing_bytes > 0 and self._chunks and self._chunks[-1].numel() < self._chunk_bytes:
            missing_bytes += self._chunks.pop().numel()
        while missing_bytes > 0:
            size = min(self._chunk_bytes, 1 << (missing_bytes - 1).bit_length())
            self._chunks.append(_allocate(size, is_pinned=is_pinned))
            missing_bytes -= size

    def _iterate_pieces(self, start: int, num_bytes: int) -> Iterator[torch.Tensor]:
        """Yield `num_bytes` of the buffer from `start`, as parts of its chunks."""
        end = start + num_bytes
        while start < end:
            index, offset = divmod(start, self._chunk_bytes)
            piece = self._chunks[index][offset : offset + end - start]
            yield piece
            start += piece.numel()


def _allocate(num_bytes: int, *, is_pinned: bool) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)


@contextmanager
def use_copy_stream(
    device: torch.device | None, ready_event: torch.cuda.Event | None
) -> Iterator[None]:
    """Run the block on a separate CUDA stream, synchronised at the end, if there is a GPU."""
    if device is None:
        yield
        return
    stream = torch.cuda.Stream(device)
    if ready_event is not None:
        stream.wait_event(ready_event)
    with torch.cuda.stream(stream):  # also sets the thread's device, by default device 0
        yield
    stream.synchronize()
