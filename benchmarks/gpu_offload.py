"""Compare steps with offloaded states to the resident step, on one device.

    python -m benchmarks.gpu_offload cuda bf16 config.json 4096 4 RESULT.json

Each variant is a process of its own that trains the same random model on the same tokens. Its step
is compared with the longer one of the resident step and of its transfers at the rates of pinned
copies, measured in the same process: a ratio of 1 means that the shorter one is hidden. A step ends
when the host has read the norm, so that an update counts in the step whose passes it overlaps with.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from itertools import pairwise
from typing import Any

from benchmarks.case import Case, make_tokens, read_model_config, select_batch
from benchmarks.gpu_variants import parse_variant_arguments, run_variant

VARIANTS: dict[str, dict[str, str]] = {
    "resident": {},
    "moments on the host": {"optimizer": "host", "update_on": "device"},
    "moments on the host, updated there": {"optimizer": "host", "update_on": "host"},
    "moments and weights on the host": {
        "optimizer": "host",
        "parameters": "host",
        "update_on": "device",
    },
    "moments and weights on the host, updated there": {
        "optimizer": "host",
        "parameters": "host",
        "update_on": "host",
    },
    "saved tensors on the host": {"activations": "host"},
    "resident, again": {},
}
"""Name -> keys of `offload`. The last one shows which losses change from run to run, because
kernels on a GPU add in no fixed order."""
WARM_UP_STEPS = 2


def main() -> int:
    """Measure the variants. Return exit code 1 if one failed."""
    arguments = parse_variant_arguments(__doc__.split("\n\n")[0], VARIANTS, num_steps=6)
    if arguments.variant is not None:
        print(json.dumps(measure_variant(arguments)))
        return 0
    rows: list[dict[str, Any]] = []
    for name in list(VARIANTS)[: arguments.num_variants]:
        rows.append({"name": name} | run_variant("benchmarks.gpu_offload", name))
        add_ratios(rows)
        arguments.result.write_text(json.dumps({"offload": rows}, indent=1) + "\n")
    return int(any("failure" in row for row in rows))


def measure_variant(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train with one variant; return seconds of a step, peak memory, losses and transfers."""
    import torch

    from benchmarks.gpu_kernels import wait
    from benchmarks.gpu_model import make_batch
    from benchmarks.gpu_step import build_training_state
    from shardwright.config.offload import OffloadSection
    from shardwright.doctor.rates.device_rates import time_copies
    from shardwright.offload import OffloadedOptimizer, TransferCounts
    from shardwright.training.step import accumulate_gradients, update_parameters

    device = (
        torch.device(arguments.device, 0) if arguments.device == "cuda" else torch.device("cpu")
    )
    case = Case(
        "offload",
        0,
        arguments.precision,
        str(arguments.config.parent),
        1,
        arguments.length,
        arguments.rows,
        device=arguments.device,
        random_weights=True,
    )
    section = OffloadSection.model_validate(VARIANTS[arguments.variant])
    rates = {rate.kind: rate.bytes_per_second for rate in time_copies(device)}
    state = build_training_state(case, device, offload=section)
    tokens = make_tokens(read_model_config(case)["vocab_size"], case.sequence_length, 32)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    losses = []
    ends: list[float] = []
    counts = TransferCounts()
    for step in range(WARM_UP_STEPS + arguments.steps):
        batch = make_batch(select_batch(tokens, case, step, 0))
        losses.append(accumulate_gradients(state.model, [batch], seed=0, step=step))
        update_parameters(
            state.model,
            state.optimizer,
            learning_rate=1e-5,
            max_grad_norm=1.0,
            overlaps_forward=True,
        )
        ends.append(time.perf_counter())
        counts = TransferCounts()
        for user in (
            state.optimizer if isinstance(state.optimizer, OffloadedOptimizer) else None,
            state.weight_offload,
            state.activation_offload,
        ):
            if user is not None:
                counts = add_counts(counts, user.pop_counts())
    state.wait_for_update()
    wait(device)
    state.close_offloads()
    is_cuda = device.type == "cuda"
    return {
        "step_seconds": statistics.median(
            end - start for start, end in pairwise(ends[WARM_UP_STEPS - 1 :])
        ),
        "losses": [loss.mean() for loss in losses],
        "peak_bytes": torch.cuda.max_memory_allocated() if is_cuda else None,
        "read_bytes": counts.read_bytes,
        "written_bytes": counts.written_bytes,
        "waiting_seconds": counts.waiting_seconds,
        "rates": rates,
    }


def add_counts(a: Any, b: Any) -> Any:
    """Return the sums of two `TransferCounts`."""
    return type(a)(**{key: value + vars(b)[key] for key, value in vars(a).items()})


def add_ratios(rows: list[dict[str, Any]]) -> None:
    """Add the seconds of the transfers, and the ratio to the longer of compute and transfers."""
    resident = rows[0]
    for row in rows[1:]:
        if "failure" in row or "failure" in resident:
            continue
        rates = row["rates"]
        host = rates.get("host memory", rates["memory"]) / 2
        row["transfer_seconds"] = max(
            row["read_bytes"] / rates.get("to device", host),
            row["written_bytes"] / rates.get("from device", host),
        )
        longest = max(resident["step_seconds"], row["transfer_seconds"])
        row["ratio"] = row["step_seconds"] / longest
        row["has_equal_losses"] = row["losses"] == resident["losses"]


if __name__ == "__main__":
    sys.exit(main())
