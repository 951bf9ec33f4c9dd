"""Hugging Face Trainer with a model that transformers shards, recorded in its second step.

    torchrun --nproc-per-node 2 docs/audit/hf_trainer_sharded.py
    shardwright audit check audit

transformers shards the model with FSDP2 when it loads it (`DistributedConfig`).
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

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


def build_model(folder: Path, distributed: DistributedConfig) -> Any:
    """Write a model on the first rank, and read every rank's shards of it."""
    torch.manual_seed(0)
    if dist.get_rank() == 0:
        config = LlamaConfig(
            vocab_size=50,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.2,
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    dist.barrier()
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, distributed_config=distributed
    )


def train(folder: Path | str, **options: Any) -> None:
    distributed = DistributedConfig(fsdp_size=dist.get_world_size())
    with tempfile.TemporaryDirectory() as output:
        names = [output]
        dist.broadcast_object_list(names)
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
            model=build_model(Path(names[0]), distributed),
            args=arguments,
            train_dataset=build_rows(64),
        )
        trainer.add_callback(Recorder(folder, steps=[2]).build_callback())
        trainer.train()
        dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train("audit")
    dist.destroy_process_group()
