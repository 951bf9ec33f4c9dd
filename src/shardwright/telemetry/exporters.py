"""Optional sinks that export metrics: TensorBoard, Weights & Biases, MLflow. No torch."""

from __future__ import annotations

import importlib
import importlib.util
import os
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from shardwright.errors import InputError
from shardwright.telemetry.event_log import (
    EvaluationEvent,
    Event,
    ResumeEvent,
    RunFinishedEvent,
    RunStartedEvent,
    SkippedStepEvent,
    StepEvent,
)
from shardwright.telemetry.meter import STEP_PARTS
from shardwright.telemetry.sinks import Sink


def extract_scalars(event: Event) -> dict[str, float]:
    """Return the scalar metrics of an event by name; empty for events without any.

    >>> from shardwright.telemetry.event_log import EvaluationEvent
    >>> extract_scalars(EvaluationEvent(step=1, loss=2.0, perplexity=7.4, tokens=9, seconds=1.0))
    {'validation/loss': 2.0, 'validation/perplexity': 7.4}
    """
    if isinstance(event, EvaluationEvent):
        rewards = _extract_rewards(event, "validation")
        # The exponential of a preference loss is not a perplexity.
        return {"validation/loss": event.loss} | (
            rewards or {"validation/perplexity": event.perplexity}
        )
    if isinstance(event, SkippedStepEvent):
        return {"train/skipped": 1.0}
    if not isinstance(event, StepEvent):
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
    values |= {f"seconds/{part}": getattr(event, f"{part}_seconds") for part in STEP_PARTS}
    values |= {
        f"memory_bytes/rank_{rank}": num_bytes for rank, num_bytes in enumerate(event.memory_bytes)
    }
    scalars = {name: float(value) for name, value in values.items() if value is not None}
    return scalars | _extract_rewards(event, "train")


def _extract_rewards(event: StepEvent | EvaluationEvent, side: str) -> dict[str, float]:
    """Return the rewards of preference tuning; empty for other training."""
    names = ("reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy")
    values = {f"{side}/{name}": getattr(event, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


class TensorBoard:
    """Sink that writes scalars to `<run>/tensorboard`; a resume purges withdrawn steps."""

    def __init__(self, run_dir: Path) -> None:
        writer = _import_package(
            "tensorboard.summary.writer.event_file_writer", extra="tensorboard"
        )
        self._events = _import_package("tensorboard.compat.proto.event_pb2", extra="tensorboard")
        self._summaries = _import_package(
            "tensorboard.compat.proto.summary_pb2", extra="tensorboard"
        )
        self._writer = writer.EventFileWriter(str(run_dir / "tensorboard"), flush_secs=10)

    def on_event(self, event: Event) -> None:
        """Add the event's scalars."""
        if isinstance(event, ResumeEvent):
            # A session start makes TensorBoard discard its data from this step on.
            session = self._events.SessionLog(status=self._events.SessionLog.START)
            self._writer.add_event(
                self._events.Event(
                    wall_time=event.time, step=(event.step or 0) + 1, session_log=session
                )
            )
        scalars = extract_scalars(event)
        if scalars:
            values = [
                self._summaries.Summary.Value(tag=name, simple_value=value)
                for name, value in scalars.items()
            ]
            summary = self._summaries.Summary(value=values)
            self._writer.add_event(
                self._events.Event(wall_time=event.time, step=event.step or 0, summary=summary)
            )

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()


class WeightsAndBiases:
    """Sink that logs scalars to a Weights & Biases run, which continues after a resume.

    The run's id is saved in the run folder. Project, mode and account are set by wandb's
    environment variables (WANDB_PROJECT, WANDB_MODE, ...).
    """

    def __init__(self, run_dir: Path) -> None:
        self._wandb = _import_package("wandb", extra="wandb")
        self._run_dir = run_dir.resolve()
        self._id_file = run_dir / "wandb-run-id"
        self._run: Any = None
        self._exit_code = 1  # until the run finishes without failure

    def on_event(self, event: Event) -> None:
        """Open the run at its start, log the event's scalars, and record the run's status."""
        if isinstance(event, RunStartedEvent) and self._run is None:
            # Not a function of the path: runs of other machines may have the same path.
            run_id = (
                self._id_file.read_text(encoding="utf-8").strip()
                if self._id_file.is_file()
                else secrets.token_hex(8)
            )
            self._run = self._wandb.init(
                id=run_id,
                name=event.name,
                config={
                    "recipe": event.recipe,
                    "plan": event.plan,
                    "versions": event.versions,
                    "parameters": event.num_parameters,
                },
                dir=str(self._run_dir),
                resume="allow",
            )
            self._id_file.write_text(run_id + "\n", encoding="utf-8")
            # wandb's own step cannot decrease, as it does after a resume: plot over our step.
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")
        if self._run is None:
            return
        scalars = extract_scalars(event)
        if scalars:
            self._run.log({"step": event.step, **scalars})
        if isinstance(event, RunFinishedEvent):
            self._exit_code = 1 if event.status == "failed" else 0
            if event.final_loss is not None:
                self._run.summary["final_loss"] = event.final_loss

    def close(self) -> None:
        """Finish the run with its status."""
        if self._run is not None:
            self._run.finish(exit_code=self._exit_code)


_MAX_MLFLOW_VALUE_CHARACTERS = 500
"""Maximum length of a parameter that MLflow accepts."""


class MLflow:
    """Sink that logs scalars to an MLflow run, which continues after a resume.

    The run's id is saved in the run folder. Server and account are set by MLflow's environment
    variables (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, ...); without a server the metrics
    and files go to a database and a folder in the run folder (`mlflow ui --backend-store-uri
    sqlite:///RUN/mlflow.db`).
    """

    def __init__(self, run_dir: Path) -> None:
        mlflow = _import_package("mlflow", extra="mlflow")
        self._entities = _import_package("mlflow.entities", extra="mlflow")
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        # MLflow's own default for files is a folder in the working directory.
        self._artifacts = None if uri else (run_dir.resolve() / "mlflow-files").as_uri()
        uri = uri or f"sqlite:///{run_dir.resolve() / 'mlflow.db'}"
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        self._id_file = run_dir / "mlflow-run-id"
        self._run_id: str | None = None
        self._status = "FAILED"  # until the run finishes without failure

    def on_event(self, event: Event) -> None:
        """Open the run at its start, log the event's scalars, and record the run's status."""
        if isinstance(event, RunStartedEvent) and self._run_id is None:
            self._run_id = self._open_run(event)
        if self._run_id is None:
            return
        scalars = extract_scalars(event)
        if scalars:
            time_milliseconds = int(1000 * event.time)
            metrics = [
                self._entities.Metric(name, value, time_milliseconds, event.step or 0)
                for name, value in scalars.items()
            ]
            self._client.log_batch(self._run_id, metrics=metrics)
        if isinstance(event, RunFinishedEvent):
            self._status = (
                "FAILED"
                if event.status == "failed"
                else "KILLED"
                if event.status == "preempted"
                else "FINISHED"
            )

    def _open_run(self, event: RunStartedEvent) -> str:
        if self._id_file.is_file():
            run_id = self._id_file.read_text(encoding="utf-8").strip()
            self._client.update_run(run_id, status="RUNNING")
            return run_id
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "shardwright"
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = (
            self._client.create_experiment(name, artifact_location=self._artifacts)
            if experiment is None
            else experiment.experiment_id
        )
        run_id = str(self._client.create_run(experiment_id, run_name=event.name).info.run_id)
        parameters = {
            "layout": event.layout,
            "parameters": event.num_parameters,
            "total_steps": event.total_steps,
            **event.versions,
        }
        values = [
            self._entities.Param(key, str(value)[:_MAX_MLFLOW_VALUE_CHARACTERS])
            for key, value in parameters.items()
        ]
        self._client.log_batch(run_id, params=values)
        self._client.log_dict(run_id, {"recipe": event.recipe, "plan": event.plan}, "run.yaml")
        self._id_file.write_text(run_id + "\n", encoding="utf-8")
        return run_id

    def close(self) -> None:
        """Finish the run with its status."""
        if self._run_id is not None:
            self._client.set_terminated(self._run_id, status=self._status)


EXPORTERS: dict[str, Callable[[Path], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}


def check_exporters(names: Iterable[str]) -> None:
    """Check that the packages of these exporters are installed, without importing them.

    Raises:
        InputError: a package is not installed.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise _build_not_installed_error(name)


def open_exporter(name: str, run_dir: Path) -> Sink:
    """Open the exporter with this name.

    Raises:
        InputError: no such exporter, or its package is not installed.
    """
    if name not in EXPORTERS:
        raise InputError("no such sink", field="run.sinks", got=name, allowed=", ".join(EXPORTERS))
    return EXPORTERS[name](run_dir)


def _import_package(module: str, *, extra: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _build_not_installed_error(extra, error) from error


def _build_not_installed_error(extra: str, error: ImportError | None = None) -> InputError:
    return InputError(
        f"the sink `{extra}` needs a package that is not installed"
        + (f": {error}" if error else ""),
        field="run.sinks",
        got=extra,
        remedy=f"Install it (pip install 'shardwright[{extra}]') or leave the sink out",
    )
