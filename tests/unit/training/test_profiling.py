"""Memory and profile events of a run in one process."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from benchmarks.allocated import AllocationCounter

from shardwright.config import Recipe
from shardwright.telemetry.event_log import (
    MemoryEvent,
    ProfileEvent,
    RanksEvent,
    StepEvent,
    read_events,
)
from shardwright.training.metrics.profiling import StepProfiler
from shardwright.training.run import train
from tests.unit.training.test_loop import build_recipe


def test_memory_and_profile_of_the_configured_steps(tmp_path: Path) -> None:
    recipe = build_recipe(tmp_path, max_steps=3)
    train(
        Recipe.model_validate(
            recipe.model_dump() | {"run": recipe.run.model_dump() | {"profile_steps": [2]}}
        )
    )
    log = read_events(tmp_path / "run")
    (memory,) = log.filter_by_type(MemoryEvent)
    assert memory.step == 2
    # AdamW keeps two moments of every weight, and a step count per parameter.
    assert memory.weights_bytes == memory.gradients_bytes
    assert 2 * memory.weights_bytes[0] <= memory.optimizer_bytes[0] < 2.1 * memory.weights_bytes[0]
    (profile,) = log.filter_by_type(ProfileEvent)
    assert (profile.step, profile.ranks) == (2, 1)
    assert [path.name for path in (tmp_path / "run" / "profile").iterdir()] == [
        Path(profile.path).name
    ]
    with gzip.open(tmp_path / "run" / profile.path) as file:
        events = json.load(file)["traceEvents"]
    spans = [event for event in events if event.get("ph") == "X"]
    assert any("backward" in event["name"].lower() for event in spans)
    assert min(event["ts"] for event in spans) == 0
    step = next(step for step in log.filter_by_type(StepEvent) if step.step == 2)
    assert max(event["ts"] + event.get("dur", 0) for event in spans) < 2e6 * (step.step_seconds + 5)
    # For one rank on a CPU the `step` event contains everything.
    assert log.filter_by_type(RanksEvent) == []


@pytest.fixture
def gloo_rank() -> Iterator[None]:
    """One rank of gloo."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


THREAD_SECONDS = 0.3


def gather_in_slow_thread() -> None:
    """Wait for an operation as DDP does, while its thread has not recorded the end yet."""
    elements = torch.ones(1 << 22)  # takes longer than the next line, on an idle machine
    threads: list[int] = []

    def delay(_: object) -> None:
        threads.append(threading.get_ident())
        time.sleep(THREAD_SECONDS)

    is_delayed = False
    while not is_delayed:
        threads.clear()
        work = dist.all_gather([torch.empty_like(elements)], elements, async_op=True)
        future = work.get_future()
        future.then(delay)  # in the thread of the operation unless that is already complete
        future.wait()
        while not threads:  # the thread is about to call
            time.sleep(0.001)
        is_delayed = threads != [threading.get_ident()]


@pytest.mark.usefixtures("gloo_rank")
def test_a_profile_ends_after_the_threads_of_gloo(tmp_path: Path) -> None:
    profiler = StepProfiler(tmp_path, [1], torch.device("cpu"), rank=0)
    with profiler.profile_step(1):
        gather_in_slow_thread()
    (path,) = tmp_path.iterdir()
    events = json.loads(path.read_text())["traceEvents"]
    durations = [event["dur"] for event in events if event["name"] == "gloo:all_gather"]
    assert max(durations) >= 1e6 * THREAD_SECONDS


@pytest.mark.usefixtures("gloo_rank")
def test_counters_of_memory_record_no_operations() -> None:
    elements = torch.ones(8)
    counter = AllocationCounter(0.0)
    dist.all_reduce(elements)
    more = torch.empty(1000)
    assert counter.end() == more.nbytes
    assert counter._profiler.profiler is not None
    assert {event.name() for event in counter._profiler.profiler.kineto_results.events()} == {
        "[memory]"
    }
    with torch.profiler.profile(acc_events=True) as recorded:  # records operations again
        more.clone()
    assert any(event.name == "aten::clone" for event in recorded.events())
