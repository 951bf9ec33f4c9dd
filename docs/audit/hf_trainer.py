"""Hugging Face Trainer with DDP, accumulation and unequal rows, recorded in its second step.

torchrun --nproc-per-node 2 docs/audit/hf_trainer.py
shardwright audit check audit
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

from shardwright.audit import Recorder

IGNORED = -100


def build_rows(num_rows: int) -> list[dict[str, Any]]:
    """Build rows whose prompts have different lengths."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for index in range(num_rows):
        ids = torch.randint(0, 50, (12,), generator=generator)
        labels = ids.clone()
        labels[: 1 + (5 * index) % 9] = IGNORED
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def train(folder: Path | str, **options: Any) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    with tempfile.TemporaryDirectory() as output:
        arguments = TrainingArguments(
            output_dir=output,
            use_cpu=True,
            ddp_backend="gloo",
            per_device_train_batch_size=2,
            gradient_accumulation_steps=4,
            max_steps=3,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **options,
        )
        trainer = Trainer(
            model=AutoModelForCausalLM.from_config(config),
            args=arguments,
            train_dataset=build_rows(64),
        )
        trainer.add_callback(Recorder(folder, steps=[2]).build_callback())
        trainer.train()


if __name__ == "__main__":
    train("audit")
