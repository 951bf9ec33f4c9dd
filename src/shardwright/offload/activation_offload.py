"""Saved tensors of blocks in a slower tier, from their forward to their backward pass.

Autograd hands every tensor that a block saves to `pack`, and asks `unpack` for it in the
backward pass; selective recomputation does the same with the results that it saves
(docs/decisions/0079-offloaded-activations.md).

[Note: when tensors move] A block's tensors begin to leave when the next block's forward pass
begins, and their memory is freed when it ends. So at most two blocks have theirs on the device,
and the last block's never move: its backward pass follows at once. The first `unpack` of a block
starts the return of the tensors of the block before it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from shardwright.config.offload import OffloadSection, OffloadTier
from shardwright.offload.activation_store import (
    ActivationStore,
    PinnedStore,
    ScratchStore,
    Wait,
)
from shardwright.offload.store import TransferCounts, TransferReporter


class PackedTensor(Protocol):
    """Reference to a saved tensor."""

    def unpack(self) -> Tensor:
        """Return the tensor on the device."""
        ...


class _SavedStorage:
    """Memory of one or more saved tensors, on the device, in the store, or on the way."""

    def __init__(self, owner: ActivationOffload, tensor: Tensor) -> None:
        num_elements = tensor.untyped_storage().nbytes() // tensor.element_size()
        self.owner = owner
        self.data: Tensor | None = (
            tensor.detach().as_strided((num_elements,), (1,), 0).view(torch.uint8)
        )
        """All bytes of the storage `[N]`, while they are on the device."""
        self.num_bytes = self.data.numel()
        self.place: Any = None
        self._write_wait: Wait | None = None
        self._read_wait: Wait | None = None

    def launch_write(self) -> None:
        """Start to copy the memory to the store."""
        assert self.data is not None
        self.place, self._write_wait = self.owner.store.write(self.data)
        self.owner.add_bytes(self.num_bytes)

    def finish_write(self) -> None:
        """Wait for the copy and drop the reference to the memory."""
        if self._write_wait is not None:
            self._write_wait()
            self._write_wait = None
            self.data = None

    def launch_read(self) -> None:
        """Start to copy the memory back, if it is not on the device."""
        if self.data is None:
            self.data, self._read_wait = self.owner.store.read(self.place, self.num_bytes)

    def get_data(self) -> Tensor:
        """Return the memory on the device, after the copy that brings it back."""
        self.launch_read()
        self._finish_read()
        assert self.data is not None
        return self.data

    def _finish_read(self) -> None:
        wait, self._read_wait = self._read_wait, None
        if wait is not None:
            wait()

    def __del__(self) -> None:
        with suppress(Exception):  # the run has failed, or the store is closed
            self._finish_read()  # nothing else may use the memory before the copy has ended
        if self.place is not None:
            self.owner.add_bytes(-self.num_bytes)
            self.owner.store.free(self.place)


@dataclass
class _BlockTensors:
    """Storages that one block has saved in one forward pass."""

    previous: _BlockTensors | None
    storages: weakref.WeakValueDictionary[int, _SavedStorage] = field(
        default_factory=weakref.WeakValueDictionary
    )
    """By address: memory that a record refers to is not reused."""
    leaving: list[_SavedStorage] = field(default_factory=list)
    is_returning: bool = False

    def launch_reads(self) -> None:
        """Start the return of all tensors; each is started once."""
        for saved in list(self.storages.values()):
            saved.launch_read()


@dataclass(frozen=True)
class SavedTensor:
    """A saved tensor: `unpack` returns it on the device."""

    saved: _SavedStorage
    block: _BlockTensors
    dtype: torch.dtype
    layout: tuple[int, torch.Size, tuple[int, ...]]
    """Offset in elements, shape and strides."""

    def unpack(self) -> Tensor:
        """Return the tensor on the device, and start the return of the block before."""
        block = self.block
        if not block.is_returning:
            block.is_returning = True
            block.launch_reads()
            if block.previous is not None:
                block.previous.launch_reads()
                block.previous = None
        offset, shape, strides = self.layout
        return self.saved.get_data().view(self.dtype).as_strided(shape, strides, offset)


@dataclass(frozen=True)
class _ResidentTensor:
    """A saved tensor that stays: a parameter, or an input that all blocks share."""

    tensor: Tensor

    def unpack(self) -> Tensor:
        return self.tensor


def _unpack(packed: PackedTensor) -> Tensor:
    return packed.unpack()


class ActivationOffload:
    """Saved tensors of all blocks of a rank."""

    def __init__(self, store: ActivationStore, tier: OffloadTier, device: torch.device) -> None:
        self.store = store
        self.tier = tier
        self.device = device
        self.num_bytes = 0
        """Bytes in the store now."""
        self.peak_bytes = 0
        self._block: _BlockTensors | None = None
        """Block whose forward pass runs."""
        self._sealed: _BlockTensors | None = None
        """Last block whose forward pass has ended; its tensors have not begun to leave."""
        self._pass: weakref.ref[Any] | None = None
        self._resident: set[int] = set()
        """Addresses of memory that is not the block's own."""
        self._shared: set[int] = set()
        self._reporter = TransferReporter()

    @contextmanager
    def offload_block(self, block: nn.Module, context: Any) -> Iterator[None]:
        """Offload what autograd saves in this context.

        Args:
            block: its parameters and buffers stay.
            context: value of the forward pass, common to its blocks; its tensors stay.
        """
        if not torch.is_grad_enabled():
            yield
            return
        is_same_pass = self._pass is not None and self._pass() is context
        if not is_same_pass:
            self._pass = weakref.ref(context)
            self._shared = {_get_address(tensor) for tensor in _list_tensors(context)}
        self._resident = self._shared | {
            _get_address(tensor) for tensor in (*block.parameters(), *block.buffers())
        }
        leaving, self._sealed = self._sealed, None
        if leaving is not None:
            leaving.leaving = list(leaving.storages.values())
            for saved in leaving.leaving:
                if saved.place is None:
                    saved.launch_write()
        current = self._block = _BlockTensors(leaving if is_same_pass else None)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.pack, _unpack):
                yield
        finally:
            self._block = None
            self._sealed = current
            if leaving is not None:
                for saved in leaving.leaving:
                    saved.finish_write()
                leaving.leaving = []

    def pack(self, tensor: Tensor) -> PackedTensor:
        """Return a reference through which a saved tensor's memory can leave."""
        block = self._block
        storage = tensor.untyped_storage()
        if (
            block is None
            or tensor.device.type != self.device.type
            or not storage.nbytes()
            or not _is_plain(tensor)
            or _get_address(tensor) in self._resident
        ):
            return _ResidentTensor(tensor)
        address = _get_address(tensor)
        saved = block.storages.get(address)
        if saved is None:
            saved = block.storages[address] = _SavedStorage(self, tensor)
        layout = (int(tensor.storage_offset()), tensor.shape, tensor.stride())
        return SavedTensor(saved, block, tensor.dtype, layout)

    def add_bytes(self, num_bytes: int) -> None:
        """Count bytes that the store receives (or frees, if negative)."""
        self.num_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)

    def pop_counts(self) -> TransferCounts:
        """Return bytes and times since the previous call."""
        return self._reporter.take(self.store.counts)

    def close(self) -> None:
        """Free the store. No backward pass may follow."""
        self._sealed = None
        self.store.close()


def _is_plain(value: Any) -> bool:
    """Return True for tensors with one storage: no DTensors or other wrappers."""
    return type(value) in (Tensor, nn.Parameter, FakeTensor)


def _get_address(tensor: Tensor) -> int:
    """Return the address of a storage's record: fake tensors have no memory to point to."""
    return int(tensor.untyped_storage()._cdata)


def _list_tensors(value: Any, depth: int = 4) -> Iterable[Tensor]:
    """List the tensors that a value of plain Python objects refers to."""
    if _is_plain(value):
        yield value
        return
    if not depth or isinstance(value, nn.Module | str | int | float | type(None)):
        return
    children: Iterable[Any] = ()
    if isinstance(value, dict):
        children = value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        children = value
    elif is_dataclass(value):
        children = [getattr(value, item.name, None) for item in fields(value)]
    elif hasattr(value, "__dict__") and not callable(value):
        children = vars(value).values()
    for child in children:
        yield from _list_tensors(child, depth - 1)


def build_activation_offload(
    section: OffloadSection, *, device: torch.device, default_folder: Path
) -> ActivationOffload | None:
    """Build the offloading of the section; None if nothing moves.

    That is so with `host` on a CPU, whose memory is the host's.

    Raises:
        OffloadFailed: the scratch file cannot be created.
    """
    store: ActivationStore
    if section.activations == "disk":
        folder = default_folder if section.dir is None else Path(section.dir)
        store = ScratchStore(folder, section.buffer_bytes, device)
    elif section.activations == "host" and device.type != "cpu":
        store = PinnedStore(device)
    else:
        return None
    return ActivationOffload(store, section.activations, device)


def describe_activation_offload(section: OffloadSection, device: torch.device) -> str:
    """Describe in one line where the saved tensors of a rank's blocks are."""
    if section.activations == "disk":
        return "offload: saved tensors of blocks leave to a scratch file"
    if device.type == "cpu":
        return (
            "offload: saved tensors stay: the device is the CPU, so its memory is the host's and "
            "nothing moves"
        )
    return "offload: saved tensors of blocks leave to pinned host memory"
