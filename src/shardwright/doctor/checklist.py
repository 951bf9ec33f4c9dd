"""Checklist for a long run of a recipe: each point checked, with a remedy. Starts nothing."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median

from shardwright import placement
from shardwright.architecture import ModelShape, read_recipe_shape
from shardwright.checkpoint.disk import write_file
from shardwright.checkpoint.object_store import get_disk
from shardwright.checkpoint.run_folder import RunFolder
from shardwright.config import Recipe
from shardwright.data.preparation import is_prepared
from shardwright.doctor.failure_rate import (
    compute_save_interval_seconds,
    estimate_lost_share,
    estimate_seconds_between_failures,
)
from shardwright.doctor.finding import Finding, Verdict
from shardwright.doctor.storage import OutputFolder, find_existing_folder, time_write
from shardwright.errors import CheckpointError, InputError, ShardwrightError
from shardwright.launch.auto_layout import choose_precision_here, detect_cluster
from shardwright.model.hf_weights import WeightsFolder
from shardwright.plan import Plan, resolve_plan, settle_precision
from shardwright.planner.auto_layout import build_cluster, choose_layout
from shardwright.planner.calibration import load_efficiencies
from shardwright.planner.engine_model import OPTIMIZER_STATE_BYTES
from shardwright.planner.prediction import Prediction
from shardwright.planner.predictor import predict
from shardwright.planner.problem import build_template
from shardwright.telemetry.event_log import StepEvent, read_events
from shardwright.train.checkpointing import find_resume_point
from shardwright.train.precision_choice import predict_precision
from shardwright.train.run_checks import ValidatedRun, validate_run
from shardwright.units import format_bytes, format_count, format_seconds

_MAX_EPOCHS = 4.0
"""Epochs up to which repeated data is about as good as new data.

Source: Muennighoff et al. 2023, arXiv 2305.16264.
"""
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
_NUM_RECENT_STEPS = 50


@dataclass(frozen=True)
class ChecklistContext:
    """Recipe and world size, with cached values that several checks use.

    `recipe_path` is the recipe's path as commands show it.
    """

    original_recipe: Recipe
    world_size: int
    recipe_path: str

    @cached_property
    def resolved_recipe(self) -> Recipe:
        """Recipe with the planner's choice in place of an automatic layout."""
        if not self.original_recipe.layout.auto:
            return self.original_recipe
        section = self.original_recipe.cluster or detect_cluster(
            self.original_recipe, self.world_size
        )
        chosen, _ = choose_layout(
            self.original_recipe, build_cluster(section, self.world_size), self.world_size
        )
        return chosen.model_copy(update={"cluster": section})

    @cached_property
    def plan(self) -> Plan:
        """Plan of the recipe; raises InputError if layout or batch is not consistent."""
        return resolve_plan(self.resolved_recipe, self.world_size)

    @cached_property
    def model_shape(self) -> ModelShape:
        """Shape of the model; raises ArchitectureError for an unsupported model."""
        return read_recipe_shape(self.original_recipe)

    @cached_property
    def run_folder(self) -> RunFolder:
        """Folder of the run."""
        return RunFolder.from_recipe(self.original_recipe)

    @cached_property
    def prediction(self) -> Prediction | None:
        """Planner's prediction; None without a cluster in the recipe or a known GPU here."""
        section = self.resolved_recipe.cluster
        if section is None:
            try:
                section = detect_cluster(self.resolved_recipe, self.world_size)
            except InputError:
                return None
        cluster = build_cluster(section, self.world_size)
        candidate = replace(
            build_template(self.resolved_recipe),
            layout=self.plan.layout,
            micro_batch_size=self.plan.batch.micro_batch_size,
            gradient_accumulation_steps=self.plan.batch.gradient_accumulation_steps,
            recompute=self.plan.recompute,
        )
        return predict(
            self.model_shape,
            candidate,
            cluster,
            load_efficiencies().get_efficiency(cluster.accelerator),
        )

    @cached_property
    def step_seconds(self) -> tuple[float, str] | None:
        """Seconds of an optimizer step, and their source: `measured` or `predicted`."""
        with suppress(ShardwrightError):
            steps = [
                event.step_seconds
                for event in read_events(self.run_folder.path)
                if isinstance(event, StepEvent)
            ]
            if steps:
                return median(steps[-_NUM_RECENT_STEPS:]), "measured"
        with suppress(InputError):
            if self.prediction is not None:
                return self.prediction.time.step, "predicted"
        return None

    @cached_property
    def checkpoint_bytes(self) -> float:
        """Bytes of one checkpoint: master weights and optimizer states of all parameters."""
        candidate = build_template(self.original_recipe)
        return self.model_shape.num_parameters * (
            candidate.master_bytes + OPTIMIZER_STATE_BYTES[candidate.optimizer]
        )

    @cached_property
    def preflight_result(self) -> ValidatedRun | None:
        """Result of checking the recipe with its data; None until the data is tokenised."""
        return (
            validate_run(self.resolved_recipe, self.world_size)
            if is_prepared(self.original_recipe)
            else None
        )


def _resolve_precision(recipe: Recipe) -> Recipe:
    """Replace the precision `auto` with the one that a run or a resumed run would use."""
    with suppress(InputError):  # another check reports an unknown cluster
        return settle_precision(recipe, predict_precision(recipe))
    return settle_precision(recipe, choose_precision_here(recipe))


def check_recipe(recipe: Recipe, world_size: int, recipe_path: str) -> tuple[Finding, ...]:
    """Run the checklist for a recipe on `world_size` ranks.

    A finding that cannot be checked yet names what is missing.
    """
    case = ChecklistContext(_resolve_precision(recipe), world_size, recipe_path)
    checks: tuple[tuple[str, str, Callable[[ChecklistContext], Iterator[Finding]]], ...] = (
        ("layout", "layout fits the model", _check_layout),
        ("layout", "memory", _check_memory),
        ("data", "data cache", _check_data),
        ("data", "validation", _check_validation),
        ("model", "weights", _check_weights),
        ("checkpoints", "checkpoint folder", _check_checkpoints),
        ("checkpoints", "saved often enough", _check_save_interval),
        ("recovery", "restarts", _check_recovery),
        ("recovery", "time-outs", _check_timeouts),
        ("recovery", "resume", _check_resume),
        ("recovery", "seed", _check_seed),
    )
    findings = []
    for section, name, run_check in checks:
        try:
            findings += list(run_check(case))
        except InputError as error:
            if any(
                known.value == error.problem or known.value.startswith(str(error.field))
                for known in findings
            ):
                continue  # the first of several checks with this error reports it
            field = f"{error.field}: " if error.field else ""
            got = f" (got {error.got})" if error.got is not None else ""
            allowed = f"; allowed: {error.allowed}" if error.allowed else ""
            remedy = error.remedy or f"Fix {error.field or 'the recipe'} in {recipe_path}"
            findings.append(
                Finding(section, name, "fail", f"{field}{error.problem}{got}{allowed}", remedy)
            )
    return tuple(findings)


def _check_layout(context: ChecklistContext) -> Iterator[Finding]:
    plan = context.plan
    placement.check_layout(context.model_shape, plan.layout, plan.batch.sequence_length)
    batch = plan.batch
    prefix = "chosen by the planner: " if context.original_recipe.layout.auto else ""
    value = (
        f"{prefix}{plan.layout} on {context.world_size} ranks; "
        f"{batch.micro_batch_size} sequences x {batch.data_ranks} data ranks x "
        f"{batch.gradient_accumulation_steps} = {batch.global_batch_size} sequences per step"
    )
    yield Finding("layout", "layout fits the model", "pass", value)


def _check_memory(context: ChecklistContext) -> Iterator[Finding]:
    prediction = context.prediction
    if prediction is None:
        value = "not predicted: the recipe names no cluster, and this machine has no known GPU"
        remedy = (
            "Name the devices, such as --set cluster=8xH100-80GB; "
            f"`shardwright plan {context.recipe_path} --cluster ...` shows which layouts fit"
        )
        yield Finding("layout", "memory", "warn", value, remedy)
        return
    total = prediction.memory.total
    capacity = prediction.memory_capacity_bytes
    verdict: Verdict = "warn" if prediction.is_tight else "pass" if prediction.fits else "fail"
    predicted = f"{format_bytes(total)} predicted of {format_bytes(capacity)} per device"
    value = prediction.warning or predicted
    cluster = context.resolved_recipe.cluster.node if context.resolved_recipe.cluster else "..."
    remedy = ""
    if verdict != "pass":
        command = f"shardwright plan {context.recipe_path} --cluster {cluster}"
        remedy = f"{command} shows the cheapest change that fits"
    numbers = {"predicted_bytes": total, "capacity_bytes": capacity}
    yield Finding("layout", "memory", verdict, value, remedy, numbers)


def _check_data(context: ChecklistContext) -> Iterator[Finding]:
    recipe = context.original_recipe
    if any("://" in source.path for source in (*recipe.data.sources, *recipe.data.validation)):
        value = "sources behind a URL are downloaded and tokenised first, while all ranks wait"
        yield Finding(
            "data", "data cache", "warn", value, f"shardwright data {context.recipe_path}"
        )
        return
    checked = context.preflight_result
    if checked is None:
        value = "not tokenised yet; the first start does that while all ranks wait"
        yield Finding(
            "data", "data cache", "warn", value, f"shardwright data {context.recipe_path}"
        )
        return
    data = checked.data
    batch = checked.plan.batch
    yield Finding(
        "data",
        "data cache",
        "pass",
        f"{len(data.train):,} samples of {batch.sequence_length:,} tokens are ready",
    )
    if data.report.tokenizer_kind == "none":
        vocabulary = f"no tokenizer; token ids fit a vocabulary of {checked.shape.vocab_size:,}"
    else:
        num_ids = data.tokenizer.vocab_size
        vocabulary = f"{num_ids:,} ids fit a vocabulary of {checked.shape.vocab_size:,}"
    template = f"; chat template: {data.report.template}" if data.report.template else ""
    yield Finding("data", "tokenizer and template", "pass", vocabulary + template)
    num_needed = checked.total_steps * batch.global_batch_size
    epochs = num_needed / len(data.train)
    value = (
        f"{checked.total_steps:,} steps x {batch.global_batch_size:,} sequences read each "
        f"sample {epochs:.3g} times"
    )
    verdict: Verdict = "pass" if epochs <= _MAX_EPOCHS else "warn"
    enough = max(1, int(_MAX_EPOCHS * len(data.train) / batch.global_batch_size))
    remedy = (
        ""
        if verdict == "pass"
        else f"Add data, or --set training.max_steps={enough} ({_MAX_EPOCHS:g} epochs)"
    )
    yield Finding("data", "enough samples", verdict, value, remedy, {"epochs": epochs})


def _check_validation(context: ChecklistContext) -> Iterator[Finding]:
    recipe = context.original_recipe
    if not recipe.data.validation and not recipe.data.validation_fraction:
        value = "no validation data: overfitting is not detected, no best checkpoint is kept"
        remedy = "--set data.validation_fraction=0.01"
        yield Finding("data", "validation", "warn", value, remedy)
        return
    source = f"{recipe.data.validation_fraction:.2%} of the training sources"
    if recipe.data.validation:
        source = "separate sources"
    every = recipe.evaluation.every_steps
    if every is None:
        remedy = "--set evaluation.every_steps=500"
        value = f"{source}, but evaluated only at the end"
        yield Finding("data", "validation", "warn", value, remedy)
    else:
        yield Finding("data", "validation", "pass", f"{source}, every {every:,} steps")


def _check_weights(context: ChecklistContext) -> Iterator[Finding]:
    num_parameters = format_count(context.model_shape.num_parameters)
    if not context.original_recipe.model.is_pretrained:
        value = f"{num_parameters} parameters, initialised from the seed"
        yield Finding("model", "weights", "pass", value)
        return
    assert context.original_recipe.model.path is not None
    WeightsFolder(context.original_recipe.model.path).check(context.model_shape)
    value = f"{context.original_recipe.model.path} contains all {num_parameters} parameters"
    yield Finding("model", "weights", "pass", value)


def _check_checkpoints(context: ChecklistContext) -> Iterator[Finding]:
    section = context.original_recipe.checkpoint
    folder = context.run_folder.checkpoints
    checkpoint_bytes = context.checkpoint_bytes
    # The checkpoint being written exists besides those that are kept.
    num_checkpoints = section.keep_last + 1 + int(section.keep_best)
    value = f"{format_bytes(checkpoint_bytes)} each, {num_checkpoints} at a time"
    numbers = {"bytes": checkpoint_bytes, "kept": num_checkpoints}
    yield Finding("checkpoints", "size", "pass", value, numbers=numbers)
    if not isinstance(folder, Path):
        try:
            probe = folder / f".shardwright-doctor-{secrets.token_hex(4)}"
            disk = get_disk(folder)
            disk.make_folder(folder)
            write_file(probe, b"probe", disk)
            disk.remove(probe)
        except (OSError, CheckpointError) as error:
            value = f"cannot write to {folder}: {error}"
            remedy = "Check credentials and bucket, or --set checkpoint.dir=..."
            yield Finding("checkpoints", "checkpoint folder", "fail", value, remedy)
            return
        yield Finding("checkpoints", "checkpoint folder", "pass", f"{folder} is writable")
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
        f"{result.bytes_per_second / 1e6:.3g} MB/s with fsync, "
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


def _check_save_interval(context: ChecklistContext) -> Iterator[Finding]:
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


def _check_recovery(context: ChecklistContext) -> Iterator[Finding]:
    restarts = context.original_recipe.elastic.max_restarts
    failure_interval = estimate_seconds_between_failures(context.world_size)
    step_time = context.step_seconds
    steps = context.original_recipe.training.max_steps
    expected = (
        None if step_time is None or steps is None else step_time[0] * steps / failure_interval
    )
    expected_text = "an unknown number of" if expected is None else f"{expected:.2g}"
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


def _check_timeouts(context: ChecklistContext) -> Iterator[Finding]:
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


def _check_resume(context: ChecklistContext) -> Iterator[Finding]:
    folder = context.run_folder
    if not folder.has_checkpoints:
        if not folder.recipe_path.exists():
            value = f"{folder.path} contains no run; training starts at step 0"
            yield Finding("recovery", "resume", "pass", value)
            return
        value = f"{folder.path} contains a run without a checkpoint"
        remedy = (
            f"shardwright train {context.recipe_path} --resume starts it again; --run-dir FOLDER chooses "
            "another folder"
        )
        yield Finding("recovery", "resume", "warn", value, remedy)
        return
    if context.preflight_result is None:
        value = f"{folder.path} contains checkpoints; checking them requires tokenised data"
        yield Finding(
            "recovery", "resume", "warn", value, f"shardwright data {context.recipe_path}"
        )
        return
    start = find_resume_point(
        context.preflight_result, folder
    )  # raises an error that names the drifted field
    step = 0 if start is None else start.checkpoint.manifest.step
    value = f"--resume continues from step {step:,} of {context.preflight_result.total_steps:,}; no drift"
    yield Finding("recovery", "resume", "pass", value)


def _check_seed(context: ChecklistContext) -> Iterator[Finding]:
    if "seed" in context.original_recipe.model_fields_set:
        yield Finding("recovery", "seed", "pass", f"{context.original_recipe.seed}")
        return
    value = (
        f"{context.original_recipe.seed}, the default: all recipes without a seed have the same sample "
        "order and initial weights"
    )
    yield Finding("recovery", "seed", "warn", value, "--set seed=1, or set it in the recipe")
