"""Checks of checkpoints and recovery, with the expected failures of a run."""

from __future__ import annotations

import math
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from shardwright.checkpoint.disk import write_file
from shardwright.checkpoint.object_store import get_disk
from shardwright.checkpoint.storage_path import RemotePath
from shardwright.doctor.checklist_context import ChecklistContext
from shardwright.doctor.finding import Finding, Verdict
from shardwright.doctor.storage import OutputFolder, find_existing_folder, time_write
from shardwright.errors import CheckpointError
from shardwright.training.resume_point import find_resume_point
from shardwright.units import format_bytes, format_bytes_per_second, format_seconds

GPU_HOURS_PER_FAILURE = 50_675.0
"""Unexpected interruptions of Llama 3 405B: 419 in 54 days on 16,384 H100s.

Source: arXiv 2407.21783, section 3.3.4, table 5.
"""


def estimate_seconds_between_failures(num_gpus: int) -> float:
    """Estimate the mean seconds between failures of a run.

    >>> round(estimate_seconds_between_failures(16_384) / 3600, 1)
    3.1
    """
    return GPU_HOURS_PER_FAILURE * 3600.0 / num_gpus


def compute_save_interval_seconds(save_seconds: float, seconds_between_failures: float) -> float:
    """Compute the seconds between saves that minimise the time for saves and repeated work.

    The square root of 2 x seconds of a save x mean seconds between failures.
    Source: Young 1974, A first order approximation to the optimum checkpoint interval,
    CACM 17(9).

    >>> compute_save_interval_seconds(2.0, 10_000.0)
    200.0
    """
    return math.sqrt(2.0 * save_seconds * seconds_between_failures)


def estimate_lost_share(
    interval_seconds: float,
    save_seconds: float,
    restart_seconds: float,
    seconds_between_failures: float,
) -> float:
    """Estimate the share of time lost to saves, restarts and half an interval per failure.

    >>> round(estimate_lost_share(200.0, 2.0, 0.0, 10_000.0), 3)
    0.02
    """
    return (
        save_seconds / interval_seconds
        + (interval_seconds / 2 + restart_seconds) / seconds_between_failures
    )


_RESTART_SECONDS = 300.0
"""Seconds from a failure to the next useful step: detection, start of processes, loading."""
_SAVE_SECONDS = 0.2
_COPY_BYTES_PER_SECOND = 2e9
"""Time that training waits for a background save.

A synchronisation of the ranks and a copy of each rank's part to host memory.
"""
_MAX_LOST_SHARE = 0.02
_NEGLIGIBLE_SECONDS = 60.0
"""Lost seconds in a whole run that are not worth a warning."""


def check_checkpoints(context: ChecklistContext) -> Iterator[Finding]:
    """Check the size of checkpoints, and the space and speed of their folder."""
    section = context.original_recipe.checkpoint
    folder = context.run_folder.checkpoints
    checkpoint_bytes = context.checkpoint_bytes
    # The checkpoint being written exists besides those that are kept.
    num_checkpoints = section.keep_last + 1 + int(section.keep_best)
    value = f"{format_bytes(checkpoint_bytes)} each, {num_checkpoints} at a time"
    numbers = {"bytes": checkpoint_bytes, "kept": num_checkpoints}
    yield Finding("checkpoints", "size", "pass", value, numbers=numbers)
    if not isinstance(folder, Path):
        yield _check_remote_folder(folder)
        return
    result = time_write(OutputFolder("checkpoints", str(folder), True))
    if result.problem:
        value = f"cannot write to {result.path}: {result.problem}"
        remedy = "--set checkpoint.dir=FOLDER, or fix its permissions"
        yield Finding("checkpoints", "checkpoint folder", "fail", value, remedy)
        return
    free = shutil.disk_usage(find_existing_folder(folder)).free
    save_seconds = checkpoint_bytes / result.bytes_per_second
    value = (
        f"{result.path}: {format_bytes(free)} free, "
        f"{format_bytes(num_checkpoints * checkpoint_bytes)} needed; "
        f"{format_bytes_per_second(result.bytes_per_second)} with fsync, "
        f"{format_seconds(save_seconds)} per save by one rank"
    )
    verdict: Verdict = "pass" if free > 1.1 * num_checkpoints * checkpoint_bytes else "fail"
    keep_last = max(0, int(free / checkpoint_bytes) - 1 - int(section.keep_best))
    remedy = "Free space, or --set checkpoint.dir=FOLDER on another disk"
    if keep_last:
        remedy += f", or --set checkpoint.keep_last={keep_last}"
    numbers = {
        "free_bytes": free,
        "needed_bytes": num_checkpoints * checkpoint_bytes,
        "bytes_per_second": result.bytes_per_second,
    }
    yield Finding(
        "checkpoints",
        "checkpoint folder",
        verdict,
        value,
        "" if verdict == "pass" else remedy,
        numbers,
    )
    if section.keep_every is not None and context.original_recipe.training.max_steps is not None:
        count = context.original_recipe.training.max_steps // section.keep_every
        if free < (num_checkpoints + count) * checkpoint_bytes:
            more = format_bytes(count * checkpoint_bytes)
            value = f"{count} permanently kept checkpoints need {more} more"
            remedy = f"--set checkpoint.keep_every={2 * section.keep_every}"
            yield Finding("checkpoints", "keep_every", "warn", value, remedy)


def _check_remote_folder(folder: RemotePath) -> Finding:
    """Write and remove one small object."""
    name = "checkpoint folder"
    try:
        probe = folder / f".shardwright-doctor-{secrets.token_hex(4)}"
        disk = get_disk(folder)
        disk.make_folder(folder)
        write_file(probe, b"probe", disk)
        disk.remove(probe)
    except (OSError, CheckpointError) as error:
        value = f"cannot write to {folder}: {error}"
        remedy = "Check credentials and bucket, or --set checkpoint.dir=..."
        return Finding("checkpoints", name, "fail", value, remedy)
    return Finding("checkpoints", name, "pass", f"{folder} is writable")


def check_save_interval(context: ChecklistContext) -> Iterator[Finding]:
    """Compare the time lost to saves and failures with the best interval between saves."""
    every = context.original_recipe.checkpoint.every_steps
    name = "saved often enough"
    step_time = context.step_seconds
    if step_time is None:
        if every is None:
            remedy = "--set checkpoint.every_steps=500"
            value = "saves only at the end, on a stop, and when validation improves"
        else:
            remedy = "Name the devices (--set cluster=...) or run a few steps to measure their time"
            value = f"every {every:,} steps of unknown duration"
        yield Finding("checkpoints", name, "warn", value, remedy)
        return
    step, source = step_time
    failure_interval = estimate_seconds_between_failures(context.world_size)
    save_seconds = (
        _SAVE_SECONDS + context.checkpoint_bytes / context.world_size / _COPY_BYTES_PER_SECOND
    )
    best_steps = max(1, round(compute_save_interval_seconds(save_seconds, failure_interval) / step))
    total = (context.original_recipe.training.max_steps or 0) * step
    interval = every * step if every is not None else max(total, step)
    lost_time = estimate_lost_share(interval, save_seconds, _RESTART_SECONDS, failure_interval)
    best_lost = estimate_lost_share(
        best_steps * step, save_seconds, _RESTART_SECONDS, failure_interval
    )
    frequency = f"every {every:,} steps" if every is not None else "at the end only"
    value = (
        f"{frequency}: {format_seconds(interval)} of work at risk "
        f"({source}: {format_seconds(step)} per step); {context.world_size} devices fail about "
        f"once in {format_seconds(failure_interval)}, so {lost_time:.2%} of the time is lost"
    )
    value += f", {format_seconds(lost_time * total)} of the run" if total else ""
    is_enough = (
        lost_time <= max(_MAX_LOST_SHARE, 1.5 * best_lost)
        or lost_time * total < _NEGLIGIBLE_SECONDS
    )
    numbers = {
        "lost_share": lost_time,
        "best_every_steps": best_steps,
        "seconds_between_failures": failure_interval,
        "step_seconds": step,
    }
    remedy = ""
    if not is_enough:
        remedy = f"--set checkpoint.every_steps={best_steps} loses only {best_lost:.2%}"
    yield Finding("checkpoints", name, "pass" if is_enough else "warn", value, remedy, numbers)


def _format_expected_failures(expected: float | None) -> str:
    """Format a number of failures; a small one as a bound, since its digits mean nothing.

    >>> _format_expected_failures(6e-8), _format_expected_failures(2.34)
    ('fewer than 0.01', '2.3')
    """
    if expected is None:
        return "an unknown number of"
    return "fewer than 0.01" if expected < 0.01 else f"{expected:.2g}"


def check_recovery(context: ChecklistContext) -> Iterator[Finding]:
    """Compare the restarts with the expected failures; check that copies are compared."""
    restarts = context.original_recipe.elastic.max_restarts
    failure_interval = estimate_seconds_between_failures(context.world_size)
    step_time = context.step_seconds
    steps = context.original_recipe.training.max_steps
    expected = (
        None if step_time is None or steps is None else step_time[0] * steps / failure_interval
    )
    expected_text = _format_expected_failures(expected)
    value = f"at most {restarts} restarts; {expected_text} failures expected in the run"
    if restarts or (expected is not None and expected < 0.01):
        yield Finding(
            "recovery", "restarts", "pass", value, numbers={"expected_failures": expected}
        )
    else:
        remedy = (
            f"--set elastic.max_restarts={max(3, round(3 * (expected or 1.0)))}, or let the "
            "scheduler restart the run (--requeue)"
        )
        yield Finding(
            "recovery", "restarts", "warn", value, remedy, {"expected_failures": expected}
        )
    layout = context.plan.layout
    has_copies = (
        layout.dp_replicate > 1 or layout.tp > 1 or (layout.zero_stage < 3 and layout.dp_shard > 1)
    )
    if (
        has_copies
        and context.world_size >= 8
        and context.original_recipe.run.replica_check_every_steps is None
    ):
        value = "replicated weights are never compared: bit flips stay undetected"
        yield Finding(
            "recovery",
            "replicas compared",
            "warn",
            value,
            "--set run.replica_check_every_steps=500",
        )


def check_timeouts(context: ChecklistContext) -> Iterator[Finding]:
    """Compare the time-outs of collectives and saves with the time of a step."""
    limit = context.original_recipe.run.timeout_seconds
    step_time = context.step_seconds
    save_limit = context.original_recipe.checkpoint.timeout_seconds
    value = f"{format_seconds(limit)} for a collective, {format_seconds(save_limit)} for a save"
    if step_time is not None and limit < 5 * step_time[0]:
        remedy = f"--set run.timeout_seconds={round(20 * step_time[0])}"
        yield Finding(
            "recovery",
            "time-outs",
            "fail",
            f"{value}; but a step takes {format_seconds(step_time[0])}",
            remedy,
        )
    elif limit > 3600:
        remedy = "--set run.timeout_seconds=600"
        yield Finding(
            "recovery", "time-outs", "warn", f"{value}; a hang blocks all devices that long", remedy
        )
    else:
        yield Finding("recovery", "time-outs", "pass", value)
    if os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "0":
        value = "TORCH_NCCL_ASYNC_ERROR_HANDLING=0 lets a hang last forever"
        yield Finding(
            "recovery", "NCCL's watchdog", "fail", value, "unset TORCH_NCCL_ASYNC_ERROR_HANDLING"
        )


def check_resume(context: ChecklistContext) -> Iterator[Finding]:
    """Check that the run folder can be resumed, without drift."""
    folder = context.run_folder
    if not folder.has_checkpoints:
        if not folder.recipe_path.exists():
            value = f"{folder.path} contains no run; training starts at step 0"
            yield Finding("recovery", "resume", "pass", value)
            return
        if (save := folder.find_last_save()) is not None:
            raise folder.build_loss_error(save.step or 0, save.path)
        value = f"{folder.path} contains a run without a checkpoint"
        remedy = (
            f"shardwright train {context.recipe_path} --resume starts it again; "
            "--run-dir FOLDER chooses another folder"
        )
        yield Finding("recovery", "resume", "warn", value, remedy)
        return
    if context.preflight_result is None:
        value = f"{folder.path} contains checkpoints; checking them requires tokenised data"
        yield Finding(
            "recovery", "resume", "warn", value, f"shardwright data {context.recipe_path}"
        )
        return
    # Raises an error that names the drifted field.
    start = find_resume_point(context.preflight_result, folder)
    step = 0 if start is None else start.checkpoint.manifest.step
    total_steps = context.preflight_result.total_steps
    value = f"--resume continues from step {step:,} of {total_steps:,}; no drift"
    yield Finding("recovery", "resume", "pass", value)


def check_seed(context: ChecklistContext) -> Iterator[Finding]:
    """Warn about the default seed."""
    if "seed" in context.original_recipe.model_fields_set:
        yield Finding("recovery", "seed", "pass", f"{context.original_recipe.seed}")
        return
    value = (
        f"{context.original_recipe.seed}, the default: all recipes without a seed have the same "
        "sample order and initial weights"
    )
    yield Finding("recovery", "seed", "warn", value, "--set seed=1, or set it in the recipe")
