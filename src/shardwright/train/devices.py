"""Which device a rank computes on."""

from __future__ import annotations

import torch

from shardwright.config.upkeep import DeviceKind
from shardwright.errors import InputError
from shardwright.train.ranks import RankEnvironment


def wants_cuda(wanted: DeviceKind, *, field: str) -> bool:
    """Whether ranks compute on CUDA: `auto` takes it where there is some.

    Args:
        field: what said so, for the error.

    Raises:
        InputError: CUDA is wanted, and this machine has none.
    """
    here = torch.cuda.is_available()
    if wanted == "cuda" and not here:
        raise InputError("this machine has no CUDA device", field=field, got="cuda", allowed="cpu or auto")
    return here and wanted != "cpu"


def choose_device(wanted: DeviceKind, ranks: RankEnvironment, *, field: str) -> torch.device:
    """CUDA number `local_rank` where ranks compute on CUDA, and made current; else the CPU.

    Raises:
        InputError: CUDA is wanted and is not there, or there are fewer devices than ranks.
    """
    if not wants_cuda(wanted, field=field):
        return torch.device("cpu")
    if ranks.local_rank >= torch.cuda.device_count():
        raise InputError(
            f"rank {ranks.rank} wants device {ranks.local_rank}, but the machine has {torch.cuda.device_count()}",
            field="--nproc",
            remedy=f"Start at most as many ranks as there are devices, or take the CPU ({field}: cpu)",
        )
    device = torch.device("cuda", ranks.local_rank)
    torch.cuda.set_device(device)
    return device
