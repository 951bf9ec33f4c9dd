"""`shardwright.tune`: check the arguments, then import torch and tune."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

from shardwright.config.recipe_source import RecipeSource, list_texts, load_recipe
from shardwright.data.sources.source_files import ProgressOpener
from shardwright.errors import InputError
from shardwright.hardware import Cluster
from shardwright.launch.rank_environment import detect_rank_environment
from shardwright.planner.cluster_choice import choose_cluster
from shardwright.tuning.candidates import DEFAULT_MAX_CANDIDATES, CandidateList, TuningCandidate
from shardwright.tuning.halving import Trial
from shardwright.tuning.tuning_result import (
    DEFAULT_BUDGET_SECONDS,
    DEFAULT_NUM_STEPS,
    TuningOptions,
    TuningResult,
)


def tune(
    recipe: RecipeSource,
    cluster: Cluster | str | None = None,
    *,
    profile: str | Path | None = None,
    num_ranks: int | None = None,
    budget_seconds: float = DEFAULT_BUDGET_SECONDS,
    max_trial_seconds: float | None = None,
    num_steps: int = DEFAULT_NUM_STEPS,
    max_candidates: int = DEFAULT_MAX_CANDIDATES,
    fixed: Sequence[str] = (),
    folder: str | Path | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    open_progress: ProgressOpener = nullcontext,
    on_start: Callable[[CandidateList, Cluster], None] = lambda _candidates, _cluster: None,
    on_trial: Callable[[TuningCandidate, Trial], None] = lambda _candidate, _trial: None,
) -> TuningResult:
    """Try the planner's best settings for a few real steps each, on ranks of this machine.

    The fastest ones are written as a recipe. A signal to stop ends the search early; the result
    then has `ending == "stopped"`.

    Args:
        cluster: devices of this machine such as `8xH100-80GB`, or a `Cluster`; None: the recipe's
            `cluster`, else the devices are detected.
        profile: file of measured rates (`doctor --calibrate`); only with the text of a cluster.
        num_ranks: ranks to start; default one per device of the cluster.
        budget_seconds: time limit of everything; `max_trial_seconds` of one trial, by default a
            quarter of it.
        num_steps: measured steps of the last round.
        fixed: settings that keep the recipe's value, such as `layout` or `recompute`.
        folder: folder of the results, default runs/<name>-tune; `resume` continues in it.
        out: file of the tuned recipe, default tuned.yaml in the folder. It is replaced if it
            exists.
        on_start: called once with the candidates and the cluster, before the first trial.
        on_trial: called with each trial when it has ended.

    Raises:
        InputError: nothing can be tuned, or the budget is too small for one candidate.
        RunFailed: no candidate ran.
    """
    loaded = load_recipe(recipe)
    if detect_rank_environment() is not None:
        raise InputError(
            "tuning starts ranks itself, and a launcher has already started this one",
            field="tune",
            remedy="Run it without torchrun or srun",
        )
    target = None
    if cluster is not None or loaded.cluster is not None:
        target = choose_cluster(loaded, cluster, profile=profile)
    elif profile is not None:
        raise InputError(
            "measured rates need the name of their devices",
            field="--profile",
            got=str(profile),
            remedy="Name the devices, e.g. --cluster 8xH100-80GB",
        )
    # Torch is imported after the recipe is validated, so that errors in it appear at once.
    from shardwright.tuning.recipe_tuning import tune as tune_recipe

    options = TuningOptions(
        num_ranks=num_ranks,
        budget_seconds=budget_seconds,
        max_trial_seconds=max_trial_seconds,
        num_steps=num_steps,
        max_candidates=max_candidates,
        fixed=tuple(list_texts(fixed, "fixed")),
        folder=None if folder is None else Path(folder),
        out=None if out is None else Path(out),
        resume=resume,
        open_progress=open_progress,
        on_start=on_start,
        on_trial=on_trial,
    )
    return tune_recipe(loaded, target, options)
