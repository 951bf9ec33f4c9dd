"""Lightning's Trainer with DDP, accumulation and unequal rows, recorded in its second step.

    torchrun --nproc-per-node 2 docs/audit/lightning_trainer.py
    shardwright audit check audit

`training_step` returns the model's own loss, the mean of a micro-batch's supervised tokens.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

from shardwright.audit import Recorder

NUM_BATCHES = 4
IGNORED = -100


def build_model() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        use_cache=False,
    )
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def build_rows(num_rows: int) -> list[dict[str, Tensor]]:
    """Build rows whose prompts have different lengths."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for index in range(num_rows):
        ids = torch.randint(0, 50, (12,), generator=generator)
        labels = ids.clone()
        labels[: 1 + (5 * index) % 9] = IGNORED
        rows.append({"input_ids": ids, "labels": labels})
    return rows


class RecordedModule(lightning.LightningModule):
    """Language model; the recorder is called at the borders of an optimizer step."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.model = build_model()
        self.recorder = recorder

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % NUM_BATCHES == 0:
            self.recorder.before_step(self.model)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % NUM_BATCHES == NUM_BATCHES - 1:
            self.recorder.after_step(self.model)


def train(folder: Path | str, **options: Any) -> None:
    with tempfile.TemporaryDirectory() as output:
        trainer = lightning.Trainer(
            default_root_dir=output,
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            accumulate_grad_batches=NUM_BATCHES,
            gradient_clip_val=1.0,
            max_steps=3,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )
        rows: Any = build_rows(64)
        trainer.fit(RecordedModule(Recorder(folder, steps=[2])), DataLoader(rows, batch_size=2))


if __name__ == "__main__":
    train("audit")
    dist.destroy_process_group()
