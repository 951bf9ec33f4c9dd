"""Loop with Accelerate, accumulation and unequal rows, recorded in its second step.

    torchrun --nproc-per-node 2 docs/audit/accelerate_loop.py
    shardwright audit check audit

The loop is the short one, with the model's own loss in `accumulate`. With `--count-tokens` the
loss is divided by one count of supervised tokens for all micro-batches of all ranks.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
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


def read_batches(step: int, rank: int) -> list[dict[str, Tensor]]:
    """Read micro-batches; each has another number of supervised tokens."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    batches = []
    for index in range(NUM_BATCHES):
        ids = torch.randint(0, 50, (2, 12), generator=generator)
        labels = ids.clone()
        labels[:, : 1 + 2 * index + 3 * rank] = IGNORED
        batches.append({"input_ids": ids, "labels": labels})
    return batches


def run_short_loop(accelerator: Accelerator, model: Any, optimizer: Any, batches: Any) -> None:
    """Run one optimizer step with the model's own loss."""
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def run_counting_loop(accelerator: Accelerator, model: Any, optimizer: Any, batches: Any) -> None:
    """Run one optimizer step whose loss is divided by the tokens of the global batch."""
    own = sum((batch["labels"][:, 1:] != IGNORED).sum() for batch in batches)
    total = accelerator.gather(own).sum().item()
    for index, batch in enumerate(batches):
        is_last = index == len(batches) - 1
        with contextlib.nullcontext() if is_last else accelerator.no_sync(model):
            logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
            loss = F.cross_entropy(
                logits.flatten(0, 1),
                batch["labels"][:, 1:].flatten(),
                ignore_index=IGNORED,
                reduction="sum",
            )
            # `backward` divides by the accumulation, DDP by the ranks.
            scale = accelerator.gradient_accumulation_steps * accelerator.num_processes
            accelerator.backward(loss * scale / total)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def train(folder: Path | str, counts_tokens: bool = False) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=NUM_BATCHES)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    recorder = Recorder(folder, steps=[2])
    run = run_counting_loop if counts_tokens else run_short_loop
    for step in range(1, 4):
        batches = read_batches(step, accelerator.process_index)
        with recorder.record_step(model, batches, optimizer):
            run(accelerator, model, optimizer, batches)


if __name__ == "__main__":
    train("audit", "--count-tokens" in sys.argv)
    dist.destroy_process_group()
