"""A run that trains adapters: saved without the base, resumed under other layouts, exported for
peft and merged.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import yaml

from shardwright.architecture import read_config
from shardwright.checkpoint.commit import LATEST_NAME
from shardwright.cli.main import run as shardwright
from shardwright.config import load_recipe
from shardwright.data.tokens.tokenizer import CharacterTokenizer
from shardwright.errors import CheckFailed, CheckpointError, ExitCode
from shardwright.inference.adapter_export import check_merged_logits, merge_adapters
from shardwright.inference.model_source import find_checkpoint, load_decoder, open_model_source
from shardwright.launch.rank_environment import RankEnvironment
from shardwright.launch.stop_signals import StopRequest
from shardwright.model.hf.hf_folder import write_hf_folder
from shardwright.model.weight_init import initialise_parameter
from shardwright.telemetry.event_log import read_events, select_surviving_steps
from shardwright.training.rank_run import train_rank
from shardwright.training.run import train
from tests.multiprocess.pool import RankPool
from tests.multiprocess.test_checkpoint_resume import train_some

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 14,
    "hidden_size": 24,
    "moe_intermediate_size": 20,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
CHAIN = [(2, "dp_shard=2,ep=2,zero_stage=3"), (2, "tp=2"), (1, "dp_replicate=1"), (2, "pp=2")]
STEPS = 2 * len(CHAIN)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    (folder / "corpus.txt").write_text(
        "".join(f"{a} + {b} = {a + b}\n" for a in range(40) for b in range(20))
    )
    shape = read_config(CONFIG)
    specs = {spec.name: spec for spec in shape.list_parameters()}
    write_hf_folder(
        folder / "base",
        shape,
        lambda name: initialise_parameter(specs[name], 0, dtype=torch.float32),
        dtype=torch.float32,
        tokenizer=CharacterTokenizer("\n +0123456789="),
    )
    document: dict[str, Any] = {
        "model": {"path": str(folder / "base")},
        "tokenizer": {"kind": "character"},
        "data": {"sources": str(folder / "corpus.txt"), "cache_dir": str(folder / "cache")},
        "adapters": {"rank": 3},
        "precision": "fp32",
        "training": {
            "sequence_length": 16,
            "global_batch_size": 8,
            "gradient_accumulation_steps": 2,
            "max_steps": STEPS,
        }
        | {"learning_rate": 1e-2},
        "run": {"device": "cpu", "replica_check_every_steps": 1},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.fixture(scope="module")
def run(ranks: RankPool, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Finish a run with two steps under each layout of the chain."""
    path = tmp_path_factory.mktemp("adapted") / "run"
    for number, (num_ranks, layout) in enumerate(CHAIN):
        ranks.run(num_ranks, train_some, str(recipe), str(path), layout, 2, number > 0)
    return path


def test_every_layout_continues_with_the_adapters_of_another(
    ranks: RankPool, recipe: Path, run: Path, tmp_path: Path
) -> None:
    ranks.run(
        1, train_some, str(recipe), str(tmp_path / "whole"), "dp_replicate=1", STEPS + 1, False
    )
    ours = select_surviving_steps(read_events(run))
    whole = select_surviving_steps(read_events(tmp_path / "whole"))
    assert len(ours) == STEPS
    assert ours[-1].loss < ours[0].loss - 0.05
    for step, other in zip(ours, whole, strict=True):
        assert step.loss == pytest.approx(other.loss, rel=2e-5), step.step
        assert step.gradient_norm == pytest.approx(other.gradient_norm, rel=2e-4), step.step


def test_checkpoints_contain_adapters_and_their_moments_only(run: Path) -> None:
    source = open_model_source(run)
    parts = {spec.name for spec in source.shape.list_parameters() if spec.adapter_part is not None}
    stored = find_checkpoint(run / "checkpoints", LATEST_NAME).manifest.tensors
    assert {name.removeprefix("model.") for name in stored if name.startswith("model.")} == parts
    moments = {
        name.removeprefix("optimizer.").rpartition(".")[0]
        for name in stored
        if name.startswith("optimizer.")
    }
    assert moments == parts


def test_peft_and_transformers_load_the_export(
    run: Path, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft")
    assert (
        shardwright(["export", str(run), "--out", str(tmp_path / "adapters"), "--json"])
        == ExitCode.DONE
    )
    summary = json.loads(capsys.readouterr().out)
    assert (summary["dtype"], summary["checked_with"], summary["checked"]) == ("fp32", "peft", True)
    assert sorted(path.name for path in (tmp_path / "adapters").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    modes = {path.stat().st_mode for path in (tmp_path / "adapters").iterdir()}
    assert len(modes) == 1, "one file is readable by fewer users than the other"
    words = ["export", str(run), "--merge", "--dtype", "fp32", "--out", str(tmp_path / "merged")]
    assert shardwright(words) == ExitCode.DONE
    texts = []
    for source in (run, tmp_path / "merged"):
        assert (
            shardwright(
                ["generate", str(source), "--prompt", "1 + 2 =", "--max-new-tokens", "6", "--json"]
            )
            == ExitCode.DONE
        )
        texts.append(json.loads(capsys.readouterr().out.strip().splitlines()[-1])["text"])
    assert texts[0] == texts[1]
    # A run that starts from the export continues where this one ended.
    words = [
        "adapters={path: " + str(tmp_path / "adapters") + "}",
        "training.max_steps=1",
        f"run.dir={tmp_path / 'next'}",
    ]
    train(load_recipe(recipe, words))
    (first,) = select_surviving_steps(read_events(tmp_path / "next"))
    first_of_base = select_surviving_steps(read_events(run))[0]
    assert first.loss < first_of_base.loss - 0.02  # the same batch


def test_a_wrong_merge_is_refused(run: Path) -> None:
    source = open_model_source(run)
    assert check_merged_logits(source, merge_adapters(source)) < 1e-5
    unmerged = patch(
        "shardwright.inference.adapter_export.merge_adapter",
        lambda weight, *_arguments, **_named: weight,
    )
    with unmerged, pytest.raises(CheckFailed, match="unmerged"):
        check_merged_logits(source, merge_adapters(source))
    assert source.shape.adapters is not None
    half_merged = replace(
        source, shape=replace(source.shape, adapters=replace(source.shape.adapters, alpha=3.0))
    )
    with pytest.raises(CheckFailed, match="unmerged"):
        check_merged_logits(source, merge_adapters(half_merged))


def train_dora_in_bf16(recipe: str, folder: str, layout: str) -> None:
    """Train two steps of DoRA in bf16 on these ranks and keep their process group."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    changes = [
        f"run.dir={folder}",
        "precision=bf16",
        "training.max_steps=2",
        "adapters={kind: dora, rank: 3, exclude: [experts.*]}",
    ]
    with patch.object(dist, "destroy_process_group"):
        train_rank(
            load_recipe(Path(recipe), changes, layout),
            RankEnvironment(rank, world_size, rank),
            StopRequest(),
        )


@pytest.mark.long
@pytest.mark.parametrize(
    "layout", ["dp_shard=2,zero_stage=3", "dp_shard=2,zero_stage=1", "tp=2", "dp_replicate=2"]
)
def test_bf16_runs_of_several_ranks_match_one_process(
    ranks: RankPool, recipe: Path, tmp_path: Path, layout: str
) -> None:
    ranks.run(1, train_dora_in_bf16, str(recipe), str(tmp_path / "one"), "dp_replicate=1")
    ranks.run(2, train_dora_in_bf16, str(recipe), str(tmp_path / "two"), layout)
    one, two = (select_surviving_steps(read_events(tmp_path / name)) for name in ("one", "two"))
    assert len(two) == 2
    for step, other in zip(two, one, strict=True):
        assert step.loss == pytest.approx(other.loss, rel=5e-3), step.step


def test_a_base_that_was_moved_is_an_error_with_a_remedy(run: Path, recipe: Path) -> None:
    base = recipe.parent / "base"
    moved = base.rename(base.with_name("moved"))
    try:
        with pytest.raises(
            CheckpointError, match=r"base model.*correct model\.path in recipe\.yaml"
        ):
            open_model_source(run)
    finally:
        moved.rename(base)


def test_another_base_is_refused(run: Path, recipe: Path) -> None:
    base = recipe.parent / "base"
    original = (base / "model.safetensors").read_bytes()
    try:
        (base / "model.safetensors").write_bytes(original[:-4] + b"\x00\x00\x00\x3f")
        with pytest.raises(CheckpointError, match="base weights differ"):
            open_model_source(run)
    finally:
        (base / "model.safetensors").write_bytes(original)
    assert (
        load_decoder(open_model_source(run), device=torch.device("cpu"), dtype=torch.float32)
        is not None
    )
