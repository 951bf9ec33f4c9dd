"""Rates of element-wise operations and the cost of a synchronisation, which no data sheet has.

Legend: N tokens, D width of the tensors; x is the residual stream, g and u the halves of a gate.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import mean

import torch
import torch.distributed as dist

from shardwright.doctor.rates.device_rates import DTYPES, measure_best_seconds
from shardwright.hardware import ElementwiseRate
from shardwright.model.mlp import apply_gate
from shardwright.model.norms import RMSNorm

_NUM_FORWARD_TENSORS = 3 + 2 + 5
_NUM_BACKWARD_TENSORS = 2 + 4 + 11
"""Tensors read and written by a residual sum, a norm and a gate, as in `planner.time.compute`."""
TRIAL_ELEMENTS = 2**18
"""Elements of the tensor that is measured first."""
_NUM_ROUNDS = 100
_MIN_ROUNDS = 3
_HANDOFF_SECONDS = 5.0
"""Time limit of all rounds of a handoff together; slow messages get fewer rounds."""
_NUM_MESSAGE_ELEMENTS = 2**16
_WORK_SECONDS = 5e-3
"""Computation between two collectives: about one layer of a small model."""


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

    forward = measure_best_seconds(run, device, seconds=seconds / 2)
    outputs = run()
    gradients = tuple(torch.randn_like(output) for output in outputs)
    inputs = (*leaves, norm.weight)
    backward = measure_best_seconds(
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
    round is the base. The rest are means, because a step pays all of this cost.
    """
    side = 256 if device.type == "cpu" else 4096
    a = torch.randn(side, side, device=device)
    b = torch.randn(side, side, device=device)
    message = torch.ones(_NUM_MESSAGE_ELEMENTS, device=device)
    times = torch.tensor(
        _WORK_SECONDS / measure_best_seconds(lambda: a @ b, device, seconds=0.05), device=device
    )
    dist.all_reduce(times)  # all ranks do the same amount of work
    products = max(1, round(float(times) / dist.get_world_size()))

    def work() -> None:
        for _ in range(products):
            torch.mm(a, b)

    def synchronise() -> None:
        dist.all_reduce(message)

    def both() -> None:
        work()
        synchronise()

    # All ranks make the same number of rounds. `both` takes about as long as the other two.
    trial = torch.tensor(min(_time_rounds(both, device, _MIN_ROUNDS)), device=device)
    dist.all_reduce(trial, op=dist.ReduceOp.MAX)
    rounds = int(min(_NUM_ROUNDS, max(_MIN_ROUNDS, _HANDOFF_SECONDS / (2 * float(trial)))))
    work_seconds, collective_seconds, both_seconds = (
        _time_rounds(call, device, rounds) for call in (work, synchronise, both)
    )
    return max(0.0, mean(both_seconds) - mean(work_seconds) - min(collective_seconds))


def _time_rounds(call: Callable[[], object], device: torch.device, rounds: int) -> list[float]:
    dist.barrier()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return seconds
