"""Fake process groups of rehearsals."""

from __future__ import annotations

from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork

from shardwright.rehearsal.fake_contexts import use_fake_group


def test_a_message_is_not_complete_whatever_torch_says() -> None:
    """A pipeline frees the tensors of complete messages; torch 2.15's are complete at once."""
    with (
        patch.object(FakeWork, "is_completed", lambda _work: True),
        use_fake_group(0, 2),
    ):
        message = dist.isend(torch.zeros(1), 1)
        assert message is not None
        assert not message.is_completed()
