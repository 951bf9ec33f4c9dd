"""Training data streamed from a real S3 server, larger than the cache that is allowed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shardwright.data.preparation import prepare_data
from shardwright.data.run_order import build_run_order
from shardwright.errors import DataError
from tests.object_store.conftest import ROOT, SECRET_KEY, Server, get_client
from tests.object_store.proxy import Request
from tests.unit.data.test_streaming import build_streamed, count_cache_bytes

NUM_FILES = 16
LIMIT = 320_000
_READER = """
import hashlib, json, resource, sys
from pathlib import Path
from shardwright.data.preparation import prepare_data
from shardwright.data.run_order import build_run_order
from tests.unit.data.test_streaming import build_streamed, count_cache_bytes

folder, limit, start, stop = Path(sys.argv[1]), *map(int, sys.argv[2:5])
data = prepare_data(build_streamed(folder, "s3://bucket/set", limit, length=64))
order = build_run_order(data.train, 0, 4)
digests = []
largest_bytes = first_kib = 0
for position in range(start, stop):
    sample = data.train.get_sample(order.get_index(position), order.get_epoch(position))
    digests.append(hashlib.sha256(sample.input_ids.tobytes()).hexdigest()[:16])
    if position % 50 == 0:
        largest_bytes = max(largest_bytes, count_cache_bytes(folder))
    if position == start:
        print("reading", flush=True)
        first_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({
    "digests": digests,
    "largest_bytes": largest_bytes,
    "token_bytes": 2 * data.report.train.counts.num_tokens,
    "grown_bytes": 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - first_kib),
}))
"""


def write_files(num_records: int = 200) -> None:
    client = get_client()
    for number in range(NUM_FILES):
        lines = [
            json.dumps({"text": " ".join(f"w{number}{record * 7 + word}" for word in range(20))})
            for record in range(num_records)
        ]
        client.pipe_file(f"bucket/set/part-{number}.jsonl", "\n".join(lines).encode())


def start_reader(folder: Path, start: int, stop: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _READER, str(folder), str(LIMIT), str(start), str(stop)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
    )


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return dict(json.loads(output.splitlines()[-1]))


def test_two_runs_share_a_cache_smaller_than_the_data_and_resume(
    store: Server, tmp_path: Path
) -> None:
    """One run is killed in the middle and continues; the other reads other positions."""
    write_files()
    recipe = build_streamed(tmp_path, "s3://bucket/set", LIMIT, length=64)
    num_samples = len(prepare_data(recipe).train)
    whole = start_reader(tmp_path, 0, num_samples + 200)
    killed = start_reader(tmp_path, 500, 10**9)
    assert killed.stdout is not None
    assert killed.stdout.readline() == "reading\n"
    time.sleep(0.3)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    resumed = finish(start_reader(tmp_path, num_samples - 300, num_samples + 100))
    undisturbed = finish(whole)
    assert resumed["digests"] == undisturbed["digests"][num_samples - 300 : num_samples + 100]
    assert len(set(undisturbed["digests"][:num_samples])) > 0.99 * num_samples
    assert undisturbed["token_bytes"] > 2 * LIMIT
    for reader in (resumed, undisturbed):
        assert 0 < reader["largest_bytes"] <= LIMIT
    # Memory does not grow with the data: the whole of it is several times larger.
    assert undisturbed["grown_bytes"] < undisturbed["token_bytes"] // 2
    assert count_cache_bytes(tmp_path) <= LIMIT


def test_files_are_read_in_ranges_and_failing_requests_are_repeated(
    store: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwright.data.streaming.shard_listing.RANGE_BYTES", 5_000)
    write_files(50)
    failed: set[str] = set()

    def fail_once(request: Request) -> int | None:
        if request.method == "GET" and "part-3" in request.key and request.key not in failed:
            failed.add(request.key)
            return 503
        return None

    store.proxy.fault = fail_once
    data = prepare_data(build_streamed(tmp_path, "s3://bucket/set", LIMIT, length=64))
    assert failed
    ranges = [r.byte_range for r in store.proxy.requests if r.method == "GET" and "part-5" in r.key]
    assert len(set(ranges)) > 1
    assert all(ranges)
    order = build_run_order(data.train, 0, 4)
    assert data.train.get_sample(order.get_index(0)).input_ids.shape == (64,)
    assert count_cache_bytes(tmp_path) <= LIMIT


def test_a_file_that_changes_during_the_run_is_an_error(store: Server, tmp_path: Path) -> None:
    write_files(50)
    data = prepare_data(build_streamed(tmp_path, "s3://bucket/set", 100_000, length=64))
    write_files(60)
    order = build_run_order(data.train, 0, 4)
    positions = range(len(data.train))
    with pytest.raises(DataError, match="changed since the run listed its sources"):
        list(map(data.train.get_sample, map(order.get_index, positions)))


def test_wrong_sources_are_one_clear_error(
    store: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match="no files to read"):
        prepare_data(build_streamed(tmp_path, "s3://bucket/absent"))
    with pytest.raises(DataError, match=r"data\.sources\.0\.path"):
        prepare_data(build_streamed(tmp_path, "s3://no-such-bucket/set"))
    write_files(20)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    type(get_client()).clear_instance_cache()
    with pytest.raises(DataError, match="cannot be reached") as error:
        prepare_data(build_streamed(tmp_path, "s3://bucket/set"))
    assert SECRET_KEY not in str(error.value)
