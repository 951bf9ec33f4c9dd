"""Offloaded optimizer states against DeepSpeed's ZeRO-Offload and NVMe offload, on a CPU.

    python -m benchmarks.offload --folder /scratch --out docs/benchmarks/offload-cpu.json

Each run is a process of its own; the contenders take turns, round after round. All train the same
random model on the same tokens with AdamW, in bf16 with fp32 master weights, on one rank. Between
the runs of a round fio moves the bytes of our moments with direct I/O. `--folder` holds scratch
files and DeepSpeed's swap files. DeepSpeed needs ninja, g++ and libaio's headers to build its
extensions. All start from the same weights, whose values bf16 has.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.case import LLAMA_29M, Case
from benchmarks.conditions import format_rows, read_conditions
from shardwright.config.offload import DEFAULT_BUFFER_BYTES, DISK_BUCKET_BYTES

MODELS: dict[str, dict[str, Any]] = {
    "29m": LLAMA_29M,
    "137m": LLAMA_29M
    | {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 10,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    },
}
CONTENDERS = ("shardwright", "shardwright disk", "deepspeed host", "deepspeed nvme")
NUM_STEPS = 6
"""The first two are not counted."""


def main() -> None:
    """Run the rounds and write the numbers, or run one contender for the parent."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.offload", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--folder", type=Path, required=True, help="folder on the disk to use")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", choices=MODELS, default="137m")
    parser.add_argument("--contender", choices=CONTENDERS, help="run this one and print its JSON")
    parser.add_argument("--weights", type=Path, help="model folder of the contender")
    options = parser.parse_args()
    if options.contender:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            run = run_contender(options.contender, options.weights, Path(folder))
            print(json.dumps(run))
        return
    runs = run_rounds(options.folder, options.model, options.rounds)
    result = {"conditions": read_conditions(), "config": MODELS[options.model], "runs": runs}
    print(json.dumps(summarise(runs), indent=1))
    if options.out is not None:
        options.out.write_text(format_rows(result | {"summary": summarise(runs)}) + "\n")


def run_rounds(folder: Path, model: str, num_rounds: int) -> list[dict[str, Any]]:
    """Run every contender once a round, in turn; a failure is recorded with its last lines."""
    runs: list[dict[str, Any]] = []
    weights = folder / f"weights-{model}"
    if not weights.exists():
        write_weights(weights, model)
    environment = {"OMP_NUM_THREADS": "1"} | dict(os.environ)
    for number in range(num_rounds):
        for contender in CONTENDERS:
            command = [sys.executable, "-m", "benchmarks.offload", "--folder", str(folder)]
            command += ["--weights", str(weights)]
            done = subprocess.run(
                [*command, "--contender", contender],
                capture_output=True,
                text=True,
                check=False,
                env=environment,
            )
            run: dict[str, Any] = {"round": number, "contender": contender}
            if done.returncode == 0:
                run |= json.loads(done.stdout.splitlines()[-1])
            else:
                run["error"] = done.stderr.splitlines()[-5:]
            if contender == "shardwright disk" and "error" not in run:
                run["fio"] = measure_with_fio(folder, int(run["read_bytes"]))
            runs.append(run)
            print(json.dumps(run), file=sys.stderr, flush=True)
    return runs


def write_weights(folder: Path, model: str) -> None:
    """Write random weights in bf16 values, which all contenders then start from."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**MODELS[model])
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).float().save_pretrained(folder)


def run_contender(contender: str, weights: Path, folder: Path) -> dict[str, Any]:
    """Train with one contender in this process; return times of its steps and its memory."""
    import torch

    case = Case(
        contender,
        0,
        "bf16",
        str(weights),
        world_size=1,
        sequence_length=256,
        micro_batch_size=1,
    )
    name, _, tier = contender.partition(" ")
    start: Callable[..., Any] = start_shardwright if name == "shardwright" else _start_deepspeed
    run_step, finish = start(case, folder, tier)
    seconds: list[float] = []
    losses: list[float] = []
    for step in range(NUM_STEPS):
        start_seconds = time.perf_counter()
        losses.append(run_step(step))
        seconds.append(time.perf_counter() - start_seconds)
    return {
        "step_seconds": seconds[2:],
        "losses": losses,
        "peak_resident_bytes": _read_peak_resident_bytes(),
        "threads": torch.get_num_threads(),
        **finish(),
    }


def start_shardwright(
    case: Case,
    folder: Path,
    tier: str,
    buffer_bytes: int = DEFAULT_BUFFER_BYTES,
    *,
    overlaps_forward: bool = True,
    is_clipped: bool = True,
    can_skip: bool = True,
) -> tuple[Any, Any]:
    """Build a model and its optimizer, with states in a tier if one is named.

    Args:
        overlaps_forward: True if the next forward pass may begin during the update, as in training.
        is_clipped: False for no clipping.
        can_skip: False if a gradient that is not finite ends the run, so that without clipping the
            update of moments on disk runs in the backward pass.

    Returns:
        Function that trains step N and returns its loss; function that describes the steps.
    """
    import torch

    from benchmarks.case import make_tokens, read_model_config, select_batch, shift_labels
    from benchmarks.contenders.with_shardwright import build_recipe, build_validated_run
    from shardwright.config.offload import OffloadSection
    from shardwright.data.loader import MicroBatch
    from shardwright.offload import OffloadedOptimizer
    from shardwright.training.setup import build_state
    from shardwright.training.step import accumulate_gradients, begin_update, update_parameters

    recipe = build_recipe(case)
    changes: dict[str, int | None] = {} if is_clipped else {"max_grad_norm": None}
    if not can_skip:
        changes["max_skipped_steps"] = 0
    training = recipe.training.model_copy(update=changes)
    recipe = recipe.model_copy(update={"training": training})
    if tier:
        section = OffloadSection.model_validate(
            {"optimizer": tier, "buffer_bytes": buffer_bytes}
            | ({"dir": str(folder)} if tier == "disk" else {})
        )
        recipe = recipe.model_copy(update={"offload": section})
    cpu = torch.device("cpu")
    state = build_state(build_validated_run(recipe, 1, cpu), cpu)
    tokens = make_tokens(read_model_config(case)["vocab_size"], case.sequence_length)
    update_seconds: list[float] = []
    transfers: list[dict[str, float]] = []

    def run_step(step: int) -> float:
        ids_BT = select_batch(tokens, case, step, 0)
        batch = MicroBatch(
            ids_BT,
            shift_labels(ids_BT),
            torch.arange(case.sequence_length).expand_as(ids_BT),
            None,
            torch.tensor([step]),
            case.micro_batch_size * (case.sequence_length - 1),
        )
        begin_update(state.optimizer, case.optimisation.learning_rate)
        loss = accumulate_gradients(state.model, [batch], seed=0, step=step)
        start_seconds = time.perf_counter()
        update_parameters(
            state.model,
            state.optimizer,
            learning_rate=case.optimisation.learning_rate,
            max_grad_norm=training.max_grad_norm,
            overlaps_forward=overlaps_forward,
        )
        update_seconds.append(time.perf_counter() - start_seconds)
        if isinstance(state.optimizer, OffloadedOptimizer):
            transfers.append(vars(state.optimizer.pop_counts()))
        return loss.mean()

    def finish() -> dict[str, Any]:
        state.close_offloads()  # otherwise its threads keep the process
        num_parameters = sum(tensor.numel() for _, tensor in state.model.named_parameters())
        result: dict[str, Any] = {
            "num_parameters": num_parameters,
            "update_seconds": update_seconds[2:],
        }
        if transfers:
            result["read_bytes"] = transfers[-1]["read_bytes"]
            result["transfers"] = transfers[2:]
        return result

    return run_step, finish


def _start_deepspeed(case: Case, folder: Path, tier: str) -> tuple[Any, Any]:
    os.environ |= {
        "DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29617",
    }  # fmt: skip
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    from benchmarks.case import make_tokens, read_model_config, select_batch
    from benchmarks.contenders.with_deepspeed import settings
    from benchmarks.contenders.with_torch import (
        build_adamw_settings,
        group_parameters,
        load_transformers_model,
    )

    deepspeed.init_distributed(dist_backend="gloo")
    model = load_transformers_model(case).train()
    adamw = build_adamw_settings(case)
    config = settings(case)
    # The optimizer's states can be on NVMe with stage 3 only.
    zero: dict[str, Any] = {"stage": 3 if tier == "nvme" else 2}
    zero["offload_optimizer"] = {"device": "nvme" if tier == "nvme" else "cpu"}
    if tier == "nvme":
        zero["offload_optimizer"] |= {"nvme_path": str(folder), "buffer_count": 4}
        zero["sub_group_size"] = 16_777_216
        config["aio"] = {"block_size": 8 * 2**20, "queue_depth": 16, "thread_count": 1}
    config["zero_optimization"] = zero
    optimizer = DeepSpeedCPUAdam(
        group_parameters(case, model),
        **{key: adamw[key] for key in ("lr", "betas", "eps") if key in adamw},
    )
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    tokens = make_tokens(read_model_config(case)["vocab_size"], case.sequence_length)

    def run_step(step: int) -> float:
        input_ids_BT = select_batch(tokens, case, step, 0)
        loss = engine(input_ids=input_ids_BT, labels=input_ids_BT).loss
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return run_step, lambda: {"stage": engine.zero_optimization_stage()}


def measure_with_fio(
    folder: Path,
    num_bytes: int,
    directions: tuple[str, ...] = ("read", "write"),
    *,
    depth: int = 1,
) -> dict[str, float]:
    """Read and write this many bytes at once with fio: sequential direct I/O in blocks of ours.

    Files exist and have all their blocks, as scratch files have.

    Args:
        depth: requests of each direction in flight.

    Returns:
        Bytes per second of each direction; the seconds of the slower one.
    """
    assert shutil.which("fio"), "install fio"
    size = num_bytes // DISK_BUCKET_BYTES * DISK_BUCKET_BYTES
    with tempfile.TemporaryDirectory(dir=folder) as name:
        for direction in directions:
            with Path(name, direction).open("wb") as file:
                for _ in range(size // DISK_BUCKET_BYTES):
                    file.write(bytes(DISK_BUCKET_BYTES))
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        engine = "psync" if depth == 1 else "libaio"
        command = ["fio", "--output-format=json", f"--ioengine={engine}", f"--iodepth={depth}"]
        command += ["--direct=1", f"--bs={DISK_BUCKET_BYTES}", f"--size={size}"]
        for direction in directions:
            command += [f"--name={direction}", f"--rw={direction}", "--overwrite=1"]
            command += [f"--filename={Path(name, direction)}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    jobs = {job["jobname"]: job[job["jobname"]] for job in json.loads(done.stdout)["jobs"]}
    rates = {f"{name}_bytes_per_second": job["bw_bytes"] for name, job in jobs.items()}
    seconds = max(job["runtime"] for job in jobs.values()) / 1000
    return {"num_bytes": size, "seconds": seconds, **rates}


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Compute medians over all counted steps, and the ratios to compare."""
    summary: dict[str, Any] = {}
    for contender in CONTENDERS:
        good = [run for run in runs if run["contender"] == contender and "error" not in run]
        if not good:
            continue
        row: dict[str, Any] = {
            "step_seconds": statistics.median(time for run in good for time in run["step_seconds"]),
            "peak_resident_bytes": max(run["peak_resident_bytes"] for run in good),
            "num_runs": len(good),
        }
        if contender == "shardwright disk":
            row |= _summarise_transfers(good)
        summary[contender] = row
    for own, other in (("shardwright", "deepspeed host"), ("shardwright disk", "deepspeed nvme")):
        if own in summary and other in summary:
            summary[f"{other} / {own}"] = {
                key: summary[other][key] / summary[own][key]
                for key in ("step_seconds", "peak_resident_bytes")
            }
    if "transfer_seconds" in summary.get("shardwright disk", {}) and "shardwright" in summary:
        disk = summary["shardwright disk"]
        limit = max(summary["shardwright"]["step_seconds"], disk["transfer_seconds"])
        disk["step_of_max_compute_transfer"] = disk["step_seconds"] / limit
    return summary


def _summarise_transfers(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Compare the transfers of each step with fio's, moved right after the run."""
    shares = []
    seconds = []
    for run in runs:
        fio = run["fio"]
        fio_rate = 2 * fio["num_bytes"] / fio["seconds"]
        for step in run["transfers"]:
            both_seconds = max(step["reading_seconds"], step["writing_seconds"])
            seconds.append(both_seconds)
            shares.append((step["read_bytes"] + step["written_bytes"]) / both_seconds / fio_rate)
    return {
        "transfer_seconds": statistics.median(seconds),
        "share_of_fio": statistics.median(shares),
        "lowest_share_of_fio": min(shares),
        "fio_bytes_per_second": statistics.median(
            2 * run["fio"]["num_bytes"] / run["fio"]["seconds"] for run in runs
        ),
    }


def _read_peak_resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (peak,) = (int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    return peak * 1024


if __name__ == "__main__":
    main()
