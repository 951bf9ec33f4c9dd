"""Axolotl with DDP, accumulation and rows of unequal lengths, recorded in its second step.

    torchrun --nproc-per-node 2 docs/audit/axolotl_trainer.py
    shardwright audit check audit

In a training run of your own the plugin is all that is needed, in a file that Python finds:
`plugins: [my_file.RecorderPlugin]`. The rest of this script makes a small model, its tokenizer and
rows, and lets Axolotl load the model on a CPU.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

os.environ |= {  # before Axolotl is imported
    "HF_HUB_OFFLINE": "1",
    "AXOLOTL_DO_NOT_TRACK": "1",
    "ACCELERATE_USE_CPU": "true",  # without it Accelerate does not connect ranks without GPUs
}

from axolotl.cli.args import TrainerCliArgs
from axolotl.cli.config import load_cfg
from axolotl.common.datasets import load_datasets
from axolotl.integrations.base import BasePlugin
from axolotl.train import train as train_with_axolotl

from shardwright.audit import Recorder

NUM_WORDS = 48
RECIPE: dict[str, Any] = {
    "sequence_len": 24,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "max_steps": 3,
    "learning_rate": 1e-3,
    "optimizer": "adamw_torch",
    "lr_scheduler": "constant",
    "bf16": False,
    "fp16": False,
    "tf32": False,
    "attn_implementation": "eager",
    "logging_steps": 1,
    "save_strategy": "no",
    "val_set_size": 0,
    "dataset_num_proc": 1,
    "dataloader_num_workers": 0,
    "special_tokens": {"pad_token": "<pad>", "eos_token": "<eos>"},
    "plugins": ["axolotl_trainer.RecorderPlugin"],
}


class RecorderPlugin(BasePlugin):
    """Record the second step of Axolotl's trainer in the folder `audit`."""

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        return [Recorder("audit", steps=[2]).build_callback()]


def write_model(folder: Path) -> None:
    torch.manual_seed(0)
    vocabulary = {"<pad>": 0, "<eos>": 1} | {f"w{n}": n + 2 for n in range(NUM_WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=NUM_WORDS + 2,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        eos_token_id=1,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def write_rows(path: Path, num_rows: int = 128) -> None:
    """Write rows of 6 to 15 words."""
    generator = torch.Generator().manual_seed(0)
    with path.open("w", encoding="utf-8") as file:
        for index in range(num_rows):
            length = 6 + (7 * index) % 10
            words = torch.randint(0, NUM_WORDS, (length,), generator=generator).tolist()
            file.write(json.dumps({"text": " ".join(f"w{n}" for n in words)}) + "\n")


def train() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model")
        write_rows(folder / "rows.jsonl")
        paths = {
            "base_model": str(folder / "model"),
            "datasets": [
                {"path": str(folder / "rows.jsonl"), "ds_type": "json", "type": "completion"}
            ],
            "dataset_prepared_path": str(folder / "prepared"),
            "output_dir": str(folder / "out"),
        }
        recipe = folder / "recipe.yml"
        recipe.write_text(json.dumps(RECIPE | paths), encoding="utf-8")
        cfg = load_cfg(str(recipe))
        cfg.device_map = "cpu"  # Axolotl's own choice for DDP is the accelerator of the local rank
        train_with_axolotl(cfg=cfg, dataset_meta=load_datasets(cfg=cfg, cli_args=TrainerCliArgs()))


if __name__ == "__main__":
    train()
