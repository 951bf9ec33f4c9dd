"""Recipe, plan, prediction and run folder that the checks of a checklist use."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from shardwright.architecture import ModelShape, read_recipe_shape
from shardwright.architecture.config_reading import PLACEHOLDER_VOCAB_SIZE
from shardwright.checkpoint.run_folder import RunFolder
from shardwright.config import Recipe
from shardwright.data.preparation import is_prepared
from shardwright.errors import InputError, ShardwrightError
from shardwright.launch.auto_layout import detect_cluster, plan_ranks
from shardwright.planner.auto_layout import build_cluster
from shardwright.planner.engine_model import OPTIMIZER_COSTS
from shardwright.planner.memory_settings import predict_run
from shardwright.planner.prediction import Prediction
from shardwright.planner.predictor import build_predictor
from shardwright.planner.problem import (
    build_plan_candidate,
    build_template,
    get_recipe_facts,
    resolve_compilation_on,
)
from shardwright.planner.recompute.choice import resolve_recompute
from shardwright.planner.search.space import PlanningProblem
from shardwright.planner.step_profile import correct_full_rows
from shardwright.plans import Plan, resolve_plan
from shardwright.telemetry.event_log import StepEvent, read_events
from shardwright.training.checks.run_checks import ValidatedRun, validate_run

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
        return plan_ranks(self.original_recipe, self.world_size).recipe

    @cached_property
    def plan(self) -> Plan:
        """Plan of the recipe; raises InputError if layout or batch is not consistent."""
        return resolve_plan(self.resolved_recipe, self.model_shape, self.world_size)

    @cached_property
    def model_shape(self) -> ModelShape:
        """Shape of the model; raises ArchitectureError for an unsupported model."""
        return read_recipe_shape(self.original_recipe)

    @cached_property
    def trained_shape(self) -> ModelShape:
        """Shape with the tokenizer's vocabulary, which a recipe may leave open, if the data is
        tokenised; otherwise `model_shape`."""
        with suppress(ShardwrightError):  # the checks of layout and data report it
            if self.preflight_result is not None:
                return self.preflight_result.shape
        return self.model_shape

    @cached_property
    def vocabulary_note(self) -> str:
        """Remark on numbers of a model whose vocabulary is not known before the data is tokenised,
        to append to them; empty if it is known."""
        config = self.original_recipe.model.config
        if (
            config is None
            or "vocab_size" in config
            or self.original_recipe.tokenizer.vocab_size is not None
        ):
            return ""
        with suppress(ShardwrightError):  # the check of the data reports it
            if self.preflight_result is not None:
                return ""
        return (
            f", with a vocabulary of {PLACEHOLDER_VOCAB_SIZE} ids for now: the data is not "
            "tokenised yet"
        )

    @cached_property
    def run_folder(self) -> RunFolder:
        """Folder with recipe, events and checkpoints of the run."""
        return RunFolder.from_recipe(self.original_recipe)

    @cached_property
    def prediction(self) -> Prediction | None:
        """Planner's prediction, corrected by measured step times as in `plan`; None without a
        cluster in the recipe or a known GPU here."""
        section = self.resolved_recipe.cluster
        if section is None:
            try:
                section = detect_cluster(self.resolved_recipe, self.world_size)
            except InputError:
                return None
        cluster = build_cluster(section, self.world_size)
        recipe = resolve_compilation_on(self.resolved_recipe, cluster.accelerator)
        plan = resolve_plan(recipe, self.model_shape, self.world_size)
        plan = resolve_recompute(recipe, plan, cluster)
        predictor = build_predictor(get_recipe_facts(recipe, self.model_shape), cluster)
        candidate = build_plan_candidate(recipe, plan)
        problem = PlanningProblem(candidate, self.world_size, plan.batch.global_batch_size)
        return correct_full_rows(predict_run(predictor, candidate), predictor, problem)

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
        costs = OPTIMIZER_COSTS[candidate.optimizer]
        shape = self.trained_shape
        num_bytes = shape.num_parameters * (candidate.master_bytes + costs.state_bytes)
        others = [spec for spec in shape.list_parameters() if not spec.is_block_matrix]
        return num_bytes + sum(spec.num_elements for spec in others) * costs.other_bytes

    @cached_property
    def preflight_result(self) -> ValidatedRun | None:
        """Result of checking the recipe with its data; None until the data is tokenised."""
        return (
            validate_run(self.resolved_recipe, self.world_size)
            if is_prepared(self.original_recipe)
            else None
        )
