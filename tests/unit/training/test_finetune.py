"""Fine-tuning of bf16 weights: fp32 master weights, frozen parameters, pruned weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.architecture import read_config
from shardwright.checkpoint.commit import LATEST_NAME
from shardwright.config import Recipe
from shardwright.data.tokens.tokenizer import CharacterTokenizer
from shardwright.inference.model_source import find_checkpoint, open_model_source
from shardwright.model.hf.hf_folder import write_hf_folder
from shardwright.model.weight_init import initialise_parameter
from shardwright.telemetry.event_log import RunStartedEvent, WarningEvent, read_events
from shardwright.training.run import train
from tests.unit.training.finished import ALPHABET, CONFIG

FROZEN = ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight")
PRUNED = "model.layers.0.mlp.down_proj.weight"


def fine_tune(folder: Path, corpus: str = ALPHABET, **model: Any) -> tuple[dict[str, Tensor], Path]:
    """Fine-tune a base in bf16; return its weights and the folder of the run."""
    tokenizer = CharacterTokenizer("".join(sorted(set(ALPHABET))))
    shape = read_config(CONFIG | {"vocab_size": tokenizer.vocab_size})
    specs = {spec.name: spec for spec in shape.list_parameters()}
    base = {
        name: initialise_parameter(spec, 1, dtype=torch.bfloat16) for name, spec in specs.items()
    }
    base[PRUNED].view(-1)[::2] = 0.0
    write_hf_folder(
        folder / "base", shape, lambda name: base[name], dtype=torch.bfloat16, tokenizer=tokenizer
    )
    (folder / "corpus.txt").write_text(corpus * 20)
    recipe = Recipe.model_validate(
        {
            "model": {"path": str(folder / "base")} | model,
            "tokenizer": {"kind": "character"},
            "data": {"sources": str(folder / "corpus.txt"), "cache_dir": str(folder / "cache")},
            "training": {
                "sequence_length": 8,
                "micro_batch_size": 2,
                "max_steps": 2,
                "learning_rate": 1e-7,
            },
            "precision": "bf16",
            "run": {"dir": str(folder / "run"), "device": "cpu"},
        }
    )
    train(recipe)
    return base, folder / "run"


def test_updates_too_small_for_bf16_are_stored_in_fp32(tmp_path: Path) -> None:
    base, run = fine_tune(tmp_path, freeze=FROZEN, keep_zeros=True)
    checkpoint = find_checkpoint(run / "checkpoints", LATEST_NAME)  # type: ignore[arg-type]
    stored = checkpoint.manifest.tensors
    assert {entry.dtype for entry in stored.values()} == {"F32"}
    source = open_model_source(run)
    trained = {name: source.read(name) for name in base}
    for name, weights in trained.items():
        has_changed = weights != base[name].float()
        if name in FROZEN:
            assert not has_changed.any()
        elif weights.ndim == 2:
            assert has_changed.double().mean() > 0.4, name  # half of the pruned matrix stays zero
            assert (weights.bfloat16() == base[name]).double().mean() > 0.9, name
    assert bool((trained[PRUNED].view(-1)[::2] == 0.0).all())
    assert not any(name.startswith(f"optimizer.{frozen}") for name in stored for frozen in FROZEN)
    (start,) = read_events(run).filter_by_type(RunStartedEvent)
    shape = source.shape
    assert start.flops_per_token == shape.count_flops_per_token(8, FROZEN)
    assert start.flops_per_token < shape.count_flops_per_token(8)


def test_weights_that_were_trained_with_another_tokenizer_are_reported(tmp_path: Path) -> None:
    """The tokenizer of characters is built from the corpus, so without one every id changes."""
    for name, corpus in (("same", ALPHABET), ("other", "".join(sorted(set(ALPHABET)))[1:])):
        _, run = fine_tune(tmp_path / name, corpus)
        warnings = [event.message for event in read_events(run).filter_by_type(WarningEvent)]
        num_ids = len(set(ALPHABET))
        text = (
            f"{num_ids} of the {num_ids} ids of the tokenizer in {tmp_path / name / 'base'} stand"
        )
        assert sum(text in warning for warning in warnings) == (name == "other")
