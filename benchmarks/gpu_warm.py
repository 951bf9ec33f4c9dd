"""Compile the kernels of the steps of `make gpu` before they are timed, several at a time on the
one device, while its tests run. Imports the standard library only.

A process builds one layer of the real width (two, if layers alternate), whose kernels are those of
the whole model, and fills the compiler's caches on disk. Timings of other kernels that the compiler
made to choose tile sizes are deleted, because other processes used the device meanwhile.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu_steps import Step

_CORES_PER_PROCESS = 3
_BYTES_PER_PROCESS = 26 * 2**30
"""One layer, embeddings and a head of 8B models, with fp32 masters and moments."""
_NUM_TESTS = 2
"""Test processes that run meanwhile; they need little memory."""
_CHOICES = "*.best_config"
"""Files with the tile sizes that Inductor chose by timing, in its cache."""


@dataclass(frozen=True)
class Compilation:
    """A process that has compiled kernels of a step."""

    step_name: str
    status: str
    seconds: float
    message: str


RunProcess = Callable[[Sequence[str], Path, float], tuple[str, str]]
"""Function of a command, its folder and its time limit; returns status and message."""


def choose_num_processes(memory_bytes: int | None) -> int:
    """Choose how many processes compile at once.

    Args:
        memory_bytes: memory of the device; None for a CPU.
    """
    by_cores = max(1, len(os.sched_getaffinity(0)) // _CORES_PER_PROCESS)
    if memory_bytes is None:
        return by_cores
    return max(1, min(by_cores, memory_bytes // _BYTES_PER_PROCESS))


def list_cache_variables(folder: Path) -> dict[str, str]:
    """Return environment variables that put the compiler's caches on disk, unless they are set."""
    chosen = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
    }
    return {name: os.environ.get(name, value) for name, value in chosen.items()}


def compile_ahead(
    steps: Iterable[Step],
    folder: Path,
    num_processes: int,
    run_process: RunProcess,
    seconds: float,
    run_meanwhile: Sequence[Callable[[], object]] = (),
) -> list[Compilation]:
    """Run the steps' compile commands, at most `num_processes` at once, and `run_meanwhile`.

    Args:
        folder: folder of the commands' logs.
        seconds: time for all of them; a process that needs longer is ended.
    """
    until = time.monotonic() + seconds
    commands = {command: step.name for step in steps for command in step.compile_commands}

    def run(number: int, command: Sequence[str], name: str) -> Compilation:
        own = folder / str(number)
        own.mkdir(parents=True, exist_ok=True)
        start_seconds = time.monotonic()
        if until <= start_seconds:
            return Compilation(name, "no time left", 0.0, "")
        status, message = run_process(command, own, until - start_seconds)
        return Compilation(name, status, time.monotonic() - start_seconds, message)

    with ThreadPoolExecutor(num_processes) as pool, ThreadPoolExecutor(_NUM_TESTS) as tests:
        others = [tests.submit(work) for work in run_meanwhile]
        futures = [
            pool.submit(run, number, command, name)
            for number, (command, name) in enumerate(commands.items())
        ]
        for other in others:
            other.result()
        return [future.result() for future in futures]


def discard_choices(cache: Path) -> int:
    """Delete the tile sizes that were chosen while other processes used the device; return their
    number.
    """
    files = list(cache.rglob(_CHOICES)) if cache.is_dir() else []
    for file in files:
        file.unlink()
    return len(files)
