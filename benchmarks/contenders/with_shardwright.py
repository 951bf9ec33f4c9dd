"""shardwright's own training loop, events and all, on the same weights and tokens as everybody.

Nothing of the loop is replaced: the clock is one more sink of the run's events, and the tokens are a dataset that undoes
the shuffle, so that step s reads the samples that the others read.
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
from shardwright.config import Recipe
from shardwright.data.dataset import Sample
from shardwright.data.order import SampleOrder
from shardwright.data.prepare import Prepared
from shardwright.plan import resolve
from shardwright.telemetry.events import Event, EventWriter
from shardwright.telemetry.sinks import LogFile, PlainLines
from shardwright.telemetry.speaker import LOG_NAME, Speaker
from shardwright.train import watchdog
from shardwright.train.ceiling import measure_ceiling
from shardwright.train.devices import choose_device
from shardwright.train.folder import RunFolder
from shardwright.train.loop import Loop
from shardwright.train.meeting import Meeting
from shardwright.train.preflight import Checked
from shardwright.train.ranks import RankEnvironment, find_ranks
from shardwright.train.saving import Saver
from shardwright.train.setup import build_state, join_ranks
from shardwright.train.signals import StopRequest
from shardwright.train.watchdog import Vigil

SEED = 0


class _Stopped(BaseException):
    """The parent said stop. Not an Exception: a speaker outlives its sinks' exceptions."""


class SyntheticDataset:
    """The benchmark's tokens, laid out so that the shuffled order reads them in order."""

    def __init__(self, vocab_size: int, sequence_length: int) -> None:
        self.sequence_length = sequence_length
        tokens = synthetic_tokens(vocab_size, sequence_length)
        self._input_ids, self._labels = tokens.numpy(), shifted_labels(tokens).numpy()
        self._positions = torch.arange(sequence_length).numpy()
        self._order = SampleOrder(SEED, NUM_SAMPLES)
        self._position_of = cache(self._positions_of_epoch)

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

    def num_used(self, index: int, epoch: int = 0) -> int:
        """All positions."""
        return self.sequence_length

    def sample(self, index: int, epoch: int = 0) -> Sample:
        """The sample that the order reads when it says `index`: the next one."""
        place = self._position_of(epoch)[index]
        return Sample(self._input_ids[place], self._labels[place], self._positions, None)

    def _positions_of_epoch(self, epoch: int) -> dict[int, int]:
        return {self._order.index_at(epoch * NUM_SAMPLES + place): place for place in range(NUM_SAMPLES)}


class _PaceSink:
    def __init__(self, pace: Pace) -> None:
        self._pace = pace

    def on_event(self, event: Event) -> None:
        if event.kind == "step" and not self._pace.step_done(event.loss):  # type: ignore[attr-defined]
            raise _Stopped

    def close(self) -> None:
        """Nothing to close."""


def run(case: Case, pace: Pace) -> None:
    """Train until the pace says stop."""
    ranks = find_ranks() or RankEnvironment()
    recipe = recipe_of(case)
    device = choose_device(recipe.run.device, ranks, field="run.device")
    join_ranks(ranks, device, recipe.run.timeout_seconds)
    checked = check(recipe, ranks.world_size)
    meeting = Meeting(ranks, device)
    with tempfile.TemporaryDirectory() as folder, _speaker(Path(folder), ranks, pace) as speaker:
        ceiling = measure_ceiling(checked, device)
        state = build_state(checked, device)
        vigil = Vigil(None, watchdog.Pace(recipe.watchdog, {}))  # nobody watches: that would be a process more on these cores
        saver = Saver(checked, state, speaker, RunFolder(Path(folder)))
        loop = Loop(checked, state, ranks, device, speaker, meeting, saver, StopRequest(), vigil, ceiling)
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
        "model": {"path": case.weights_dir, "init": "random" if case.random_weights else "pretrained", "compile": case.compile},
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
        "optimizer": {"name": "adamw", "beta1": chosen.beta1, "beta2": chosen.beta2, "eps": chosen.eps},
        "precision": case.precision,
        "recompute": case.recompute,
        "layout": {"zero_stage": case.zero_stage},
        "run": {"device": case.device},
    }
    return Recipe.model_validate(content)


def check(recipe: Recipe, world_size: int) -> Checked:
    """The recipe with synthetic tokens in the place of its sources."""
    assert recipe.model.path is not None
    shape = read_config(recipe.model.path)
    dataset = SyntheticDataset(shape.vocab_size, recipe.training.sequence_length)
    data = Prepared(dataset, None, None, None, "synthetic")  # type: ignore[arg-type]  # no text was tokenised
    assert recipe.training.max_steps is not None
    return Checked(
        recipe=recipe,
        plan=resolve(recipe, world_size),
        shape=shape,
        data=data,
        total_steps=recipe.training.max_steps,
        frozen=frozenset(),
    )


def _speaker(folder: Path, ranks: RankEnvironment, pace: Pace) -> Speaker:
    """As a run has it, with the clock as its last sink."""
    if not ranks.speaks:
        return Speaker(None, [_PaceSink(pace)])
    return Speaker(
        EventWriter(folder),
        [PlainLines(sys.stderr, every_steps=1), LogFile(folder / LOG_NAME, every_steps=1), _PaceSink(pace)],
    )
