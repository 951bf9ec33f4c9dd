"""The production checklist: what a long run needs, each point checked, with the command that mends it. Nothing is started."""

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
from shardwright.architecture import ModelShape, shape_of
from shardwright.checkpoint.disk import write_file
from shardwright.checkpoint.remote import disk_of
from shardwright.config import Recipe
from shardwright.data.prepare import is_prepared
from shardwright.errors import CheckpointError, InputError, ShardwrightError
from shardwright.model.load import WeightsFolder
from shardwright.plan import Plan, resolve, settle_precision
from shardwright.planner.achieved import load_efficiencies
from shardwright.planner.automatic import choose_layout, cluster_of
from shardwright.planner.candidate import STATE_BYTES
from shardwright.planner.predict import predict
from shardwright.planner.prediction import Prediction
from shardwright.planner.question import template_of
from shardwright.probe.failures import best_save_interval, lost_share, seconds_between_failures
from shardwright.probe.finding import Finding, Verdict
from shardwright.probe.storage import Folder, existing, time_write
from shardwright.telemetry.events import Step, read_events
from shardwright.train.automatic import choose_precision_here, cluster_here
from shardwright.train.folder import RunFolder
from shardwright.train.precision_choice import foresee_precision
from shardwright.train.preflight import Checked, check
from shardwright.train.saving import find_start
from shardwright.units import format_bytes, format_count, format_seconds

_MOST_EPOCHS = 4.0
"""Repeating data up to four times is about as good as fresh data (Muennighoff et al. 2023, arXiv 2305.16264)."""
_RESTART_SECONDS = 300.0
"""From a failure to the next useful step: noticing, starting processes, loading."""
_SAVE_SECONDS, _COPY_BYTES_PER_SECOND = 0.2, 2e9
"""How long training waits for a background save: a meeting of the ranks, and a copy of what each holds to host memory."""
_MOST_LOST = 0.02
_NEGLIGIBLE_SECONDS = 60.0
"""Of a whole run: not worth a word."""
_STEPS_COUNTED = 50


@dataclass(frozen=True)
class Case:
    """A recipe on so many ranks; what several checks need is worked out once. `path` is how commands name the recipe."""

    given: Recipe
    world_size: int
    path: str

    @cached_property
    def recipe(self) -> Recipe:
        """With the layout that the planner chose where the recipe leaves it to it."""
        if not self.given.layout.auto:
            return self.given
        section = self.given.cluster or cluster_here(self.given, self.world_size)
        chosen, _ = choose_layout(self.given, cluster_of(section, self.world_size), self.world_size)
        return chosen.model_copy(update={"cluster": section})

    @cached_property
    def plan(self) -> Plan:
        """Raises InputError where the layout or the batch does not come out."""
        return resolve(self.recipe, self.world_size)

    @cached_property
    def shape(self) -> ModelShape:
        """Raises ArchitectureError for a model that we refuse."""
        return shape_of(self.given)

    @cached_property
    def folder(self) -> RunFolder:
        """Where the run writes."""
        return RunFolder.of(self.given)

    @cached_property
    def prediction(self) -> Prediction | None:
        """Of the planner; None where neither the recipe names a cluster nor this machine has a GPU of the catalogue."""
        section = self.recipe.cluster
        if section is None:
            try:
                section = cluster_here(self.recipe, self.world_size)
            except InputError:
                return None
        cluster = cluster_of(section, self.world_size)
        candidate = replace(
            template_of(self.recipe),
            layout=self.plan.layout,
            micro_batch_size=self.plan.batch.micro_batch_size,
            gradient_accumulation_steps=self.plan.batch.gradient_accumulation_steps,
            recompute=self.plan.recompute,
        )
        return predict(self.shape, candidate, cluster, load_efficiencies().of(cluster.accelerator))

    @cached_property
    def step_seconds(self) -> tuple[float, str] | None:
        """Of one optimizer step, and whether that was measured by an earlier run in the run folder or is predicted."""
        with suppress(ShardwrightError):
            steps = [event.step_seconds for event in read_events(self.folder.path) if isinstance(event, Step)]
            if steps:
                return median(steps[-_STEPS_COUNTED:]), "measured"
        with suppress(InputError):
            if self.prediction is not None:
                return self.prediction.time.step, "predicted"
        return None

    @cached_property
    def checkpoint_bytes(self) -> float:
        """Of one checkpoint: master weights and the optimizer's states of all parameters."""
        candidate = template_of(self.given)
        return self.shape.num_parameters * (candidate.master_bytes + STATE_BYTES[candidate.optimizer])

    @cached_property
    def checked(self) -> Checked | None:
        """The recipe held against its data, once that is tokenised; None before."""
        return check(self.recipe, self.world_size) if is_prepared(self.given) else None


def _with_its_precision(recipe: Recipe) -> Recipe:
    """The recipe with the precision that a run or a resumed run would have, where it says `auto`."""
    with suppress(InputError):  # an unknown cluster is a finding of its own
        return settle_precision(recipe, foresee_precision(recipe))
    return settle_precision(recipe, choose_precision_here(recipe))


def check_recipe(recipe: Recipe, world_size: int, path: str) -> tuple[Finding, ...]:
    """Every point of the checklist for a recipe on `world_size` ranks; what cannot be checked is told with what it waits for."""
    case = Case(_with_its_precision(recipe), world_size, path)
    checks: tuple[tuple[str, str, Callable[[Case], Iterator[Finding]]], ...] = (
        ("layout", "layout fits the model", _check_layout),
        ("layout", "memory", _check_memory),
        ("data", "data cache", _check_data),
        ("data", "validation", _check_validation),
        ("model", "weights", _check_weights),
        ("checkpoints", "checkpoint folder", _check_checkpoints),
        ("checkpoints", "saved often enough", _check_interval),
        ("recovery", "restarts", _check_recovery),
        ("recovery", "time-outs", _check_timeouts),
        ("recovery", "resume", _check_resume),
        ("recovery", "seed", _check_seed),
    )
    findings = []
    for section, name, found in checks:
        try:
            findings += list(found(case))
        except InputError as error:
            if any(known.value == error.problem or known.value.startswith(str(error.field)) for known in findings):
                continue  # what several checks need is told by the first
            field = f"{error.field}: " if error.field else ""
            got = f" (got {error.got})" if error.got is not None else ""
            allowed = f"; allowed: {error.allowed}" if error.allowed else ""
            remedy = error.remedy or f"Mend {error.field or 'the recipe'} in {path}"
            findings.append(Finding(section, name, "fail", f"{field}{error.problem}{got}{allowed}", remedy))
    return tuple(findings)


def _check_layout(case: Case) -> Iterator[Finding]:
    plan = case.plan
    placement.check(case.shape, plan.layout, plan.batch.sequence_length)
    batch = plan.batch
    chosen = "chosen by the planner: " if case.given.layout.auto else ""
    told = (
        f"{chosen}{plan.layout} on {case.world_size} ranks; {batch.micro_batch_size} sequences x {batch.data_ranks} data ranks x "
    )
    told += f"{batch.gradient_accumulation_steps} = {batch.global_batch_size} a step"
    yield Finding("layout", "layout fits the model", "pass", told)


def _check_memory(case: Case) -> Iterator[Finding]:
    prediction = case.prediction
    if prediction is None:
        remedy = f"Name the devices: --set cluster=8xH100-80GB; `shardwright plan {case.path} --cluster ...` shows what fits"
        yield Finding("layout", "memory", "warn", "not predicted: the recipe names no cluster and no known GPU is here", remedy)
        return
    total, capacity = prediction.memory.total, prediction.memory_capacity_bytes
    verdict: Verdict = "warn" if prediction.is_tight else "pass" if prediction.fits else "fail"
    told = prediction.warning or f"{format_bytes(total)} predicted of {format_bytes(capacity)} a device"
    cluster = case.recipe.cluster.node if case.recipe.cluster else "..."
    remedy = "" if verdict == "pass" else f"shardwright plan {case.path} --cluster {cluster}: the cheapest change that fits"
    yield Finding("layout", "memory", verdict, told, remedy, {"predicted_bytes": total, "capacity_bytes": capacity})


def _check_data(case: Case) -> Iterator[Finding]:
    recipe = case.given
    if any("://" in source.path for source in (*recipe.data.sources, *recipe.data.validation)):
        told = "sources behind a URL are fetched and tokenised before the first step, with every rank waiting"
        yield Finding("data", "data cache", "warn", told, f"shardwright data {case.path}")
        return
    checked = case.checked
    if checked is None:
        told = "not tokenised yet: the first start does it, with every rank waiting"
        yield Finding("data", "data cache", "warn", told, f"shardwright data {case.path}")
        return
    data, batch = checked.data, checked.plan.batch
    yield Finding("data", "data cache", "pass", f"{len(data.train):,} samples of {batch.sequence_length:,} tokens are ready")
    if data.report.tokenizer_kind == "none":
        fits = f"no tokenizer: token ids in a vocabulary of {checked.shape.vocab_size:,}"
    else:
        fits = f"{data.tokenizer.vocab_size:,} ids in a vocabulary of {checked.shape.vocab_size:,}"
    template = f"; chat template: {data.report.template}" if data.report.template else ""
    yield Finding("data", "tokenizer and template", "pass", fits + template)
    needed = checked.total_steps * batch.global_batch_size
    epochs = needed / len(data.train)
    told = f"{checked.total_steps:,} steps x {batch.global_batch_size:,} sequences see each sample {epochs:.3g} times"
    verdict: Verdict = "pass" if epochs <= _MOST_EPOCHS else "warn"
    enough = max(1, int(_MOST_EPOCHS * len(data.train) / batch.global_batch_size))
    remedy = "" if verdict == "pass" else f"Add data, or --set training.max_steps={enough} ({_MOST_EPOCHS:g} epochs)"
    yield Finding("data", "enough samples", verdict, told, remedy, {"epochs": epochs})


def _check_validation(case: Case) -> Iterator[Finding]:
    recipe = case.given
    if not recipe.data.validation and not recipe.data.validation_fraction:
        told = "none: nobody will see the run overfit, and no best checkpoint is kept"
        yield Finding("data", "validation", "warn", told, "--set data.validation_fraction=0.01")
        return
    where = "its own sources" if recipe.data.validation else f"{recipe.data.validation_fraction:.2%} of the sources"
    every = recipe.evaluation.every_steps
    if every is None:
        remedy = "--set evaluation.every_steps=500"
        yield Finding("data", "validation", "warn", f"{where}, but evaluated only at the end", remedy)
    else:
        yield Finding("data", "validation", "pass", f"{where}, every {every:,} steps")


def _check_weights(case: Case) -> Iterator[Finding]:
    if not case.given.model.pretrained:
        yield Finding(
            "model", "weights", "pass", f"{format_count(case.shape.num_parameters)} parameters, initialised from the seed"
        )
        return
    assert case.given.model.path is not None
    WeightsFolder(case.given.model.path).check(case.shape)
    told = f"{case.given.model.path} holds all {format_count(case.shape.num_parameters)} parameters"
    yield Finding("model", "weights", "pass", told)


def _check_checkpoints(case: Case) -> Iterator[Finding]:
    section, place = case.given.checkpoint, case.folder.checkpoints
    one = case.checkpoint_bytes
    kept = section.keep_last + 1 + int(section.keep_best)  # the one being written lies beside those that are kept
    yield Finding(
        "checkpoints", "size", "pass", f"{format_bytes(one)} each, {kept} at a time", numbers={"bytes": one, "kept": kept}
    )
    if not isinstance(place, Path):
        try:
            probe = place / f".shardwright-doctor-{secrets.token_hex(4)}"
            disk = disk_of(place)
            disk.make_folder(place)
            write_file(probe, b"probe", disk)
            disk.remove(probe)
        except (OSError, CheckpointError) as error:
            told = f"{place} cannot be written: {error}"
            yield Finding(
                "checkpoints", "checkpoint folder", "fail", told, "Look at credentials and bucket, or --set checkpoint.dir=..."
            )
            return
        yield Finding("checkpoints", "checkpoint folder", "pass", f"{place} takes files")
        return
    written = time_write(Folder("checkpoints", str(place), True))
    if written.problem:
        told = f"{written.path} cannot be written: {written.problem}"
        yield Finding("checkpoints", "checkpoint folder", "fail", told, "--set checkpoint.dir=FOLDER, or mend its permissions")
        return
    free = shutil.disk_usage(existing(place)).free
    saved = (
        f"{written.bytes_per_second / 1e6:.3g} MB/s with fsync, {format_seconds(one / written.bytes_per_second)} a save by one rank"
    )
    told = f"{written.path}: {format_bytes(free)} free for {format_bytes(kept * one)}; {saved}"
    verdict: Verdict = "pass" if free > 1.1 * kept * one else "fail"
    fits = max(0, int(free / one) - 1 - int(section.keep_best))
    remedy = (
        f"Make room, --set checkpoint.dir=FOLDER, or --set checkpoint.keep_last={fits}"
        if fits
        else "Make room, or name another disk"
    )
    numbers = {"free_bytes": free, "needed_bytes": kept * one, "bytes_per_second": written.bytes_per_second}
    yield Finding("checkpoints", "checkpoint folder", verdict, told, "" if verdict == "pass" else remedy, numbers)
    if section.keep_every is not None and case.given.training.max_steps is not None:
        count = case.given.training.max_steps // section.keep_every
        if free < (kept + count) * one:
            told = f"{count} kept for good want {format_bytes(count * one)} more"
            yield Finding("checkpoints", "keep_every", "warn", told, f"--set checkpoint.keep_every={2 * section.keep_every}")


def _check_interval(case: Case) -> Iterator[Finding]:
    every, name = case.given.checkpoint.every_steps, "saved often enough"
    known = case.step_seconds
    if known is None:
        if every is None:
            remedy = "--set checkpoint.every_steps=500"
            yield Finding("checkpoints", name, "warn", "saves only at the end, on a stop, and where validation improves", remedy)
        else:
            remedy = "Name the devices (--set cluster=...), or run a few steps: then the time of a step is known"
            yield Finding("checkpoints", name, "warn", f"every {every:,} steps, of unknown length", remedy)
        return
    step, source = known
    between = seconds_between_failures(case.world_size)
    save = _SAVE_SECONDS + case.checkpoint_bytes / case.world_size / _COPY_BYTES_PER_SECOND
    best_steps = max(1, round(best_save_interval(save, between) / step))
    total = (case.given.training.max_steps or 0) * step
    interval = every * step if every is not None else max(total, step)
    lost = lost_share(interval, save, _RESTART_SECONDS, between)
    unavoidable = lost_share(best_steps * step, save, _RESTART_SECONDS, between)
    often = f"every {every:,} steps" if every is not None else "at the end only"
    told = f"{often}: {format_seconds(interval)} of work at risk ({source}: {format_seconds(step)} a step); on {case.world_size} "
    told += f"devices one failure in {format_seconds(between)} is usual, so {lost:.2%} of the time is lost"
    told += f", {format_seconds(lost * total)} of the run" if total else ""
    enough = lost <= max(_MOST_LOST, 1.5 * unavoidable) or lost * total < _NEGLIGIBLE_SECONDS
    numbers = {"lost_share": lost, "best_every_steps": best_steps, "seconds_between_failures": between, "step_seconds": step}
    remedy = "" if enough else f"--set checkpoint.every_steps={best_steps} loses {unavoidable:.2%}"
    yield Finding("checkpoints", name, "pass" if enough else "warn", told, remedy, numbers)


def _check_recovery(case: Case) -> Iterator[Finding]:
    restarts = case.given.elastic.max_restarts
    between = seconds_between_failures(case.world_size)
    known, steps = case.step_seconds, case.given.training.max_steps
    expected = None if known is None or steps is None else known[0] * steps / between
    shown = "an unknown number of" if expected is None else f"{expected:.2g}"
    told = f"at most {restarts} restarts, {shown} failures expected in the whole run"
    if restarts or (expected is not None and expected < 0.01):
        yield Finding("recovery", "restarts", "pass", told, numbers={"expected_failures": expected})
    else:
        remedy = (
            f"--set elastic.max_restarts={max(3, round(3 * (expected or 1.0)))}, or let the scheduler start it again (--requeue)"
        )
        yield Finding("recovery", "restarts", "warn", told, remedy, {"expected_failures": expected})
    layout = case.plan.layout
    copies = layout.dp_replicate > 1 or layout.tp > 1 or (layout.zero_stage < 3 and layout.dp_shard > 1)
    if copies and case.world_size >= 8 and case.given.run.replica_check_every_steps is None:
        told = "weights that several ranks hold alike are never compared: a flipped bit would be trained on"
        yield Finding("recovery", "replicas compared", "warn", told, "--set run.replica_check_every_steps=500")


def _check_timeouts(case: Case) -> Iterator[Finding]:
    limit, known = case.given.run.timeout_seconds, case.step_seconds
    told = f"a collective waits {format_seconds(limit)} at most, a save {format_seconds(case.given.checkpoint.timeout_seconds)}"
    if known is not None and limit < 5 * known[0]:
        remedy = f"--set run.timeout_seconds={round(20 * known[0])}"
        yield Finding("recovery", "time-outs", "fail", f"{told}; a step alone takes {format_seconds(known[0])}", remedy)
    elif limit > 3600:
        remedy = "--set run.timeout_seconds=600"
        yield Finding("recovery", "time-outs", "warn", f"{told}: a hang would hold all devices that long", remedy)
    else:
        yield Finding("recovery", "time-outs", "pass", told)
    if os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "0":
        told = "TORCH_NCCL_ASYNC_ERROR_HANDLING=0 lets a hang last for ever"
        yield Finding("recovery", "NCCL's watchdog", "fail", told, "unset TORCH_NCCL_ASYNC_ERROR_HANDLING")


def _check_resume(case: Case) -> Iterator[Finding]:
    folder = case.folder
    if not folder.has_checkpoints:
        began = folder.recipe.exists()
        told = f"{folder.path} holds a run without a checkpoint" if began else f"{folder.path} is free: the run begins at step 0"
        remedy = f"shardwright train {case.path} --resume begins it again, --run-dir names another folder"
        yield Finding("recovery", "resume", "warn" if began else "pass", told, remedy if began else "")
        return
    if case.checked is None:
        told = f"{folder.path} holds checkpoints; whether they fit is known once the data is tokenised"
        yield Finding("recovery", "resume", "warn", told, f"shardwright data {case.path}")
        return
    start = find_start(case.checked, folder)  # refuses drift, by field
    step = 0 if start is None else start.checkpoint.manifest.step
    yield Finding(
        "recovery", "resume", "pass", f"--resume goes on from step {step:,} of {case.checked.total_steps:,}; nothing drifted"
    )


def _check_seed(case: Case) -> Iterator[Finding]:
    said = "seed" in case.given.model_fields_set
    told = f"{case.given.seed}" + ("" if said else ", the default: two recipes without one see the same order and weights")
    yield Finding(
        "recovery", "seed", "pass" if said else "warn", told, "" if said else "--set seed=1, and write it into the recipe"
    )
