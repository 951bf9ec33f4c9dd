"""Offloading's transfers against fio's of the same bytes, and the CPU's update against its memory.

    python -m benchmarks.offload_disk --folder /scratch --out docs/benchmarks/offload-disk.json

Nothing computes during the transfers. fio and the stores take turns, round after round. The store
of moments swaps buckets in and out as an update does; the store of weights reads or writes blocks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.conditions import format_rows, read_conditions
from benchmarks.offload import measure_with_fio
from shardwright.config.offload import DISK_BUCKET_BYTES
from shardwright.offload.disk_store import DiskStore
from shardwright.offload.parameter_store import DiskParameterStore
from shardwright.offload.state_buckets import OffloadedParameter, partition_state
from shardwright.offload.weight_store import DiskWeightStore, WrittenRange
from shardwright.optim.sharded_optimizer import StateSpec

_BUFFER_BYTES = 64 * 2**20
_NUM_BUFFERS = 16
_NUM_BYTES = _NUM_BUFFERS * _BUFFER_BYTES
_BLOCK_BYTES = 3 * _BUFFER_BYTES
"""About the weights of a block of Qwen2.5-1.5B in fp32."""
_KINDS = ("moments", "weights_read", "frozen_read", "weights_write")
_DEPTHS = (1, 4)
"""Requests that fio has in flight."""


def main() -> None:
    """Measure all rounds and write the rates."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.offload_disk", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--folder", type=Path, required=True, help="folder on the disk to use")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=_KINDS, default=_KINDS, help="transfers")
    options = parser.parse_args()
    rounds = [
        measure_round(options.folder, number, options.kinds) for number in range(options.rounds)
    ]
    result = {
        "conditions": read_conditions() | {"load": os.getloadavg()},
        "num_bytes": _NUM_BYTES,
        "rounds": rounds,
        "summary": {
            name: statistics.median(item[name] for item in rounds)
            for name in rounds[0]
            if "share" in name
        },
    }
    print(json.dumps(result["summary"], indent=1))
    if options.out is not None:
        options.out.write_text(format_rows(result) + "\n")


def measure_round(folder: Path, number: int, names: Sequence[str] = _KINDS) -> dict[str, float]:
    """Measure bytes per second of kinds of transfers by the stores, and of the CPU's update."""
    kinds: dict[str, tuple[tuple[str, ...], Callable[[], float]]] = {
        "moments": (("read", "write"), lambda: swap_moments(folder)),
        "weights_read": (("read",), lambda: move_blocks(folder)[0]),
        "frozen_read": (("read",), lambda: read_frozen_blocks(folder)),
        "weights_write": (("write",), lambda: move_blocks(folder)[1]),
    }
    rates: dict[str, float] = {}
    for name in names:
        directions, measure = kinds[name]
        rates |= _compare_with_fio(folder, name, directions, measure, is_reversed=number % 2 == 1)
    update, addition = measure_update()
    return rates | {"update": update, "addition": addition, "update_share": update / addition}


def _compare_with_fio(
    folder: Path,
    name: str,
    directions: tuple[str, ...],
    measure: Callable[[], float],
    *,
    is_reversed: bool,
) -> dict[str, float]:
    """Measure a store between fio with one request in flight and fio with several."""
    num_bytes = len(directions) * _NUM_BYTES
    rates: dict[str, float] = {}
    for depth in (_DEPTHS[1], 0, _DEPTHS[0]) if is_reversed else (_DEPTHS[0], 0, _DEPTHS[1]):
        if depth:
            fio = measure_with_fio(folder, _NUM_BYTES, directions, depth=depth)
            rates[f"{name}_fio_{depth}"] = num_bytes / fio["seconds"]
        else:
            rates[name] = measure()
    for depth in _DEPTHS:
        rates[f"{name}_share_of_{depth}"] = rates[name] / rates[f"{name}_fio_{depth}"]
    return rates


def swap_moments(folder: Path) -> float:
    """Swap moments in and out, bucket by bucket; return bytes per second of both directions."""
    spec = StateSpec((_NUM_BYTES // 8,), torch.float32)
    moments = OffloadedParameter("weight", spec.shape[0], 1, {"exp_avg": spec, "exp_avg_sq": spec})
    buckets = partition_state([moments], DISK_BUCKET_BYTES)
    store = DiskStore(folder, buckets.segment_bytes, 3 * _BUFFER_BYTES)
    seconds = 0.0
    for is_measured in (False, True):  # the first writes of a reserved file take longer
        start_seconds = time.perf_counter()
        open_swaps = []
        for index, bucket in enumerate(buckets.buckets):
            open_swaps.append(store.swap_in(index, bucket))
            if len(open_swaps) == 3 * _BUFFER_BYTES // DISK_BUCKET_BYTES:
                swap = open_swaps.pop(0)
                swap.parts.result()
                store.swap_out(swap)
        for swap in open_swaps:
            swap.parts.result()
            store.swap_out(swap)
        store.view_segment(0)  # waits for the writes
        seconds = time.perf_counter() - start_seconds if is_measured else 0.0
    store.close()
    return 2 * _NUM_BYTES / seconds


def move_blocks(folder: Path) -> tuple[float, float]:
    """Read and write blocks of trained weights, one ahead; return bytes per second of each.

    A block is read into new memory, as in training, which frees that of blocks that have left.
    """
    device = torch.device("cpu")
    store = DiskParameterStore(folder, _BUFFER_BYTES, device)
    num_blocks = _NUM_BYTES // _BLOCK_BYTES
    places = [store.add(_BLOCK_BYTES) for _ in range(num_blocks)]
    blocks = [store.allocate(_BLOCK_BYTES).zero_() for _ in range(2)]

    _move(store.write, places, blocks)
    rates = _move(store.read, places, blocks, is_read=True), _move(store.write, places, blocks)
    store.close()
    return rates


def read_frozen_blocks(folder: Path) -> float:
    """Read blocks of frozen weights, one transfer ahead; return bytes per second."""
    store = DiskWeightStore(folder, _BUFFER_BYTES, torch.device("cpu"))
    values = WrittenRange(_BLOCK_BYTES, 0, lambda: [torch.zeros(_BLOCK_BYTES, dtype=torch.uint8)])
    places = [store.add(_BLOCK_BYTES, [values]) for _ in range(_NUM_BYTES // _BLOCK_BYTES)]
    blocks = [torch.empty(_BLOCK_BYTES, dtype=torch.uint8) for _ in range(2)]
    rate = _move(store.read, places, blocks, is_read=True)
    store.close()
    return rate


def _move(
    operation: Callable[[Any, torch.Tensor], Callable[[], None]],
    places: Sequence[Any],
    blocks: Sequence[torch.Tensor],
    *,
    is_read: bool = False,
) -> float:
    """Read blocks into new memory, or write them; return bytes per second."""
    num_bytes = blocks[0].untyped_storage().nbytes()
    start_seconds = time.perf_counter()
    waits: list[Callable[[], None]] = []
    for number, place in enumerate(places):
        block = blocks[number % 2]
        if is_read:
            block.untyped_storage().resize_(0)
            block.untyped_storage().resize_(num_bytes)
        waits.append(operation(place, block))
        if number:
            waits[number - 1]()
    waits[-1]()
    return len(places) * _BLOCK_BYTES / (time.perf_counter() - start_seconds)


def measure_update() -> tuple[float, float]:
    """Return bytes per second of the fused AdamW update and of an addition in place, by turns."""
    weights = torch.zeros(2**25, requires_grad=True)
    weights.grad = torch.full_like(weights, 1e-3)
    optimizer = torch.optim.AdamW([weights], fused=True)
    first, second = torch.zeros(2, 2**26)
    optimizer.step()
    updates: list[float] = []
    additions: list[float] = []
    for _ in range(3):
        start_seconds = time.perf_counter()
        optimizer.step()
        updates.append(time.perf_counter() - start_seconds)
        start_seconds = time.perf_counter()
        first.add_(second)
        additions.append(time.perf_counter() - start_seconds)
    # Weights and two moments are read and written, the gradient is read.
    return (
        28 * weights.numel() / statistics.median(updates),
        12 * first.numel() / statistics.median(additions),
    )


if __name__ == "__main__":
    main()
