"""Hands each event to the file and to every sink; the one thing that a trainer talks to.

    Speaker ── EventWriter          events.jsonl, the source
            ├─ Terminal | PlainLines    standard error, for the person who waits
            ├─ LogFile                  log.txt, the same lines with the time
            └─ TensorBoard, WeightsAndBiases, MLflow

Rank 0 speaks. Other ranks have a Speaker too, but it only passes their warnings and failures on, with the rank.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

from shardwright.telemetry.events import Event, EventWriter, Warned, make_event
from shardwright.telemetry.exporters import open_exporter
from shardwright.telemetry.sinks import LogFile, PlainLines, RankedErrors, Sink
from shardwright.telemetry.terminal import Terminal

LOG_NAME = "log.txt"


class Speaker:
    """Writes each event to the file first, then shows it in every sink; the one thing that a trainer talks to.

    A sink that raises is turned off with one warning event; only the event file itself may stop the run.
    """

    def __init__(self, writer: EventWriter | None, sinks: Iterable[Sink]) -> None:
        self._writer = writer
        self._sinks = list(sinks)

    def write(self, kind: str, **values: Any) -> Event:
        """`emit` the event of a kind (see `make_event`)."""
        return self.emit(make_event(kind, **values))

    def emit(self, event: Event) -> Event:
        """Write and show an event; returns it as written, with its clocks."""
        if self._writer is not None:
            event = self._writer.append(event)
        for sink in tuple(self._sinks):
            try:
                sink.on_event(event)
            except Exception as error:  # whatever a terminal, a disk or a service may throw: the run is worth more
                self._turn_off(sink, error)
        return event

    def _turn_off(self, sink: Sink, error: Exception) -> None:
        if sink not in self._sinks:
            return
        self._sinks.remove(sink)
        with contextlib.suppress(Exception):  # it is broken already, and the warning below says so
            sink.close()
        self.emit(Warned(message=f"{type(sink).__name__} is off for the rest of the run: {type(error).__name__}: {error}"))

    def close(self) -> None:
        """Close all sinks, then the event file."""
        for sink in tuple(self._sinks):
            try:
                sink.close()
            except Exception as error:
                self._turn_off(sink, error)
        self._sinks.clear()
        if self._writer is not None:
            self._writer.close()

    def __enter__(self) -> Speaker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_speaker(
    run_dir: str | os.PathLike[str],
    *,
    rank: int = 0,
    exporters: Sequence[str] = (),
    log_every_steps: int = 1,
    stream: TextIO | None = None,
) -> Speaker:
    """The speaker of a rank.

    Rank 0 gets the event file, log.txt, the terminal (a bar on a terminal, plain lines elsewhere) and the exporters named
    (`tensorboard`, `wandb`, `mlflow`); every other rank only says its warnings and failures.

    Raises:
        InputError: an exporter whose package is missing, or another process writes this run.
        RunFailed: the run folder cannot be written.
    """
    stream = sys.stderr if stream is None else stream
    if rank != 0:
        return Speaker(None, [RankedErrors(rank, stream)])
    folder = Path(run_dir)
    writer = EventWriter(folder)
    sinks: list[Sink] = []
    try:
        sinks.append(Terminal(stream) if stream.isatty() else PlainLines(stream, every_steps=log_every_steps))
        sinks.append(LogFile(folder / LOG_NAME, every_steps=log_every_steps))
        sinks += [open_exporter(name, folder) for name in exporters]
    except BaseException:
        Speaker(writer, sinks).close()
        raise
    return Speaker(writer, sinks)
