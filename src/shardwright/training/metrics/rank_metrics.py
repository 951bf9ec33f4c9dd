"""Measurements of every rank, exchanged in the per-step synchronisation and written as events.

Every step, all ranks exchange step time and own time (without waiting for other ranks). Every
`run.log_every_steps` steps a longer row follows, which rank 0 writes as a `ranks` event.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.layout import RankGrid
from shardwright.numerics import get_local_tensor
from shardwright.offload import OffloadedOptimizer
from shardwright.parallel.clock_sync import SharedClock
from shardwright.parallel.comm_timing import PARALLELISMS, CommunicationTimer, use_timer
from shardwright.telemetry.event_logger import EventLogger
from shardwright.telemetry.sensors import SensorReading, open_sensor
from shardwright.training.metrics.profiling import StepProfiler
from shardwright.training.metrics.step_times import StepTimes
from shardwright.training.rank_sync import RankSync
from shardwright.training.training_state import TrainingState

RANKS_PER_EVENT = 8
"""Largest world size with a `ranks` event at every logged step; n times as many ranks have one
at every n-th logged step."""

_STEP_PARTS = ("data", "forward", "backward", "reduction", "optimizer")
_NUM_PIPELINE_EVENTS = 20
"""Number of steps of a run whose pipeline timeline is recorded."""


@dataclass(frozen=True)
class RankStepTimes:
    """Times of one step of one rank, in seconds."""

    step_seconds: float
    own_seconds: float
    """Step time without waiting for other ranks."""
    part_seconds: dict[str, float]
    """Seconds by part of the step, including `data`."""
    wait_seconds: dict[str, float]
    """Seconds of waiting for communication, by kind of parallelism; contained in the parts."""
    number: int = 0
    """Number of the step in this process, from 1."""


@dataclass(frozen=True)
class MeasuredStep:
    """Marks of a step that has been launched; `RankMetrics.finish_step` computes its times.

    The device may not have reached the last mark yet.
    """

    number: int
    start_seconds: float
    data_seconds: float
    step_times: StepTimes
    comm_timer: CommunicationTimer
    previous_end: float | torch.cuda.Event | None
    """Last mark of the previous step, if the device goes from that step to this one without
    waiting for the host."""


class RankMetrics:
    """Measurements of this rank's steps; writes those of all ranks as events."""

    def __init__(
        self,
        state: TrainingState,
        device: torch.device,
        rank_sync: RankSync,
        num_micro_batches: int,
        profiler: StepProfiler,
    ) -> None:
        self._state = state
        self._model = state.model
        self._device = device
        self._rank_sync = rank_sync
        self._num_micro_batches = num_micro_batches
        self._profiler = profiler
        # Two, because a step may be launched before the times of the last one are known.
        self._timers = [(StepTimes(device), state.model.build_comm_timer()) for _ in range(2)]
        self._sensor = (
            open_sensor(str(torch.cuda.get_device_properties(device).uuid))
            if device.type == "cuda"
            else None
        )
        self._checkpoint_seconds = 0.0
        self._num_steps = 0
        self._gradients_bytes = 0
        self._clock: SharedClock | None = None

    @property
    def step_times(self) -> StepTimes:
        """Marks of the current step, which `measure_step` begins."""
        return self._timers[self._num_steps % 2][0]

    @contextmanager
    def measure_step(self) -> Iterator[None]:
        """Measure communication, and profile if requested, while a step runs in the block."""
        self._num_steps += 1
        comm_timer = self._timers[self._num_steps % 2][1]
        comm_timer.reset()
        with self._profiler.profile_step(self._state.step + 1), use_timer(comm_timer):
            yield

    def is_profiled(self, step: int) -> bool:
        """Return True if this step is profiled."""
        return self._profiler.is_due(step)

    def record_gradient_bytes(self) -> None:
        """Record the gradients' bytes, once, when all gradients of a step exist."""
        if self._num_steps == 2:
            self._gradients_bytes = _count_bytes(
                gradient for gradient, _ in self._model.list_gradients()
            )

    def end_step(
        self,
        start_seconds: float,
        data_seconds: float,
        *,
        previous: MeasuredStep | None = None,
    ) -> MeasuredStep:
        """Return the marks of the step that `measure_step` began; waits for nothing.

        Args:
            start_seconds: Reading of `time.perf_counter` at the start of the step, seconds.
            data_seconds: Time spent reading the data.
            previous: Previous step, if `finish_step` has not been called for it.
        """
        step_times, comm_timer = self._timers[self._num_steps % 2]
        return MeasuredStep(
            self._num_steps,
            start_seconds,
            data_seconds,
            step_times,
            comm_timer,
            None if previous is None else previous.step_times.end,
        )

    def finish_step(self, measured: MeasuredStep) -> RankStepTimes:
        """Return the times of a step. Waits for the device if it has not finished that step.

        Call it for every step, before the next but one begins.
        """
        times = measured.step_times
        parts = times.seconds()
        if self._device.type != "cuda":
            step_seconds = time.perf_counter() - measured.start_seconds
        elif measured.previous_end is not None:
            step_seconds = times.compute_seconds_since(measured.previous_end)
        else:
            # The device was idle until the host launched the first kernel.
            step_seconds = times.start_seconds - measured.start_seconds
            step_seconds += times.compute_seconds_since(None)
        waits = measured.comm_timer.seconds()
        return RankStepTimes(
            step_seconds,
            max(0.0, step_seconds - sum(waits.values())),
            {"data": measured.data_seconds} | parts,
            waits,
            measured.number,
        )

    @contextmanager
    def measure_checkpoint(self) -> Iterator[None]:
        """Add the time of the block to the time that training is blocked by saving."""
        start_seconds = time.perf_counter()
        try:
            yield
        finally:
            self._checkpoint_seconds += time.perf_counter() - start_seconds

    def log_events(
        self,
        event_logger: EventLogger,
        step: int,
        times: RankStepTimes,
        *,
        log_every_steps: int,
        total_steps: int,
    ) -> None:
        """Write the events about all ranks that are due at this step. Collective."""
        world_size = self._rank_sync.rank_environment.world_size
        # For a single rank on a CPU, the `step` event already has all of it.
        if (world_size > 1 or self._device.type == "cuda") and step % (
            log_every_steps * -(-world_size // RANKS_PER_EVENT)
        ) == 0:
            self._log_ranks(event_logger, step, times)
        if times.number == 2:
            self._log_memory(event_logger, step)
        if self._model.pipeline is not None and (
            times.number == 3 or step % max(1, total_steps // _NUM_PIPELINE_EVENTS) == 0
        ):
            self._log_pipeline(event_logger, step)
        if self._profiler.is_due(step):
            self._profiler.merge_profiles(step, self._rank_sync, self.get_clock(), event_logger)

    def get_clock(self) -> SharedClock:
        """Return the common clock of all ranks; synchronised at the first call. Collective."""
        if self._clock is None:
            self._clock = self._rank_sync.synchronise_clock()
        return self._clock

    def _log_ranks(self, event_logger: EventLogger, step: int, times: RankStepTimes) -> None:
        cuda = self._device.type == "cuda"
        reading = self._sensor.read() if self._sensor is not None else SensorReading()
        device_bytes = 0
        reserved_bytes = 0
        if cuda:
            free_bytes, all_bytes = torch.cuda.mem_get_info(self._device)
            device_bytes = all_bytes - free_bytes
            reserved_bytes = torch.cuda.max_memory_reserved(self._device)
        rows = self._rank_sync.gather(
            [
                times.step_seconds,
                times.own_seconds,
                *(times.part_seconds[part] for part in _STEP_PARTS),
                self._checkpoint_seconds,
            ]
            + [times.wait_seconds[kind] for kind in PARALLELISMS]
            + [reserved_bytes, device_bytes, reading.temperature_celsius, reading.throttle_bits]
        )
        self._checkpoint_seconds = 0.0
        columns = list(zip(*rows, strict=True))
        seconds = [
            _round_to_microseconds(column)
            for column in columns[: 3 + len(_STEP_PARTS) + len(PARALLELISMS)]
        ]
        names = ["step", "own", *_STEP_PARTS, "checkpoint"]
        fields: dict[str, Any] = {
            f"{name}_seconds": column for name, column in zip(names, seconds, strict=False)
        }
        waits = dict(zip(PARALLELISMS, seconds[len(names) :], strict=True))
        reserved, used, temperature, throttle = columns[-4:]
        if cuda:
            fields |= {
                "reserved_bytes": tuple(map(int, reserved)),
                "device_bytes": tuple(map(int, used)),
            }
        if max(temperature) > 0:
            fields["temperature_celsius"] = temperature
            fields["throttled"] = tuple(
                SensorReading(throttle_bits=int(bits)).throttle_reasons for bits in throttle
            )
        event_logger.log(
            "ranks",
            step=step,
            wait_seconds={kind: row for kind, row in waits.items() if any(row)},
            **fields,
        )

    def _log_memory(self, event_logger: EventLogger, step: int) -> None:
        cuda = self._device.type == "cuda"
        reserved = torch.cuda.max_memory_reserved(self._device) if cuda else 0
        driver = 0
        if cuda:
            free_bytes, all_bytes = torch.cuda.mem_get_info(self._device)
            driver = all_bytes - free_bytes - torch.cuda.memory_reserved(self._device)
        offloaded_names = self._model.offloaded_names
        weights = _count_bytes(
            parameter
            for name, parameter in self._model.named_parameters()
            if name not in offloaded_names
        )
        working = self._model.decoder.working_weights
        if working is not None:
            weights += _count_bytes(working.copies)
        moments = (
            value for state in self._state.optimizer.state.values() for value in state.values()
        )
        optimizer = _count_bytes(value for value in moments if isinstance(value, Tensor))
        values = {
            "weights_bytes": weights,
            "gradients_bytes": self._gradients_bytes,
            "optimizer_bytes": optimizer,
            "peak_bytes": self._rank_sync.measure_memory_bytes(),
        }
        if cuda:
            values |= {"driver_bytes": driver, "reserved_bytes": reserved}
        if isinstance(self._state.optimizer, OffloadedOptimizer):
            values["offloaded_bytes"] = self._state.optimizer.num_bytes
        if self._state.activation_offload is not None:
            values["offloaded_activation_bytes"] = self._state.activation_offload.peak_bytes
        if self._state.weight_offload is not None:
            values["offloaded_parameter_bytes"] = self._state.weight_offload.stored_bytes
        rows = self._rank_sync.gather(list(values.values()))
        columns = [tuple(map(int, column)) for column in zip(*rows, strict=True)]
        event_logger.log("memory", step=step, **dict(zip(values, columns, strict=True)))

    def _log_pipeline(self, event_logger: EventLogger, step: int) -> None:
        """Write the timeline of the pipeline that rank 0 belongs to."""
        pipeline = self._model.pipeline
        clock = self.get_clock()
        assert pipeline is not None
        spans = [
            (begin, end)
            for part, begin, end in self.step_times.list_spans()
            if part in ("forward", "backward")
        ]
        rows = self._rank_sync.gather(
            [
                clock.error_seconds,
                *(clock.to_wall_seconds(instant) for span in spans for instant in span),
            ],
            is_ragged=True,
        )
        schedule = pipeline.schedule(self._num_micro_batches)
        ranks = RankGrid(self._model.layout).group_of(0, ["pp"])
        instants = [rows[rank][1:] for rank in ranks]
        assert [len(row) for row in instants] == [2 * len(row) for row in schedule.rows], (
            "each action needs a begin and an end"
        )
        first = min(row[0] for row in instants)
        event_logger.log(
            "pipeline",
            step=step,
            schedule=schedule.name,
            ranks=ranks,
            num_micro_batches=self._num_micro_batches,
            rank_of_stage=schedule.rank_of_stage,
            actions=tuple(tuple(map(str, row)) for row in schedule.rows),
            begins=tuple(
                _round_to_microseconds([begin - first for begin in row[::2]]) for row in instants
            ),
            ends=tuple(
                _round_to_microseconds([end - first for end in row[1::2]]) for row in instants
            ),
            clock_error_seconds=max(rows[rank][0] for rank in ranks),
        )


def _count_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Count the bytes of the tensors' local shards."""
    return sum(
        part.numel() * part.element_size()
        for part in (get_local_tensor(t) for t in tensors if t is not None)
    )


def _round_to_microseconds(seconds: Iterable[float]) -> tuple[float, ...]:
    """Round to microseconds, which is precise enough and keeps lines short."""
    return tuple(round(value, 6) for value in seconds)
