"""Sending of each rank's state to its holder, on a thread, while the next step is computed.

[Note: two steps in memory]
All ranks announce a copy to each other before they overwrite anything. A rank announces step s only
once its own copy and its peer's of the step before are complete. So after the announcement the step
before is complete on all ranks, and the memory of the step before that is free. At any moment at
least one step is complete everywhere.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardwright.checkpoint.host_buffer import use_copy_stream
from shardwright.checkpoint.local_tensors import ParameterShard, describe_local_tensor
from shardwright.checkpoint.manifest import DTYPE_BYTES
from shardwright.checkpoint.rank_group import RankGroup
from shardwright.errors import RunFailed
from shardwright.peer_copies.memory import CopiedBox, CopyId, CopySlot, PeerMemory, StateCopy

COPY_THREAD_NAME = "peer-copy"
"""Prefix of the names of the threads that send copies."""


@dataclass(frozen=True)
class CopyCounts:
    """Copies that this rank has sent, with their bytes and seconds."""

    num_copies: int = 0
    own_bytes: int = 0
    """Bytes of this rank's state, which it keeps itself in host memory."""
    sent_bytes: int = 0
    """Bytes of the last copy that went to the holder: without what the holder has anyway."""
    copy_seconds: float = 0.0
    """Time from the start of the last copy until the state was in host memory and sent."""
    stall_seconds: float = 0.0
    """Time that training has waited for all copies so far."""


class PeerCopier:
    """Copier of one rank's state, one step at a time. All ranks make the same calls.

    After `begin` no tensor may change until `wait_for_copy` has returned.
    """

    def __init__(
        self, memory: PeerMemory, group: dist.ProcessGroup, holders: Sequence[int]
    ) -> None:
        """
        Args:
            memory: Memory of this process for its own copies and those that it holds.
            group: gloo group of all ranks, used by nothing else.
            holders: Rank that keeps the copy of each rank, as `choose_holders` returns them.
        """
        self.memory = memory
        self.counts = CopyCounts()
        self._group = group
        self._ranks = RankGroup(group)
        self._holder = holders[self._ranks.rank]
        self._owner = list(holders).index(self._ranks.rank)
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=COPY_THREAD_NAME)
        self._pending: Future[None] | None = None
        self._is_copied = threading.Event()
        self._is_copied.set()
        self._digest = ""
        self._boxes_of_ranks: list[list[CopiedBox]] = []
        """Boxes of each rank's state, as the ranks last announced them."""
        self._stall_seconds = 0.0

    def begin(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor | ParameterShard],
        values: Mapping[str, Any],
        collect_merged_values: Callable[[], Mapping[str, Any]],
    ) -> None:
        """Start to copy this rank's state after `step`. Waits for the end of the previous copy.

        Args:
            step: Number of finished optimizer steps.
            tensors: This rank's part of the state, as for `save_checkpoint`.
            values: State that is not tensors, the same on all ranks.
            collect_merged_values: Returns the values that differ between ranks. Called on the
                thread, because reading them may wait for the device.

        Raises:
            RunFailed: The copy before failed. RuntimeError: A peer was lost during it.
        """
        self.wait()
        described = {
            name: describe_local_tensor(name, tensor) for name, tensor in sorted(tensors.items())
        }
        sources = {
            CopiedBox(name, tensor.dtype, tensor.shape, part.box): part.values
            for name, tensor in described.items()
            for part in tensor.slices
        }
        device = next((values.device for values in sources.values() if values.is_cuda), None)
        ready = None if device is None else torch.cuda.current_stream(device).record_event()
        copy_id = CopyId(self.memory.generation, step)

        def collect_values() -> dict[str, Any]:
            with use_copy_stream(device, ready):
                return {"values": dict(values), "merged": dict(collect_merged_values())}

        self._is_copied.clear()
        self._pending = self._pool.submit(self._copy, copy_id, sources, collect_values, ready)

    def wait_for_copy(self) -> None:
        """Wait until the tensors given to `begin` may change."""
        started = time.perf_counter()
        self._is_copied.wait()
        self._stall_seconds += time.perf_counter() - started

    def wait(self) -> None:
        """Wait until the current copy is complete on this rank. Raises as `begin`."""
        started = time.perf_counter()
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending.result()
            except MemoryError as error:
                raise RunFailed(
                    "elastic.peer_copies: not enough host memory for the copies of the state"
                ) from error
        self._stall_seconds += time.perf_counter() - started

    def close(self) -> None:
        """Wait for the current copy and end the thread. Raises as `begin`."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()

    def abandon(self) -> None:
        """Give up the current copy without waiting: after a failure a peer may be gone."""
        self._pending = None
        self._is_copied.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _copy(
        self,
        copy_id: CopyId,
        sources: Mapping[CopiedBox, torch.Tensor],
        collect_values: Callable[[], dict[str, Any]],
        ready: torch.cuda.Event | None,
    ) -> None:
        """Copy the state to host memory and exchange it with the peers, on the thread."""
        started = time.perf_counter()
        try:
            self._announce(copy_id, list(sources))
            slot = self.memory.open_slot()
            sent = self._list_sent_boxes(self._ranks.rank)
            order = sent + [box for box in sources if box not in set(sent)]
            versions = _read_versions(sources)
            copies = slot.own_buffer.copy_tensors([sources[box] for box in order], ready)
            values = collect_values()
            if _read_versions(sources) != versions:
                raise RunFailed("elastic.peer_copies: a tensor changed while it was copied")
            parts = dict(zip(order, copies, strict=True))
            slot.own = StateCopy(copy_id, self._ranks.rank, self._ranks.world_size, parts, values)
        finally:
            self._is_copied.set()
        sent_bytes = _count_bytes(sent)
        slot.peer = self._exchange(slot, slot.own, sent_bytes)
        self.memory.keep_slot(slot)
        self.counts = CopyCounts(
            self.counts.num_copies + 1,
            _count_bytes(order),
            sent_bytes,
            time.perf_counter() - started,
            self._stall_seconds,
        )

    def _announce(self, copy_id: CopyId, boxes: list[CopiedBox]) -> None:
        """Agree on the step with all ranks; send the boxes of the state if any rank's changed.

        Raises:
            RunFailed: The ranks copy different steps.
        """
        description = [box.to_json() for box in boxes]
        digest = hashlib.sha256(json.dumps(description).encode()).hexdigest()
        reports = self._ranks.all_gather([copy_id.generation, copy_id.step, digest == self._digest])
        if len({(generation, step) for generation, step, _ in reports}) > 1:
            raise RunFailed(
                "elastic.peer_copies: the ranks copied different steps: "
                f"{sorted({step for _, step, _ in reports})}"
            )
        if not all(is_same for *_, is_same in reports):
            self._boxes_of_ranks = [
                [CopiedBox.from_json(fields) for fields in boxes_of_rank]
                for boxes_of_rank in self._ranks.all_gather(description)
            ]
            self._digest = digest

    def _list_sent_boxes(self, owner: int) -> list[CopiedBox]:
        """List the boxes of a rank's state that its holder does not have itself."""
        holder = self._holder if owner == self._ranks.rank else self._ranks.rank
        known = set(self._boxes_of_ranks[holder])
        return [box for box in self._boxes_of_ranks[owner] if box not in known]

    def _exchange(self, slot: CopySlot, own: StateCopy, sent_bytes: int) -> StateCopy:
        """Send this rank's copy to its holder, and receive the copy that this rank holds.

        Raises:
            RunFailed: What arrived is not the copy of the announced step.
        """
        header = {
            "copy": [own.copy_id.generation, own.copy_id.step],
            "owner": own.owner,
            "values": own.values,
        }
        boxes = self._list_sent_boxes(self._owner)
        received = slot.peer_buffer.reserve_copies([_count_bytes([box]) for box in boxes])
        text = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
        length = torch.zeros(1, dtype=torch.int64)
        self._transfer(torch.tensor([text.numel()], dtype=torch.int64), length)
        peer_text = torch.empty(int(length), dtype=torch.uint8)
        self._transfer(text, peer_text)
        peer_header = json.loads(bytes(peer_text.numpy()))
        if peer_header["copy"] != header["copy"] or peer_header["owner"] != self._owner:
            raise RunFailed(
                f"elastic.peer_copies: rank {peer_header['owner']} sent its state of step "
                f"{peer_header['copy'][1]}; that of rank {self._owner} after step "
                f"{own.copy_id.step} was expected"
            )
        outgoing = slot.own_buffer.list_pieces(sent_bytes)
        incoming = slot.peer_buffer.list_pieces(_count_bytes(boxes))
        for index in range(max(len(outgoing), len(incoming))):
            self._transfer(
                outgoing[index] if index < len(outgoing) else None,
                incoming[index] if index < len(incoming) else None,
            )
        received_parts = dict(zip(boxes, received, strict=True))
        parts = {
            box: received_parts[box] if box in received_parts else own.parts[box]
            for box in self._boxes_of_ranks[self._owner]
        }
        return StateCopy(
            own.copy_id, self._owner, self._ranks.world_size, parts, peer_header["values"]
        )

    def _transfer(self, outgoing: torch.Tensor | None, incoming: torch.Tensor | None) -> None:
        """Send one tensor to the holder and receive one from the owner at the same time."""
        works = []
        if outgoing is not None:
            works.append(dist.isend(outgoing, self._holder, group=self._group))
        if incoming is not None:
            works.append(dist.irecv(incoming, self._owner, group=self._group))
        for work in works:
            assert work is not None
            work.wait()


def _read_versions(sources: Mapping[CopiedBox, torch.Tensor]) -> list[int]:
    """Return torch's counts of in-place changes; 0 for inference tensors, which have none."""
    return [0 if values.is_inference() else values._version for values in sources.values()]


def _count_bytes(boxes: Sequence[CopiedBox]) -> int:
    return sum(DTYPE_BYTES[box.dtype] * box.box.num_elements for box in boxes)
