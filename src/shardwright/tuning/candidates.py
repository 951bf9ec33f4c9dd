"""Settings worth a trial: those whose predicted interval overlaps that of the fastest.

The global batch, the model and the data are those of the recipe; what changes is the layout, how
the batch is split, recomputation, compilation, prefetching, bucket sizes and offloading.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Literal, get_args

from shardwright.config import Recipe
from shardwright.errors import InputError, LayoutError, RecipeError
from shardwright.hardware import Cluster
from shardwright.planner.auto_layout import apply_candidate, apply_compilation
from shardwright.planner.candidate import Candidate, OffloadKind
from shardwright.planner.memory_settings import predict_run
from shardwright.planner.prediction import Prediction
from shardwright.planner.predictor import build_predictor
from shardwright.planner.problem import (
    build_problem,
    build_recipe_candidate,
    build_template,
    get_recipe_facts,
    read_planning_shape,
    restrict_to_runnable,
)
from shardwright.planner.rejections import explain_conflict
from shardwright.planner.search.best_first import search_layouts
from shardwright.planner.search.result import EQUAL_STEP_SHARE
from shardwright.planner.search.space import list_batches
from shardwright.planner.step_profile import describe_workload
from shardwright.plans import resolve_degrees
from shardwright.units import MIB_BYTES, format_bytes

Setting = Literal[
    "layout", "micro_batch_size", "recompute", "compile", "prefetch", "bucket_size", "offload"
]
"""Group of recipe keys that can change together, by the name that `--fix` takes."""
SETTINGS: tuple[Setting, ...] = get_args(Setting)

DEFAULT_MAX_CANDIDATES = 16
_MAX_LAYOUTS = 24
_DOUBTFUL_SHARE = 0.10
"""Share by which candidates rank as slower that do not fit as predicted, but may: their trial
probably ends without memory."""
_MAX_PREFETCH_DEPTH = 2
_BUCKET_SIZES_BYTES = (8 * MIB_BYTES, 100 * MIB_BYTES)
"""Buckets below and above the default of 25 MiB."""


@dataclass(frozen=True)
class TuningRequest:
    """A recipe to tune on `num_ranks` ranks of a cluster."""

    recipe: Recipe
    """With the precision settled, and the vocabulary size in an inline config."""
    cluster: Cluster
    num_ranks: int
    is_compiled: bool
    """Compilation of the recipe's blocks on this machine."""
    can_compile: bool
    """True if torch.compile works on this machine."""
    fixed: frozenset[Setting] = frozenset()
    max_candidates: int = DEFAULT_MAX_CANDIDATES


@dataclass(frozen=True)
class TuningCandidate:
    """Settings to try: the complete recipe, and its prediction."""

    recipe: Recipe
    prediction: Prediction
    is_compile_changed: bool = False
    is_baseline: bool = False
    """True for the settings of the recipe as the user wrote it."""

    @property
    def key(self) -> str:
        """Hash of everything that tuning changes."""
        recipe = self.recipe.model_dump(mode="json")
        changed = {name: recipe[name] for name in ("layout", "recompute", "offload", "training")}
        changed["compile"] = recipe["model"]["compile"]
        return hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:12]

    def describe(self) -> str:
        """Describe the settings in one line."""
        candidate = self.prediction.candidate
        layout = candidate.layout
        default = type(layout)()
        words = [
            candidate.describe(),
            f"{candidate.micro_batch_size} x {candidate.gradient_accumulation_steps}",
            f"recompute {candidate.recompute}",
        ]
        if self.is_compile_changed:
            words.append("compiled" if candidate.compile else "not compiled")
        if layout.prefetch_depth != default.prefetch_depth:
            words.append(f"prefetch {layout.prefetch_depth}")
        if layout.wrap_blocks != default.wrap_blocks:
            words.append(f"{layout.wrap_blocks} blocks per gather")
        if layout.bucket_size_bytes != default.bucket_size_bytes:
            words.append(f"buckets of {format_bytes(layout.bucket_size_bytes)}")
        return ", ".join(words)


@dataclass(frozen=True)
class CandidateList:
    """Candidates, the recipe's own settings first if they can run, then by predicted time."""

    candidates: tuple[TuningCandidate, ...]
    num_overlapping: int
    """Number of predicted settings whose interval overlaps that of the fastest."""
    workload: str
    """Hash of everything but the settings, for the file of measured steps."""
    baseline_obstacle: str | None = None
    """Reason why the recipe's own settings are not among the candidates."""


def parse_settings(names: Iterable[str]) -> frozenset[Setting]:
    """Return the settings with these names.

    Raises:
        InputError: unknown name.
    """
    found: set[Setting] = set()
    for name in names:
        matching = [setting for setting in SETTINGS if setting == name]
        if not matching:
            raise InputError(
                "not a setting that tuning changes",
                field="--fix",
                got=name,
                allowed=", ".join(SETTINGS),
            )
        found.update(matching)
    return frozenset(found)


def list_candidates(request: TuningRequest) -> CandidateList:
    """List the candidates, at most `max_candidates`.

    Raises:
        InputError: no layout divides the model, the batch and the ranks, nothing fits, or only one
            candidate is left: then there is nothing to tune.
    """
    return _CandidateSearch(request).run()


class _CandidateSearch:
    """The planner's view of a request, and the steps that lead to the list."""

    def __init__(self, request: TuningRequest) -> None:
        self.request = request
        self.recipe, self.baseline_obstacle = _fix_global_batch(request)
        shape = read_planning_shape(self.recipe)
        self.predictor = build_predictor(get_recipe_facts(self.recipe, shape), request.cluster)
        template = replace(build_template(self.recipe), compile=request.is_compiled)
        self.predictor.get_rates(template)  # raise for a precision without units
        planned = self.recipe.model_copy(
            update={
                "training": self.recipe.training.model_copy(
                    update={"micro_batch_size": None, "gradient_accumulation_steps": None}
                )
            }
        )
        if self.recipe.recompute_kind is None:
            raise InputError(
                "tuning compares only kinds of recomputation that treat all layers alike",
                field="recompute",
                got="auto or a budget",
                allowed="none, selective, full",
                remedy="Tune with one of them (--set recompute=full), then set the budget",
            )
        problem = build_problem(planned, template, request.num_ranks)
        self.problem = restrict_to_runnable(problem, shape)
        own = build_recipe_candidate(self.recipe, template, request.num_ranks)
        self.own = own
        if own is not None and "micro_batch_size" in request.fixed:
            self.problem = replace(self.problem, micro_batch_sizes=(own.micro_batch_size,))
        if "recompute" in request.fixed:
            self.problem = replace(self.problem, recompute_kinds=(self.recipe.recompute_kind,))

    def run(self) -> CandidateList:
        groups = [
            list(self._predict(chain((layout,), self._iterate_variants(layout))))
            for layout in self._list_layouts()
        ]
        predictions = [prediction for group in groups for prediction in group]
        baseline = self._build_baseline()
        if not predictions and baseline is None:
            raise self._build_error()
        fastest = min(predictions, key=lambda p: p.time.step, default=None)
        ranked: list[tuple[float, TuningCandidate]] = []
        for group in groups:
            candidates = self._build_candidates(group, fastest)
            # A setting that repeats a layout ranks as if it were a little slower: the order of
            # predictions closer than this share is often wrong, so that layouts come first.
            ranked += [
                (_get_rank_seconds(each.prediction) * (1 + EQUAL_STEP_SHARE * index), each)
                for index, each in enumerate(candidates)
            ]
        ranked.sort(key=lambda pair: pair[0])
        distinct = {} if baseline is None else {baseline.key: baseline}
        for _, candidate in ranked:
            distinct.setdefault(candidate.key, candidate)
        if len(distinct) < 2:
            raise InputError(
                "nothing to tune: only one combination of settings remains",
                field="--fix" if self.request.fixed else "recipe",
                got=", ".join(each.describe() for each in distinct.values()) or None,
                allowed=f"settings that tuning may change: {', '.join(SETTINGS)}",
                remedy="Fix fewer settings (--fix), or use more ranks or a larger batch",
            )
        chosen = tuple(distinct.values())[: self.request.max_candidates]
        workload = describe_workload(self.predictor, self.problem)
        return CandidateList(chosen, len(distinct), workload, self.baseline_obstacle)

    def _list_layouts(self) -> list[Candidate]:
        """List the layouts to vary: the planner's best for all degrees, or the recipe's own."""
        if "layout" in self.request.fixed:
            if self.own is None:
                raise LayoutError(
                    "the recipe's layout cannot run on this number of ranks: "
                    f"{self.baseline_obstacle}",
                    field="--fix layout",
                    got=self.request.num_ranks,
                    remedy="Change the number of ranks (--nproc), or let the layout change",
                )
            return [self.own]
        found = search_layouts(self.predictor, self.problem, num_layouts=_MAX_LAYOUTS)
        return [prediction.candidate for prediction in found.predictions]

    def _iterate_variants(self, candidate: Candidate) -> Iterator[Candidate]:
        """Yield the candidate with other settings: of the batch and of recomputation in all
        combinations, all others one at a time."""
        splits = chain.from_iterable(list_batches(self.problem, candidate.layout.data_ranks))
        for (micro_batch, steps), recompute in product(splits, self.problem.recompute_kinds):
            yield replace(
                candidate,
                micro_batch_size=micro_batch,
                gradient_accumulation_steps=steps,
                recompute=recompute,
            )
        fixed = self.request.fixed
        layout = candidate.layout
        if "compile" not in fixed and (self.request.can_compile or candidate.compile):
            yield replace(candidate, compile=not candidate.compile)
        if "prefetch" not in fixed and layout.zero_stage == 3 and layout.fsdp > 1:
            deeper = replace(
                layout,
                prefetch_depth=_MAX_PREFETCH_DEPTH,
                max_gathers_in_flight=max(layout.max_gathers_in_flight, 1 + _MAX_PREFETCH_DEPTH),
            )
            yield replace(candidate, layout=deeper)
            yield replace(candidate, layout=replace(layout, wrap_blocks=2 * layout.wrap_blocks))
        if "bucket_size" not in fixed and layout.zero_stage == 0 and layout.data_ranks > 1:
            for size in _BUCKET_SIZES_BYTES:
                yield replace(candidate, layout=replace(layout, bucket_size_bytes=size))
        if "offload" not in fixed and self.request.cluster.accelerator.kind == "gpu":
            kinds: tuple[OffloadKind, ...] = ("none", "optimizer")
            for kind in kinds:
                yield replace(candidate, offload=kind)

    def _predict(self, candidates: Iterable[Candidate]) -> Iterator[Prediction]:
        """Yield predictions of the candidates that can run and may fit, without repetitions.

        The low end of the memory's interval decides: a trial shows whether the rest fits.
        """
        for candidate in dict.fromkeys(candidates):
            try:
                if explain_conflict(self.predictor, self.problem, candidate) is not None:
                    continue
                if self.problem.is_allowed is not None and not self.problem.is_allowed(candidate):
                    continue
                prediction = predict_run(self.predictor, candidate)
                resolve_degrees(self._apply(candidate), self.request.num_ranks)
            except InputError:
                continue
            if prediction.memory_interval[0] <= prediction.memory_capacity_bytes:
                yield prediction

    def _build_candidates(
        self, group: Sequence[Prediction], fastest: Prediction | None
    ) -> list[TuningCandidate]:
        """Return the overlapping candidates of one layout, the most promising first."""
        assert fastest is not None
        overlapping = [p for p in group if p.step_interval[0] <= fastest.step_interval[1]]
        overlapping.sort(key=_get_rank_seconds)
        return [self._build_candidate(prediction) for prediction in overlapping]

    def _build_candidate(self, prediction: Prediction) -> TuningCandidate:
        candidate = prediction.candidate
        return TuningCandidate(
            self._apply(candidate),
            prediction,
            is_compile_changed=candidate.compile != self.request.is_compiled,
        )

    def _build_baseline(self) -> TuningCandidate | None:
        """Return the recipe's own settings; None, with `baseline_obstacle`, if they cannot run."""
        if self.own is None:
            return None
        for prediction in self._predict([self.own]):
            return replace(self._build_candidate(prediction), is_baseline=True)
        reason = explain_conflict(self.predictor, self.problem, self.own)
        self.baseline_obstacle = reason or "it needs too much memory by the planner's prediction"
        return None

    def _apply(self, candidate: Candidate) -> Recipe:
        """Return the recipe with the candidate's settings."""
        recipe = self.recipe
        template = self.problem.template
        if candidate.offload != template.offload:
            section = recipe.offload.change_tiers(optimizer=candidate.optimizer_tier)
            recipe = recipe.model_copy(update={"offload": section})
        return apply_candidate(apply_compilation(recipe, candidate, template), candidate)

    def _build_error(self) -> LayoutError:
        """Return the error for a recipe without candidates."""
        found = search_layouts(self.predictor, self.problem, num_layouts=1)
        too_large = found.num_too_large > 0
        return LayoutError(
            "no candidate fits these devices"
            if too_large
            else "no layout divides the model, the batch and this number of ranks",
            field="--nproc",
            got=self.request.num_ranks,
            remedy="Use more or larger devices, a shorter sequence_length or a smaller model"
            if too_large
            else "Choose a number of ranks that divides the global batch, the heads or the layers",
        )


def _get_rank_seconds(prediction: Prediction) -> float:
    """Return the predicted seconds by which candidates are ordered."""
    return prediction.time.step * (1 if prediction.fits else 1 + _DOUBTFUL_SHARE)


def _fix_global_batch(request: TuningRequest) -> tuple[Recipe, str | None]:
    """Return the recipe with its global batch written out, and the reason why its own layout
    cannot run on these ranks; None if it can.

    Raises:
        RecipeError: the recipe states no global batch, and its layout does not define one.
    """
    recipe = request.recipe
    if recipe.layout.auto:
        obstacle = "layout is auto"
    else:
        try:
            _, batch = resolve_degrees(recipe, request.num_ranks)
        except InputError as error:
            obstacle = str(error)
        else:
            update = {"global_batch_size": batch.global_batch_size}
            training = recipe.training.model_copy(update=update)
            return recipe.model_copy(update={"training": training}), None
    if recipe.training.global_batch_size is None:
        raise RecipeError(
            "the global batch is not known, and candidates must have the same one",
            field="training.global_batch_size",
            got=f"not set ({obstacle})",
            remedy="Set it",
        )
    return recipe, obstacle
