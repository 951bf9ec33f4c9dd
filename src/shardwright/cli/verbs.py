"""Table of the verbs, in the order of --help.

A verb's module is imported when the verb is called, so that `shardwright --help` answers at
once.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import typer

VERBS = {
    "data": "Show the training data as the model sees it.",
    "plan": "Rank a recipe's layouts by predicted speed on a cluster.",
    "tune": "Find a recipe's fastest settings by short measured runs.",
    "doctor": "Check devices, links and hosts before a long run.",
    "verify": "Check that a layout's gradients equal those of one process.",
    "audit": "Compare a step of any trainer with one process.",
    "rehearse": "Run a layout's training step on fake devices.",
    "train": "Train a recipe, in one process or many.",
    "launch": "Print a script or manifest that starts a recipe on a cluster.",
    "evaluate": "Score a trained model on questions with known answers.",
    "generate": "Continue a prompt with a trained model.",
    "export": "Write a run as a Hugging Face folder.",
    "report": "Write a report page of one or more runs.",
    "watch": "Serve the live report of a run on this machine.",
    "compare": "Compare a run's loss with that of a reference run.",
    "checkpoint": "List, verify and inspect checkpoints.",
    "convert": "Convert a DeepSpeed, Accelerate or Axolotl file to a recipe.",
    "schedule": "Check and draw a pipeline schedule.",
    "predict": "Predict speed and memory for every row of a table.",
    "schema": "Print the JSON schema of recipes, for editors.",
}
"""Summaries of the verbs. The module of a verb has its name."""


def load_command(verb: str) -> Callable[..., Any] | typer.Typer:
    """Import a verb's module; return its `app` of subcommands, or its one command."""
    module = import_module(f"shardwright.cli.{verb}")
    command: Callable[..., Any] = getattr(module, f"{verb}_command", None) or module.app
    return command
