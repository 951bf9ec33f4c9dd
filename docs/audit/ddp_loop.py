"""Hand-written DDP loop with accumulation and unequal rows, recorded in its second step.

    torchrun --nproc-per-node 2 docs/audit/ddp_loop.py
    shardwright audit check audit

With `--mean-of-means` every micro-batch divides by its own tokens, a common mistake; the audit
names it.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, LlamaConfig

from shardwright.audit import Recorder

NUM_BATCHES = 4
IGNORED = -100


def build_model() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=18,
        intermediate_size=22,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=6,
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


def compute_loss_sum(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Sum the loss of a micro-batch's supervised tokens."""
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    targets = batch["labels"][:, 1:]
    return F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def count_targets(batch: dict[str, Tensor]) -> int:
    return int((batch["labels"][:, 1:] != IGNORED).sum())


def train(folder: Path | str, has_mistake: bool = False) -> None:
    ranks = dist.get_world_size()
    model = DistributedDataParallel(build_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    recorder = Recorder(folder, steps=[2])
    for step in range(1, 4):
        batches = read_batches(step, dist.get_rank())
        total = torch.tensor(float(sum(map(count_targets, batches))))
        dist.all_reduce(total)
        loss_sum = torch.zeros(())
        with recorder.record_step(model, batches, optimizer):
            for index, batch in enumerate(batches):
                is_last = index == NUM_BATCHES - 1
                with contextlib.nullcontext() if is_last else model.no_sync():
                    loss = compute_loss_sum(model, batch)
                    loss_sum += loss.detach()
                    # DDP averages over ranks, so the sum is divided by tokens per rank.
                    divisor = total / ranks
                    if has_mistake:
                        divisor = torch.tensor(float(count_targets(batch) * NUM_BATCHES))
                    (loss / divisor).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(loss_sum)
            recorder.report(loss=loss_sum / total)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train("audit", "--mean-of-means" in sys.argv)
    dist.destroy_process_group()
