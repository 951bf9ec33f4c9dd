"""Copies of training states in the memory of this process, which outlive a generation.

Two steps are kept: while the copies of one step are made and sent, those of the step before are
complete on all ranks. Nothing here refers to a process group, a model or a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwright.checkpoint.boxes import Box
from shardwright.checkpoint.host_buffer import HostBuffer
from shardwright.checkpoint.local_tensors import HostCopy


@dataclass(frozen=True, order=True)
class CopyId:
    """Identity of the copies of all ranks of one step.

    Two generations may run the same step, and reach other bits without deterministic kernels. So
    their copies are never combined.
    """

    generation: int
    """Number of the generation that ran the step, which all its ranks share."""
    step: int


@dataclass(frozen=True)
class CopiedBox:
    """Part of a tensor in a copy: name and dtype as in a checkpoint, global shape, box."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box

    def to_json(self) -> list[Any]:
        """Return a list for `from_json`."""
        return [self.name, self.dtype, self.shape, self.box.offsets, self.box.lengths]

    @classmethod
    def from_json(cls, fields: list[Any]) -> CopiedBox:
        """Read the list of `to_json`."""
        name, dtype, shape, offsets, lengths = fields
        return cls(name, dtype, tuple(shape), Box(tuple(offsets), tuple(lengths)))


@dataclass(frozen=True)
class StateCopy:
    """Complete state of one rank after one step. It exists only once all of it has arrived."""

    copy_id: CopyId
    owner: int
    """Rank whose state it is."""
    world_size: int
    """Number of ranks of the owner's generation."""
    parts: Mapping[CopiedBox, HostCopy]
    values: Mapping[str, Any]
    """State that is not tensors, as JSON: `values` and `merged` of `save_checkpoint`."""


@dataclass
class CopySlot:
    """Memory for the copies of one step: this rank's own state and that of a peer."""

    own: StateCopy | None = None
    peer: StateCopy | None = None
    """Copy of the peer's state. Boxes that this rank has too refer to `own`'s memory."""
    own_buffer: HostBuffer = field(default_factory=HostBuffer)
    peer_buffer: HostBuffer = field(default_factory=HostBuffer)

    def clear(self) -> None:
        """Forget the copies, and keep the memory for the next ones."""
        self.own = self.peer = None

    @property
    def copies(self) -> tuple[StateCopy, ...]:
        """Complete copies."""
        return tuple(copy for copy in (self.own, self.peer) if copy is not None)


class PeerMemory:
    """Copies of two steps in this process."""

    def __init__(self) -> None:
        self._slots = (CopySlot(), CopySlot())
        self._complete_slot = 1
        """Index of the slot whose copies are complete on all ranks, if any are."""
        self.generation = 0
        """Number of the newest generation that this process took part in."""
        self.first_valid_generation = 0
        """Copies of earlier generations must not be used."""
        self.finished_step = 0
        """Newest finished step that this process knows of."""

    @property
    def copies(self) -> tuple[StateCopy, ...]:
        """All complete copies in this process, at most four."""
        return tuple(copy for slot in self._slots for copy in slot.copies)

    def open_slot(self) -> CopySlot:
        """Empty and return the slot for the next step.

        Call it only when the copies of the step before are complete on all ranks, which are then
        the ones that are kept.
        """
        slot = self._slots[1 - self._complete_slot]
        slot.clear()
        return slot

    def keep_slot(self, slot: CopySlot) -> None:
        """Keep this slot's copies at the next `open_slot`."""
        self._complete_slot = self._slots.index(slot)

    def keep_copies(self, copy_id: CopyId) -> None:
        """Keep the copies of this identity at the next `open_slot`, if there are any."""
        for slot in self._slots:
            if any(copy.copy_id == copy_id for copy in slot.copies):
                self.keep_slot(slot)

    def discard(self) -> None:
        """Forget all copies, also those that other processes have not forgotten yet.

        For states that must not be continued: they are followed by a new generation.
        """
        for slot in self._slots:
            slot.clear()
        self.generation += 1
        self.first_valid_generation = self.generation


_process_memory = PeerMemory()


def get_process_memory() -> PeerMemory:
    """Return the copies of this process, the same in all its generations."""
    return _process_memory
