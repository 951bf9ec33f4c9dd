"""Frozen matrices of blocks in a slower tier; each block's arrive before it computes.

The matrices of a block are views of one memory on the device (two, if its experts are sharded
over other ranks), whose storage is freed while they are not needed. Autograd's saved tensors are
views of it too, and see the values again when the storage returns.

When a block is used (`block_uses.py`), all other blocks' weights leave, and those of the block
that came next the last time begin to arrive. So two blocks bound the memory. A wrong guess costs
a transfer and changes no result. All ranks that gather together make the same uses and so the
same guesses.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.config.offload import OffloadSection, OffloadTier
from shardwright.errors import OffloadFailed
from shardwright.model.block_weights import (
    BlockWeight,
    BlockWeightSources,
    ShardGroup,
    read_rows,
)
from shardwright.model.decoder import Decoder
from shardwright.model.hf.weight_bytes import NotStored, StoredWeights
from shardwright.offload.activation_store import Wait
from shardwright.offload.block_uses import BlockUses, Use
from shardwright.offload.store import TransferCounts, TransferReporter
from shardwright.offload.weight_store import (
    DiskWeightStore,
    PinnedWeightStore,
    StoredRange,
    WeightRange,
    WeightStore,
    WrittenRange,
)
from shardwright.units import format_bytes

logger = logging.getLogger("shardwright")

_TENSOR_BYTES = 256
"""Alignment of tensors, which CUDA's vector loads need."""
_MAX_PIECE_BYTES = 1 << 26
"""Bytes of a weight that are read from the model at once to be stored elsewhere."""


@dataclass
class _SharedMemory:
    """Weights of a block that the same ranks divide, in one memory of the device."""

    memory: Tensor
    """All bytes `[N]`; the storage is empty while they are not on the device."""
    part: Tensor
    """The bytes that this rank stores, a view."""
    group: ShardGroup | None
    place: Any


@dataclass
class _BlockWeights:
    """Weights of a block, absent, on the way, or present."""

    memories: list[_SharedMemory] = field(default_factory=list)
    waits: list[Wait] | None = None
    """Waits of the copies that are on the way."""
    is_present: bool = False

    def launch(self, store: WeightStore) -> None:
        """Allocate memory and start to fetch this rank's part."""
        if self.is_present or self.waits is not None:
            return
        self.waits = []
        for shared in self.memories:
            shared.memory.untyped_storage().resize_(shared.memory.numel())
            self.waits.append(store.read(shared.place, shared.part))

    def finish(self) -> None:
        """Wait for this rank's part and gather the other ranks' parts."""
        waits, self.waits = self.waits, None
        for wait, shared in zip(waits or (), self.memories, strict=False):
            wait()
            if shared.group is not None:
                shared.group.gather(shared.memory, shared.part)
        self.is_present = True

    def release(self) -> None:
        """Free the memory; copies on the way end first."""
        for wait in self.waits or ():
            wait()
        if self.is_present or self.waits is not None:
            for shared in self.memories:
                shared.memory.untyped_storage().resize_(0)
        self.waits = None
        self.is_present = False


class WeightOffload(BlockUses):
    """Frozen weights of all blocks of a rank."""

    def __init__(
        self,
        store: WeightStore,
        tier: OffloadTier,
        device: torch.device,
        stored: StoredWeights | None = None,
    ) -> None:
        """
        Args:
            stored: places of weights in the model's files, which are read in place; None stores
                all values.
        """
        super().__init__()
        self.store = store
        self.tier = tier
        self.device = device
        self.num_bytes = 0
        """Bytes of the tensors that this rank computes with."""
        self.stored_bytes = 0
        """Bytes that this rank keeps in the tier; those of the model's files included."""
        self.written_bytes: Counter[str] = Counter()
        """Bytes of weights that no file has as they are needed, by reason."""
        self._stored = stored
        self._blocks: dict[int, _BlockWeights] = {}
        self._reporter = TransferReporter()

    def attach(
        self, decoder: Decoder, weights: Iterable[BlockWeight], sources: BlockWeightSources
    ) -> None:
        """Store the weights and make them the decoder's parameters, absent from the device.

        Raises:
            OffloadFailed: the files cannot be read or written.
        """
        by_layer: dict[int, list[BlockWeight]] = defaultdict(list)
        for weight in weights:
            assert weight.spec.layer is not None
            by_layer[weight.spec.layer].append(weight)
        for block in decoder.blocks:
            found = by_layer.get(block.layer_index)
            if found:
                self._blocks[block.layer_index] = self._store_block(found, sources)
                self.install_hooks(block)
        self._stored = None  # closes the files' mappings
        self._log_places()

    def _store_block(
        self, weights: Sequence[BlockWeight], sources: BlockWeightSources
    ) -> _BlockWeights:
        by_group: dict[int, list[BlockWeight]] = defaultdict(list)
        for weight in weights:
            by_group[id(sources.groups.get(weight.spec.name))].append(weight)
        block = _BlockWeights()
        for members in by_group.values():
            group = sources.groups.get(members[0].spec.name)
            num_ranks = 1 if group is None else group.num_ranks
            offsets = []
            size = 0
            for weight in members:
                offsets.append(size)
                size += _round_up(weight.num_bytes, _TENSOR_BYTES)
            part_bytes = _round_up(size, num_ranks * _TENSOR_BYTES) // num_ranks
            first = 0 if group is None else group.rank * part_bytes
            ranges = [
                _clip(part, first, part_bytes)
                for weight, offset in zip(members, offsets, strict=True)
                for part in self._find_ranges(weight, offset, sources, first, part_bytes)
                if part.target < first + part_bytes and part.target + part.num_bytes > first
            ]
            place = self.store.add(part_bytes, ranges)
            memory = torch.empty(num_ranks * part_bytes, dtype=torch.uint8, device=self.device)
            part = memory[first : first + part_bytes]
            block.memories.append(_SharedMemory(memory, part, group, place))
            for weight, offset in zip(members, offsets, strict=True):
                values = memory[offset : offset + weight.num_bytes].view(weight.dtype)
                # `data` has a version counter of its own: autograd must not take the return of
                # the same values for a change of a saved tensor.
                weight.install(values.view(weight.shape).data)
            memory.untyped_storage().resize_(0)
            self.num_bytes += size
            self.stored_bytes += part_bytes
        return block

    def _find_ranges(
        self,
        weight: BlockWeight,
        offset: int,
        sources: BlockWeightSources,
        first: int,
        num_bytes: int,
    ) -> list[WeightRange]:
        """Find a weight's bytes, by their place in the block's memory.

        Those that must be written are limited to the `num_bytes` from `first` on.
        """
        found = locate_in_files(weight, sources, self._stored)
        if not isinstance(found, NotStored):
            return [
                StoredRange(item.path, item.position, item.num_bytes, offset + item.target)
                for item in found
            ]
        low = max(0, first - offset)
        high = min(weight.num_bytes, first + num_bytes - offset)
        if low >= high:
            return []
        self.written_bytes[found.reason] += high - low
        return [
            WrittenRange(high - low, offset + low, lambda: read_bytes(weight, sources, low, high))
        ]

    def _fetch(self, use: Use, following: Use | None) -> None:
        """Fetch a block's weights, start to fetch the next block's, and free all others."""
        layer, _ = use
        for other, weights in self._blocks.items():
            if other != layer:
                weights.release()
        block = self._blocks[layer]
        if not block.is_present:
            block.launch(self.store)
            block.finish()
        if following is not None:
            self._blocks[following[0]].launch(self.store)

    def count_device_bytes(self) -> int:
        """Count the bytes of weights on the device."""
        return sum(
            shared.memory.untyped_storage().nbytes()
            for block in self._blocks.values()
            for shared in block.memories
        )

    def pop_counts(self) -> TransferCounts:
        """Return bytes and times since the previous call."""
        return self._reporter.take(self.store.counts)

    def _log_places(self) -> None:
        if self.tier != "disk":
            return
        for reason, num_bytes in sorted(self.written_bytes.items()):
            logger.info(
                "offload: %s of frozen weights are in a scratch file: %s",
                format_bytes(num_bytes),
                reason,
            )

    def close(self) -> None:
        """Free store and memory. No pass may follow."""
        for weights in self._blocks.values():
            with suppress(OffloadFailed):  # the run has failed by it already
                weights.release()
        self._blocks.clear()
        self.store.close()


def locate_in_files(
    weight: BlockWeight, sources: BlockWeightSources, stored: StoredWeights | None
) -> Any:
    """Find a weight's bytes in the model's files, or the reason why they are not there."""
    if stored is None:
        return NotStored("its initial values are in no file")
    boxes = sources.boxes[weight.spec.name]
    return stored.locate(weight.spec, boxes, weight.shape, weight.dtype)


def _clip(part: WeightRange, first: int, num_bytes: int) -> WeightRange:
    """Limit a range to the bytes of this rank, with targets that count from them."""
    low = max(part.target, first)
    high = min(part.target + part.num_bytes, first + num_bytes)
    if isinstance(part, StoredRange):
        return StoredRange(part.path, part.position + low - part.target, high - low, low - first)
    assert (low, high) == (part.target, part.target + part.num_bytes)
    return replace(part, target=low - first)


def read_bytes(
    weight: BlockWeight, sources: BlockWeightSources, low: int, high: int
) -> Iterator[Tensor]:
    """Read bytes `[low, high)` of a weight from the model, some rows at a time."""
    row_bytes = weight.num_bytes // weight.shape[0]
    step = max(1, _MAX_PIECE_BYTES // row_bytes)
    for start in range(low // row_bytes, -(-high // row_bytes), step):
        stop = min(start + step, -(-high // row_bytes))
        values = read_rows(weight, sources, (start, stop)).view(-1).view(torch.uint8)
        yield values[max(0, low - start * row_bytes) : high - start * row_bytes]


def _round_up(num_bytes: int, multiple: int) -> int:
    return -(-num_bytes // multiple) * multiple


def build_weight_offload(
    section: OffloadSection,
    *,
    device: torch.device,
    default_folder: Path,
    open_stored: Callable[[], StoredWeights | None],
) -> WeightOffload | None:
    """Build the offloading of frozen weights; None if nothing moves.

    That is so with `host` on a CPU, whose memory is the host's.

    Args:
        default_folder: folder of the scratch file if the section names none.
        open_stored: returns the places of weights in the model's files; None without files.
    """
    if section.parameters == "disk":
        folder = default_folder if section.dir is None else Path(section.dir)
        store = DiskWeightStore(folder, section.buffer_bytes, device)
        return WeightOffload(store, "disk", device, open_stored())
    if section.parameters == "host" and device.type != "cpu":
        return WeightOffload(PinnedWeightStore(device), "host", device)
    return None


def describe_weight_offload(offload: WeightOffload | None, section: OffloadSection) -> str:
    """Describe in one line where the frozen weights of a rank's blocks are."""
    if offload is None:
        return (
            "offload: frozen weights stay: the device is the CPU, so its memory is the host's and "
            "nothing moves"
        )
    num_written = sum(offload.written_bytes.values())
    place = (
        "pinned host memory"
        if section.parameters == "host"
        else f"files ({format_bytes(num_written)} in a scratch file, the rest in the model's own)"
    )
    return (
        f"offload: {format_bytes(offload.num_bytes)} of frozen weights of this rank's blocks are "
        f"brought from {place}, where this rank has {format_bytes(offload.stored_bytes)}"
    )
