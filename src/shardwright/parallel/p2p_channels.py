"""Point-to-point messages between pipeline ranks, in the order of a schedule's transfers.

Each direction of a pair of ranks is a channel. Messages to higher ranks go through one process
group, those to lower ranks through another: NCCL runs the messages of a pair and group one
after another on one stream, and a send must not queue there behind a receive whose message
depends on that send.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.parallel.comm_timing import time_wait
from shardwright.parallel.mesh import Mesh, RankTuple
from shardwright.schedule import Action, Transfer

_downward_groups: dict[tuple[dist.ProcessGroup | None, RankTuple], dist.ProcessGroup] = {}
"""Second process group of each pipeline, by world and ranks.

Like a mesh's groups they exist until the process ends.
"""


class P2PChannels:
    """This rank's ends of its channels. Nothing is pending after `finish`."""

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        """Create the process groups; every rank of the world calls this."""
        self._device = device
        self._ranks = mesh.grid.group_of(mesh.rank, ["pp"])
        self._pp_rank = mesh.coordinates["pp"]
        upward = mesh.group("pp")
        assert upward is not None, "a pipeline of one rank needs no channels"
        for ranks in mesh.grid.groups(["pp"]):
            key = (dist.group.WORLD, ranks)
            if key not in _downward_groups:
                _downward_groups[key] = dist.new_group(list(ranks))
        self._groups = upward, _downward_groups[dist.group.WORLD, self._ranks]
        self._pending_receives: dict[Transfer, tuple[Tensor, dist.Work | None]] = {}
        self._pending_sends: dict[Action, tuple[Tensor, dist.Work]] = {}

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
        if transfer.is_gradient:
            # This gradient answers the forward message, which has therefore arrived; gloo
            # reports that only to a waiter.
            self._wait_send(Action("F", transfer.action.stage - 1, transfer.action.micro_batch))
        return buffer

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
        return self._groups[transfer.receiver < transfer.sender]
