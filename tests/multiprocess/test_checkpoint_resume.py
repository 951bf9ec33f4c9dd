"""A run that changes its layout at every checkpoint has the losses and the sample order of a
run that does not.
"""

from __future__ import annotations

import json
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import yaml

from shardwright.checkpoint.tensor_loading import find_newest_checkpoint, read_tensor, read_values
from shardwright.config import load_recipe
from shardwright.errors import Preempted
from shardwright.launch.rank_environment import RankEnvironment
from shardwright.launch.stop_signals import StopRequest
from shardwright.telemetry.event_log import (
    ReshardEvent,
    ResumeEvent,
    read_events,
    select_surviving_steps,
)
from shardwright.training.rank_run import train_rank
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
"""Ranks and layout of two steps each; every one resumes from the checkpoint of the one before.
"""
STEPS = 2 * len(CHAIN)
BATCH = 8


class StopAfter(StopRequest):
    """Request a stop after so many checks, one per step."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.left = steps

    def __bool__(self) -> bool:
        self.left -= 1
        if self.left <= 0:
            self.record(signal.SIGTERM)
        return super().__bool__()


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    (folder / "corpus.txt").write_text(
        "".join(f"{a} + {b} = {a + b}\n" for a in range(40) for b in range(20))
    )
    sizes = {
        "hidden_size": 24,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "max_position_embeddings": 32,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    document: dict[str, Any] = {
        "seed": 1,
        "model": {"config": {"model_type": "mixtral"} | sizes | heads | experts},
        "tokenizer": {"kind": "character"},
        "data": {"sources": str(folder / "corpus.txt"), "cache_dir": str(folder / "cache")},
        "precision": "fp32",
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
    path.write_text(yaml.safe_dump(document))
    return path


def train_some(
    recipe: str, folder: str, layout: str, steps: int, resume: bool, *changes: str
) -> None:
    """Train some steps on these ranks and keep their process group; `changes` are values of
    `--set`.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    with mock.patch.object(dist, "destroy_process_group"), suppress(Preempted):
        train_rank(
            load_recipe(Path(recipe), [f"run.dir={folder}", *changes], layout),
            RankEnvironment(rank, world_size, rank),
            StopAfter(steps),
            resume=resume,
        )


def test_steps_under_changing_layouts_equal_those_of_one_layout(
    ranks: RankPool, recipe: Path, tmp_path: Path
) -> None:
    ranks.run(
        1, train_some, str(recipe), str(tmp_path / "whole"), "dp_replicate=1", STEPS + 1, False
    )
    for number, (num_ranks, layout) in enumerate(CHAIN):
        ranks.run(num_ranks, train_some, str(recipe), str(tmp_path / "run"), layout, 2, number > 0)
    events = read_events(tmp_path / "run")
    assert [event.step for event in events.filter_by_type(ResumeEvent)] == list(range(2, STEPS, 2))
    changes = events.filter_by_type(ReshardEvent)
    assert [event.step for event in changes] == list(range(2, STEPS, 2))
    assert [event.world_size for event in changes] == [num_ranks for num_ranks, _ in CHAIN[1:]]
    assert all(event.from_layout != event.to_layout for event in changes)
    ours = select_surviving_steps(events)
    whole = select_surviving_steps(read_events(tmp_path / "whole"))
    assert [step.samples_seen for step in ours] == [BATCH * step for step in range(1, STEPS + 1)]
    for step, other in zip(ours, whole, strict=True):
        assert step.loss == pytest.approx(other.loss, rel=2e-5), step.step
        assert step.gradient_norm == pytest.approx(other.gradient_norm, rel=2e-4), step.step


FP16 = "precision={kind: fp16, initial_loss_scale: 1024, loss_scale_growth_steps: 3}"
BALANCED = "model.config=" + json.dumps(
    {
        "model_type": "deepseek_v3", "hidden_size": 24, "intermediate_size": 20,
        "num_hidden_layers": 2, "max_position_embeddings": 32, "num_attention_heads": 4,
        "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
        "topk_group": 1, "moe_intermediate_size": 8, "first_k_dense_replace": 0,
        "q_lora_rank": None, "kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2,
        "v_head_dim": 4, "num_nextn_predict_layers": 0,
    }
)  # fmt: skip


@pytest.mark.parametrize("change", [FP16, BALANCED], ids=["loss scale", "balance biases"])
def test_state_beside_the_weights_continues_under_another_layout(
    ranks: RankPool, recipe: Path, tmp_path: Path, change: str
) -> None:
    """The state of fp16's loss scaler and the balance biases equal those of a run under one
    layout.
    """
    chain = [(2, "dp_shard=2,ep=2,zero_stage=1"), (2, "tp=2"), (1, "dp_replicate=1")]
    changes = [change, f"training.max_steps={2 * len(chain)}"]
    ranks.run(
        1,
        train_some,
        str(recipe),
        str(tmp_path / "whole"),
        "dp_replicate=1",
        STEPS,
        False,
        *changes,
    )
    for number, (num_ranks, layout) in enumerate(chain):
        ranks.run(
            num_ranks,
            train_some,
            str(recipe),
            str(tmp_path / "run"),
            layout,
            2,
            number > 0,
            *changes,
        )
    ours, whole = (
        find_newest_checkpoint(tmp_path / run / "checkpoints") for run in ("run", "whole")
    )
    assert ours is not None
    assert whole is not None
    assert ours.step == whole.step == 2 * len(chain)
    assert read_values(ours)["loss_scaler"] == read_values(whole)["loss_scaler"]
    if change is FP16:
        assert read_values(ours)["loss_scaler"] == {"scale": 4096.0, "finite_steps": 0}
        return
    biases = [name for name in ours.manifest.tensors if name.endswith("e_score_correction_bias")]
    assert len(biases) == 2
    for name in biases:
        assert bool(read_tensor(ours, name).any())
        assert torch.equal(read_tensor(ours, name), read_tensor(whole, name))
