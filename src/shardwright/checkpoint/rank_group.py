"""Collectives of JSON values as uint8 tensors; torch's object collectives use pickle."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


class RankGroup:
    """Ranks that save or load together; one process if torch.distributed is not in use.

    `group` None is the default group, as in torch. Only the first rank (0 of the group)
    creates, renames and removes folders.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._is_single = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if self._is_single else dist.get_rank(group)
        self.world_size = 1 if self._is_single else dist.get_world_size(group)

    @property
    def is_first(self) -> bool:
        """True for the rank that creates, renames and removes folders."""
        return self.rank == 0

    def all_gather(self, value: Any) -> list[Any]:
        """Return the JSON values of all ranks, by rank, on every rank."""
        if self.world_size == 1:
            return [json.loads(json.dumps(value))]
        local = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        device = self._get_device()
        length = torch.tensor([local.numel()], dtype=torch.int64, device=device)
        lengths = [torch.zeros_like(length) for _ in range(self.world_size)]
        dist.all_gather(lengths, length, group=self._group)
        sizes = [int(size) for size in lengths]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
        padded[: local.numel()] = local.to(device)
        gathered = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(gathered, padded, group=self._group)
        return [
            json.loads(bytes(data[:size].cpu().numpy()))
            for data, size in zip(gathered, sizes, strict=True)
        ]

    def broadcast_first(self, value: Any) -> Any:
        """Return the first rank's JSON value on every rank; ignore the others' values."""
        if self.world_size == 1:
            return json.loads(json.dumps(value))
        source = dist.get_global_rank(self._group, 0) if self._group is not None else 0
        local = (
            torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
            if self.is_first
            else torch.empty(0)
        )
        length = torch.tensor([local.numel()], dtype=torch.int64, device=self._get_device())
        dist.broadcast(length, src=source, group=self._group)
        data = (
            local.to(self._get_device())
            if self.is_first
            else torch.empty(int(length), dtype=torch.uint8, device=self._get_device())
        )
        dist.broadcast(data, src=source, group=self._group)
        return json.loads(bytes(data.cpu().numpy()))

    def exchange(self, payloads: list[torch.Tensor]) -> list[torch.Tensor]:
        """Send `payloads[r]`, bytes `[N]` in host memory, to rank r; return those for this rank."""
        device = self._get_device()
        sizes = torch.tensor([data_N.numel() for data_N in payloads], device=device)
        received_sizes = torch.empty_like(sizes)
        dist.all_to_all_single(received_sizes, sizes, group=self._group)
        lengths = received_sizes.tolist()
        received_N = torch.empty(sum(lengths), dtype=torch.uint8, device=device)
        dist.all_to_all_single(
            received_N,
            torch.cat(payloads).to(device),
            output_split_sizes=lengths,
            input_split_sizes=sizes.tolist(),
            group=self._group,
        )
        return list(received_N.cpu().split(lengths))

    def _get_device(self) -> torch.device:
        """Return the device that the group's collectives require."""
        backend = str(dist.get_backend(self._group))
        return (
            torch.device("cuda", torch.cuda.current_device())
            if backend == "nccl"
            else torch.device("cpu")
        )
