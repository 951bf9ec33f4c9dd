"""shardwright's training loop with its events, on the same weights and tokens as all contenders.

Nothing of the loop is replaced: the timer is one more sink of the run's events, and the dataset
inverts the shuffle, so that step s reads the samples that the others read. Random weights are drawn
on the device: a run draws them on the host, which takes a core two minutes for 8B parameters.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.allocated import count_resident_bytes
from benchmarks.attention_log import record_attention
from benchmarks.case import NUM_SAMPLES, Case, make_tokens, shift_labels
from benchmarks.pace import Pace
from shardwright.architecture import NormalInit, ParameterSpec, read_config
from shardwright.architecture.adapter_targets import add_adapters
from shardwright.checkpoint.run_folder import RunFolder
from shardwright.config import Recipe
from shardwright.data.dataset import Sample
from shardwright.data.prepared_data import PreparedData
from shardwright.data.sample_order import SampleOrder
from shardwright.launch.devices import choose_rank_device
from shardwright.launch.rank_claim import join_ranks
from shardwright.launch.rank_environment import RankEnvironment, detect_rank_environment
from shardwright.launch.stop_signals import StopRequest
from shardwright.model.weight_init import initialise_parameter
from shardwright.numerics.compilation import choose_compilation
from shardwright.plans import resolve_plan
from shardwright.telemetry.event_log import Event, EventWriter, StepEvent
from shardwright.telemetry.event_logger import LOG_FILE_NAME, EventLogger
from shardwright.telemetry.sinks import LogFile, PlainLines
from shardwright.training import setup
from shardwright.training.checkpointing import RunCheckpointer
from shardwright.training.checks.run_checks import ValidatedRun
from shardwright.training.loop import TrainingLoop
from shardwright.training.memory_settings import agree_on_memory_settings
from shardwright.training.rank_context import RankContext
from shardwright.training.rank_sync import RankSync
from shardwright.training.setup import build_state, measure_ceiling
from shardwright.watchdog import monitor
from shardwright.watchdog.monitor import WatchdogClient

SEED = 0


class _Stopped(BaseException):
    """Stop command of the parent. No Exception, because event loggers survive those of sinks."""


class _TimerFailed(BaseException):
    """The timer raised an error; no Exception either."""


class SyntheticDataset:
    """Dataset of the benchmark's tokens, which the shuffled order reads in the original order."""

    def __init__(self, vocab_size: int, sequence_length: int) -> None:
        self.sequence_length = sequence_length
        tokens = make_tokens(vocab_size, sequence_length)
        self._input_ids = tokens.numpy()
        self._labels = shift_labels(tokens).numpy()
        self._positions = torch.arange(sequence_length).numpy()
        self._order = SampleOrder(SEED, NUM_SAMPLES)
        self._position_by_index = cache(self._map_positions)

    def __len__(self) -> int:
        return NUM_SAMPLES

    @property
    def num_supervised(self) -> int:
        """Supervised tokens of one epoch."""
        return NUM_SAMPLES * (self.sequence_length - 1)

    @property
    def is_uneven(self) -> bool:
        """True if rows differ in length; here they do not."""
        return False

    def count_used_positions(self, index: int, epoch: int = 0) -> int:
        """Return the number of positions in use: all of them."""
        return self.sequence_length

    def list_document_lengths(self, index: int, epoch: int = 0) -> tuple[int, ...]:
        """Return the positions of the row's only document."""
        return (self.sequence_length,)

    def get_sample(self, index: int, epoch: int = 0) -> Sample:
        """Return the sample that comes next when the order yields `index`."""
        place = self._position_by_index(epoch)[index]
        return Sample(self._input_ids[place], self._labels[place], self._positions, None)

    def _map_positions(self, epoch: int) -> dict[int, int]:
        return {
            self._order.get_index(epoch * NUM_SAMPLES + place): place
            for place in range(NUM_SAMPLES)
        }


class _PaceSink:
    def __init__(self, pace: Pace) -> None:
        self._pace = pace

    def on_event(self, event: Event) -> None:
        if not isinstance(event, StepEvent):
            return
        try:
            goes_on = self._pace.step_done(event.loss)
        except Exception as error:
            # The logger would turn this sink off, and training would never end.
            raise _TimerFailed from error
        if not goes_on:
            raise _Stopped

    def close(self) -> None:
        """Do nothing; there is no file."""


def run(case: Case, pace: Pace) -> None:
    """Train until `pace` returns False."""
    ranks = detect_rank_environment() or RankEnvironment()
    recipe = build_recipe(case)
    device = choose_rank_device(recipe.run.device, ranks, field="run.device")
    join_ranks(ranks, device, recipe.run.timeout_seconds)
    rank_sync = RankSync(ranks, device)
    validated_run = agree_on_memory_settings(
        build_validated_run(recipe, ranks.world_size, device), rank_sync, device
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        _open_event_logger(Path(folder), ranks, pace) as event_logger,
        record_attention() as pace.attention,
    ):
        ceiling = measure_ceiling(validated_run, device)
        with draw_weights_on(device) if case.random_weights else contextlib.nullcontext():
            state = build_state(validated_run, device)
        # No watchdog process: it would use these cores.
        watchdog = WatchdogClient(None, monitor.PhaseLimits(recipe.watchdog, {}))
        context = RankContext(
            validated_run,
            ranks,
            device,
            RunFolder(Path(folder)),
            event_logger,
            rank_sync,
            StopRequest(),
            watchdog,
        )
        loop = TrainingLoop(context, state, RunCheckpointer(context, state), ceiling)
        pace.count_resident_bytes = lambda: count_resident_bytes(state.model, state.optimizer)
        pace.details["wrapped"] = (
            f"{type(state.model.module).__name__}, {validated_run.plan.layout}"
        )
        if pace.begin():
            with contextlib.suppress(_Stopped):
                loop.run()
    if dist.is_initialized():
        dist.barrier()


@contextlib.contextmanager
def draw_weights_on(device: torch.device) -> Iterator[None]:
    """Within the context, draw normal initial weights with the device's generator, seeded."""

    def draw(
        spec: ParameterSpec, seed: int, *, dtype: torch.dtype, narrow: Sequence[tuple[int, int]]
    ) -> Tensor:
        if not isinstance(spec.init, NormalInit) or spec.init.zero_row is not None:
            return initialise_parameter(spec, seed, dtype=dtype, narrow=narrow)
        lengths = [length for _, length in narrow]
        return torch.empty(lengths, dtype=dtype, device=device).normal_(std=spec.init.std)

    torch.manual_seed(SEED)
    with mock.patch.object(setup, "initialise_parameter", draw):
        yield
    if device.type == "cuda":
        torch.cuda.empty_cache()


def build_recipe(case: Case) -> Recipe:
    """Build the recipe of the case."""
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
            "name": case.optimizer,
            "beta1": chosen.beta1,
            "beta2": chosen.beta2,
            "eps": chosen.eps,
        },
        "adapters": None if case.lora_rank is None else {"rank": case.lora_rank},
        "offload": {"optimizer": "host" if case.has_offloaded_moments else "none"},
        "precision": {
            "kind": case.precision,
            "master_weights": "bf16" if case.has_bf16_weights else "fp32",
        },
        "recompute": case.recompute,
        "layout": {"zero_stage": case.zero_stage},
        "run": {"device": case.device},
    }
    return Recipe.model_validate(content)


def build_validated_run(recipe: Recipe, world_size: int, device: torch.device) -> ValidatedRun:
    """Build a validated run with synthetic tokens in place of the recipe's sources.

    Functions are compiled where a run on this device compiles them.
    """
    assert recipe.model.path is not None
    shape = add_adapters(read_config(recipe.model.path), recipe.adapters)
    dataset = SyntheticDataset(shape.vocab_size, recipe.training.sequence_length)
    # There is no tokenised text.
    data = PreparedData(dataset, None, None, None, "synthetic")  # type: ignore[arg-type]
    assert recipe.training.max_steps is not None
    return ValidatedRun(
        recipe=recipe,
        plan=resolve_plan(recipe, shape, world_size, auto_compilation=choose_compilation(device)),
        data=data,
        total_steps=recipe.training.max_steps,
        frozen_names=frozenset(),
    )


def _open_event_logger(folder: Path, ranks: RankEnvironment, pace: Pace) -> EventLogger:
    """Open the event logger of a run, with the timer as its last sink."""
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
