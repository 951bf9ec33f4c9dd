"""Ignite's supervised trainer with DDP, accumulation and unequal rows, recorded in its second step.

    torchrun --nproc-per-node 2 docs/audit/ignite_trainer.py
    shardwright audit check audit

The loss is the model's own, the mean of a micro-batch's supervised tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events, create_supervised_trainer
from torch import Tensor, nn
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


def prepare_batch(batch: Any, **options: Any) -> tuple[Any, Any]:
    return batch, batch["labels"]


def train(_local_rank: int, folder: Path | str) -> None:
    model: Any = idist.auto_model(build_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    recorder = Recorder(folder, steps=[2])
    trainer = create_supervised_trainer(
        model,
        optimizer,
        loss_fn=lambda loss, labels: loss,
        prepare_batch=prepare_batch,
        model_fn=lambda model, batch: model(**batch),
        model_transform=lambda output: output.loss,
        gradient_accumulation_steps=NUM_BATCHES,
    )

    @trainer.on(Events.ITERATION_STARTED)
    def begin(engine: Engine) -> None:
        if engine.state.iteration % NUM_BATCHES == 1:
            recorder.before_step(model, optimizer=optimizer)

    @trainer.on(Events.ITERATION_COMPLETED(every=NUM_BATCHES))
    def end(engine: Engine) -> None:
        recorder.after_step(model)

    rows: Any = build_rows(64)
    trainer.run(idist.auto_dataloader(rows, batch_size=2 * idist.get_world_size()), max_epochs=1)


if __name__ == "__main__":
    with idist.Parallel(backend="gloo") as parallel:
        parallel.run(train, "audit")
