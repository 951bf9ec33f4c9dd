"""Host memory of a background save: its size under CUDA's rounding, and the bytes copied."""

from __future__ import annotations

import pytest
import torch

from shardwright.checkpoint import host_buffer
from shardwright.checkpoint.host_buffer import HostBuffer
from shardwright.checkpoint.local_tensors import iterate_blocks

CHUNK_BYTES = 1 << 12


class PinnedMemory:
    """Pinned memory as CUDA's caching allocator gives it: every block is a power of two."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_bytes = 0
        self.num_blocks = 0
        self._allocate = host_buffer._allocate
        monkeypatch.setattr(host_buffer, "_allocate", self.allocate)

    def allocate(self, num_bytes: int, *, is_pinned: bool) -> torch.Tensor:
        self.num_bytes += 1 << (num_bytes - 1).bit_length()
        self.num_blocks += 1
        return self._allocate(num_bytes, is_pinned=False)


def read_copy(buffer: HostBuffer, tensors: list[torch.Tensor]) -> list[bytes]:
    return [b"".join(iterate_blocks(copy)) for copy in buffer.copy_tensors(tensors)]


@pytest.mark.parametrize("num_bytes", [1, 4096, 4097, 65_537, 1_000_003])
def test_pinned_memory_exceeds_the_state_by_less_than_a_chunk(
    monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    memory = PinnedMemory(monkeypatch)
    buffer = HostBuffer(CHUNK_BYTES)
    state = torch.arange(num_bytes).to(torch.uint8)
    sizes = [num_bytes // 3, num_bytes // 2, num_bytes - num_bytes // 3 - num_bytes // 2]
    tensors = list(state.split(sizes))
    assert read_copy(buffer, tensors) == [bytes(tensor.tolist()) for tensor in tensors]
    assert num_bytes <= memory.num_bytes < num_bytes + CHUNK_BYTES
    blocks = memory.num_blocks
    read_copy(buffer, tensors)
    assert memory.num_blocks == blocks  # the next save reuses them


def test_a_larger_state_keeps_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = PinnedMemory(monkeypatch)
    buffer = HostBuffer(CHUNK_BYTES)
    read_copy(buffer, [torch.zeros(3 * CHUNK_BYTES + 10, dtype=torch.uint8)])
    larger = torch.arange(5 * CHUNK_BYTES // 4, dtype=torch.int32)
    assert read_copy(buffer, [larger]) == [larger.numpy().tobytes()]
    assert memory.num_blocks == 3 + 1 + 2


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(5000, dtype=torch.float64),
        torch.arange(6000, dtype=torch.bfloat16).view(60, 100).t(),  # not contiguous
        torch.arange(6000, dtype=torch.float32).view(60, 100)[:, 3:50],
        torch.tensor(3.5),
        torch.tensor([True, False, True]),
        torch.view_as_complex(torch.randn(700, 2)).conj(),
    ],
    ids=["wide", "transposed", "narrow", "scalar", "bool", "conjugate"],
)
def test_every_layout_is_copied_in_row_major_order(tensor: torch.Tensor) -> None:
    first = torch.arange(77, dtype=torch.uint8)
    expected = [b"".join(iterate_blocks(part)) for part in (first, tensor)]
    assert read_copy(HostBuffer(CHUNK_BYTES), [first, tensor]) == expected
