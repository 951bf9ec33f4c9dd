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

from shardwright.parallel.mesh import Mesh, Ranks
from shardwright.parallel.waiting import waiting
from shardwright.schedule import Action, Transfer

_downward: dict[tuple[dist.ProcessGroup | None, Ranks], dist.ProcessGroup] = {}
"""Second process group of each pipeline, by world and ranks.

Like a mesh's groups they exist until the process ends.
"""


class Channels:
    """This rank's ends of its channels. Nothing is pending after `finish`."""

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        """Create the process groups; every rank of the world calls this."""
        self._device = device
        self._ranks = mesh.grid.group_of(mesh.rank, ["pp"])
        self._here = mesh.coordinates["pp"]
        upward = mesh.group("pp")
        assert upward is not None, "a pipeline of one rank needs no channels"
        for ranks in mesh.grid.groups(["pp"]):
            key = (dist.group.WORLD, ranks)
            if key not in _downward:
                _downward[key] = dist.new_group(list(ranks))
        self._groups = upward, _downward[dist.group.WORLD, self._ranks]
        self._coming: dict[Transfer, tuple[Tensor, dist.Work | None]] = {}
        self._going: dict[Action, tuple[Tensor, dist.Work]] = {}

    def post(self, transfer: Transfer, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Post the receive of a message of this shape."""
        buffer = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        work = None
        if buffer.numel():  # a message without elements is not sent
            work = dist.irecv(buffer, self._ranks[transfer.sender], self._group(transfer), transfer.number)
        self._coming[transfer] = buffer, work

    def take(self, transfer: Transfer) -> Tensor:
        """Wait for a message and return it."""
        buffer, work = self._coming.pop(transfer)
        if work is not None:
            with waiting("pipeline"):
                work.wait()
        if transfer.carries_gradient:
            # This gradient answers the forward message, which has therefore arrived; gloo
            # reports that only to a waiter.
            self._release(Action("F", transfer.action.stage - 1, transfer.action.micro_batch))
        return buffer

    def send(self, transfer: Transfer, tensor: Tensor) -> None:
        """Send a message without waiting for it."""
        tensor = tensor.contiguous()
        if tensor.numel():
            work = dist.isend(tensor, self._ranks[transfer.receiver], self._group(transfer), transfer.number)
            assert work is not None
            # A buffer must stay unchanged until its send has completed.
            self._going = {action: (buffer, send) for action, (buffer, send) in self._going.items() if not send.is_completed()}
            self._going[transfer.action] = tensor, work

    def finish(self) -> None:
        """Wait until all sends have completed."""
        assert not self._coming, "a receive was posted whose message was never read"
        for action in list(self._going):
            self._release(action)

    def _release(self, action: Action) -> None:
        """Wait for a send and release its buffer."""
        if action in self._going:
            with waiting("pipeline"):
                self._going.pop(action)[1].wait()

    def _group(self, transfer: Transfer) -> dist.ProcessGroup:
        return self._groups[transfer.receiver < transfer.sender]
