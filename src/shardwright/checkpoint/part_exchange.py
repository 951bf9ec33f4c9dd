"""Exchange of parts of stored tensors between ranks that have their files in memory.

Each object of a checkpoint is fetched and hashed by one rank, which keeps it. Under another layout
other ranks need parts of it. They come from that rank: the store is not asked a second time, and
short runs of a tensor need no request that reads the bytes between them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from typing import Any, TypeAlias

import torch

from shardwright.checkpoint.box_reading import DTYPES, StoredPart, plan_reads
from shardwright.checkpoint.boxes import Box
from shardwright.checkpoint.header import HeaderEntry
from shardwright.checkpoint.rank_group import RankGroup
from shardwright.checkpoint.storage_path import SHORT_RUN_BYTES, ReadableFile
from shardwright.grouping import group_by_size

_ROUND_BYTES = 64 * 1024**2
"""Bytes that a rank sends or receives in one round; both are in host memory."""

FindSlice: TypeAlias = Callable[[str, str], tuple[ReadableFile, HeaderEntry]]
"""Function that returns the open file and the header entry of a file's name and a slice's key."""


def exchange_parts(
    ranks: RankGroup, cached: Collection[str], parts: Iterable[StoredPart], find: FindSlice
) -> list[StoredPart]:
    """Fill the parts whose file is in another rank's memory; return the others. Collective.

    Args:
        cached: Names of the files in this rank's memory.
        find: Finds slices of these files.
    """
    owners = {
        name: rank for rank, names in enumerate(ranks.all_gather(sorted(cached))) for name in names
    }
    limit_bytes = max(SHORT_RUN_BYTES, _ROUND_BYTES // ranks.world_size)
    wanted: list[list[StoredPart]] = [[] for _ in range(ranks.world_size)]
    others = []
    for part in parts:
        owner = owners.get(part.stored_slice.file, ranks.rank)
        if owner == ranks.rank:
            others.append(part)
        else:
            wanted[owner] += _divide(part, limit_bytes)
    received = ranks.exchange([_encode([_describe(part) for part in each]) for each in wanted])
    # Both sides compute the same groups, one per round.
    requests = [json.loads(bytes(data_N.numpy())) for data_N in received]
    outgoing = [
        list(group_by_size(each, [request[-1] for request in each], limit_bytes))
        for each in requests
    ]
    incoming = [
        list(group_by_size(each, [part.num_bytes for part in each], limit_bytes)) for each in wanted
    ]
    for number in range(max(ranks.all_gather(max(map(len, incoming))))):
        answers = ranks.exchange([_read_all(_get(groups, number), find) for groups in outgoing])
        for groups, data_N in zip(incoming, answers, strict=True):
            _fill_all(_get(groups, number), data_N)
    return others


def _divide(part: StoredPart, limit_bytes: int) -> Iterator[StoredPart]:
    """Yield parts of at most so many bytes."""
    if part.num_bytes <= limit_bytes:
        yield part
    else:
        yield from chain.from_iterable(_divide(half, limit_bytes) for half in part.halve())


def _describe(part: StoredPart) -> list[Any]:
    """Return the request for a part, as JSON."""
    stored = part.stored_slice
    return [stored.file, stored.key, part.box.offsets, part.box.lengths, part.num_bytes]


def _get(groups: list[list[Any]], number: int) -> list[Any]:
    """Return the items of a round; none after the last one."""
    return groups[number] if number < len(groups) else []


def _encode(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _read_all(requests: list[list[Any]], find: FindSlice) -> torch.Tensor:
    """Return the bytes of all requested parts, one after the other."""
    data_N = torch.empty(sum(request[-1] for request in requests), dtype=torch.uint8)
    position = 0
    for name, key, offsets, lengths, num_bytes in requests:
        file, stored = find(name, key)
        values = torch.empty(lengths, dtype=DTYPES[stored.dtype])
        box = Box(tuple(offsets), tuple(lengths))
        for read in plan_reads(file, stored, box, values):
            read.load()
        data_N[position : position + num_bytes] = values.view(-1).view(torch.uint8)
        position += num_bytes
    return data_N


@torch.no_grad()
def _fill_all(parts: list[StoredPart], data_N: torch.Tensor) -> None:
    """Copy bytes that `_read_all` has made into the parts."""
    position = 0
    for part in parts:
        values_N = data_N[position : position + part.num_bytes]
        if values_N.storage_offset() % part.target.element_size():
            values_N = values_N.clone()  # parts of another dtype come first
        part.target.copy_(values_N.view(part.target.dtype).view(part.target.shape))
        position += part.num_bytes
