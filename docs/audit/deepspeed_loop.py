"""Loop with DeepSpeed's engine, accumulation and unequal rows, recorded in its second step.

    torchrun --nproc-per-node 2 docs/audit/deepspeed_loop.py 3
    shardwright audit check audit

The number is the ZeRO stage. Every micro-batch's loss is the model's own mean; with
`--count-tokens` the sums are divided by the tokens of the global batch.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
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


def compute_loss(engine: Any, batch: dict[str, Tensor], total: Tensor | None) -> Tensor:
    """Return the model's own loss, or the sum divided by the tokens of the global batch."""
    if total is None:
        loss: Tensor = engine(**batch).loss
        return loss
    logits = engine(input_ids=batch["input_ids"]).logits[:, :-1]
    loss_sum = F.cross_entropy(
        logits.flatten(0, 1),
        batch["labels"][:, 1:].flatten(),
        ignore_index=IGNORED,
        reduction="sum",
    )
    # The engine divides by the accumulation and averages over ranks.
    return loss_sum * NUM_BATCHES * dist.get_world_size() / total


def train(folder: Path | str, stage: int = 3, counts_tokens: bool = False) -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": NUM_BATCHES,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if engine.zero_optimization_stage() != stage:
        raise RuntimeError(f"DeepSpeed runs ZeRO {engine.zero_optimization_stage()}, not {stage}")
    recorder = Recorder(folder, steps=[2])
    for step in range(1, 4):
        batches = read_batches(step, dist.get_rank())
        total = torch.tensor(float(sum((b["labels"][:, 1:] != IGNORED).sum() for b in batches)))
        dist.all_reduce(total)
        with recorder.record_step(engine, batches, optimizer):
            for batch in batches:
                engine.backward(compute_loss(engine, batch, total if counts_tokens else None))
                engine.step()
            recorder.report(gradient_norm=engine.get_global_grad_norm(), max_grad_norm=1.0)


if __name__ == "__main__":
    stage = next((int(argument) for argument in sys.argv[1:] if argument.isdigit()), 3)
    train("audit", stage, "--count-tokens" in sys.argv)
    dist.destroy_process_group()
