"""Optional sinks that hand the numbers to other tools: TensorBoard files, Weights & Biases. Neither needs torch."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from shardwright.errors import InputError
from shardwright.telemetry.events import Evaluation, Event, Resumed, RunFinished, RunStarted, SkippedStep, Step
from shardwright.telemetry.meter import PARTS
from shardwright.telemetry.sinks import Sink


def scalars_of(event: Event) -> dict[str, float]:
    """The numbers of an event that make a curve, by name; empty for events that are none.

    >>> from shardwright.telemetry.events import Evaluation
    >>> scalars_of(Evaluation(step=1, loss=2.0, perplexity=7.4, tokens=9, seconds=1.0))
    {'validation/loss': 2.0, 'validation/perplexity': 7.4}
    """
    if isinstance(event, Evaluation):
        return {"validation/loss": event.loss, "validation/perplexity": event.perplexity}
    if isinstance(event, SkippedStep):
        return {"train/skipped": 1.0}
    if not isinstance(event, Step):
        return {}
    values: dict[str, float | None] = {
        "train/loss": event.loss,
        "train/gradient_norm": event.gradient_norm,
        "train/learning_rate": event.learning_rate,
        "train/loss_scale": event.loss_scale,
        "train/samples_seen": event.samples_seen,
        "speed/tokens_per_second": event.tokens_per_second,
        "speed/model_flops_per_second": event.model_flops_per_second,
        "speed/mfu": event.mfu,
        "seconds/step": event.step_seconds,
    }
    values |= {f"seconds/{part}": getattr(event, f"{part}_seconds") for part in PARTS}
    values |= {f"memory_bytes/rank_{rank}": num_bytes for rank, num_bytes in enumerate(event.memory_bytes)}
    return {name: float(value) for name, value in values.items() if value is not None}


class TensorBoard:
    """Scalars into `<run>/tensorboard`, through TensorBoard's own writer. A resume purges the steps it withdraws."""

    def __init__(self, run_dir: Path) -> None:
        writer = _need("tensorboard.summary.writer.event_file_writer", extra="tensorboard")
        self._events = _need("tensorboard.compat.proto.event_pb2", extra="tensorboard")
        self._summaries = _need("tensorboard.compat.proto.summary_pb2", extra="tensorboard")
        self._writer = writer.EventFileWriter(str(run_dir / "tensorboard"), flush_secs=10)

    def on_event(self, event: Event) -> None:
        """Add the event's scalars."""
        if isinstance(event, Resumed):
            # How TensorBoard is told that what it has from this step on is void.
            session = self._events.SessionLog(status=self._events.SessionLog.START)
            self._writer.add_event(self._events.Event(wall_time=event.time, step=(event.step or 0) + 1, session_log=session))
        scalars = scalars_of(event)
        if scalars:
            values = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
            summary = self._summaries.Summary(value=values)
            self._writer.add_event(self._events.Event(wall_time=event.time, step=event.step or 0, summary=summary))

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()


class WeightsAndBiases:
    """Scalars into a Weights & Biases run that goes on after a resume (its id is a hash of the run folder's path).

    Project, mode and account are wandb's own environment variables (WANDB_PROJECT, WANDB_MODE, ...).
    """

    def __init__(self, run_dir: Path) -> None:
        self._wandb = _need("wandb", extra="wandb")
        self._run_dir = run_dir.resolve()
        self._run: Any = None
        self._exit_code = 1  # unless the run says that it ended well

    def on_event(self, event: Event) -> None:
        """Open the run at its start, log the event's scalars, and keep the outcome."""
        if isinstance(event, RunStarted) and self._run is None:
            self._run = self._wandb.init(
                id=hashlib.sha256(str(self._run_dir).encode()).hexdigest()[:16],
                name=event.name,
                config={"recipe": event.recipe, "plan": event.plan, "versions": event.versions, "parameters": event.num_parameters},
                dir=str(self._run_dir),
                resume="allow",
            )
            # wandb's own step may only rise, a resume goes back: curves are drawn over ours.
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")
        if self._run is None:
            return
        scalars = scalars_of(event)
        if scalars:
            self._run.log({"step": event.step, **scalars})
        if isinstance(event, RunFinished):
            self._exit_code = 1 if event.status == "failed" else 0
            if event.final_loss is not None:
                self._run.summary["final_loss"] = event.final_loss

    def close(self) -> None:
        """Finish the run with its outcome."""
        if self._run is not None:
            self._run.finish(exit_code=self._exit_code)


EXPORTERS: dict[str, Callable[[Path], Sink]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


def check_exporters(names: Iterable[str]) -> None:
    """See that the packages of these exporters are there, without importing them.

    Raises:
        InputError: one is not installed.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise _not_installed(name)


def open_exporter(name: str, run_dir: Path) -> Sink:
    """The exporter of a name.

    Raises:
        InputError: no such exporter, or its package is not installed.
    """
    if name not in EXPORTERS:
        raise InputError("no such sink", field="run.sinks", got=name, allowed=", ".join(EXPORTERS))
    return EXPORTERS[name](run_dir)


def _need(module: str, *, extra: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _not_installed(extra, error) from error


def _not_installed(extra: str, error: ImportError | None = None) -> InputError:
    return InputError(
        f"the sink `{extra}` needs a package that is not installed" + (f": {error}" if error else ""),
        field="run.sinks",
        got=extra,
        remedy=f"Install it (pip install 'shardwright[{extra}]') or leave the sink out",
    )
