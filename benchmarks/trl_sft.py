"""The same fine-tuning by TRL's SFTTrainer and by shardwright: supervised tokens, first losses, and tokens/s side by side.

    python -m benchmarks.trl_sft --model MODEL --text tinyshakespeare.txt        TRL: pip install trl datasets (only for this)

A file of prompts and completions is made of the text's lines, each completed by the next. Both sides read that file, with their own
code from text to gradients: TRL's tokenisation, mask and loss are its own. Rows come in the file's order on both sides, because TRL
shuffles otherwise; the settings are alike (float32, AdamW, constant rate, no decay, the same clip). Times are told for the steps
after the first two, and mean something on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from shardwright.config.load import validate_recipe
from shardwright.data.loader import collate
from shardwright.train.preflight import check
from shardwright.train.setup import build_state
from shardwright.train.step import accumulate_gradients, update

TOLERANCE = 1e-4
BATCH, RATE, CLIP, LENGTH = 8, 1e-3, 1.0, 128


def main() -> None:
    """Train both, print both; an error where tokens or losses differ."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trl_sft", description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder with a tokenizer")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        path = write_pairs(options.text, Path(name) / "pairs.jsonl", options.steps * BATCH)
        sides = {
            "shardwright": with_shardwright(options.model, path, options.steps),
            "TRL": with_trl(options.model, path, options.steps, Path(name)),
        }
    print(f"{'':12} {'supervised tokens of each step':60} {'tokens/s':>9}")
    for side, (tokens, _, seconds) in sides.items():
        speed = BATCH * LENGTH / median(seconds[2:]) if len(seconds) > 2 else float("nan")
        print(f"{side:12} {tokens!s:60} {speed:9.0f}")
    (tokens, losses, _), (their_tokens, their_losses, _) = sides.values()
    worst = max(abs(a - b) for a, b in zip(losses, their_losses, strict=True))
    print(f"largest difference of {len(losses)} losses, from {losses[0]:.4f} to {losses[-1]:.4f}: {worst:.1e}")
    if tokens != their_tokens or worst > TOLERANCE:
        raise SystemExit("the two sides differ")


def write_pairs(text: Path, path: Path, num_rows: int) -> Path:
    """Lines of the text, each with the next as its completion."""
    lines = [line.strip() for line in text.read_text(encoding="utf-8").splitlines() if len(line.strip()) > 10]
    rows = [{"prompt": a[:60], "completion": f" {b[:60]}"} for a, b in pairwise(lines)][:num_rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


Told = tuple[list[int], list[float], list[float]]
"""Supervised tokens, loss and seconds of every step."""


def with_shardwright(model: Path, path: Path, steps: int) -> Told:
    """Our side, rows in the file's order."""
    training = {
        "sequence_length": LENGTH,
        "global_batch_size": BATCH,
        "max_steps": steps,
        "learning_rate": RATE,
        "schedule": "constant",
    }
    recipe = {
        "model": {"path": str(model)},
        "data": {"sources": str(path), "packing": "none", "overlong": "refuse", "cache_dir": str(path.parent / "cache")},
        "training": training | {"max_grad_norm": CLIP},
        "optimizer": {"beta2": 0.999},
    }
    checked = check(validate_recipe(recipe), 1)
    state = build_state(checked, torch.device("cpu"))
    tokens, losses, seconds = [], [], []
    for step in range(steps):
        began = time.perf_counter()
        rows = range(step * BATCH, (step + 1) * BATCH)
        batch = collate([checked.data.train.sample(row) for row in rows], rows)
        loss = accumulate_gradients(state.model, [batch], seed=0, step=step)
        update(state.model, state.optimizer, learning_rate=RATE, max_grad_norm=CLIP)
        tokens.append(batch.num_supervised)
        losses.append(loss.mean())
        seconds.append(time.perf_counter() - began)
    return tokens, losses, seconds


def with_trl(model: Path, path: Path, steps: int, folder: Path) -> Told:
    """TRL's side. Its trainer is told to take rows in order and to say what it supervises; all else is its own."""
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    tokens: list[int] = []
    marks: list[float] = []

    class InOrder(SFTTrainer):  # type: ignore[misc, unused-ignore]
        def _get_train_sampler(self, *_arguments: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

        def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
            tokens.append(int((inputs["labels"][:, 1:] != -100).sum()))
            return super().compute_loss(model, inputs, *arguments, **named)

    class Clock(TrainerCallback):
        def on_step_begin(self, *_arguments: Any, **_named: Any) -> None:
            marks.append(time.perf_counter())

        def on_step_end(self, *_arguments: Any, **_named: Any) -> None:
            marks[-1] = time.perf_counter() - marks[-1]

    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    settings = SFTConfig(
        output_dir=str(folder / "trl"), per_device_train_batch_size=BATCH, max_steps=steps, learning_rate=RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0, max_grad_norm=CLIP, logging_steps=1, max_length=LENGTH, packing=False, use_cpu=True, bf16=False,
        report_to="none", save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = InOrder(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[Clock()],
    )
    trainer.train()
    return tokens, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], marks


if __name__ == "__main__":
    main()
