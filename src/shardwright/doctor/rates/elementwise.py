"""Rates of element-wise operations and the cost of a synchronisation, which no data sheet has.

Legend: N tokens, D width of the tensors; x is the residual stream, g and u the halves of a gate.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import mean, median

import torch
import torch.distributed as dist

from shardwright.doctor.rates.computation import WORK_SECONDS, build_computation
from shardwright.doctor.rates.device_rates import DTYPES, measure_median_seconds
from shardwright.hardware import ElementwiseRate
from shardwright.model.mlp import apply_gate
from shardwright.model.norms import RMSNorm

_NUM_FORWARD_TENSORS = 3 + 2 + 5
_NUM_BACKWARD_TENSORS = 2 + 4 + 11
"""Tensors read and written by a residual sum, a norm and a gate, as in `planner.time.compute`."""
TRIAL_ELEMENTS = 2**18
"""Elements of the tensor that is measured first."""
_NUM_ROUNDS_ALONE = 10
_NUM_GROUPS = 5
_NUM_ROUNDS = 20
"""Rounds of a group at most: the collectives of about one step."""
_HANDOFF_SECONDS = 5.0
"""Time limit of all rounds of a handoff together; slow messages get fewer rounds."""
_NUM_MESSAGE_ELEMENTS = 2**16


def time_elementwise(
    precision: str, tokens: int, width: int, device: torch.device, *, seconds: float = 0.2
) -> ElementwiseRate:
    """Measure bytes/s of the decoder's sum, norm and gate on `[tokens, width]`, both passes."""
    dtype = DTYPES[precision]
    x_ND, update_ND, g_ND, u_ND = (
        torch.randn(tokens, width, device=device).to(dtype) for _ in range(4)
    )
    leaves = [tensor.requires_grad_() for tensor in (x_ND, update_ND, g_ND, u_ND)]
    norm = RMSNorm(width, 1e-5).to(device)
    torch.nn.init.ones_(norm.weight)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return norm(x_ND + update_ND), apply_gate("silu", g_ND, u_ND)

    forward = measure_median_seconds(run, device, seconds=seconds / 2)
    outputs = run()
    gradients = tuple(torch.randn_like(output) for output in outputs)
    inputs = (*leaves, norm.weight)
    backward = measure_median_seconds(
        lambda: torch.autograd.grad(outputs, inputs, gradients, retain_graph=True),
        device,
        seconds=seconds / 2,
    )
    num_bytes = tokens * width * x_ND.element_size()
    return ElementwiseRate(
        precision,
        tokens,
        width,
        _NUM_FORWARD_TENSORS * num_bytes / forward,
        _NUM_BACKWARD_TENSORS * num_bytes / backward,
    )


def compute_call_seconds(rate: ElementwiseRate) -> float:
    """Return the seconds of one forward and backward call at this rate."""
    num_bytes = rate.tokens * rate.width * DTYPES[rate.precision].itemsize
    forward = _NUM_FORWARD_TENSORS * num_bytes / rate.forward_bytes_per_second
    return forward + _NUM_BACKWARD_TENSORS * num_bytes / rate.backward_bytes_per_second


def time_handoff(device: torch.device) -> float:
    """Measure the extra seconds of an all-reduce between two pieces of work.

    The first rank to arrive waits for the others, and waiting threads wake up on cores that may
    be busy. Collectives back to back show little of that, and their best round nothing, so that
    round is the base. A step pays the mean of its collectives, so the rounds form groups of as many
    as a step has. The median group counts, which the rare pauses of a machine do not change.
    """
    compute = build_computation(device)
    message = torch.ones(_NUM_MESSAGE_ELEMENTS, device=device)

    def time_collective(compute: Callable[[], None] | None = None) -> float:
        if compute is not None:
            compute()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        dist.all_reduce(message)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    dist.barrier()
    alone = min(time_collective() for _ in range(_NUM_ROUNDS_ALONE))
    # All ranks make the same number of rounds.
    round_seconds = torch.tensor(alone + WORK_SECONDS, device=device)
    dist.all_reduce(round_seconds, op=dist.ReduceOp.MAX)
    limit = _HANDOFF_SECONDS / (_NUM_GROUPS * float(round_seconds))
    rounds = int(min(_NUM_ROUNDS, max(1, limit)))
    groups = [mean(time_collective(compute) for _ in range(rounds)) for _ in range(_NUM_GROUPS)]
    return max(0.0, median(groups) - alone)
