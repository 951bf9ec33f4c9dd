"""Checklist for a long run of a recipe: each point checked, with a remedy. Starts nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

from shardwright.config import Recipe
from shardwright.doctor.checklist_context import ChecklistContext
from shardwright.doctor.finding import Finding, Verdict
from shardwright.doctor.recovery_checks import (
    check_checkpoints,
    check_recovery,
    check_resume,
    check_save_interval,
    check_seed,
    check_timeouts,
)
from shardwright.errors import InputError
from shardwright.launch.auto_layout import choose_precision_here
from shardwright.model.hf.hf_weights import WeightsFolder
from shardwright.plans import resolve_precision
from shardwright.training.checks.auto_choice import predict_precision
from shardwright.units import format_bytes, format_count

_MAX_EPOCHS = 4.0
"""Epochs up to which repeated data is about as good as new data.

Source: Muennighoff et al. 2023, arXiv 2305.16264.
"""


def _resolve_precision(recipe: Recipe) -> Recipe:
    """Replace the precision `auto` with the one that a run or a resumed run would use."""
    with suppress(InputError):  # another check reports an unknown cluster
        return resolve_precision(recipe, predict_precision(recipe))
    return resolve_precision(recipe, choose_precision_here(recipe))


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
        ("checkpoints", "checkpoint folder", check_checkpoints),
        ("checkpoints", "saved often enough", check_save_interval),
        ("recovery", "restarts", check_recovery),
        ("recovery", "time-outs", check_timeouts),
        ("recovery", "resume", check_resume),
        ("recovery", "seed", check_seed),
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
    value = (prediction.warning or predicted) + context.vocabulary_note
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
        if recipe.data.streaming is not None:
            value = "streamed sources are read once to index them, while all ranks wait"
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
    num_parameters = format_count(context.trained_shape.num_parameters)
    if not context.original_recipe.model.is_pretrained:
        value = f"{num_parameters} parameters, initialised from the seed{context.vocabulary_note}"
        yield Finding("model", "weights", "pass", value)
        return
    assert context.original_recipe.model.path is not None
    WeightsFolder(context.original_recipe.model.path).check(context.model_shape)
    value = f"{context.original_recipe.model.path} contains all {num_parameters} parameters"
    yield Finding("model", "weights", "pass", value)
