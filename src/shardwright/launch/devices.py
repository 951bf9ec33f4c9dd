"""Choice of the device on which a rank computes."""

from __future__ import annotations

import os
import socket

import torch
import torch.distributed as dist

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
    """Return this rank's CUDA device and make it current, or the CPU if CUDA is not used.

    It is device `local_rank`, or the only visible one: a launcher may show each rank its own
    device alone (`srun --gpus-per-task=1`). `claim_device` refuses two ranks on one device.

    Raises:
        InputError: CUDA is requested and missing, or there are fewer devices than ranks.
    """
    if not should_use_cuda(requested, field=field):
        return torch.device("cpu")
    num_visible = torch.cuda.device_count()
    index = 0 if num_visible == 1 else rank_environment.local_rank
    if index >= num_visible:
        raise InputError(
            f"rank {rank_environment.rank} is local rank {index} of its node "
            f"and sees {num_visible} CUDA devices",
            field="--nproc",
            allowed="a visible device for every rank of the node, or exactly one for each rank",
            remedy=f"Start at most one rank per device, or use the CPU ({field}: cpu)",
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def claim_device(
    store: dist.Store, rank_environment: RankEnvironment, device: torch.device
) -> None:
    """Claim a CUDA device for this rank in the launch's store; does nothing on the CPU.

    Two ranks on one device would be refused by NCCL later, without their names, or run out of
    memory.

    Raises:
        InputError: Another rank has claimed this device.
    """
    name = None if device.type != "cuda" else _identify_device(device)
    if name is None:
        return
    owner = store.compare_set(f"device/{name}", "", str(rank_environment.rank)).decode()
    if owner != str(rank_environment.rank):
        raise InputError(
            f"ranks {owner} and {rank_environment.rank} compute on the same device, {name}",
            field="CUDA_VISIBLE_DEVICES",
            got=os.environ.get("CUDA_VISIBLE_DEVICES", "not set"),
            allowed="a device of its own for each rank",
            remedy="Start at most one rank per device, "
            "or give each rank its own device (srun --gpus-per-task=1)",
        )


def _identify_device(device: torch.device) -> str | None:
    """Return a name that no other device of the run has; None if the driver gives none."""
    properties = torch.cuda.get_device_properties(device)
    uuid = getattr(properties, "uuid", None)
    if uuid is not None:
        return f"GPU-{uuid}"
    bus = getattr(properties, "pci_bus_id", None)
    if bus is None:
        return None
    domain = getattr(properties, "pci_domain_id", 0)
    slot = getattr(properties, "pci_device_id", 0)
    return f"{socket.gethostname()} PCI {domain:04x}:{bus:02x}:{slot:02x}"
