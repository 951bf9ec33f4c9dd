"""Saved tensors of blocks in a slower tier, from their forward to their backward pass.

Autograd hands every tensor that a block saves to `pack`, and asks `unpack` for it in the
backward pass; selective recomputation does the same with the results that it saves
(docs/decisions/0079-offloaded-activations.md).

[Note: when tensors move] A block's tensors begin to leave when the next block's forward pass
begins, and their memory is freed when it ends. So at most two blocks have theirs on the device,
and the last block's never move: its backward pass follows at once. The first `unpack` of a block
starts the return of the tensors of the block before it.

Inputs of deferred weight gradients (I and W of pipeline schedules) move by the same rule. A block's
leave when the next block's backward pass begins; those of the last block stay if its W is next.
Under W, as in a backward pass, the first `unpack` of a block starts the return of the next one's.
That of the first block in W starts with the last block of the action before, if it can
(docs/decisions/0193-offloaded-inputs-of-weight-gradients.md).
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

    @property
    def is_on_device(self) -> bool:
        """True if the memory is on the device and no copy brings it there now."""
        return self.data is not None and self._read_wait is None

    def launch_write(self) -> None:
        """Start to copy the memory to the store, if that does not have it."""
        assert self.data is not None
        if self.place is None:
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
    """Storages that one block has saved in one forward pass, or deferred in one backward pass."""

    previous: _BlockTensors | None
    storages: weakref.WeakValueDictionary[int, _SavedStorage] = field(
        default_factory=weakref.WeakValueDictionary
    )
    """By address on the device, of those that are there."""
    is_returning: bool = False

    def launch_reads(self) -> None:
        """Start the return of all tensors; each is started once."""
        returning = list(self.storages.values())
        self.storages.clear()
        for saved in returning:
            saved.launch_read()
            assert saved.data is not None
            self.storages[_get_address(saved.data)] = saved

    def find(self, address: int) -> _SavedStorage | None:
        """Find the storage whose memory has this address now: a left one's may be reused."""
        saved = self.storages.get(address)
        if saved is None or saved.data is None or _get_address(saved.data) != address:
            return None
        return saved


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
        if not self.block.is_returning:
            self.saved.owner.begin_return(self.block)
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
        self._leaving: list[_SavedStorage] = []
        """Storages that leave during the pass of another block."""
        self._returned: _BlockTensors | None = None
        """Block whose tensors have returned last, for its backward pass."""
        self._inputs: _BlockTensors | None = None
        """Inputs of deferred weight gradients of that block."""
        self._last_inputs: _BlockTensors | None = None
        """Such inputs of the last block of this backward pass."""
        self._ended_inputs: _BlockTensors | None = None
        """Those of the last block of a pass that has ended; they have not begun to leave."""
        self._expected: _BlockTensors | None = None
        """Inputs that the pass after this one reads first."""
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
        last, self._sealed = self._sealed, None
        self._begin_leaving(last)
        current = self._block = _BlockTensors(last if is_same_pass else None)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.pack, _unpack):
                yield
        finally:
            self._block = None
            self._sealed = current
            self._finish_leaving()

    def _begin_leaving(
        self, *blocks: _BlockTensors | None, used: _BlockTensors | None = None
    ) -> None:
        """Let blocks' tensors leave, and deferred inputs of a block whose pass has ended.

        Args:
            used: stays; its tensors are read next.
        """
        self._finish_leaving()
        for block in (*blocks, self._ended_inputs, self._inputs):
            if block is not None and block is not used:
                self._leaving += (saved for saved in block.storages.values() if saved.is_on_device)
        self._ended_inputs = self._inputs = None
        for saved in self._leaving:
            saved.launch_write()

    def _finish_leaving(self) -> None:
        leaving, self._leaving = self._leaving, []
        for saved in leaving:
            saved.finish_write()

    def begin_return(self, block: _BlockTensors) -> None:
        """Bring back a block's tensors, and those of the block that is needed after it."""
        block.is_returning = True
        if self._sealed is block:
            self._sealed = None
        self._begin_leaving(used=block)
        block.launch_reads()
        self._returned = block
        following, block.previous = block.previous, None
        if following is None:
            following, self._expected = self._expected, None
        if following is not None:
            following.launch_reads()

    def pack(self, tensor: Tensor) -> PackedTensor:
        """Return a reference through which a saved tensor's memory can leave."""
        block = self._block
        if block is None or not self._can_leave(tensor) or _get_address(tensor) in self._resident:
            return _ResidentTensor(tensor)
        return self._refer(tensor, block, block.find(_get_address(tensor)))

    def pack_input(self, tensor: Tensor) -> PackedTensor:
        """Return a reference through which an input of a deferred weight gradient can leave.

        What the store has as a saved tensor of the same block is not written again.
        """
        if not self._can_leave(tensor):
            return _ResidentTensor(tensor)
        if self._inputs is None:
            self._inputs = self._last_inputs = _BlockTensors(self._last_inputs)
        address = _get_address(tensor)
        saved = self._inputs.find(address)
        if saved is None and self._returned is not None:
            saved = self._returned.find(address)
        return self._refer(tensor, self._inputs, saved)

    def _can_leave(self, tensor: Tensor) -> bool:
        return (
            tensor.device.type == self.device.type
            and _is_plain(tensor)
            and tensor.untyped_storage().nbytes() > 0
        )

    def _refer(
        self, tensor: Tensor, block: _BlockTensors, saved: _SavedStorage | None
    ) -> SavedTensor:
        """Return a reference to a tensor of a block, whose storage may be known."""
        if saved is None:
            saved = _SavedStorage(self, tensor)
        block.storages[_get_address(tensor)] = saved
        layout = (int(tensor.storage_offset()), tensor.shape, tensor.stride())
        return SavedTensor(saved, block, tensor.dtype, layout)

    def end_inputs(self) -> None:
        """End a backward pass: its last block's inputs stay until another block's pass begins."""
        self._ended_inputs, self._inputs, self._last_inputs = self._inputs, None, None
        self._returned = None

    def expect_input(self, packed: PackedTensor) -> None:
        """Let an input's block return during the last block of the pass that begins."""
        if isinstance(packed, SavedTensor):
            self._expected = packed.block

    def add_bytes(self, num_bytes: int) -> None:
        """Count bytes that the store receives (or frees, if negative)."""
        self.num_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)

    def pop_counts(self) -> TransferCounts:
        """Return bytes and times since the previous call."""
        return self._reporter.take(self.store.counts)

    def close(self) -> None:
        """Free the store. No backward pass may follow."""
        self._sealed = self._ended_inputs = self._expected = None
        self._leaving.clear()
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
