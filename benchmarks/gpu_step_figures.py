"""Figures that every kind of step has on the page of `make gpu`, measured in the step's process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from benchmarks.attention_operators import AttentionRecorder
from benchmarks.ceiling import DTYPES, measure_best_matmul_rate
from benchmarks.gpu_figures import StepFigures, build_step_figures
from benchmarks.gpu_turns import COUNTED_STEPS
from benchmarks.host_waits import HostWaitCounter
from benchmarks.pace import count_graph_breaks
from benchmarks.predicted import find_catalogue_cluster, predict_validated_run
from shardwright.errors import InputError
from shardwright.hardware import Cluster
from shardwright.training.checks.run_checks import ValidatedRun


class DeviceRates(NamedTuple):
    """Rate of products of a device, and what the planner knows of the device."""

    matmul_flops_per_second: float
    cluster: Cluster | None
    """None: the catalogue lacks the device, and nothing is predicted."""


class StepCounter:
    """Counter of the host's waits in some steps after the timed ones, and of attention in one more.

    Call `begin_step` before each step, and before what would be the next one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._num_started = 0
        self._waits: HostWaitCounter | None = None
        self._recorder: AttentionRecorder | None = None
        self.counts: dict[str, Any] = {"host_waits": None}

    def begin_step(self) -> bool:
        """Return False, after the last step, when `counts` is complete."""
        number = self._num_started
        self._num_started += 1
        if number == 0 and self._device.type == "cuda":
            self._waits = HostWaitCounter()
        if number == COUNTED_STEPS:
            if self._waits is not None:
                self.counts["host_waits"] = self._waits.end() / COUNTED_STEPS
            self._recorder = AttentionRecorder(self._device.type)
        if number <= COUNTED_STEPS:
            return True
        assert self._recorder is not None
        self.counts |= self._recorder.end() | {"graph_breaks": count_graph_breaks()}
        return False


def count_steps(run_step: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Run steps after the timed ones; return the waits of the host per step, the attention
    operators of a step, and graph breaks."""
    counter = StepCounter(device)
    while counter.begin_step():
        run_step()
    return counter.counts


def measure_rates(device: torch.device, precision: str) -> DeviceRates:
    """Measure the best product of the device before a model is there."""
    is_gpu = device.type == "cuda" and torch.version.cuda is not None
    rate = measure_best_matmul_rate(device, DTYPES[precision], is_large=is_gpu)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return DeviceRates(rate, find_catalogue_cluster(name))


def read_peaks(device: torch.device) -> dict[str, int | None]:
    """Return the peaks of allocated and reserved bytes; None on a CPU."""
    is_cuda = device.type == "cuda"
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated() if is_cuda else None,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved() if is_cuda else None,
    }


def describe_step(
    validated_run: ValidatedRun,
    rates: DeviceRates,
    seconds: float,
    peaks: dict[str, int | None],
    counts: dict[str, Any],
) -> StepFigures:
    """Return the figures of a run's step of so many seconds, with the planner's prediction.

    Args:
        peaks: Of the timed steps, as `read_peaks` returns them.
        counts: As `count_steps` returns them.
    """
    batch = validated_run.plan.batch
    predicted = None
    if rates.cluster is not None:
        try:
            predicted = predict_validated_run(validated_run, rates.cluster)
        except InputError as error:  # a measured step is worth more than its prediction
            print(f"no prediction: {error}", file=sys.stderr)
    return build_step_figures(
        tokens_per_second=batch.global_batch_tokens / seconds,
        flops_per_token=validated_run.shape.count_flops_per_token(batch.sequence_length),
        ceiling=rates.matmul_flops_per_second,
        measured=peaks | counts,
        predicted=predicted,
    )
