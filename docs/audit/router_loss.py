"""Sparse model with its router's auxiliary loss, recorded in its second step.

    torchrun --nproc-per-node 2 docs/audit/router_loss.py transformers
    shardwright audit check audit

The word is `transformers` (Trainer) or `trl` (SFTTrainer); both with DDP and accumulation.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from shardwright.audit import Recorder

IGNORED = -100
COEFFICIENT = 0.1


def build_rows(num_rows: int) -> list[dict[str, list[int]]]:
    """Build rows whose prompts have different lengths."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for index in range(num_rows):
        ids = torch.randint(0, 50, (12,), generator=generator).tolist()
        prompt = 1 + (5 * index) % 9
        rows.append({"input_ids": ids, "labels": [IGNORED] * prompt + ids[prompt:]})
    return rows


def build_model() -> Any:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.2,
        output_router_logits=True,
        router_aux_loss_coef=COEFFICIENT,
    )
    return AutoModelForCausalLM.from_config(config)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer that TRL's trainer needs for padding; the rows are ids already."""
    vocabulary = {f"w{number}": number for number in range(50)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w1")


def build_trainer(library: str, arguments: dict[str, Any]) -> Any:
    """Build the trainer of a library with its defaults for sparse models."""
    if library == "transformers":
        return Trainer(
            model=build_model(), args=TrainingArguments(**arguments), train_dataset=build_rows(64)
        )
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    settings = SFTConfig(router_aux_loss_coef=COEFFICIENT, bf16=False, **arguments)
    return SFTTrainer(
        model=build_model(),
        args=settings,
        train_dataset=Dataset.from_list(build_rows(64)),
        processing_class=build_tokenizer(),
    )


def train(folder: Path | str, library: str = "transformers", **options: Any) -> None:
    with tempfile.TemporaryDirectory() as output:
        arguments = {
            "output_dir": output,
            "use_cpu": True,
            "ddp_backend": "gloo",
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 4,
            "max_steps": 3,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
        }
        trainer = build_trainer(library, arguments | options)
        trainer.add_callback(Recorder(folder, steps=[2]).build_callback())
        trainer.train()


if __name__ == "__main__":
    train("audit", sys.argv[1] if len(sys.argv) > 1 else "transformers")
    dist.destroy_process_group()
