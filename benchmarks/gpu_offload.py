"""Compare steps with offloaded states to the resident step, on one device.

    python -m benchmarks.gpu_offload cuda bf16 config.json 4096 4 RESULT.json

Each variant is a process of its own that trains the same random model on the same tokens. Its step
is compared with the longer one of the resident step and of its transfers at the rates of pinned
copies, measured in the same process: a ratio of 1 means that the shorter one is hidden. A step ends
when the host has read the norm, so that an update counts in the step whose passes it overlaps with.
`--more` runs the variants on disk and those of frozen weights under adapters.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import sys
import tempfile
import time
from typing import Any, NamedTuple

from benchmarks.case import Case, make_tokens, read_model_config, select_batch
from benchmarks.gpu_variants import parse_variant_arguments, run_variant
from benchmarks.pace import forget_graph_breaks


class OffloadVariant(NamedTuple):
    """Keys of `offload`, and whether adapters are trained over a frozen model."""

    keys: dict[str, str]
    has_adapters: bool = False

    @property
    def resident(self) -> str:
        """Name of the variant that it is compared with."""
        return LORA_RESIDENT if self.has_adapters else RESIDENT


RESIDENT = "resident"
LORA_RESIDENT = "LoRA, resident"
_MOVED_WEIGHTS = {"optimizer": "host", "parameters": "host"}
VARIANTS: dict[str, OffloadVariant] = {
    RESIDENT: OffloadVariant({}),
    "moments on the host": OffloadVariant({"optimizer": "host", "update_on": "device"}),
    "moments on the host, updated there": OffloadVariant(
        {"optimizer": "host", "update_on": "host"}
    ),
    "moments and weights on the host": OffloadVariant(_MOVED_WEIGHTS | {"update_on": "device"}),
    "moments and weights on the host, updated there": OffloadVariant(
        _MOVED_WEIGHTS | {"update_on": "host"}
    ),
    "saved tensors on the host": OffloadVariant({"activations": "host"}),
    "resident, again": OffloadVariant({}),
}
"""Name -> variant. The last one shows which losses change from run to run, because kernels on a GPU
add in no fixed order."""
DISK_VARIANTS: dict[str, OffloadVariant] = {
    RESIDENT: OffloadVariant({}),
    "moments on disk": OffloadVariant({"optimizer": "disk", "update_on": "device"}),
    "moments and weights on disk": OffloadVariant(
        {"optimizer": "disk", "parameters": "disk", "update_on": "device"}
    ),
    "saved tensors on disk": OffloadVariant({"activations": "disk"}),
    LORA_RESIDENT: OffloadVariant({}, has_adapters=True),
    "LoRA, frozen weights on the host": OffloadVariant({"parameters": "host"}, has_adapters=True),
    "LoRA, frozen weights on disk": OffloadVariant({"parameters": "disk"}, has_adapters=True),
}
_LORA_RANK = 16
WARM_UP_STEPS = 2


def main() -> int:
    """Measure the variants. Return exit code 1 if one failed."""
    arguments = parse_variant_arguments(
        __doc__.split("\n\n")[0], [*VARIANTS, *DISK_VARIANTS], num_steps=6, has_sets=True
    )
    variants = DISK_VARIANTS if arguments.more else VARIANTS
    if arguments.variant is not None:
        print(json.dumps(measure_variant(arguments)))
        return 0
    rows: list[dict[str, Any]] = []
    for name in list(variants)[: arguments.num_variants]:
        names = {"name": name, "compared_with": variants[name].resident}
        rows.append(names | run_variant("benchmarks.gpu_offload", name))
        add_ratios(rows)
        arguments.result.write_text(json.dumps({"offload": rows}, indent=1) + "\n")
    return int(any("failure" in row for row in rows))


def measure_variant(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train with one variant; return the figures of a step, losses and transfers."""
    forget_graph_breaks()
    import torch

    from benchmarks.gpu_kernels import wait
    from benchmarks.gpu_model import make_batch
    from benchmarks.gpu_step import build_training_state
    from benchmarks.gpu_step_figures import count_steps, describe_step, measure_rates, read_peaks
    from shardwright.config.offload import OffloadSection
    from shardwright.doctor.rates.device_rates import time_copies
    from shardwright.offload import OffloadedOptimizer, TransferCounts
    from shardwright.training.step import StepLoss, accumulate_gradients, update_parameters

    device = (
        torch.device(arguments.device, 0) if arguments.device == "cuda" else torch.device("cpu")
    )
    variant = (VARIANTS | DISK_VARIANTS)[arguments.variant]
    case = Case(
        "offload",
        0,
        arguments.precision,
        str(arguments.config.parent),
        1,
        arguments.length,
        arguments.rows,
        lora_rank=_LORA_RANK if variant.has_adapters else None,
        device=arguments.device,
        random_weights=True,
    )
    folder = tempfile.mkdtemp() if "disk" in variant.keys.values() else None
    section = OffloadSection.model_validate({**variant.keys, "dir": folder})
    device_rates = measure_rates(device, arguments.precision)
    rates = {rate.kind: rate.bytes_per_second for rate in time_copies(device)}
    validated_run, state = build_training_state(case, device, offload=section)
    tokens = make_tokens(read_model_config(case)["vocab_size"], case.sequence_length, 32)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    losses = []
    ends: list[float] = []
    counts = TransferCounts()

    def run_step(step: int) -> StepLoss:
        batch = make_batch(select_batch(tokens, case, step, 0))
        loss = accumulate_gradients(state.model, [batch], seed=0, step=step)
        update_parameters(
            state.model,
            state.optimizer,
            learning_rate=1e-5,
            max_grad_norm=1.0,
            overlaps_forward=True,
        )
        return loss

    num_steps = WARM_UP_STEPS + arguments.steps
    for step in range(num_steps):
        losses.append(run_step(step))
        ends.append(time.perf_counter())
        counts = TransferCounts()
        for user in (
            state.optimizer if isinstance(state.optimizer, OffloadedOptimizer) else None,
            state.weight_offload,
            state.activation_offload,
        ):
            if user is not None:
                counts = add_counts(counts, user.pop_counts())
    peaks = read_peaks(device)
    further_steps = itertools.count(num_steps)
    figures = count_steps(lambda: run_step(next(further_steps)), device)
    state.wait_for_update()
    wait(device)
    state.close_offloads()
    if folder is not None:
        shutil.rmtree(folder)
    seconds = statistics.median(
        end - start for start, end in itertools.pairwise(ends[WARM_UP_STEPS - 1 :])
    )
    return {
        **describe_step(validated_run, device_rates, seconds, peaks, figures),
        "step_seconds": seconds,
        "losses": [loss.mean() for loss in losses],
        "peak_bytes": peaks["peak_allocated_bytes"],
        "read_bytes": counts.read_bytes,
        "written_bytes": counts.written_bytes,
        "waiting_seconds": counts.waiting_seconds,
        "rates": rates,
    }


def add_counts(a: Any, b: Any) -> Any:
    """Return the sums of two `TransferCounts`."""
    return type(a)(**{key: value + vars(b)[key] for key, value in vars(a).items()})


def add_ratios(rows: list[dict[str, Any]]) -> None:
    """Add the seconds of a step over those of the resident one; of transfers over the link, their
    seconds and the ratio of the step to the longer of compute and transfers."""
    by_name = {row["name"]: row for row in rows}
    for row in rows:
        resident = by_name[row["compared_with"]]
        if row is resident or "failure" in row or "failure" in resident:
            continue
        row["has_equal_losses"] = row["losses"] == resident["losses"]
        row["times_resident"] = row["step_seconds"] / resident["step_seconds"]
        if "disk" in (VARIANTS | DISK_VARIANTS)[row["name"]].keys.values():
            continue
        rates = row["rates"]
        host = rates.get("host memory", rates["memory"]) / 2
        row["transfer_seconds"] = max(
            row["read_bytes"] / rates.get("to device", host),
            row["written_bytes"] / rates.get("from device", host),
        )
        longest = max(resident["step_seconds"], row["transfer_seconds"])
        row["ratio"] = row["step_seconds"] / longest


if __name__ == "__main__":
    sys.exit(main())
