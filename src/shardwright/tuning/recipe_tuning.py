"""Tuning of a recipe: prepare the data, list candidates, try them, and report the fastest."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path

import torch

from shardwright.config import Recipe, dump_recipe
from shardwright.config.recipe_loading import load_recipe
from shardwright.data.model_data import prepare_for_model
from shardwright.errors import InputError, RunFailed
from shardwright.hardware import Cluster
from shardwright.hardware.step_versions import describe_step_versions
from shardwright.launch.auto_layout import (
    choose_compilation_here,
    choose_precision_here,
    detect_cluster,
)
from shardwright.launch.devices import should_use_cuda
from shardwright.launch.launch_limit import GRACE_SECONDS
from shardwright.launch.stop_signals import describe_cause, listen_for_stop
from shardwright.model.hf.hf_model import read_model_shape
from shardwright.numerics.compilation import find_compiler_obstacle
from shardwright.planner.cluster_choice import load_cluster
from shardwright.planner.scaling import resize_cluster
from shardwright.planner.step_profile import (
    StepProfile,
    TunedStep,
    build_tuned_step,
    find_profile_path,
    load_step_profile,
    save_step_profile,
)
from shardwright.plans import resolve_precision
from shardwright.training.setup import describe_device, describe_versions
from shardwright.tuning.candidates import (
    CandidateList,
    TuningRequest,
    list_candidates,
    parse_settings,
)
from shardwright.tuning.halving import HalvingResult, Trial, choose_rounds, run_halving
from shardwright.tuning.measurement import TrialOutcome, format_current_time
from shardwright.tuning.results_file import ResultsFile, SearchIdentity
from shardwright.tuning.trial import remove_abandoned_trials, run_trial
from shardwright.tuning.tuning_result import TriedCandidate, TuningOptions, TuningResult

TUNED_RECIPE_NAME = "tuned.yaml"


def tune(recipe: Recipe, cluster: Cluster | None, options: TuningOptions) -> TuningResult:
    """Find the fastest settings of a recipe on this machine; write them as a recipe.

    Args:
        cluster: Cluster to predict for; None: this machine's devices.

    Raises:
        InputError: Nothing can be tuned, or the budget is too small for one candidate.
        RunFailed: No candidate ran.
    """
    start_seconds = time.monotonic()
    cluster = _choose_cluster(recipe, cluster, options.num_ranks)
    planned, request = _prepare(recipe, cluster, options)
    candidates = list_candidates(request)
    folder = options.folder or Path("runs") / f"{recipe.name}-tune"
    identity = SearchIdentity(
        planned.model_dump(mode="json", exclude={"name": True, "run": {"dir"}}),
        f"{cluster.name}, {cluster.rates_source}",
        request.num_ranks,
        describe_device(_get_device(recipe)),
        describe_versions(),
    )
    # Ranks that do not stop at the deadline are killed within the budget.
    reserve_seconds = min(GRACE_SECONDS, options.budget_seconds / 10)
    deadline = _Deadline(start_seconds + options.budget_seconds - reserve_seconds)
    with ResultsFile.open(folder, identity, resume=options.resume) as results:
        remove_abandoned_trials(folder)
        options.on_start(candidates, cluster)
        found, stop_cause = _search(
            recipe, candidates, request.num_ranks, deadline, results, options
        )
    tried = _collect_tried(candidates, found)
    winner = next((each for each in tried if each.candidate.key == found.best_key), None)
    is_stopped = found.ending == "stopped"
    if winner is None and not is_stopped:
        raise _build_failure(found, tried, options)
    recipe_path = None
    if winner is not None and not is_stopped:
        recipe_path = options.out or folder / TUNED_RECIPE_NAME
        _write_recipe(restore_source(winner.candidate.recipe, recipe), recipe_path)
    profile_path, problem = _save_profile(cluster, candidates.workload, tried)
    return TuningResult(
        tried,
        winner,
        found.ending,
        stop_cause,
        cluster,
        folder,
        recipe_path,
        profile_path,
        problem,
        time.monotonic() - start_seconds,
        sum(trial.is_new for trial in found.trials),
        candidates,
    )


def _search(
    recipe: Recipe,
    candidates: CandidateList,
    num_ranks: int,
    deadline: _Deadline,
    results: ResultsFile,
    options: TuningOptions,
) -> tuple[HalvingResult, str | None]:
    """Try the candidates; return the trials, and the signal that stopped them, if any."""
    by_key = {candidate.key: candidate for candidate in candidates.candidates}

    def record_trial(trial: Trial) -> None:
        if trial.is_new:
            results.append(trial)
        options.on_trial(by_key[trial.key], trial)

    with listen_for_stop() as stop:

        def run_candidate(key: str, num_steps: int, seconds: float) -> TrialOutcome | None:
            if stop:
                return None
            tried = restore_source(by_key[key].recipe, recipe)
            folder = results.path.parent
            return run_trial(tried, num_ranks, num_steps, seconds, folder=folder, stop=stop)

        found = run_halving(
            list(by_key),
            run_candidate,
            choose_rounds(options.num_steps),
            deadline,
            max_trial_seconds=options.max_trial_seconds or options.budget_seconds / 4,
            max_first_seconds=options.max_trial_seconds or inf,
            known=results.known,
            on_trial=record_trial,
        )
        return found, describe_cause(stop.cause) if stop else None


@dataclass(frozen=True)
class _Deadline:
    """End of the budget, a reading of `time.monotonic`."""

    end_seconds: float

    def get_remaining_seconds(self) -> float:
        return self.end_seconds - time.monotonic()


def restore_source(tuned: Recipe, source: Recipe) -> Recipe:
    """Return a candidate's recipe with what tuning does not change as the user wrote it.

    A precision of `auto` stays so, and an inline config keeps the tokenizer's vocabulary.
    """
    model = source.model.model_copy(update={"compile": tuned.model.compile})
    return tuned.model_copy(update={"precision": source.precision, "model": model})


def _get_device(recipe: Recipe) -> torch.device:
    uses_cuda = should_use_cuda(recipe.run.device, field="run.device")
    return torch.device("cuda" if uses_cuda else "cpu")


def _choose_cluster(recipe: Recipe, cluster: Cluster | None, num_ranks: int | None) -> Cluster:
    """Return the cluster with one device per rank.

    Raises:
        InputError: More ranks than the cluster's node has devices, or than this machine has GPUs.
    """
    uses_cuda = _get_device(recipe).type == "cuda"
    if cluster is None:
        count = num_ranks or (torch.cuda.device_count() if uses_cuda else 1)
        cluster = load_cluster(detect_cluster(recipe, count).node if uses_cuda else f"{count}xcpu")
    count = num_ranks or cluster.gpus_per_node
    local = torch.cuda.device_count() if uses_cuda else count
    if count > min(cluster.gpus_per_node, local):
        raise InputError(
            "more ranks than devices: tuning starts all ranks on this machine",
            field="--nproc",
            got=count,
            allowed=f"at most {min(cluster.gpus_per_node, local)}",
            remedy="Name a node with more devices (--cluster), or start fewer ranks",
        )
    return resize_cluster(cluster, count)


def _prepare(
    recipe: Recipe, cluster: Cluster, options: TuningOptions
) -> tuple[Recipe, TuningRequest]:
    """Prepare the data, so that no trial has to; return the recipe as planned, and the request."""
    fixed = parse_settings(options.fixed)
    device = _get_device(recipe)
    choice = choose_precision_here(recipe) if recipe.precision.kind == "auto" else None
    compilation = choose_compilation_here(recipe)
    read_shape = partial(read_model_shape, section=recipe.model)
    if options.open_progress is None:
        shape, _ = prepare_for_model(recipe, read_shape)
    else:
        with options.open_progress() as progress:
            shape, _ = prepare_for_model(recipe, read_shape, progress=progress)
    planned = resolve_precision(recipe, choice)
    config = recipe.model.config
    if config is not None and "vocab_size" not in config:
        update = {"config": {**config, "vocab_size": shape.vocab_size}}
        planned = planned.model_copy(update={"model": recipe.model.model_copy(update=update)})
    is_compiled = recipe.model.compile is True
    if recipe.model.compile == "auto" and compilation is not None:
        is_compiled = compilation.is_compiled
    return planned, TuningRequest(
        planned,
        cluster,
        cluster.num_gpus,
        is_compiled,
        find_compiler_obstacle(device) is None,
        fixed,
        options.max_candidates,
    )


def _collect_tried(candidates: CandidateList, found: HalvingResult) -> tuple[TriedCandidate, ...]:
    """Return all candidates: those in the search to its end first, each group fastest first."""
    outcomes = found.get_last_outcomes()
    warmups: dict[str, float] = {}
    for trial in found.trials:
        if trial.outcome.measurement is not None:
            warmups.setdefault(trial.key, trial.outcome.measurement.warmup_seconds)

    def get_order(tried: TriedCandidate) -> tuple[bool, float]:
        measured = tried.measurement
        if measured is None:
            return True, tried.candidate.prediction.time.step
        return False, measured.step_seconds

    tried = (
        TriedCandidate(candidate, outcomes.get(candidate.key), warmups.get(candidate.key))
        for candidate in candidates.candidates
    )
    return tuple(sorted(tried, key=get_order))


def _build_failure(
    found: HalvingResult, tried: Iterable[TriedCandidate], options: TuningOptions
) -> InputError | RunFailed:
    """Return the error for a search without any measurement."""
    reasons = [
        f"{each.candidate.describe()}: {each.outcome.reason}"
        for each in tried
        if each.outcome is not None
    ]
    if found.ending == "budget":
        return InputError(
            "too small: no candidate ended in time",
            field="--budget",
            got=f"{options.budget_seconds:g} s",
            remedy="Increase it; starting the ranks, reading the data and a few steps must fit"
            + (f". Without a time: {'; '.join(reasons)}" if reasons else ""),
        )
    return RunFailed(f"no candidate ran: {'; '.join(reasons)}")


def _write_recipe(recipe: Recipe, path: Path) -> None:
    """Write a recipe, and load it again to check that it is complete."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial_path = path.with_name(f"{path.name}.partial")
        partial_path.write_text(dump_recipe(recipe), encoding="utf-8")
        loaded = load_recipe(partial_path)
        assert loaded == recipe, "the written recipe differs from the winner's"
        partial_path.replace(path)
    except OSError as error:
        raise InputError(
            f"cannot be written: {error.strerror}", field="--out", got=str(path)
        ) from error


def _save_profile(
    cluster: Cluster, workload: str, tried: Iterable[TriedCandidate]
) -> tuple[Path | None, str | None]:
    """Add the measured steps to the cluster's file; return the file, or None and the problem."""
    now = format_current_time()
    versions = describe_step_versions(cluster)
    steps: list[TunedStep] = [
        build_tuned_step(
            each.candidate.prediction,
            workload,
            measured_seconds=each.measurement.step_seconds,
            spread=each.measurement.spread_seconds / each.measurement.step_seconds,
            rates=cluster.rates_source,
            measured_at=each.outcome.measured_at or now,
            versions=versions,
        )
        for each in tried
        if each.outcome is not None and each.measurement is not None
    ]
    if not steps:
        return None, None
    path = find_profile_path(cluster)
    try:
        former = load_step_profile(path) or StepProfile(cluster.name)
        save_step_profile(former.add(steps), path)
    except (OSError, InputError) as error:
        return None, str(error)
    return path, None
