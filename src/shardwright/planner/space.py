"""Search space of layouts: four choices in sequence, and the candidate that results from them.

1  degrees, micro-batch         all factorisations of the device count that divide model, batch
2  recompute, methods of tp, cp
3  ZeRO                         stage, and number of ranks to shard over
4  schedule
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from shardwright.config.schema import RecomputeKind
from shardwright.layout import CpMethod, Layout
from shardwright.layout.degrees import ZeroStage
from shardwright.planner.candidate import Candidate
from shardwright.planner.facts import ModelFacts
from shardwright.planner.rules import divisors, why_not_context, why_not_expert, why_not_tensor


@dataclass(frozen=True)
class Question:
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
    accumulations: tuple[int, ...] | None = None
    recomputes: tuple[RecomputeKind, ...] = ("none", "selective", "full")
    zero_stages: tuple[ZeroStage, ...] = (0, 1, 2, 3)
    allowed: Callable[[Candidate], bool] | None = None
    """Additional condition on candidates (`layout: auto`: that `train` can run them)."""


class Degrees(NamedTuple):
    """First choice: degrees and batch. `data` is the number of ranks that read different
    samples."""

    pp: int
    tp: int
    cp: int
    ep: int
    data: int
    micro_batch: int
    accumulation: int

    @property
    def cuts(self) -> int:
        """Number of axes of model parallelism in use."""
        return (self.pp > 1) + (self.tp > 1) + (self.cp > 1) + (self.ep > 1)


class How(NamedTuple):
    """Second choice: settings that change the cost of a micro-batch, other than the degrees."""

    recompute: RecomputeKind
    sequence_parallel: bool
    method: CpMethod


class Sharding(NamedTuple):
    """ZeRO stage, and number of replicas of each shard."""

    zero_stage: ZeroStage
    replicas: int


PLAIN = How("none", sequence_parallel=True, method="ring")
"""No recomputation and the least communication: a lower bound of all other executions."""


class Space:
    """All choices of one planning problem. `domain_size` devices share the fast links."""

    def __init__(self, facts: ModelFacts, question: Question, domain_size: int) -> None:
        self.facts = facts
        self.question = question
        self._domain_size = domain_size
        self._layout = partial(Layout, **_others(question.template.layout, _SEARCHED_OF_LAYOUT))
        self._candidate = partial(Candidate, **_others(question.template, _SEARCHED))

    def degrees(self) -> Iterator[tuple[Degrees, ...]]:
        """Yield the first choices. Those that differ only in the split of a rank's rows come
        together, smallest micro-batch first."""
        facts = self.facts
        question = self.question
        for tp in divisors(question.num_gpus):
            if tp > facts.shape.num_heads or why_not_tensor(facts, tp):
                continue
            for cp in divisors(question.num_gpus // tp):
                if not self._ways(tp, cp):
                    continue
                for pp in divisors(question.num_gpus // tp // cp):
                    if pp > facts.shape.num_layers:
                        break
                    data_ranks = question.num_gpus // tp // cp // pp
                    for ep, variants in product(self._expert_degrees(data_ranks * cp), batches(question, data_ranks)):
                        yield tuple(Degrees(pp, tp, cp, ep, data_ranks, micro_batch, steps) for micro_batch, steps in variants)

    def _expert_degrees(self, ranks: int) -> Iterable[int]:
        experts = self.facts.shape.experts
        return (1,) if experts is None else (e for e in divisors(experts.num_experts) if not why_not_expert(self.facts, e, ranks))

    def hows(self, degrees: Degrees) -> Iterator[How]:
        """Yield recomputation with the methods of tp and cp."""
        for recompute, (sequence_parallel, method) in product(self.question.recomputes, self._ways(degrees.tp, degrees.cp)):
            yield How(recompute, sequence_parallel, method)

    def _ways(self, tp: int, cp: int) -> list[tuple[bool, CpMethod]]:
        """List sequence parallelism on or off with the context-parallel methods that can shard
        the rows."""
        methods: tuple[CpMethod, ...] = ("ring", "all_gather", "ulysses") if cp > 1 else ("auto",)
        methods_found = []
        for sequence_parallel, method in product((True, False) if tp > 1 else (True,), methods):
            layout = replace(self.question.template.layout, tp=tp, cp=cp, sequence_parallel=sequence_parallel, cp_method=method)
            if why_not_context(self.facts, layout, self.question.template.sequence_length) is None:
                methods_found.append((sequence_parallel, method))
        return methods_found

    def shardings(self, degrees: Degrees) -> Iterator[Sharding]:
        """Yield ZeRO stages, sharded over all data ranks or over those of a fast domain. Stage
        0 replicates."""
        local = max(1, self._domain_size // (degrees.tp * degrees.cp))
        for stage in self.question.zero_stages:
            if stage == 0:
                if degrees.ep == 1 or degrees.cp % degrees.ep == 0:
                    yield Sharding(0, degrees.data)
            elif degrees.data * degrees.cp > 1:
                shards_in_domain = max(shards for shards in divisors(degrees.data) if shards <= local)
                for shards in dict.fromkeys((degrees.data, shards_in_domain)):
                    if shards * degrees.cp > 1 and not why_not_expert(self.facts, degrees.ep, shards * degrees.cp):
                        yield Sharding(stage, degrees.data // shards)

    def most_sharded(self, degrees: Degrees) -> Sharding:
        """Return the choice with the most sharding."""
        stage = max(self.question.zero_stages)
        return Sharding(stage, 1) if stage and degrees.data * degrees.cp > 1 else Sharding(0, degrees.data)

    def candidate(
        self,
        degrees: Degrees,
        how: How,
        sharding: Sharding | None = None,
        schedule: tuple[str, int | None] = ("1f1b", None),
    ) -> Candidate:
        """Build the candidate of these choices. Default: everything sharded over all data
        ranks."""
        stage, replicas = sharding or Sharding(3 if degrees.data * degrees.cp > 1 else 0, 1)
        layout = self._layout(
            zero_stage=stage,
            dp_replicate=replicas,
            dp_shard=degrees.data // replicas,
            pp=degrees.pp,
            tp=degrees.tp,
            cp=degrees.cp,
            ep=degrees.ep,
            sequence_parallel=how.sequence_parallel,
            cp_method=how.method,
            schedule=schedule[0],
            virtual_stages=schedule[1],
        )
        return self._candidate(
            layout=layout,
            micro_batch_size=degrees.micro_batch,
            gradient_accumulation_steps=degrees.accumulation,
            recompute=how.recompute,
        )


def _others(value: Any, searched: frozenset[str]) -> dict[str, Any]:
    """Return the fields that the search does not change. A partial constructor takes half the
    time of `replace`."""
    return {field.name: getattr(value, field.name) for field in fields(value) if field.init and field.name not in searched}


_SEARCHED_OF_LAYOUT = frozenset(
    (
        "zero_stage",
        "dp_replicate",
        "dp_shard",
        "pp",
        "tp",
        "cp",
        "ep",
        "sequence_parallel",
        "cp_method",
        "schedule",
        "virtual_stages",
    )
)
_SEARCHED = frozenset(("layout", "micro_batch_size", "gradient_accumulation_steps", "recompute"))


def batches(question: Question, data: int) -> Iterator[list[tuple[int, int]]]:
    """Yield lists of (micro-batch, accumulation) for `data` data ranks, one list per number of
    rows, in ascending order."""
    total = question.global_batch_size
    if total is None:
        for split in product(question.micro_batch_sizes or (1,), question.accumulations or (1,)):
            yield [split]
        return
    splits = []
    for micro_batch in divisors(total // data) if total % data == 0 else ():
        accumulation = total // data // micro_batch
        if question.micro_batch_sizes is not None and micro_batch not in question.micro_batch_sizes:
            continue
        if question.accumulations is None or accumulation in question.accumulations:
            splits.append((micro_batch, accumulation))
    if splits:
        yield splits
