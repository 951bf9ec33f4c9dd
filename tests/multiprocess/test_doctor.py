"""The examination on real ranks with injected faults: it names each fault and its rank."""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from shardwright.doctor.diagnosis import Diagnosis, examine_rank
from shardwright.doctor.examination import ExaminationRequest
from shardwright.doctor.probe_budget import TimeBudget
from shardwright.doctor.rates.link_bandwidth import time_links
from shardwright.doctor.storage import OutputFolder
from shardwright.errors import ExitCode
from shardwright.hardware import load_profile
from shardwright.launch.rank_environment import RankEnvironment
from shardwright.layout import Layout
from tests.multiprocess.pool import RankPool

SLOW = 1
NARROW = 0
LATE = 2
"""Ranks with a fault: slow products, sums in a narrower dtype, late sends."""

TIMES_SLOWER = (6, 36, 216)
"""Sizes of the injected delays; other load slows all ranks, so the delay grows until it stands
out.
"""

_mm = torch.mm
_all_reduce = dist.all_reduce
_send = dist.send
_broadcast = dist.broadcast


def multiply_slowly(times_slower: int, *tensors: Any, **options: Any) -> Any:
    """Multiply at a seventh of the device's rate, or less."""
    start = time.perf_counter()
    product = _mm(*tensors, **options)
    time.sleep(times_slower * (time.perf_counter() - start))
    return product


def sum_in_bf16(tensor: torch.Tensor, *words: Any, **options: Any) -> Any:
    """Sum and round the result to bf16."""
    done = _all_reduce(tensor, *words, **options)
    if tensor.dtype == torch.float32 and tensor.numel() > 1:
        tensor.copy_(tensor.bfloat16())
    return done


def send_late(times_slower: int, tensor: torch.Tensor, *words: Any, **options: Any) -> Any:
    """Send after a delay, like a slow network adapter."""
    if tensor.numel() > 1:
        time.sleep(times_slower / 30)
    return _send(tensor, *words, **options)


def broadcast_slowly(tensor: torch.Tensor, *words: Any, **options: Any) -> Any:
    """Broadcast at 1 MB/s: 5 ms for the smallest message, a quarter of a second for the next."""
    time.sleep(tensor.numel() * tensor.element_size() / 1e6)
    return _broadcast(tensor, *words, **options)


def fail_as_lost_device(*tensors: Any, **options: Any) -> Any:
    """Raise the error of a device that fell off the bus."""
    raise RuntimeError("CUDA error: unspecified launch failure")


def choose_faults(kind: str, times_slower: int) -> dict[int, tuple[Any, str, Any]]:
    """Return by rank the owner and name to patch, and the replacement."""
    if kind == "lost":
        return {1: (torch, "mm", fail_as_lost_device)}
    return {
        SLOW: (torch, "mm", partial(multiply_slowly, times_slower)),
        NARROW: (dist, "all_reduce", sum_in_bf16),
        LATE: (dist, "send", partial(send_late, times_slower)),
    }


def examine_with_faults(
    port: int, folder: str, kind: str, times_slower: int = 0
) -> Diagnosis | None:
    """Examine this rank with faults; ranks connect at the port of the test's own store."""
    rank = dist.get_rank()
    rendezvous = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    request = ExaminationRequest(
        Layout(dp_shard=dist.get_world_size(), zero_stage=3),
        (OutputFolder("runs", folder, True),),
        device="cpu",
    )
    owner, name, fault = choose_faults(kind, times_slower).get(rank, (torch, "mm", _mm))
    with (
        patch.dict(os.environ, rendezvous),
        patch.object(owner, name, fault),
        patch.object(dist, "broadcast", broadcast_slowly),
    ):
        return examine_rank(
            request, RankEnvironment(rank, dist.get_world_size(), rank), lambda diagnosis: None
        )


def test_injected_faults_are_found_and_named(ranks: RankPool, tmp_path: Path) -> None:
    injected = {
        f"rates: products, fp32: slow rank {SLOW}",
        f"rates: products, bf16: slow rank {SLOW}",
        "correctness: all_reduce over dp_shard = fsdp = all",
        f"links: slow rank {LATE}",
    }
    failed: set[str] = set()
    for times_slower in TIMES_SLOWER:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        diagnosis, *others = ranks.run(
            3, examine_with_faults, store.port, str(tmp_path), "planted", times_slower
        )
        assert others == [None, None]
        failed = {
            f"{finding.section}: {finding.name}"
            for finding in diagnosis.findings
            if finding.verdict == "fail"
        }
        if injected <= failed:
            break
    assert injected <= failed
    products_by_rank = [
        [
            (rate["precision"], rate["m"])
            for rate in diagnosis.rates["products"]
            if rate["rank"] == rank
        ]
        for rank in range(3)
    ]
    assert (
        products_by_rank[0] == products_by_rank[1] == products_by_rank[2]
    )  # the slow rank limits the size of products
    (slow,) = [finding for finding in diagnosis.findings if finding.name == "messages"]
    assert (slow.section, slow.verdict) == ("collectives", "warn")
    assert "broadcast of 4.00 MiB" in slow.value
    (wrong,) = [finding for finding in diagnosis.findings if finding.section == "correctness"]
    assert wrong.numbers["ranks"] == [NARROW]
    assert "float32" in wrong.value
    assert "int64" not in wrong.value
    assert list(tmp_path.iterdir()) == []


def test_a_failing_rank_is_named_and_does_not_block_the_others(
    ranks: RankPool, tmp_path: Path
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    diagnosis, _ = ranks.run(2, examine_with_faults, store.port, str(tmp_path), "lost")
    (finding,) = [
        finding
        for finding in diagnosis.findings
        if finding.section == "peers" and finding.verdict == "fail"
    ]
    assert finding.name == "products"
    assert finding.value == "rank 1: CUDA error: unspecified launch failure"
    # Rank 0 reports its own measurements.
    assert any(finding.name == "products, fp32" for finding in diagnosis.findings)


def run_doctor(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardwright", "doctor", *words]
    variables = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(
        command, capture_output=True, text=True, timeout=280, env=variables, check=False
    )


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="names x86-64 instruction sets"
)
def test_fp32_is_advised_on_a_cpu_without_bf16_units() -> None:
    avx2_variables = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    done = run_doctor("--nproc", "1", "--device", "cpu", "--json", **avx2_variables)
    report = json.loads(done.stdout)
    (finding,) = [finding for finding in report["findings"] if finding["name"] == "products, bf16"]
    assert finding["verdict"] == "warn"
    times = finding["numbers"]["times_slower_than_fp32"]["0"]
    assert times > 1.5
    assert re.match(
        r"bf16 is emulated here, [\d.]+ times slower than fp32: use fp32", finding["value"]
    )
    assert "precision: fp32" in finding["remedy"]
    assert "bf16 is emulated here" in " ".join(done.stderr.split())  # the table, for readers


def measure_links(seconds: float) -> list[tuple[int, int] | None]:
    """Return the directions of links that one rank of an examination measures."""
    links = time_links(torch.device("cpu"), 2**16, TimeBudget(seconds))
    return [None if link is None else (link.sender, link.receiver) for link in links]


def test_links_end_when_their_time_is_spent(ranks: RankPool) -> None:
    assert ranks.run(2, measure_links, 1e6) == [[(0, 1), None], [None, (1, 0)]]
    assert ranks.run(2, measure_links, 0.0) == [[], []]


@pytest.mark.long
def test_two_ranks_are_examined_by_command_and_calibrated(tmp_path: Path) -> None:
    profile = tmp_path / "profiles" / "here.json"
    page = tmp_path / "doctor.html"
    words = [
        "--nproc",
        "2",
        "--layout",
        "tp=2",
        "--device",
        "cpu",
        "--json",
        "--calibrate",
        str(profile),
        "--html",
        str(page),
    ]
    words += ["--budget", "60"]
    done = run_doctor(*words)
    report = json.loads(done.stdout)
    assert report["schema_version"] == 1
    assert done.returncode == (
        ExitCode.CHECK_FAILED if report["verdict"] == "fail" else ExitCode.DONE
    ), done.stderr
    assert (report["world_size"], report["layout"]) == (2, "tp=2,zero_stage=0")
    sections = {finding["section"] for finding in report["findings"]}
    expected = {
        "software",
        "host",
        "rates",
        "storage",
        "peers",
        "correctness",
        "collectives",
        "links",
    }
    assert sections - {"calibration"} == expected
    limited = {
        finding["name"] for finding in report["findings"] if finding["section"] == "calibration"
    }
    kinds = {
        finding["numbers"]["kind"] for finding in report["findings"] if "kind" in finding["numbers"]
    }
    assert kinds == {
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "broadcast",
        "send",
    }
    measured = load_profile(profile)
    assert {rate.num_ranks for rate in measured.collectives} == {2}
    assert all(
        (rate.step_seconds is None) == (rate.kind in ("broadcast", "send"))
        for rate in measured.collectives
    )
    assert {rate.precision for rate in measured.matmuls} == {"fp32", "bf16"}
    rows = {rate.row_tokens for rate in measured.attention}
    assert rows == {128, 512, 2048} or (rows < {128, 512, 2048} and "attention" in limited)
    products_by_rank = [
        [
            (rate["precision"], rate["m"], rate["n"], rate["k"])
            for rate in report["rates"]["products"]
            if rate["rank"] == rank
        ]
        for rank in range(2)
    ]
    assert products_by_rank[0] == products_by_rank[1]
    assert "Collectives over tp = all" in page.read_text()


@pytest.mark.long
def test_a_missing_rank_of_a_launcher_ends_the_examination() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    launcher = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    done = run_doctor("--device", "cpu", "--timeout", "3", **launcher)
    assert done.returncode == ExitCode.CHECK_FAILED
    assert f"rank 1 of 2 did not reach 127.0.0.1:{port}" in " ".join(done.stdout.split())
    done = run_doctor(
        "--device", "cpu", "--timeout", "3", **launcher | {"RANK": "1", "LOCAL_RANK": "1"}
    )
    assert done.returncode == ExitCode.CHECK_FAILED
    assert f"127.0.0.1:{port} was not reached" in done.stderr


@pytest.mark.long
def test_torchrun_examines_its_ranks_once() -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    command += ["-m", "shardwright", "doctor", "--device", "cpu", "--json"]
    variables = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=280, env=variables, check=False
    )
    report = json.loads(done.stdout)  # one object: only rank 0 prints
    assert report["world_size"] == 2
    assert any(
        finding["name"] == "rendezvous" and finding["verdict"] == "pass"
        for finding in report["findings"]
    )
