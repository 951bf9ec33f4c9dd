"""One process with FSDP2's mixed precision computes the same bits as the plain decoder with fp32
weights.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from shardwright.architecture import read_config
from shardwright.model import Decoder, DropoutKey
from tests.reference.cases import CASES


@pytest.fixture
def single_process_group() -> Iterator[None]:
    """Initialise a process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def build(case: str) -> Decoder:
    decoder = Decoder(read_config(CASES[case]), compute_dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return decoder


@pytest.mark.parametrize(
    "case", ["llama-one-kv-head-tied", "gemma3_text-older", "phi3-longrope-long", "gpt2"]
)
def test_loss_is_bit_equal_in_bf16(case: str, single_process_group: None) -> None:
    """FSDP must not round the rotation tables to bf16, as it does with inputs of blocks."""
    plain = build(case)
    sharded = build(case)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in sharded.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(sharded, mp_policy=policy)
    ids_BT = torch.randint(0, 97, (2, 30), generator=torch.Generator().manual_seed(1))
    key = DropoutKey(0, 1, torch.tensor([3, 4]))
    sharded_loss = sharded(ids_BT, labels_BT=ids_BT, dropout=key)
    plain_loss = plain(ids_BT, labels_BT=ids_BT, dropout=key)
    assert torch.equal(sharded_loss, plain_loss)
    sharded_loss.backward()
    plain_loss.backward()
    for (name, parameter), reference in zip(
        sharded.named_parameters(), plain.parameters(), strict=True
    ):
        assert parameter.grad is not None
        assert reference.grad is not None
        gradient = parameter.grad.full_tensor()  # type: ignore[attr-defined]
        # An embedding's gradient is a sum over tokens, in the precision in which FSDP gathers the
        # table.
        assert (gradient - reference.grad).norm() <= 4e-3 * reference.grad.norm(), name
