"""Point-to-point messages between pipeline ranks, in the order of a schedule's transfers.

Each direction of a pair of ranks is a channel. No rank has two channels in one process group
(`schedule.assign_channel_groups`). Groups on CUDA are initialised eagerly, and NCCL then runs all
operations of a rank and group one after another on one stream: a send in the group of an earlier
receive would wait for that receive's message, which may depend on the send.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.parallel.comm_timing import time_wait
from shardwright.parallel.mesh import Mesh
from shardwright.schedule import Action, Transfer, assign_channel_groups


class P2PChannels:
    """This rank's ends of its channels. Nothing is pending after `finish`."""

    def __init__(self, mesh: Mesh, device: torch.device, rank_of_stage: Sequence[int]) -> None:
        """Create the process groups and connect the ranks; every rank of the world calls this."""
        self._device = device
        self._ranks = mesh.grid.group_of(mesh.rank, ["pp"])
        self._pp_rank = mesh.coordinates["pp"]
        self._group_of_channel = assign_channel_groups(rank_of_stage)
        self._groups = [
            self._join_group(mesh, number)
            for number in range(1 + max(self._group_of_channel.values()))
        ]
        self._pending_receives: dict[Transfer, tuple[Tensor, dist.Work | None]] = {}
        self._pending_sends: dict[Action, tuple[Tensor, dist.Work]] = {}
        self._connect()

    @staticmethod
    def _join_group(mesh: Mesh, number: int) -> dist.ProcessGroup:
        """Return one of the groups of this rank's pipeline; the first is the mesh's own."""
        group = mesh.join_group(mesh.grid.groups(["pp"]), f"pp channels {number}", copy=number)
        assert group is not None, "a pipeline of one rank needs no channels"
        return group

    def _connect(self) -> None:
        """Send one number through every channel.

        NCCL connects two ranks at the first message between them, and their hosts wait there for
        each other. A receive that is posted ahead would wait for a message that its own rank has
        to answer first. Here all ranks take the groups in the same order, and each rank has at
        most one channel in a group.
        """
        number = torch.zeros(1, device=self._device)
        for channel, group in sorted(self._group_of_channel.items(), key=lambda item: item[1]):
            sender, receiver = channel
            if sender == self._pp_rank:
                dist.send(number, self._ranks[receiver], self._groups[group])
            elif receiver == self._pp_rank:
                dist.recv(number, self._ranks[sender], self._groups[group])

    def post_receive(self, transfer: Transfer, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Post the receive of a message of this shape."""
        buffer = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        work = None
        if buffer.numel():  # a message without elements is not sent
            work = dist.irecv(
                buffer,
                self._ranks[transfer.sender],
                self._choose_group(transfer),
                transfer.sequence_number,
            )
        self._pending_receives[transfer] = buffer, work

    def wait_receive(self, transfer: Transfer) -> Tensor:
        """Wait for a message and return it."""
        buffer, work = self._pending_receives.pop(transfer)
        if work is not None:
            with time_wait("pipeline"):
                work.wait()
        return buffer

    def release_sends(self, actions: Iterable[Action]) -> None:
        """Release the buffers of messages that have arrived; gloo reports that only to a waiter."""
        for action in actions:
            self._wait_send(action)

    def send(self, transfer: Transfer, tensor: Tensor) -> None:
        """Send a message without waiting for it."""
        tensor = tensor.contiguous()
        if tensor.numel():
            work = dist.isend(
                tensor,
                self._ranks[transfer.receiver],
                self._choose_group(transfer),
                transfer.sequence_number,
            )
            assert work is not None
            # A buffer must stay unchanged until its send has completed.
            self._pending_sends = {
                action: (buffer, send)
                for action, (buffer, send) in self._pending_sends.items()
                if not send.is_completed()
            }
            self._pending_sends[transfer.action] = tensor, work

    def finish(self) -> None:
        """Wait until all sends have completed."""
        assert not self._pending_receives, "a receive was posted whose message was never read"
        for action in list(self._pending_sends):
            self._wait_send(action)

    def _wait_send(self, action: Action) -> None:
        """Wait for a send and release its buffer."""
        if action in self._pending_sends:
            with time_wait("pipeline"):
                self._pending_sends.pop(action)[1].wait()

    def _choose_group(self, transfer: Transfer) -> dist.ProcessGroup:
        return self._groups[self._group_of_channel[transfer.channel]]
