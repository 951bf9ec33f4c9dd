"""shardwright's own training loop, events and all, on the same weights and tokens as everybody.

Nothing of the loop is replaced: the clock is one more sink of the run's events, and the tokens are
a dataset that undoes the shuffle, so that step s reads the samples that the others read.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.allocated import held_bytes
from benchmarks.case import NUM_SAMPLES, Case, shifted_labels, synthetic_tokens
from benchmarks.pace import Pace
from shardwright.architecture import read_config
from shardwright.checkpoint.run_folder import RunFolder
from shardwright.config import Recipe
from shardwright.data.dataset import Sample
from shardwright.data.preparation import PreparedData
from shardwright.data.sample_order import SampleOrder
from shardwright.launch.devices import choose_rank_device
from shardwright.launch.rank_claim import join_ranks
from shardwright.launch.rank_environment import RankEnvironment, detect_rank_environment
from shardwright.launch.stop_signals import StopRequest
from shardwright.plan import resolve_plan
from shardwright.telemetry.event_log import Event, EventWriter
from shardwright.telemetry.event_logger import LOG_FILE_NAME, EventLogger
from shardwright.telemetry.sinks import LogFile, PlainLines
from shardwright.train.checkpointing import RunCheckpointer
from shardwright.train.loop import TrainingLoop
from shardwright.train.rank_context import RankContext
from shardwright.train.rank_sync import RankSync
from shardwright.train.run_checks import ValidatedRun
from shardwright.train.setup import build_state, measure_ceiling
from shardwright.watchdog import monitor
from shardwright.watchdog.monitor import WatchdogClient

SEED = 0


class _Stopped(BaseException):
    """The parent said stop. Not an Exception: a speaker outlives its sinks' exceptions."""


class SyntheticDataset:
    """The benchmark's tokens, laid out so that the shuffled order reads them in order."""

    def __init__(self, vocab_size: int, sequence_length: int) -> None:
        self.sequence_length = sequence_length
        tokens = synthetic_tokens(vocab_size, sequence_length)
        self._input_ids = tokens.numpy()
        self._labels = shifted_labels(tokens).numpy()
        self._positions = torch.arange(sequence_length).numpy()
        self._order = SampleOrder(SEED, NUM_SAMPLES)
        self._position_by_index = cache(self._positions_of_epoch)

    def __len__(self) -> int:
        return NUM_SAMPLES

    @property
    def num_supervised(self) -> int:
        """Tokens predicted in one pass."""
        return NUM_SAMPLES * (self.sequence_length - 1)

    @property
    def is_uneven(self) -> bool:
        """No."""
        return False

    def count_used_positions(self, index: int, epoch: int = 0) -> int:
        """All positions."""
        return self.sequence_length

    def get_sample(self, index: int, epoch: int = 0) -> Sample:
        """The sample that the order reads when it says `index`: the next one."""
        place = self._position_by_index(epoch)[index]
        return Sample(self._input_ids[place], self._labels[place], self._positions, None)

    def _positions_of_epoch(self, epoch: int) -> dict[int, int]:
        return {
            self._order.get_index(epoch * NUM_SAMPLES + place): place
            for place in range(NUM_SAMPLES)
        }


class _PaceSink:
    def __init__(self, pace: Pace) -> None:
        self._limits = pace

    def on_event(self, event: Event) -> None:
        if event.kind == "step" and not self._limits.step_done(event.loss):  # type: ignore[attr-defined]
            raise _Stopped

    def close(self) -> None:
        """Nothing to close."""


def run(case: Case, pace: Pace) -> None:
    """Train until the pace says stop."""
    ranks = detect_rank_environment() or RankEnvironment()
    recipe = recipe_of(case)
    device = choose_rank_device(recipe.run.device, ranks, field="run.device")
    join_ranks(ranks, device, recipe.run.timeout_seconds)
    checked = check(recipe, ranks.world_size)
    meeting = RankSync(ranks, device)
    with tempfile.TemporaryDirectory() as folder, _speaker(Path(folder), ranks, pace) as speaker:
        ceiling = measure_ceiling(checked, device)
        state = build_state(checked, device)
        vigil = WatchdogClient(
            None, monitor.PhaseLimits(recipe.watchdog, {})
        )  # nobody watches: that would be a process more on these cores
        run_folder = RunFolder(Path(folder))
        context = RankContext(
            checked, ranks, device, run_folder, speaker, meeting, StopRequest(), vigil
        )
        loop = TrainingLoop(context, state, RunCheckpointer(context, state), ceiling)
        pace.held_bytes = lambda: held_bytes(state.model, state.optimizer)
        pace.details["wrapped"] = f"{type(state.model.module).__name__}, {checked.plan.layout}"
        if pace.begin():
            with contextlib.suppress(_Stopped):
                loop.run()
    if dist.is_initialized():
        dist.barrier()


def recipe_of(case: Case) -> Recipe:
    """The recipe that a person would write for the case."""
    chosen = case.optimisation
    content: dict[str, Any] = {
        "name": "benchmark",
        "seed": SEED,
        "model": {
            "path": case.weights_dir,
            "init": "random" if case.random_weights else "pretrained",
            "compile": case.compile,
        },
        "data": {"sources": [case.weights_dir]},
        "training": {
            "sequence_length": case.sequence_length,
            "micro_batch_size": case.micro_batch_size,
            "max_steps": 100_000,
            "learning_rate": chosen.learning_rate,
            "schedule": "constant",
            "weight_decay": chosen.weight_decay,
            "max_grad_norm": chosen.max_grad_norm,
        },
        "optimizer": {
            "name": "adamw",
            "beta1": chosen.beta1,
            "beta2": chosen.beta2,
            "eps": chosen.eps,
        },
        "precision": case.precision,
        "recompute": case.recompute,
        "layout": {"zero_stage": case.zero_stage},
        "run": {"device": case.device},
    }
    return Recipe.model_validate(content)


def check(recipe: Recipe, world_size: int) -> ValidatedRun:
    """The recipe with synthetic tokens in the place of its sources."""
    assert recipe.model.path is not None
    shape = read_config(recipe.model.path)
    dataset = SyntheticDataset(shape.vocab_size, recipe.training.sequence_length)
    data = PreparedData(dataset, None, None, None, "synthetic")  # type: ignore[arg-type]  # no text was tokenised
    assert recipe.training.max_steps is not None
    return ValidatedRun(
        recipe=recipe,
        plan=resolve_plan(recipe, world_size),
        shape=shape,
        data=data,
        total_steps=recipe.training.max_steps,
        frozen_names=frozenset(),
    )


def _speaker(folder: Path, ranks: RankEnvironment, pace: Pace) -> EventLogger:
    """As a run has it, with the clock as its last sink."""
    if not ranks.is_main_rank:
        return EventLogger(None, [_PaceSink(pace)])
    return EventLogger(
        EventWriter(folder),
        [
            PlainLines(sys.stderr, every_steps=1),
            LogFile(folder / LOG_FILE_NAME, every_steps=1),
            _PaceSink(pace),
        ],
    )
