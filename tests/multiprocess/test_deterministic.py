"""Deterministic algorithms over several ranks: the first step of a process has no bits of its
own."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from shardwright.config.training import PrecisionSection
from shardwright.layout import Layout
from shardwright.numerics.determinism import use_deterministic_algorithms
from shardwright.training.step import accumulate_gradients
from tests.multiprocess.pool import RankPool
from tests.multiprocess.test_layouts import build, micro_batches

RANKS = 4
LAYOUT = Layout(dp_replicate=RANKS, bucket_size_bytes=2048)


def repeat_step() -> tuple[bool, list[list[Tensor]]]:
    """Return whether DDP is used, and the gradients of one step computed three times."""
    with use_deterministic_algorithms(is_cuda=False):
        model = build(LAYOUT, PrecisionSection(kind="fp32"))
        gradients = []
        for _ in range(3):
            model.decoder.zero_grad()
            accumulate_gradients(model, micro_batches(dist.get_rank()), seed=0, step=0)
            gradients.append(
                [p.grad.clone() for _, p in model.named_parameters() if p.grad is not None]
            )
    return isinstance(model.module, DistributedDataParallel), gradients


def is_equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_gradients_of_replicas_have_the_same_bits_in_every_step(ranks: RankPool) -> None:
    for uses_ddp, (first, second, third) in ranks.run(RANKS, repeat_step):
        assert not uses_ddp
        assert is_equal(first, second)
        assert is_equal(second, third)
