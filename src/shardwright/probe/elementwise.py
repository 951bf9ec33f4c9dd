"""Rates of what lies between products, and what ranks lose where they meet: numbers that no data sheet of a CPU holds.

Legend: N tokens, D width of the tensors; x is the residual stream, g and u the two halves of a gate.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import mean

import torch
import torch.distributed as dist

from shardwright.hardware import ElementwiseRate
from shardwright.model.mlp import gate
from shardwright.model.norms import RMSNorm
from shardwright.probe.matmul import DTYPES, best_seconds

_FORWARD_WIDTHS, _BACKWARD_WIDTHS = 3 + 2 + 5, 2 + 4 + 11
"""Tensors read and written by a residual sum, a norm and a gate, as `planner.compute` counts them."""
TRIAL_ELEMENTS = 2**18
"""Of the tensor that is tried first."""
_ROUNDS, _FEWEST_ROUNDS = 100, 3
_HANDOFF_SECONDS = 5.0
"""What all rounds of a handoff may take together; slow messages make fewer rounds."""
_MESSAGE_ELEMENTS = 2**16
_WORK_SECONDS = 5e-3
"""What a rank computes between two meetings: about a layer of a small model."""


def time_elementwise(precision: str, tokens: int, width: int, device: torch.device, *, seconds: float = 0.2) -> ElementwiseRate:
    """Bytes/s of the decoder's own sum, norm and gate on `[tokens, width]`, forward and backward."""
    dtype = DTYPES[precision]
    x_ND, update_ND, g_ND, u_ND = (torch.randn(tokens, width, device=device).to(dtype) for _ in range(4))
    leaves = [tensor.requires_grad_() for tensor in (x_ND, update_ND, g_ND, u_ND)]
    norm = RMSNorm(width, 1e-5).to(device)
    torch.nn.init.ones_(norm.weight)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return norm(x_ND + update_ND), gate("silu", g_ND, u_ND)

    forward = best_seconds(run, device, seconds=seconds / 2)
    outputs = run()
    gradients = tuple(torch.randn_like(output) for output in outputs)
    inputs = (*leaves, norm.weight)
    backward = best_seconds(lambda: torch.autograd.grad(outputs, inputs, gradients, retain_graph=True), device, seconds=seconds / 2)
    moved = tokens * width * x_ND.element_size()
    return ElementwiseRate(precision, tokens, width, _FORWARD_WIDTHS * moved / forward, _BACKWARD_WIDTHS * moved / backward)


def call_seconds(rate: ElementwiseRate) -> float:
    """Return the seconds of one forward and backward call at this rate."""
    num_bytes = rate.tokens * rate.width * DTYPES[rate.precision].itemsize
    forward = _FORWARD_WIDTHS * num_bytes / rate.forward_bytes_per_second
    return forward + _BACKWARD_WIDTHS * num_bytes / rate.backward_bytes_per_second


def time_handoff(device: torch.device) -> float:
    """Seconds that a collective of all ranks costs between two pieces of work, beyond what it takes back to back at its best.

    Whoever comes first waits for the others, and threads that wait are woken on cores that may be at other work. Back to back
    little of that is seen, and in the best round none. Means, not bests: a step pays them all.
    """
    side = 256 if device.type == "cpu" else 4096
    a, b = torch.randn(side, side, device=device), torch.randn(side, side, device=device)
    message = torch.ones(_MESSAGE_ELEMENTS, device=device)
    times = torch.tensor(_WORK_SECONDS / best_seconds(lambda: a @ b, device, seconds=0.05), device=device)
    dist.all_reduce(times)  # all ranks do as much
    products = max(1, round(float(times) / dist.get_world_size()))

    def work() -> None:
        for _ in range(products):
            torch.mm(a, b)

    def meet() -> None:
        dist.all_reduce(message)

    def both() -> None:
        work()
        meet()

    # All ranks make as many rounds: one with both takes about as long as one of each alone.
    trial = torch.tensor(min(_each_round(both, device, _FEWEST_ROUNDS)), device=device)
    dist.all_reduce(trial, op=dist.ReduceOp.MAX)
    rounds = int(min(_ROUNDS, max(_FEWEST_ROUNDS, _HANDOFF_SECONDS / (2 * float(trial)))))
    alone, meeting, together = (_each_round(what, device, rounds) for what in (work, meet, both))
    return max(0.0, mean(together) - mean(alone) - min(meeting))


def _each_round(what: Callable[[], object], device: torch.device, rounds: int) -> list[float]:
    dist.barrier()
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        what()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - began)
    return taken
