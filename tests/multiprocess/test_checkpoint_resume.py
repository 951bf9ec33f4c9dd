"""A run that changes its layout at every checkpoint goes on as if it had not: the same losses, each sample once, in order."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
import yaml

from shardwright.config import load_recipe
from shardwright.errors import Preempted
from shardwright.telemetry.events import Resumed, read_events, surviving_steps
from shardwright.train.ranks import RankEnvironment
from shardwright.train.signals import StopRequest
from shardwright.train.start import train_rank
from tests.multiprocess.pool import RankPool

CHAIN = [
    (2, "dp_shard=2,zero_stage=3"),
    (2, "tp=2"),
    (2, "pp=2"),
    (2, "cp=2,zero_stage=2"),
    (2, "dp_shard=2,ep=2,zero_stage=1"),
    (1, "dp_replicate=1"),
    (4, "pp=2,dp_shard=2,zero_stage=2"),
    (4, "tp=2,dp_replicate=2"),
    (2, "dp_replicate=2"),
]
"""Ranks and layout, two steps each: every one resumes what another one saved."""
STEPS, BATCH = 2 * len(CHAIN), 8


class StopAfter(StopRequest):
    """Asks for a stop when it has been looked at so many times: once a step."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.left = steps

    def __bool__(self) -> bool:
        self.left -= 1
        if self.left <= 0:
            self.note(signal.SIGTERM)
        return super().__bool__()


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    (folder / "corpus.txt").write_text("".join(f"{a} + {b} = {a + b}\n" for a in range(40) for b in range(20)))
    sizes = {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "max_position_embeddings": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    told: dict[str, Any] = {
        "seed": 1,
        "model": {"config": {"model_type": "mixtral"} | sizes | heads | experts},
        "tokenizer": {"kind": "character"},
        "data": {"sources": str(folder / "corpus.txt"), "cache_dir": str(folder / "cache")},
        "training": {
            "sequence_length": 16,
            "global_batch_size": BATCH,
            "gradient_accumulation_steps": 2,
            "max_steps": STEPS,
            "learning_rate": 1e-2,
        },
        "run": {"device": "cpu", "replica_check_every_steps": 1},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(told))
    return path


def train_some(recipe: str, folder: str, layout: str, steps: int, resume: bool) -> None:
    """Some steps of the run on these ranks, whose process group stays."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    with mock.patch.object(dist, "destroy_process_group"), suppress(Preempted):
        train_rank(
            load_recipe(Path(recipe), [f"run.dir={folder}"], layout),
            RankEnvironment(rank, world_size, rank),
            StopAfter(steps),
            resume=resume,
        )


def test_every_step_under_another_layout_is_the_step_of_the_whole_run(ranks: RankPool, recipe: Path, tmp_path: Path) -> None:
    ranks.run(1, train_some, str(recipe), str(tmp_path / "whole"), "dp_replicate=1", STEPS + 1, False)
    for number, (num_ranks, layout) in enumerate(CHAIN):
        ranks.run(num_ranks, train_some, str(recipe), str(tmp_path / "run"), layout, 2, number > 0)
    events = read_events(tmp_path / "run")
    assert [event.step for event in events.of(Resumed)] == list(range(2, STEPS, 2))
    ours, whole = surviving_steps(events), surviving_steps(read_events(tmp_path / "whole"))
    assert [step.samples_seen for step in ours] == [BATCH * step for step in range(1, STEPS + 1)]
    for step, other in zip(ours, whole, strict=True):
        assert step.loss == pytest.approx(other.loss, rel=2e-5), step.step
        assert step.gradient_norm == pytest.approx(other.gradient_norm, rel=2e-4), step.step
