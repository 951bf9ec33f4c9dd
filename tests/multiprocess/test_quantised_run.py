"""A run with a 4-bit base, Muon, label smoothing and noisy embeddings: resumed under other
layouts, and merged.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from shardwright.architecture import read_config
from shardwright.data.tokens.tokenizer import CharacterTokenizer
from shardwright.inference.adapter_export import check_merged_logits, merge_adapters
from shardwright.inference.model_source import open_model_source
from shardwright.model.hf.hf_folder import write_hf_folder
from shardwright.model.weight_init import initialise_parameter
from shardwright.telemetry.event_log import read_events, select_surviving_steps
from tests.multiprocess.pool import RankPool
from tests.multiprocess.test_checkpoint_resume import train_some

CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 14, "hidden_size": 24, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip
CHAIN = [(2, "dp_shard=2,zero_stage=3"), (2, "tp=2"), (1, "dp_replicate=1")]


@pytest.mark.long
def test_a_quantised_base_is_the_same_for_every_layout_and_for_the_merge(
    ranks: RankPool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "corpus.txt").write_text(
        "".join(f"{a} + {b} = {a + b}\n" for a in range(40) for b in range(20))
    )
    specs = {spec.name: spec for spec in read_config(CONFIG).list_parameters()}
    write_hf_folder(
        tmp_path / "base",
        read_config(CONFIG),
        lambda name: initialise_parameter(specs[name], 0, dtype=torch.float32),
        dtype=torch.bfloat16,
        tokenizer=CharacterTokenizer("\n +0123456789="),
    )
    recipe = tmp_path / "recipe.yaml"
    training = {
        "sequence_length": 16,
        "global_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "max_steps": 6,
    }
    document: dict[str, Any] = {
        "model": {"path": str(tmp_path / "base")},
        "tokenizer": {"kind": "character"},
        "data": {"sources": str(tmp_path / "corpus.txt"), "cache_dir": str(tmp_path / "cache")},
        "adapters": {"rank": 3, "quantize": "nf4"},
        "optimizer": {"name": "muon"},
        "precision": "fp64",
        "training": training
        | {"learning_rate": 1e-2, "label_smoothing": 0.1, "neftune_noise_alpha": 5},
        "run": {"device": "cpu"},
    }
    recipe.write_text(yaml.safe_dump(document))
    for number, (num_ranks, layout) in enumerate(CHAIN):
        ranks.run(num_ranks, train_some, str(recipe), str(tmp_path / "run"), layout, 2, number > 0)
    train_some(str(recipe), str(tmp_path / "whole"), "dp_replicate=1", 7, False)
    ours = select_surviving_steps(read_events(tmp_path / "run"))
    whole = select_surviving_steps(read_events(tmp_path / "whole"))
    assert len(ours) == 6
    assert ours[-1].loss < ours[0].loss - 0.01
    for step, other in zip(ours, whole, strict=True):
        assert step.loss == pytest.approx(other.loss, rel=1e-9), step.step
        assert step.gradient_norm == pytest.approx(other.gradient_norm, rel=1e-8), step.step
    source = open_model_source(tmp_path / "run")
    with caplog.at_level(logging.INFO, logger="shardwright"):
        assert check_merged_logits(source, merge_adapters(source)) < 1e-5
    assert "trained in 4 bits: its dequantised values are merged" in caplog.text
