"""Hugging Face Trainer with DeepSpeed, accumulation and unequal rows, recorded in its second step.

    torchrun --nproc-per-node 2 docs/audit/hf_trainer_deepspeed.py 2
    shardwright audit check audit

The number is the ZeRO stage. DeepSpeed's engine updates inside the backward pass, and callbacks do
not get it, so the recorder's callback gets the trainer.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
import torch.distributed as dist
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


def train(folder: Path | str, stage: int = 2, **options: Any) -> None:
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
            deepspeed={
                "train_micro_batch_size_per_gpu": "auto",
                "gradient_accumulation_steps": "auto",
                "gradient_clipping": "auto",
                "zero_optimization": {"stage": stage},
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
            },
            **options,
        )
        trainer = Trainer(
            model=AutoModelForCausalLM.from_config(config),
            args=arguments,
            train_dataset=build_rows(64),
        )
        trainer.add_callback(Recorder(folder, steps=[2]).build_callback(trainer))
        trainer.train()
        found = trainer.accelerator.deepspeed_engine_wrapped.engine.zero_optimization_stage()
        if found != stage:
            raise RuntimeError(f"DeepSpeed runs ZeRO {found}, not {stage}")


if __name__ == "__main__":
    train("audit", int(sys.argv[1]) if len(sys.argv) > 1 else 2)
    dist.destroy_process_group()
