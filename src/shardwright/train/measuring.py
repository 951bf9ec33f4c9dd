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
from shardwright.parallel.model import local_part
from shardwright.parallel.waiting import CUTS, measuring
from shardwright.telemetry.sensors import Reading, open_sensor
from shardwright.telemetry.speaker import Speaker
from shardwright.train.clocks import SharedClock
from shardwright.train.meeting import Meeting
from shardwright.train.profiling import ProfiledSteps
from shardwright.train.setup import TrainState
from shardwright.train.step import StepTimes

RANKS_PER_EVENT = 8
"""Largest world size with a `ranks` event at every logged step; n times as many ranks have one
at every n-th logged step."""

_PARTS = ("data", "forward", "backward", "reduction", "optimizer")
_PICTURES = 20
"""Number of steps of a run whose pipeline timeline is recorded."""


@dataclass(frozen=True)
class RankStep:
    """Times of one step of one rank, in seconds."""

    step_seconds: float
    own_seconds: float
    """Step time without waiting for other ranks."""
    parts: dict[str, float]
    """Seconds by part of the step, including `data`."""
    waits: dict[str, float]
    """Seconds of waiting for communication, by kind of parallelism; contained in the parts."""


class RankMeter:
    """Measurements of this rank's steps; writes those of all ranks as events."""

    def __init__(
        self,
        state: TrainState,
        device: torch.device,
        meeting: Meeting,
        num_micro_batches: int,
        profiled: ProfiledSteps,
    ) -> None:
        self.times = StepTimes(device)
        self._state = state
        self._model = state.model
        self._device = device
        self._meeting = meeting
        self._num_micro_batches = num_micro_batches
        self._profiled = profiled
        self._waits = state.model.waits()
        self._sensor = (
            open_sensor(str(torch.cuda.get_device_properties(device).uuid))
            if device.type == "cuda"
            else None
        )
        self._checkpoint_seconds = 0.0
        self._steps = 0
        self._gradients_bytes = 0
        self._clock: SharedClock | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure communication, and profile if requested, while a step runs in the block."""
        self._waits.start()
        self._steps += 1
        with self._profiled.profiling(self._state.step + 1), measuring(self._waits):
            yield

    def note_gradients(self) -> None:
        """Record the gradients' bytes, once, when all gradients of a step exist."""
        if self._steps == 2:
            self._gradients_bytes = _bytes_of(gradient for gradient, _ in self._model.gradients())

    def read(self, began: float, data_seconds: float) -> RankStep:
        """Return the times of the step that started at `began`; synchronises the device.

        Args:
            began: Reading of `time.perf_counter`, seconds.
            data_seconds: Time spent reading the data.
        """
        parts = self.times.seconds()
        step_seconds = time.perf_counter() - began
        waits = self._waits.seconds()
        return RankStep(
            step_seconds,
            max(0.0, step_seconds - sum(waits.values())),
            {"data": data_seconds} | parts,
            waits,
        )

    @contextmanager
    def checkpointing(self) -> Iterator[None]:
        """Add the time of the block to the time that training is blocked by saving."""
        start_seconds = time.perf_counter()
        try:
            yield
        finally:
            self._checkpoint_seconds += time.perf_counter() - start_seconds

    def tell(
        self, speaker: Speaker, step: int, mine: RankStep, *, log_every_steps: int, total_steps: int
    ) -> None:
        """Write the events about all ranks that are due at this step. Collective."""
        world_size = self._meeting.ranks.world_size
        # For a single rank on a CPU, the `step` event already has all of it.
        if (world_size > 1 or self._device.type == "cuda") and step % (
            log_every_steps * -(-world_size // RANKS_PER_EVENT)
        ) == 0:
            self._tell_ranks(speaker, step, mine)
        if self._steps == 2:
            self._tell_memory(speaker, step)
        if self._model.pipeline is not None and (
            self._steps == 3 or step % max(1, total_steps // _PICTURES) == 0
        ):
            self._tell_pipeline(speaker, step)
        if self._profiled.due(step):
            self._profiled.gather(step, self._meeting, self.clock(), speaker)

    def clock(self) -> SharedClock:
        """Return the common clock of all ranks; synchronised at the first call. Collective."""
        if self._clock is None:
            self._clock = self._meeting.agree_on_clock()
        return self._clock

    def _tell_ranks(self, speaker: Speaker, step: int, mine: RankStep) -> None:
        cuda = self._device.type == "cuda"
        reading = self._sensor.read() if self._sensor is not None else Reading()
        device_bytes = 0
        reserved_bytes = 0
        if cuda:
            free_bytes, all_bytes = torch.cuda.mem_get_info(self._device)
            device_bytes = all_bytes - free_bytes
            reserved_bytes = torch.cuda.max_memory_reserved(self._device)
        rows = self._meeting.gather(
            [
                mine.step_seconds,
                mine.own_seconds,
                *(mine.parts[part] for part in _PARTS),
                self._checkpoint_seconds,
            ]
            + [mine.waits[kind] for kind in CUTS]
            + [reserved_bytes, device_bytes, reading.temperature_celsius, reading.throttle_bits]
        )
        self._checkpoint_seconds = 0.0
        columns = list(zip(*rows, strict=True))
        seconds = [_rounded(column) for column in columns[: 3 + len(_PARTS) + len(CUTS)]]
        names = ["step", "own", *_PARTS, "checkpoint"]
        fields: dict[str, Any] = {
            f"{name}_seconds": column for name, column in zip(names, seconds, strict=False)
        }
        waits = dict(zip(CUTS, seconds[len(names) :], strict=True))
        reserved, used, temperature, throttle = columns[-4:]
        if cuda:
            fields |= {
                "reserved_bytes": tuple(map(int, reserved)),
                "device_bytes": tuple(map(int, used)),
            }
        if max(temperature) > 0:
            fields["temperature_celsius"] = temperature
            fields["throttled"] = tuple(
                Reading(throttle_bits=int(bits)).throttled for bits in throttle
            )
        speaker.write(
            "ranks",
            step=step,
            wait_seconds={kind: row for kind, row in waits.items() if any(row)},
            **fields,
        )

    def _tell_memory(self, speaker: Speaker, step: int) -> None:
        cuda = self._device.type == "cuda"
        reserved = torch.cuda.max_memory_reserved(self._device) if cuda else 0
        driver = 0
        if cuda:
            free_bytes, all_bytes = torch.cuda.mem_get_info(self._device)
            driver = all_bytes - free_bytes - torch.cuda.memory_reserved(self._device)
        weights = _bytes_of(parameter for _, parameter in self._model.named_parameters())
        moments = (
            value for state in self._state.optimizer.state.values() for value in state.values()
        )
        optimizer = _bytes_of(value for value in moments if isinstance(value, Tensor))
        rows = self._meeting.gather(
            [
                weights,
                self._gradients_bytes,
                optimizer,
                self._meeting.memory_bytes(),
                driver,
                reserved,
            ]
        )
        columns = [tuple(map(int, column)) for column in zip(*rows, strict=True)]
        names = (
            "weights_bytes",
            "gradients_bytes",
            "optimizer_bytes",
            "peak_bytes",
            "driver_bytes",
            "reserved_bytes",
        )
        speaker.write(
            "memory", step=step, **dict(zip(names if cuda else names[:4], columns, strict=False))
        )

    def _tell_pipeline(self, speaker: Speaker, step: int) -> None:
        """Write the timeline of the pipeline that rank 0 belongs to."""
        pipeline = self._model.pipeline
        clock = self.clock()
        assert pipeline is not None
        spans = [
            (begin, end)
            for part, begin, end in self.times.spans()
            if part in ("forward", "backward")
        ]
        rows = self._meeting.gather(
            [clock.error_seconds, *(clock.at(instant) for span in spans for instant in span)],
            ragged=True,
        )
        schedule = pipeline.schedule(self._num_micro_batches)
        ranks = RankGrid(self._model.layout).group_of(0, ["pp"])
        instants = [rows[rank][1:] for rank in ranks]
        assert [len(row) for row in instants] == [2 * len(row) for row in schedule.rows], (
            "each action needs a begin and an end"
        )
        first = min(row[0] for row in instants)
        speaker.write(
            "pipeline",
            step=step,
            schedule=schedule.name,
            ranks=ranks,
            num_micro_batches=self._num_micro_batches,
            rank_of_stage=schedule.rank_of_stage,
            actions=tuple(tuple(map(str, row)) for row in schedule.rows),
            begins=tuple(_rounded([begin - first for begin in row[::2]]) for row in instants),
            ends=tuple(_rounded([end - first for end in row[1::2]]) for row in instants),
            clock_error_seconds=max(rows[rank][0] for rank in ranks),
        )


def _bytes_of(tensors: Iterable[Tensor | None]) -> int:
    """Count the bytes of the tensors' local shards."""
    return sum(
        part.numel() * part.element_size()
        for part in (local_part(t) for t in tensors if t is not None)
    )


def _rounded(seconds: Iterable[float]) -> tuple[float, ...]:
    """Round to microseconds, which is precise enough and keeps lines short."""
    return tuple(round(value, 6) for value in seconds)
