"""Choice of the device on which a rank computes."""

from __future__ import annotations

import torch

from shardwright.config.run import DeviceKind
from shardwright.errors import InputError
from shardwright.launch.rank_environment import RankEnvironment


def should_use_cuda(requested: DeviceKind, *, field: str) -> bool:
    """Return True if ranks compute on CUDA; `auto` uses CUDA if the machine has it.

    Args:
        field: Recipe field or option that `requested` comes from, named in the error.

    Raises:
        InputError: CUDA is requested, and this machine has no CUDA device.
    """
    is_available = torch.cuda.is_available()
    if requested == "cuda" and not is_available:
        raise InputError(
            "this machine has no CUDA device", field=field, got="cuda", allowed="cpu or auto"
        )
    return is_available and requested != "cpu"


def choose_rank_device(
    requested: DeviceKind, rank_environment: RankEnvironment, *, field: str
) -> torch.device:
    """Return CUDA device `local_rank` and make it current, or the CPU if CUDA is not used.

    Raises:
        InputError: CUDA is requested and missing, or there are fewer devices than ranks.
    """
    if not should_use_cuda(requested, field=field):
        return torch.device("cpu")
    if rank_environment.local_rank >= torch.cuda.device_count():
        raise InputError(
            f"rank {rank_environment.rank} needs device {rank_environment.local_rank}, "
            f"but the machine has {torch.cuda.device_count()}",
            field="--nproc",
            remedy=f"Start at most one rank per device, or use the CPU ({field}: cpu)",
        )
    device = torch.device("cuda", rank_environment.local_rank)
    torch.cuda.set_device(device)
    return device
