"""Optimizer updates on the host of a published run: bytes that it moves, and its memory's rate."""

from __future__ import annotations

HOST_MEMORY_SHARE = 0.47
"""Share of the bandwidth of a host's memory that an update reaches: DeepSpeedCPUAdam updates a
billion parameters, of 30 bytes each, in a quarter of a second on a DGX-2 with 256 GB/s
(ZeRO-Offload, arXiv 2101.06840, section 6)."""

HOST_MEMORY_BYTES_PER_SECOND = {"Ampere": 410e9, "Hopper": 614e9, "Blackwell": 717e9}
"""Memory bandwidth of the hosts of these accelerators: those of DGX A100 (two EPYC 7742 with eight
channels of DDR4-3200 each), DGX H100 (two Xeon 8480C, DDR5-4800) and DGX B200 (two Xeon 8570,
DDR5-5600)."""


def count_host_update_bytes(
    num_elements: float, state_bytes: float, *, has_master_copies: bool, width: int
) -> float:
    """Count the bytes that the host reads and writes (DeepSpeedCPUAdam, or torch's AdamW with
    FSDP's CPUOffload).

    It reads and writes each state once, master weights included. DeepSpeed's gradients arrive in
    fp32, are scaled and are read (16 bytes); weights are cast and read for their copy (8;
    deepspeed/runtime/zero/stage3.py, `unscale_and_clip_grads` and
    `_reassign_or_swap_out_partitioned_parameters`). FSDP's gradients arrive and are read, and
    weights are read, written, and read for their copy: `width` bytes each.
    """
    return 2 * state_bytes + num_elements * (24 if has_master_copies else 5 * width)
