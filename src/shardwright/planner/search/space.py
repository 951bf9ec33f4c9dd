"""Search space of layouts: four choices in sequence, and the candidate that results from them.

1  degrees, micro-batch         all factorisations of the device count that divide model, batch
2  recompute, methods of tp, cp
3  ZeRO                         stage, and number of ranks to shard over
4  schedule
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple, TypeVar

from shardwright.config.recipe import RecomputeKind
from shardwright.layout import CpMethod
from shardwright.layout.degrees import ZeroStage
from shardwright.planner.candidate import Candidate
from shardwright.planner.model_costs import ModelFacts
from shardwright.planner.search.divisibility import (
    explain_context_conflict,
    explain_expert_conflict,
    explain_tensor_conflict,
    list_divisors,
)

T = TypeVar("T")


@dataclass(frozen=True)
class PlanningProblem:
    """A planning problem: a candidate with all fixed settings, and the settings to search.

    `template` gives sequence length, precision, optimizer, adapters, wrapping and so on; its
    layout and batch are replaced. If `global_batch_size` is None, each rank has
    `micro_batch_sizes` x accumulation 1, for any number of ranks.
    """

    template: Candidate
    num_gpus: int
    global_batch_size: int | None
    micro_batch_sizes: tuple[int, ...] | None = None
    """Sizes to try. None: all that divide the batch."""
    accumulation_steps: tuple[int, ...] | None = None
    recompute_kinds: tuple[RecomputeKind, ...] = ("none", "selective", "full")
    zero_stages: tuple[ZeroStage, ...] = (0, 1, 2, 3)
    is_allowed: Callable[[Candidate], bool] | None = None
    """Additional condition on candidates (`layout: auto`: that `train` can run them;
    fp8: that the recipe's scales are those of one process)."""


class Degrees(NamedTuple):
    """First choice: degrees and batch. `data_ranks` is the number of ranks that read different
    samples."""

    pp: int
    tp: int
    cp: int
    ep: int
    data_ranks: int
    micro_batch_size: int
    accumulation_steps: int

    @property
    def num_parallel_axes(self) -> int:
        """Number of axes of model parallelism in use."""
        return (self.pp > 1) + (self.tp > 1) + (self.cp > 1) + (self.ep > 1)


class ExecutionChoice(NamedTuple):
    """Second choice: settings that change the cost of a micro-batch, other than the degrees."""

    recompute: RecomputeKind
    sequence_parallel: bool
    cp_method: CpMethod


class ShardingChoice(NamedTuple):
    """ZeRO stage, and number of replicas of each shard."""

    zero_stage: ZeroStage
    num_replicas: int


ANY_EXECUTION = ExecutionChoice("none", sequence_parallel=True, cp_method="ring")
"""Execution for costs that do not depend on it."""


class SearchSpace:
    """All choices of one planning problem. `domain_size` devices share the fast links."""

    def __init__(self, facts: ModelFacts, problem: PlanningProblem, domain_size: int) -> None:
        self.facts = facts
        self.problem = problem
        self._domain_size = domain_size
        self._shardings: dict[tuple[int, ...], tuple[ShardingChoice, ...]] = {}
        self._sequence_methods: dict[tuple[int, int], list[tuple[bool, CpMethod]]] = {}

    def list_degrees(self) -> Iterator[tuple[Degrees, ...]]:
        """Yield the first choices. Those that differ only in how a rank's rows are split into
        micro-batches follow each other, smallest micro-batch first."""
        facts = self.facts
        problem = self.problem
        for tp in list_divisors(problem.num_gpus):
            if tp > facts.shape.num_heads or explain_tensor_conflict(facts, tp):
                continue
            for cp in list_divisors(problem.num_gpus // tp):
                if not self._list_sequence_methods(tp, cp):
                    continue
                for pp in list_divisors(problem.num_gpus // tp // cp):
                    if pp > facts.shape.num_layers:
                        break
                    data_ranks = problem.num_gpus // tp // cp // pp
                    for ep, variants in product(
                        self._list_expert_degrees(data_ranks * cp),
                        list_batches(problem, data_ranks),
                    ):
                        yield tuple(
                            Degrees(pp, tp, cp, ep, data_ranks, micro_batch, steps)
                            for micro_batch, steps in variants
                        )

    def _list_expert_degrees(self, num_ranks: int) -> Iterable[int]:
        experts = self.facts.shape.experts
        return (
            (1,)
            if experts is None
            else (
                e
                for e in list_divisors(experts.num_experts)
                if not explain_expert_conflict(self.facts, e, num_ranks)
            )
        )

    def list_executions(
        self, degrees: Degrees, recompute_kinds: tuple[RecomputeKind, ...] | None = None
    ) -> Iterator[ExecutionChoice]:
        """Yield recomputation, of the problem's kinds or those given, with the methods of tp and
        cp."""
        for recompute, (sequence_parallel, method) in product(
            recompute_kinds or self.problem.recompute_kinds,
            self._list_sequence_methods(degrees.tp, degrees.cp),
        ):
            yield ExecutionChoice(recompute, sequence_parallel, method)

    def _list_sequence_methods(self, tp: int, cp: int) -> list[tuple[bool, CpMethod]]:
        """List sequence parallelism on or off with the context-parallel methods that can shard
        the rows."""
        found = self._sequence_methods.get((tp, cp))
        if found is None:
            methods: tuple[CpMethod, ...] = (
                ("ring", "all_gather", "ulysses") if cp > 1 else ("auto",)
            )
            found = self._sequence_methods[tp, cp] = [
                (sequence_parallel, method)
                for sequence_parallel, method in product(
                    (True, False) if tp > 1 else (True,), methods
                )
                if self._can_shard_rows(tp, cp, sequence_parallel, method)
            ]
        return found

    def _can_shard_rows(self, tp: int, cp: int, sequence_parallel: bool, method: CpMethod) -> bool:
        template = self.problem.template
        layout = replace(
            template.layout, tp=tp, cp=cp, sequence_parallel=sequence_parallel, cp_method=method
        )
        return explain_context_conflict(self.facts, layout, template.sequence_length) is None

    def list_shardings(self, degrees: Degrees) -> tuple[ShardingChoice, ...]:
        """List ZeRO stages, sharded over all data ranks or over those of a fast domain. Stage
        0 replicates."""
        key = (degrees.tp, degrees.cp, degrees.ep, degrees.data_ranks)
        found = self._shardings.get(key)
        if found is None:
            found = self._shardings[key] = tuple(self._iterate_shardings(degrees))
        return found

    def _iterate_shardings(self, degrees: Degrees) -> Iterator[ShardingChoice]:
        local = max(1, self._domain_size // (degrees.tp * degrees.cp))
        for stage in self.problem.zero_stages:
            if stage == 0:
                if degrees.ep == 1 or degrees.cp % degrees.ep == 0:
                    yield ShardingChoice(0, degrees.data_ranks)
            elif degrees.data_ranks * degrees.cp > 1:
                shards_in_domain = max(
                    shards for shards in list_divisors(degrees.data_ranks) if shards <= local
                )
                for shards in dict.fromkeys((degrees.data_ranks, shards_in_domain)):
                    if shards * degrees.cp > 1 and not explain_expert_conflict(
                        self.facts, degrees.ep, shards * degrees.cp
                    ):
                        yield ShardingChoice(stage, degrees.data_ranks // shards)

    def get_max_sharding(self, degrees: Degrees) -> ShardingChoice:
        """Return the choice with the most sharding."""
        stage = max(self.problem.zero_stages)
        return (
            ShardingChoice(stage, 1)
            if stage and degrees.data_ranks * degrees.cp > 1
            else ShardingChoice(0, degrees.data_ranks)
        )

    def build_candidate(
        self,
        degrees: Degrees,
        execution: ExecutionChoice,
        sharding: ShardingChoice | None = None,
        schedule: tuple[str, int | None] = ("1f1b", None),
    ) -> Candidate:
        """Build the candidate of these choices. Default: everything sharded over all data
        ranks."""
        stage, replicas = sharding or ShardingChoice(
            3 if degrees.data_ranks * degrees.cp > 1 else 0, 1
        )
        template = self.problem.template
        layout = _copy_with(
            template.layout,
            zero_stage=stage,
            dp_replicate=replicas,
            dp_shard=degrees.data_ranks // replicas,
            pp=degrees.pp,
            tp=degrees.tp,
            cp=degrees.cp,
            ep=degrees.ep,
            sequence_parallel=execution.sequence_parallel,
            cp_method=execution.cp_method,
            schedule=schedule[0],
            virtual_stages=schedule[1],
        )
        return _copy_with(
            template,
            layout=layout,
            micro_batch_size=degrees.micro_batch_size,
            gradient_accumulation_steps=degrees.accumulation_steps,
            recompute=execution.recompute,
        )


def _copy_with(template: T, **changes: Any) -> T:
    """As `replace`, of a frozen dataclass without `__post_init__`, in a tenth of its time: a search
    builds tens of thousands of candidates."""
    copy: T = object.__new__(type(template))
    copy.__dict__.update(template.__dict__)
    copy.__dict__.update(changes)
    return copy


def list_batches(problem: PlanningProblem, data_ranks: int) -> Iterator[list[tuple[int, int]]]:
    """Yield lists of (micro-batch, accumulation) for `data_ranks` data ranks, one list per number
    of rows, in ascending order."""
    total = problem.global_batch_size
    if total is None:
        for split in product(problem.micro_batch_sizes or (1,), problem.accumulation_steps or (1,)):
            yield [split]
        return
    splits = []
    for micro_batch in list_divisors(total // data_ranks) if total % data_ranks == 0 else ():
        accumulation = total // data_ranks // micro_batch
        if problem.micro_batch_sizes is not None and micro_batch not in problem.micro_batch_sizes:
            continue
        if problem.accumulation_steps is None or accumulation in problem.accumulation_steps:
            splits.append((micro_batch, accumulation))
    if splits:
        yield splits
