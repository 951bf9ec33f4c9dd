"""Saves to and loads from an S3 store, compared with plain parallel transfers of the same bytes by
the client libraries: python -m benchmarks.object_store [--endpoint URL].

Two ranks hold float32 tensors sharded by rows. The plain transfers move each rank's bytes as one
object, with s3fs and with boto3, in parts of the size and number that our saves use. They check
nothing; ours hash every byte. All run in the same processes, one after the other in every round,
and each round starts with another one. A time is that of the slower rank. Without `--endpoint` a
server of moto is started.
"""

from __future__ import annotations

import argparse
import io
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.checkpoint import RANKS, make_tensors, reduce_to_slowest
from benchmarks.conditions import read_conditions
from shardwright.checkpoint.object_upload import NUM_PARALLEL_PARTS
from shardwright.checkpoint.storage_path import BLOCK_BYTES
from shardwright.checkpoint.tensor_loading import find_newest_checkpoint, load_checkpoint
from shardwright.checkpoint.tensor_saving import save_checkpoint
from shardwright.store_requests import open_file_system
from shardwright.verification.rank_pool import RankPool

BUCKET = "benchmark"
CLIENTS = ("s3fs", "boto3")


@dataclass(frozen=True)
class Sample:
    """Tensors of this rank sharded by rows, blank ones sharded by columns, and the rows' bytes."""

    rows: Mapping[str, Any]
    columns: Mapping[str, Any]
    data: bytes


Transfers = dict[str, Callable[[str, Sample], None]]


def upload_with_s3fs(name: str, sample: Sample) -> None:
    """Upload this rank's bytes with s3fs."""
    path = f"{BUCKET}/{name}/{dist.get_rank()}"
    get_s3fs().pipe_file(
        path, sample.data, chunksize=BLOCK_BYTES, max_concurrency=NUM_PARALLEL_PARTS
    )


def upload_with_boto3(name: str, sample: Sample) -> None:
    """Upload this rank's bytes with boto3's transfer manager."""
    client, settings = get_boto3()
    client.upload_fileobj(
        io.BytesIO(sample.data), BUCKET, f"{name}/{dist.get_rank()}", Config=settings
    )


def save(name: str, sample: Sample) -> None:
    """Save a checkpoint."""
    save_checkpoint(f"s3://{BUCKET}/{name}", 1, dict(sample.rows), {})


def download_with_s3fs(name: str, sample: Sample) -> None:
    """Download this rank's bytes with s3fs."""
    path = f"{BUCKET}/s3fs/{dist.get_rank()}"
    received = get_s3fs().cat_file(path, chunksize=BLOCK_BYTES, max_concurrency=NUM_PARALLEL_PARTS)
    assert len(received) == len(sample.data)


def download_with_boto3(name: str, sample: Sample) -> None:
    """Download this rank's bytes with boto3's transfer manager."""
    client, settings = get_boto3()
    received = io.BytesIO()
    client.download_fileobj(BUCKET, f"boto3/{dist.get_rank()}", received, Config=settings)
    assert received.getbuffer().nbytes == len(sample.data)


def load_newest(tensors: Mapping[str, Any]) -> None:
    """Load the newest checkpoint as a resumed run does: every byte is hashed."""
    newest = find_newest_checkpoint(f"s3://{BUCKET}/ours", should_cache=True)
    assert newest is not None
    load_checkpoint(newest, tensors)


def load(name: str, sample: Sample) -> None:
    """Load the newest checkpoint into tensors of the layout that saved it."""
    load_newest(sample.rows)


def load_resharded(name: str, sample: Sample) -> None:
    """Load the same checkpoint into tensors sharded by columns."""
    load_newest(sample.columns)


UPLOADS: Transfers = {"s3fs": upload_with_s3fs, "boto3": upload_with_boto3, "ours": save}
DOWNLOADS: Transfers = {
    "s3fs": download_with_s3fs,
    "boto3": download_with_boto3,
    "ours": load,
    "ours, other layout": load_resharded,
}


def get_s3fs() -> Any:
    """Return the file system that shardwright uses."""
    return open_file_system(f"s3://{BUCKET}/x")[0]


def remove_objects(name: str) -> None:
    """Remove the objects of one transfer, one by one: not every server removes several at once."""
    file_system = get_s3fs()
    file_system.invalidate_cache()
    for path in file_system.find(f"{BUCKET}/{name}"):
        file_system.rm_file(path)


def get_boto3() -> tuple[Any, Any]:
    """Return a client of boto3 and the settings of its transfers."""
    import boto3
    from boto3.s3.transfer import TransferConfig

    return boto3.client("s3"), TransferConfig(
        multipart_threshold=BLOCK_BYTES,
        multipart_chunksize=BLOCK_BYTES,
        max_concurrency=NUM_PARALLEL_PARTS,
    )


def measure_transfers(num_tensors: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each transfer and round on the slower rank, after one to warm up."""
    torch.set_num_threads(1)
    tensors = make_tensors(num_tensors)
    data = b"".join(tensor.to_local().numpy().tobytes() for tensor in tensors.values())
    sample = Sample(tensors, make_tensors(num_tensors, blank=True, dim=1), data)
    measured: dict[str, dict[str, list[float]]] = {}
    for direction, transfers in (("save", UPLOADS), ("load", DOWNLOADS)):
        names = list(transfers)
        seconds = measured[direction] = {name: [] for name in names}
        for number in range(rounds + 1):
            for place in range(len(names)):
                name = names[(place + number) % len(names)]
                dist.barrier()
                start_seconds = time.perf_counter()
                transfers[name](name, sample)
                total = {"total": time.perf_counter() - start_seconds}
                total = reduce_to_slowest(total)
                if number:
                    seconds[name].append(total["total"])
                dist.barrier()
                if direction == "save" and dist.get_rank() == 0 and number < rounds:
                    remove_objects(name)
    return measured


@contextmanager
def serve_moto() -> Iterator[str]:
    """Run a server of moto in a process of its own; yield its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    words = [sys.executable, "-m", "moto.server", "-p", str(port)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def render(measured: dict[str, list[float]], size_bytes: int) -> list[str]:
    """Render a table: speeds, and their shares of each client's speed in the same round."""
    shares = "".join(f" share of {client} |" for client in CLIENTS)
    lines = [f"| | MiB/s, median (range) |{shares}", "|---|---|" + "---|" * len(CLIENTS)]
    for name, seconds in measured.items():
        speeds = sorted(size_bytes / 2**20 / each for each in seconds)
        cells = [f"{statistics.median(speeds):.0f} ({speeds[0]:.0f} to {speeds[-1]:.0f})"]
        for client in CLIENTS:
            rounds = zip(measured[client], seconds, strict=True)
            cells.append(f"{statistics.median(limit / each for limit, each in rounds):.0%}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Measure and print tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint", help="URL of the store; default: a server of moto")
    parser.add_argument("--tensors", type=int, default=64, help="number of tensors of 4 MiB")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "S3RVER",
        "AWS_SECRET_ACCESS_KEY": "S3RVER",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        os.environ.setdefault(name, value)
    load_before = os.getloadavg()[0]
    with serve_moto() if options.endpoint is None else nullcontext(options.endpoint) as url:
        os.environ["AWS_ENDPOINT_URL"] = url
        client, _ = get_boto3()
        client.create_bucket(Bucket=BUCKET)
        with RankPool(timeout_seconds=550.0, backend="gloo") as pool:
            measured = pool.run(RANKS, measure_transfers, options.tensors, options.rounds)[0]
    size_bytes = options.tensors * 4 * 2**20
    sys.stdout.write(
        f"{size_bytes / 2**20:.0f} MiB, {options.rounds} rounds, load average {load_before:.1f} "
        f"before, {os.getloadavg()[0]:.1f} after; {read_conditions()}\n"
    )
    for direction, seconds in measured.items():
        sys.stdout.write("\n".join(["", direction, "", *render(seconds, size_bytes), ""]))


if __name__ == "__main__":
    main()
