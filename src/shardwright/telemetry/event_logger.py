"""Logging of events to the event file and to sinks.

On rank 0 every event goes to

- `EventWriter`: events.jsonl, the source of all reports
- `Terminal` or `PlainLines`: standard error
- `LogFile`: log.txt, the same lines with date and time
- exporters: `TensorBoard`, `WeightsAndBiases`, `MLflow`

Other ranks write only warnings and failures to standard error, with the rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

from shardwright.masking import mask_values
from shardwright.telemetry.event_log import Event, EventWriter, WarningEvent, make_event
from shardwright.telemetry.exporters import open_exporter
from shardwright.telemetry.sinks import LogFile, PlainLines, RankErrorLines, Sink
from shardwright.telemetry.terminal import Terminal

LOG_FILE_NAME = "log.txt"


class EventLogger:
    """Logger that writes each event to the event file first, then to every sink.

    A sink that raises is disabled with one warning event; only errors of the event file stop
    the run.
    """

    def __init__(self, writer: EventWriter | None, sinks: Iterable[Sink]) -> None:
        self._writer = writer
        self._sinks = list(sinks)

    def log(self, kind: str, **values: Any) -> Event:
        """Build an event of a kind (see `make_event`) and log it with `log_event`."""
        return self.log_event(make_event(kind, **values))

    def log_event(self, event: Event) -> Event:
        """Write an event to the file and to all sinks; return it as written, with its times.

        Credentials in its texts are masked.
        """
        texts = {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
        masked = mask_values(texts)
        if masked != texts:
            changed = {name: value for name, value in masked.items() if value != texts[name]}
            event = dataclasses.replace(event, **changed)
        if self._writer is not None:
            event = self._writer.append(event)
        for sink in tuple(self._sinks):
            try:
                sink.on_event(event)
            except Exception as error:
                # no error of a terminal, a disk or a service may stop the run
                self._disable_sink(sink, error)
        return event

    def _disable_sink(self, sink: Sink, error: Exception) -> None:
        if sink not in self._sinks:
            return
        self._sinks.remove(sink)
        # The sink already failed; the warning below reports it.
        with contextlib.suppress(Exception):
            sink.close()
        reason = f"{type(error).__name__}: {error}"
        message = f"{type(sink).__name__} is off for the rest of the run: {reason}"
        self.log_event(WarningEvent(message=message))

    def close(self) -> None:
        """Close all sinks, then the event file."""
        for sink in tuple(self._sinks):
            try:
                sink.close()
            except Exception as error:
                self._disable_sink(sink, error)
        self._sinks.clear()
        if self._writer is not None:
            self._writer.close()

    def __enter__(self) -> EventLogger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_event_logger(
    run_dir: str | os.PathLike[str],
    *,
    rank: int = 0,
    exporters: Sequence[str] = (),
    log_every_steps: int = 1,
    stream: TextIO | None = None,
) -> EventLogger:
    """Open the event logger of a rank.

    Rank 0 gets the event file, log.txt, `stream` (a progress bar on a terminal, else plain
    lines) and the given exporters (`tensorboard`, `wandb`, `mlflow`); other ranks only write
    warnings and failures to `stream`, by default standard error.

    Raises:
        InputError: the package of an exporter is missing, or another process writes this run.
        RunFailed: the run folder cannot be written.
    """
    stream = sys.stderr if stream is None else stream
    if rank != 0:
        return EventLogger(None, [RankErrorLines(rank, stream)])
    folder = Path(run_dir)
    writer = EventWriter(folder)
    sinks: list[Sink] = []
    try:
        sinks.append(
            Terminal(stream) if stream.isatty() else PlainLines(stream, every_steps=log_every_steps)
        )
        sinks.append(LogFile(folder / LOG_FILE_NAME, every_steps=log_every_steps))
        sinks += [open_exporter(name, folder) for name in exporters]
    except BaseException:
        EventLogger(writer, sinks).close()
        raise
    return EventLogger(writer, sinks)
