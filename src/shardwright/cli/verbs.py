"""Table of the verbs, in the order of --help.

A verb's module is imported when the verb is called, so that `shardwright --help` answers at
once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import typer


@dataclass(frozen=True)
class Verb:
    """A verb: its summary, and a function that imports its command or group of commands."""

    summary: str
    load_command: Callable[[], Callable[..., Any] | typer.Typer]


def _load_data() -> Callable[..., Any]:
    from shardwright.cli.data import data_command

    return data_command


def _load_train() -> Callable[..., Any]:
    from shardwright.cli.train import train_command

    return train_command


def _load_plan() -> Callable[..., Any]:
    from shardwright.cli.plan import plan_command

    return plan_command


def _load_tune() -> Callable[..., Any]:
    from shardwright.cli.tune import tune_command

    return tune_command


def _load_verify() -> Callable[..., Any]:
    from shardwright.cli.verify import verify_command

    return verify_command


def _load_launch() -> typer.Typer:
    from shardwright.cli.launch import app

    return app


def _load_convert() -> Callable[..., Any]:
    from shardwright.cli.convert import convert_command

    return convert_command


def _load_evaluate() -> Callable[..., Any]:
    from shardwright.cli.evaluate import evaluate_command

    return evaluate_command


def _load_generate() -> Callable[..., Any]:
    from shardwright.cli.generate import generate_command

    return generate_command


def _load_export() -> Callable[..., Any]:
    from shardwright.cli.export import export_command

    return export_command


def _load_report() -> Callable[..., Any]:
    from shardwright.cli.report import report_command

    return report_command


def _load_watch() -> Callable[..., Any]:
    from shardwright.cli.watch import watch_command

    return watch_command


def _load_compare() -> Callable[..., Any]:
    from shardwright.cli.compare import compare_command

    return compare_command


def _load_schedule() -> Callable[..., Any]:
    from shardwright.cli.schedule import schedule_command

    return schedule_command


def _load_rehearse() -> Callable[..., Any]:
    from shardwright.cli.rehearse import rehearse_command

    return rehearse_command


def _load_checkpoint() -> typer.Typer:
    from shardwright.cli.checkpoint import app

    return app


def _load_schema() -> Callable[..., Any]:
    from shardwright.cli.schema import schema_command

    return schema_command


def _load_doctor() -> Callable[..., Any]:
    from shardwright.cli.doctor import doctor_command

    return doctor_command


def _load_predict() -> Callable[..., Any]:
    from shardwright.cli.predict import predict_command

    return predict_command


def _load_audit() -> typer.Typer:
    from shardwright.cli.audit import app

    return app


VERBS = {
    "data": Verb("Show the training data as the model will see it.", _load_data),
    "plan": Verb("Rank a recipe's layouts by predicted speed on a cluster.", _load_plan),
    "tune": Verb("Measure a recipe's best settings on this machine.", _load_tune),
    "doctor": Verb("Check devices, links and hosts before a long run.", _load_doctor),
    "verify": Verb("Check that a layout's gradients equal those of one process.", _load_verify),
    "audit": Verb("Check a recorded step of any trainer against one process.", _load_audit),
    "rehearse": Verb("Run a layout's training step on fake devices.", _load_rehearse),
    "train": Verb("Train a recipe, in one process or many.", _load_train),
    "launch": Verb("Start a recipe on Slurm, Kubernetes or torchrun.", _load_launch),
    "evaluate": Verb("Score a trained model on questions with known answers.", _load_evaluate),
    "generate": Verb("Continue a prompt with a trained model.", _load_generate),
    "export": Verb("Write a run as a Hugging Face folder.", _load_export),
    "report": Verb("Write a report page of one or more runs.", _load_report),
    "watch": Verb("Serve the live report of a run on this machine.", _load_watch),
    "compare": Verb("Compare a run's loss with that of a reference run.", _load_compare),
    "checkpoint": Verb("List, verify and inspect checkpoints.", _load_checkpoint),
    "convert": Verb("Convert a DeepSpeed, Accelerate or Axolotl file to a recipe.", _load_convert),
    "schedule": Verb("Check and draw a pipeline schedule.", _load_schedule),
    "predict": Verb("Compare the planner with published measurements.", _load_predict),
    "schema": Verb("Print the JSON schema of recipes, for editors.", _load_schema),
}
