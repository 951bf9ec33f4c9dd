"""Hand-written FSDP2 loop, recorded in its first step.

    torchrun --nproc-per-node 2 docs/audit/fsdp2_loop.py
    shardwright audit check audit

With `--own-tokens` every rank divides by its own tokens; the audit names this mistake.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig

from shardwright.audit import Recorder

IGNORED = -100


def build_model() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=51,
        hidden_size=18,
        intermediate_size=23,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=6,
        initializer_range=0.2,
        use_cache=False,
    )
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(folder: Path | str, has_mistake: bool = False) -> None:
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    recorder = Recorder(folder, steps=[1])
    for step in range(1, 3):
        generator = torch.Generator().manual_seed(10 * step + rank)
        ids = torch.randint(0, 51, (2, 12), generator=generator)
        labels = ids.clone()
        labels[:, : 1 + 4 * rank] = IGNORED
        targets = labels[:, 1:]
        own = (targets != IGNORED).sum().float()
        total = own.clone()
        dist.all_reduce(total)
        with recorder.record_step(model, {"labels": labels}, optimizer):
            logits = model(input_ids=ids).logits[:, :-1]
            loss_sum = F.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
            )
            # FSDP averages over ranks, so the sum is divided by tokens per rank.
            (loss_sum / (own if has_mistake else total / ranks)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train("audit", "--own-tokens" in sys.argv)
    dist.destroy_process_group()
