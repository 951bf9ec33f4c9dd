"""Saving and loading compared with plain writes of the same bytes, DCP and torch.save: python -m
benchmarks.checkpoint [--publish].

Two ranks hold float32 tensors sharded by rows, as FSDP2 shards them. All contenders run in the same
processes, one after the other in every round; each round starts with another one. Each writes to a
new folder, which is removed outside of the measured time. Times are those of the slower rank. Every
writer synchronises its bytes to the device (fsync) and starts when no other writes are pending
(sync). Files to read are in the page cache: the times compare the readers, not the device.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from benchmarks.checkpoint_page import FOLDER, STEP_SECONDS, Times, render_page
from benchmarks.conditions import read_conditions
from shardwright.checkpoint.background_save import BackgroundSaver
from shardwright.checkpoint.disk import LOCAL_DISK, HashedFile
from shardwright.checkpoint.local_tensors import iterate_blocks
from shardwright.checkpoint.storage_path import BLOCK_BYTES
from shardwright.checkpoint.tensor_loading import load_checkpoint
from shardwright.checkpoint.tensor_saving import save_checkpoint
from shardwright.verification.rank_pool import RankPool

RANKS = 2
WIDTH = 1024
READERS = (1, 2, 4, 8)
SHARES = (8, 4, 2, 1)
"""Sizes whose resharding is measured, as divisors of the whole."""


def make_tensors(num_tensors: int, *, blank: bool = False, dim: int = 0) -> dict[str, DTensor]:
    """Make tensors of 4 MiB, sharded by rows (`dim` 0) or columns over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(0)
    make = torch.zeros if blank else lambda *shape: torch.randn(*shape, generator=generator)
    return {
        f"layer{n}.weight": distribute_tensor(make(WIDTH, WIDTH), mesh, [Shard(dim)])
        for n in range(num_tensors)
    }


def write_plainly(folder: Path, tensors: dict[str, DTensor]) -> Times:
    """Write this rank's bytes to one file, then fsync file and folder: the rate of the device."""
    start_seconds = time.perf_counter()
    descriptor = LOCAL_DISK.create(folder / f"plain-{dist.get_rank()}")
    for tensor in tensors.values():
        for block in iterate_blocks(tensor.to_local()):
            LOCAL_DISK.write(descriptor, block)
    LOCAL_DISK.sync(descriptor)
    LOCAL_DISK.close(descriptor)
    LOCAL_DISK.sync_folder(folder)
    return {"total": time.perf_counter() - start_seconds}


def write_past_the_cache(folder: Path, tensors: dict[str, DTensor]) -> Times:
    """Write the same number of bytes from one aligned block, past the page cache: the rate of the
    device without the limit of memory.
    """
    block = memoryview(mmap.mmap(-1, BLOCK_BYTES))
    block[:] = bytes(BLOCK_BYTES)
    remaining_bytes = sum(
        tensor.to_local().numel() * tensor.element_size() for tensor in tensors.values()
    )
    dist.barrier()
    start_seconds = time.perf_counter()
    descriptor = LOCAL_DISK.create(folder / f"direct-{dist.get_rank()}")
    LOCAL_DISK.bypass_cache(descriptor, True)
    while remaining_bytes:
        count = min(remaining_bytes, BLOCK_BYTES)
        LOCAL_DISK.write(descriptor, block[:count])
        remaining_bytes -= count
    LOCAL_DISK.sync(descriptor)
    LOCAL_DISK.close(descriptor)
    LOCAL_DISK.sync_folder(folder)
    return {"total": time.perf_counter() - start_seconds}


def write_hashed(folder: Path, tensors: dict[str, DTensor]) -> Times:
    """Write as `write_plainly` with a SHA-256 on a second thread: the cost of hashing alone."""
    start_seconds = time.perf_counter()
    with HashedFile(folder / f"hashed-{dist.get_rank()}", LOCAL_DISK) as file:
        for tensor in tensors.values():
            for block in iterate_blocks(tensor.to_local()):
                file.write(block)
        file.finish()
    LOCAL_DISK.sync_folder(folder)
    return {"total": time.perf_counter() - start_seconds}


def save_with_torch(folder: Path, tensors: dict[str, DTensor]) -> Times:
    """Call torch.save for this rank's shards, then fsync."""
    start_seconds = time.perf_counter()
    with (folder / f"torch-{dist.get_rank()}.pt").open("wb") as file:
        torch.save({name: tensor.to_local() for name, tensor in tensors.items()}, file)
        file.flush()
        os.fsync(file.fileno())
    LOCAL_DISK.sync_folder(folder)
    return {"total": time.perf_counter() - start_seconds}


def save_with_dcp(folder: Path, tensors: dict[str, DTensor]) -> Times:
    """Save with DCP's own file writer, which fsyncs its files."""
    start_seconds = time.perf_counter()
    dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(folder, sync_files=True))
    return {"total": time.perf_counter() - start_seconds}


class BackgroundContenders:
    """Savers whose buffers and groups are reused during a run."""

    def __init__(self) -> None:
        self.checkpointer = BackgroundSaver()
        self.group = dist.new_group(backend="gloo")

    def save(self, folder: Path, tensors: dict[str, DTensor]) -> Times:
        """Save with BackgroundSaver where the update follows at once and waits for the copy."""
        start_seconds = time.perf_counter()
        self.checkpointer.save(folder, 1, tensors, {})
        self.checkpointer.wait_for_copy()
        stall = time.perf_counter() - start_seconds
        self.checkpointer.wait()
        return {"stall": stall, "total": time.perf_counter() - start_seconds}

    def save_during_a_step(self, folder: Path, tensors: dict[str, DTensor]) -> Times:
        """Save with BackgroundSaver where the next gradients are computed before the update, as in
        training.
        """
        alone = measure_products(STEP_SECONDS)
        start_seconds = time.perf_counter()
        self.checkpointer.save(folder, 1, tensors, {})
        started_seconds = time.perf_counter()
        slowed = measure_products(STEP_SECONDS)
        computed_seconds = time.perf_counter()
        self.checkpointer.wait_for_copy()
        stall = (started_seconds - start_seconds) + (time.perf_counter() - computed_seconds)
        self.checkpointer.wait()
        return {
            "stall": stall,
            "total": time.perf_counter() - start_seconds,
            "slowed": 1.0 - slowed / alone,
        }

    def save_with_dcp(self, folder: Path, tensors: dict[str, DTensor]) -> Times:
        """Save with DCP's async_save on a thread, in its own group."""
        start_seconds = time.perf_counter()
        writer = dcp.FileSystemWriter(folder, sync_files=True)
        future: Any = dcp.async_save(dict(tensors), storage_writer=writer, process_group=self.group)
        stall = time.perf_counter() - start_seconds
        future.result()
        return {"stall": stall, "total": time.perf_counter() - start_seconds}


def measure_products(seconds: float) -> float:
    """Return matrix products per second on this rank's one thread."""
    square = torch.randn(256, 256)
    count = 0
    start_seconds = time.perf_counter()
    while (elapsed_seconds := time.perf_counter() - start_seconds) < seconds:
        square @ square
        count += 1
    return count / elapsed_seconds


def save_with_shardwright(folder: Path, tensors: dict[str, DTensor]) -> Times:
    """Save with shardwright and wait for the end."""
    start_seconds = time.perf_counter()
    save_checkpoint(folder, 1, tensors, {})
    return {"total": time.perf_counter() - start_seconds}


def measure_saves(root: str, num_tensors: int, rounds: int) -> dict[str, list[Times]]:
    """Return the seconds of every contender and round on the slower rank. The first round warms up
    and does not count.
    """
    background = BackgroundContenders()
    contenders: dict[str, Callable[[Path, dict[str, DTensor]], Times]] = {
        "plain": write_plainly,
        "plain, past the cache": write_past_the_cache,
        "hashed": write_hashed,
        "ours": save_with_shardwright,
        "ours in the background": background.save,
        "ours during a step": background.save_during_a_step,
        "dcp": save_with_dcp,
        "dcp async": background.save_with_dcp,
        "torch.save": save_with_torch,
    }
    tensors = make_tensors(num_tensors)
    measured: dict[str, list[Times]] = {name: [] for name in contenders}
    names = list(contenders)
    for number in range(rounds + 1):
        for place in range(len(names)):
            name = names[(place + number) % len(names)]
            contender = contenders[name]
            folder = Path(root) / f"{name}-{number}"
            if dist.get_rank() == 0:
                folder.mkdir()
                os.sync()
            dist.barrier()
            times = reduce_to_slowest(contender(folder, tensors))
            if number:
                measured[name].append(times)
            dist.barrier()
            if dist.get_rank() == 0 and not (
                number == rounds and name in ("plain", "ours", "dcp", "torch.save")
            ):
                shutil.rmtree(folder)
    return measured


def reduce_to_slowest(times: Times) -> Times:
    """Return the largest times over ranks."""
    largest = torch.tensor(list(times.values()), dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return dict(zip(times, largest.tolist(), strict=True))


def measure_loads(root: str, num_tensors: int, last: int, rounds: int) -> dict[str, list[Times]]:
    """Measure loading the files of the last round of saves."""
    tensors = make_tensors(num_tensors, blank=True)
    buffers = {name: tensor.to_local() for name, tensor in tensors.items()}

    def read_plainly() -> None:
        with (Path(root) / f"plain-{last}" / f"plain-{dist.get_rank()}").open(
            "rb", buffering=0
        ) as file:
            for local in buffers.values():
                file.readinto(local.view(-1).view(torch.uint8).numpy().data)

    def load_with_torch() -> None:
        loaded = torch.load(
            Path(root) / f"torch.save-{last}" / f"torch-{dist.get_rank()}.pt", weights_only=True
        )
        for name, local in buffers.items():
            local.copy_(loaded[name])

    contenders: dict[str, Callable[[], object]] = {
        "plain": read_plainly,
        "ours, every byte hashed": lambda: load_checkpoint(
            Path(root) / f"ours-{last}" / "step-00000001", tensors
        ),
        "dcp": lambda: dcp.load(
            dict(tensors), storage_reader=dcp.FileSystemReader(Path(root) / f"dcp-{last}")
        ),
        "torch.load": load_with_torch,
    }
    measured: dict[str, list[Times]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, contender in contenders.items():
            dist.barrier()
            start_seconds = time.perf_counter()
            contender()
            times = reduce_to_slowest({"total": time.perf_counter() - start_seconds})
            if number:
                measured[name].append(times)
    return measured


def save_sizes(root: str, num_tensors: int) -> None:
    """Save checkpoints of two ranks, one for each share of the whole."""
    for share in SHARES:
        save_checkpoint(Path(root) / f"share-{share}", 1, make_tensors(num_tensors // share), {})


def measure_resharding(root: str, num_tensors: int, rounds: int) -> dict[str, list[Times]]:
    """Measure opening the checkpoints of two ranks, sharded by rows, on these ranks; return the
    rounds by "share/dim".
    """
    measured: dict[str, list[Times]] = {}
    for share in SHARES:
        for dim, sharded_by in enumerate(("rows", "columns")):
            if dist.is_initialized():
                tensors: dict[str, Any] = dict(
                    make_tensors(num_tensors // share, blank=True, dim=dim)
                )
            else:
                tensors = {
                    f"layer{n}.weight": torch.zeros(WIDTH, WIDTH)
                    for n in range(num_tensors // share)
                }
            for number in range(rounds + 1):
                if dist.is_initialized():
                    dist.barrier()
                start_seconds = time.perf_counter()
                load_checkpoint(Path(root) / f"share-{share}" / "step-00000001", tensors)
                times = {"total": time.perf_counter() - start_seconds}
                if number:
                    measured.setdefault(f"{share}/{sharded_by}", []).append(
                        reduce_to_slowest(times) if dist.is_initialized() else times
                    )
    return measured


def measure(num_tensors: int, rounds: int, base: Path | None) -> dict[str, Any]:
    """Run all measurements; return JSON values."""
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=base) as root, RankPool(timeout_seconds=550.0) as pool:
        saves = pool.run(RANKS, measure_saves, root, num_tensors, rounds)[0]
        loads = pool.run(RANKS, measure_loads, root, num_tensors, rounds, rounds)[0]
        pool.run(RANKS, save_sizes, root, num_tensors)
        reshards = {
            n: pool.run(n, measure_resharding, root, num_tensors, rounds)[0] for n in READERS
        }
    return {
        "conditions": read_conditions(),
        "ranks": RANKS,
        "rounds": rounds,
        "size_bytes": num_tensors * WIDTH * WIDTH * 4,
        "load_average": [round(load_before, 1), round(os.getloadavg()[0], 1)],
        "saves": saves,
        "loads": loads,
        "resharding": {str(n): times for n, times in reshards.items()},
    }


def main() -> None:
    """Measure, print, and with --publish write docs/benchmarks/checkpoints.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=128, help="number of tensors of 4 MiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--folder",
        type=Path,
        help="folder on the device to measure; default: the system's folder for temporary files",
    )
    parser.add_argument("--publish", action="store_true")
    options = parser.parse_args()
    result = measure(options.tensors, options.rounds, options.folder)
    text = render_page(result)
    if options.publish:
        (FOLDER / "checkpoints.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
