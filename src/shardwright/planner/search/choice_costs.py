"""Costs and bounds of partial choices in the search, computed once per distinct choice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shardwright.planner.memory.activations import get_layer_activations
from shardwright.planner.memory.parameter_memory import (
    PersistentMemory,
    compute_persistent_memory,
)
from shardwright.planner.memory.stage_load import StageLoad
from shardwright.planner.prediction import MemoryParts
from shardwright.planner.predictor import Predictor
from shardwright.planner.search.bounds import (
    DataTrafficBound,
    MinLayerCosts,
    PipelineBoundModel,
    PipelineKey,
    PipelinesBoundModel,
    build_pipeline_key,
    merge_costs,
)
from shardwright.planner.search.divisibility import list_schedules
from shardwright.planner.search.space import (
    ANY_EXECUTION,
    Degrees,
    ExecutionChoice,
    PlanningProblem,
    SearchSpace,
    ShardingChoice,
)
from shardwright.planner.search.state import (
    CompleteChoice,
    DeferredActivations,
    PipelineOptions,
    RowActivations,
    ScheduleOption,
    build_pipeline_options,
)
from shardwright.planner.time.data_parallel_time import RankTraffic
from shardwright.planner.time.pipeline import PipelineStages
from shardwright.planner.time.pipeline_simulation import SimulationHistory
from shardwright.planner.time.step_costs import LayerCompute, LayerCosts

CompleteKey = tuple[Degrees, ExecutionChoice, ShardingChoice, tuple[str, int | None]]
"""All choices; the last one is the schedule with its virtual stages."""


class ChoiceCosts:
    """Cached costs of the searches of one problem. Each key has the settings on which its value
    depends."""

    def __init__(self, predictor: Predictor, problem: PlanningProblem, space: SearchSpace) -> None:
        self.predictor = predictor
        self.problem = problem
        self.facts = predictor.facts
        self.space = space
        shares = problem.template.quantised_shares
        self._has_spanning_scales = shares is not None and shares.spanning is not None
        self.simulations = SimulationHistory()
        self._compute = LayerCompute()
        self._costs: dict[tuple[object, ...], LayerCosts] = {}
        self._min_costs: dict[tuple[object, ...], MinLayerCosts] = {}
        self._activations: dict[tuple[object, ...], RowActivations] = {}
        self._deferred: dict[tuple[object, ...], DeferredActivations] = {}
        self._persistent: dict[tuple[object, ...], PersistentMemory] = {}
        self._data_bounds: dict[tuple[object, ...], DataTrafficBound] = {}
        self._schedules: dict[tuple[int, int], PipelineOptions | None] = {}
        self._bounds: dict[PipelineKey, PipelineBoundModel] = {}
        self._smallest_executions: dict[tuple[int, int], list[ExecutionChoice]] = {}
        self._variant_bounds: dict[tuple[object, ...], PipelinesBoundModel] = {}
        self._complete: dict[CompleteKey, CompleteChoice] = {}
        self._traffic: dict[tuple[object, ...], RankTraffic] = {}
        self._min_persistent_bytes: dict[Degrees, float] = {}
        self._sharding_bytes: dict[Degrees, list[tuple[ShardingChoice, float]]] = {}
        self._schedule_bytes: dict[tuple[Degrees, ShardingChoice], list[float]] = {}
        self._deferring_bytes: dict[tuple[object, ...], float] = {}

    def get_pipeline_options(self, degrees: Degrees) -> PipelineOptions | None:
        """Return the schedules that can run, None if there are none."""
        key = (degrees.pp, degrees.accumulation_steps)
        if key not in self._schedules:
            options = []
            for name, virtual in list_schedules(self.facts, degrees.pp, degrees.accumulation_steps):
                candidate = self.space.build_candidate(
                    degrees, ANY_EXECUTION, schedule=(name, virtual)
                )
                pipeline = self.predictor.get_pipeline_stages(candidate)
                options.append(
                    ScheduleOption(
                        self._get_pipeline_bounds(pipeline),
                        pipeline.build_first_load(),
                        name,
                        virtual,
                        self._build_deferring_load(pipeline),
                    )
                )
            self._schedules[key] = (
                build_pipeline_options(options, is_single_stage=degrees.pp == 1)
                if options
                else None
            )
        return self._schedules[key]

    def _build_deferring_load(self, pipeline: PipelineStages) -> StageLoad | None:
        template = self.problem.template
        # Of offloaded activations few are on the device.
        if template.activation_offload != "none" or not template.engine.has_ordered_frees:
            return None
        load = pipeline.build_rank_load(pipeline.num_ranks - 1)
        return load if load.backward_moments else None

    def _get_pipeline_bounds(self, pipeline: PipelineStages) -> PipelineBoundModel:
        key = build_pipeline_key(pipeline)
        if key not in self._bounds:
            self._bounds[key] = PipelineBoundModel(pipeline)
        return self._bounds[key]

    def get_layer_costs(self, degrees: Degrees, execution: ExecutionChoice) -> LayerCosts:
        """Return the cached costs of a micro-batch on the layers."""
        key = (*self._build_cost_key(degrees), execution)
        costs = self._costs.get(key)
        if costs is None:
            costs = self._costs[key] = self.predictor.compute_layer_costs(
                self.space.build_candidate(degrees, execution), self._compute
            )
        return costs

    def get_min_layer_costs(self, degrees: Degrees) -> MinLayerCosts:
        """Return the cached minima of these costs over recomputation and methods of tp and cp."""
        key = self._build_cost_key(degrees)
        costs = self._min_costs.get(key)
        if costs is None:
            costs = self._min_costs[key] = merge_costs(
                [
                    self.get_layer_costs(degrees, execution)
                    for execution in self.space.list_executions(degrees, ("none",))
                ]
            )
        return costs

    def _list_smallest_executions(self, degrees: Degrees) -> list[ExecutionChoice]:
        """List executions, with sequence parallelism where it is possible: it repeats no
        activations. Full recomputation, which usually saves least, is the first."""
        found = self._smallest_executions.get((degrees.tp, degrees.cp))
        if found is None:
            executions = list(self.space.list_executions(degrees))[::-1]
            parallel = [execution for execution in executions if execution.sequence_parallel]
            found = self._smallest_executions[degrees.tp, degrees.cp] = parallel or executions
        return found

    def _build_cost_key(self, degrees: Degrees) -> tuple[object, ...]:
        key = (degrees.tp, degrees.cp, degrees.ep, degrees.micro_batch_size)
        if self._has_spanning_scales and degrees.tp > 1:
            # A stage exchanges the maxima of weights once per step.
            return (*key, degrees.pp, degrees.accumulation_steps)
        return key

    def get_complete_choice(
        self,
        degrees: Degrees,
        execution: ExecutionChoice,
        sharding: ShardingChoice,
        schedule: tuple[str, int | None],
    ) -> CompleteChoice:
        """Return the cached consequences of all choices."""
        key = (degrees, execution, sharding, schedule)
        choice = self._complete.get(key)
        if choice is None:
            choice = self._complete[key] = CompleteChoice(
                self.predictor,
                degrees,
                sharding,
                self.space.build_candidate(degrees, execution, sharding, schedule),
                self.get_layer_costs(degrees, execution),
                self._get_traffic(key),
            )
        return choice

    def _get_traffic(self, choices: CompleteKey) -> RankTraffic:
        """Return the cached traffic of ranks, which does not depend on the micro-batch and its
        execution, unless ranks gather codes."""
        degrees, _, sharding, schedule = choices
        is_shared = self.problem.template.quantised_shares is None
        key = (degrees[:5], sharding, schedule) if is_shared else choices
        return self._traffic.setdefault(key, RankTraffic())

    def get_memory(self, choice: CompleteChoice, rank: int) -> MemoryParts:
        """Return the cached memory of one rank of a pipeline, with the persistent one that other
        choices share."""
        memory = choice.memory_of_rank.get(rank)
        if memory is None:
            load = choice.pipeline.build_rank_load(rank)
            memory = choice.memory_of_rank[rank] = self.predictor.compute_rank_memory(
                choice.candidate,
                load,
                self.get_persistent_memory(choice.degrees, load, choice.sharding),
            )
        return memory

    def find_largest_memory(self, choice: CompleteChoice, capacity_bytes: float) -> MemoryParts:
        """Return the memory of the rank that needs the most, or of one that needs more than the
        capacity."""
        # The first rank had enough. The last one often has not: it has the head.
        last = self.get_memory(choice, choice.pipeline.num_ranks - 1)
        by_rank = [last]
        if last.total <= capacity_bytes:
            for rank in choice.pipeline.fullest_ranks:
                by_rank.append(self.get_memory(choice, rank))
                if by_rank[-1].total > capacity_bytes:
                    break
        return max(by_rank[1:] or by_rank, key=lambda memory: memory.total)

    def get_activations(self, degrees: Degrees, execution: ExecutionChoice) -> RowActivations:
        """Return the cached activation bytes of one row."""
        key = (*_build_activation_key(degrees), execution)
        activations = self._activations.get(key)
        if activations is None:
            row = degrees._replace(micro_batch_size=1)
            candidate = self.space.build_candidate(row, execution)
            activations = self._activations[key] = RowActivations(
                tuple(
                    get_layer_activations(self.facts, kind, candidate).saved_bytes
                    for kind in self.facts.kinds
                ),
                is_offloaded=candidate.activation_offload != "none",
            )
        return activations

    def get_deferred_activations(
        self, degrees: Degrees, execution: ExecutionChoice
    ) -> DeferredActivations:
        """Return the cached activation bytes of a micro-batch under a schedule that defers
        gradients of weights."""
        key = (*_build_activation_key(degrees), degrees.micro_batch_size, execution)
        activations = self._deferred.get(key)
        if activations is None:
            candidate = self.space.build_candidate(degrees, execution, schedule=("zb_h1", None))
            layers = [
                get_layer_activations(self.facts, kind, candidate) for kind in self.facts.kinds
            ]
            activations = self._deferred[key] = DeferredActivations(
                tuple(layer.saved_bytes for layer in layers),
                tuple(layer.deferred_bytes for layer in layers),
            )
        return activations

    def get_data_bound(
        self, degrees: Degrees, sharding: ShardingChoice, min_layers: tuple[int, ...]
    ) -> DataTrafficBound:
        """Return the cached bound of data-parallel communication."""
        key = (degrees.pp, degrees.tp, degrees.cp, degrees.ep, sharding, min_layers)
        bound = self._data_bounds.get(key)
        if bound is None:
            bound = self._data_bounds[key] = DataTrafficBound(
                self.predictor,
                self.space.build_candidate(degrees, ANY_EXECUTION, sharding),
                min_layers,
            )
        return bound

    def get_persistent_memory(
        self, degrees: Degrees, load: StageLoad, sharding: ShardingChoice
    ) -> PersistentMemory:
        """Return the cached memory of a rank that persists between steps."""
        key = (
            degrees.tp,
            degrees.cp,
            degrees.ep,
            degrees.data_ranks,
            degrees.accumulation_steps > 1,
            load.layers,
            load.has_embedding,
            load.has_head,
            sharding,
        )
        memory = self._persistent.get(key)
        if memory is None:
            memory = self._persistent[key] = compute_persistent_memory(
                self.facts, self.space.build_candidate(degrees, ANY_EXECUTION, sharding), load
            )
        return memory

    def list_sharding_bytes(
        self, degrees: Degrees, pipelines: PipelineOptions
    ) -> list[tuple[ShardingChoice, float]]:
        """List the shardings with the least bytes at a loss of the first rank's persistent memory
        over schedules."""
        found = self._sharding_bytes.get(degrees)
        if found is None:
            load = pipelines.first_rank_load
            found = self._sharding_bytes[degrees] = [
                (sharding, self.get_persistent_memory(degrees, load, sharding).total_at_loss)
                for sharding in self.space.list_shardings(degrees)
            ]
        return found

    def list_schedule_bytes(
        self, degrees: Degrees, sharding: ShardingChoice, pipelines: PipelineOptions
    ) -> list[float]:
        """List the bytes at a loss of the first rank's persistent memory under each schedule."""
        key = (degrees, sharding)
        found = self._schedule_bytes.get(key)
        if found is None:
            found = self._schedule_bytes[key] = [
                self.get_persistent_memory(
                    degrees, scheduled.first_rank_load, sharding
                ).total_at_loss
                for scheduled in pipelines.options
            ]
        return found

    def compute_deferring_bytes(
        self, degrees: Degrees, execution: ExecutionChoice, scheduled: ScheduleOption
    ) -> float:
        """Compute the least activation bytes of the rank that defers most."""
        key = (degrees, execution, scheduled.name, scheduled.virtual_stages)
        num_bytes = self._deferring_bytes.get(key)
        if num_bytes is None:
            assert scheduled.deferring_rank_load is not None
            activations = self.get_deferred_activations(degrees, execution)
            num_bytes = self._deferring_bytes[key] = activations.compute_min_bytes(
                scheduled.deferring_rank_load
            )
        return num_bytes

    def get_min_persistent_bytes(self, degrees: Degrees, pipelines: PipelineOptions) -> float:
        """Return the cached `compute_min_persistent_bytes` of the first rank over schedules."""
        num_bytes = self._min_persistent_bytes.get(degrees)
        if num_bytes is None:
            num_bytes = self._min_persistent_bytes[degrees] = self.compute_min_persistent_bytes(
                degrees, pipelines.first_rank_load
            )
        return num_bytes

    def compute_min_persistent_bytes(self, degrees: Degrees, load: StageLoad) -> float:
        """Compute the least bytes at a loss of a rank's persistent memory over ZeRO stages."""
        # Frozen weights may take less than those that the highest stage gathers.
        shardings: Iterable[ShardingChoice] = (
            (self.space.get_max_sharding(degrees),)
            if self.problem.template.adapter is None and not self.facts.frozen_names
            else self.space.list_shardings(degrees) or (self.space.get_max_sharding(degrees),)
        )
        return min(
            self.get_persistent_memory(degrees, load, sharding).total_at_loss
            for sharding in shardings
        )

    def get_variant_bounds(self, variants: tuple[Degrees, ...]) -> PipelinesBoundModel:
        """Return the cached bounds over the pipelines of all micro-batch variants."""
        key = (variants[0].pp, tuple(degrees.accumulation_steps for degrees in variants))
        bounds = self._variant_bounds.get(key)
        if bounds is None:
            bounds = self._variant_bounds[key] = PipelinesBoundModel(
                pipeline
                for degrees in variants
                if (pipelines := self.get_pipeline_options(degrees)) is not None
                for pipeline in pipelines.bounds.pipelines
            )
        return bounds

    def iterate_min_activation_bytes(
        self, degrees: Degrees, pipelines: PipelineOptions
    ) -> Iterator[float]:
        """Yield lower bounds of the first rank's activation bytes over schedules, for methods and
        kinds of recomputation of which one has the minimum of all."""
        for execution in self._list_smallest_executions(degrees):
            activations = self.get_activations(degrees, execution)
            yield activations.compute_min_bytes(pipelines.num_passes, degrees.micro_batch_size)


def _build_activation_key(degrees: Degrees) -> tuple[object, ...]:
    """Return the degrees on which activations depend, next to the micro-batch."""
    return (
        degrees.tp,
        degrees.cp,
        degrees.ep,
        degrees.data_ranks > 1,
        degrees.accumulation_steps > 1,
    )
