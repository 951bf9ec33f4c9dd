"""The space that a search goes through, one choice after the other: what there is to choose, and the candidate that it makes.

1  degrees, micro batch           every product that makes the number of devices and divides the model and the batch
2  recompute, methods of tp, cp
3  ZeRO                           stage, and over how many ranks
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
    """What is to be planned: a plain candidate with everything that is not searched, and what is.

    `template` gives sequence length, precision, optimizer, adapters, wrapping and so on; its layout and batch are replaced.
    `global_batch_size` None keeps `micro_batch_sizes` x accumulation 1 a rank, whatever the number of ranks.
    """

    template: Candidate
    num_gpus: int
    global_batch_size: int | None
    micro_batch_sizes: tuple[int, ...] | None = None
    """Those to try; None: all that divide the batch."""
    accumulations: tuple[int, ...] | None = None
    recomputes: tuple[RecomputeKind, ...] = ("none", "selective", "full")
    zero_stages: tuple[ZeroStage, ...] = (0, 1, 2, 3)
    allowed: Callable[[Candidate], bool] | None = None
    """What else a candidate must satisfy (that `train` can run it, for `layout: auto`)."""


class Degrees(NamedTuple):
    """The first choice. `data` are the ranks that read different samples."""

    pp: int
    tp: int
    cp: int
    ep: int
    data: int
    micro_batch: int
    accumulation: int

    @property
    def cuts(self) -> int:
        """Axes of model parallelism in use."""
        return (self.pp > 1) + (self.tp > 1) + (self.cp > 1) + (self.ep > 1)


class How(NamedTuple):
    """What changes the cost of a micro-batch beside the degrees."""

    recompute: RecomputeKind
    sequence_parallel: bool
    method: CpMethod


class Sharding(NamedTuple):
    """ZeRO's stage, and how many replicas hold the same shards."""

    zero_stage: ZeroStage
    replicas: int


PLAIN = How("none", sequence_parallel=True, method="ring")
"""Nothing that is done again, and the least traffic: what no other way goes below."""


class Space:
    """All choices for one question about one model; `domain_size` devices share the fast links."""

    def __init__(self, facts: ModelFacts, question: Question, domain_size: int) -> None:
        self.facts, self.question, self._domain_size = facts, question, domain_size
        self._layout = partial(Layout, **_others(question.template.layout, _SEARCHED_OF_LAYOUT))
        self._candidate = partial(Candidate, **_others(question.template, _SEARCHED))

    def degrees(self) -> Iterator[tuple[Degrees, ...]]:
        """The first choices; those that differ in how the rows of a rank are cut together, the smallest micro batch first."""
        facts, question = self.facts, self.question
        for tp in divisors(question.num_gpus):
            if tp > facts.shape.num_heads or why_not_tensor(facts, tp):
                continue
            for cp in divisors(question.num_gpus // tp):
                if not self._ways(tp, cp):
                    continue
                for pp in divisors(question.num_gpus // tp // cp):
                    if pp > facts.shape.num_layers:
                        break
                    data = question.num_gpus // tp // cp // pp
                    for ep, alike in product(self._expert_degrees(data * cp), batches(question, data)):
                        yield tuple(Degrees(pp, tp, cp, ep, data, micro_batch, steps) for micro_batch, steps in alike)

    def _expert_degrees(self, ranks: int) -> Iterable[int]:
        experts = self.facts.shape.experts
        return (1,) if experts is None else (e for e in divisors(experts.num_experts) if not why_not_expert(self.facts, e, ranks))

    def hows(self, degrees: Degrees) -> Iterator[How]:
        """Recomputation, and how tp and cp talk."""
        for recompute, (sequence_parallel, method) in product(self.question.recomputes, self._ways(degrees.tp, degrees.cp)):
            yield How(recompute, sequence_parallel, method)

    def _ways(self, tp: int, cp: int) -> list[tuple[bool, CpMethod]]:
        """Sequence parallelism on or off, and methods of context parallelism, that can cut the rows."""
        methods: tuple[CpMethod, ...] = ("ring", "all_gather", "ulysses") if cp > 1 else ("auto",)
        found = []
        for sequence_parallel, method in product((True, False) if tp > 1 else (True,), methods):
            layout = replace(self.question.template.layout, tp=tp, cp=cp, sequence_parallel=sequence_parallel, cp_method=method)
            if why_not_context(self.facts, layout, self.question.template.sequence_length) is None:
                found.append((sequence_parallel, method))
        return found

    def shardings(self, degrees: Degrees) -> Iterator[Sharding]:
        """ZeRO stages, sharded over all data ranks or over those that share a fast domain; stage 0 replicates."""
        local = max(1, self._domain_size // (degrees.tp * degrees.cp))
        for zero in self.question.zero_stages:
            if zero == 0:
                if degrees.ep == 1 or degrees.cp % degrees.ep == 0:
                    yield Sharding(0, degrees.data)
            elif degrees.data * degrees.cp > 1:
                near = max(shards for shards in divisors(degrees.data) if shards <= local)
                for shards in dict.fromkeys((degrees.data, near)):
                    if shards * degrees.cp > 1 and not why_not_expert(self.facts, degrees.ep, shards * degrees.cp):
                        yield Sharding(zero, degrees.data // shards)

    def most_sharded(self, degrees: Degrees) -> Sharding:
        """With everything sharded that may be."""
        stage = max(self.question.zero_stages)
        return Sharding(stage, 1) if stage and degrees.data * degrees.cp > 1 else Sharding(0, degrees.data)

    def candidate(
        self,
        degrees: Degrees,
        how: How,
        sharding: Sharding | None = None,
        schedule: tuple[str, int | None] = ("1f1b", None),
    ) -> Candidate:
        """What the choices come to; without a sharding everything is sharded over all data ranks."""
        zero, replicas = sharding or Sharding(3 if degrees.data * degrees.cp > 1 else 0, 1)
        layout = self._layout(
            zero_stage=zero,
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
    """What the search leaves as it is: a constructor with it filled in takes half of the time of `replace`."""
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
    """Micro batch and accumulation of `data` data ranks: those that come to the same number of rows together, ascending."""
    total = question.global_batch_size
    if total is None:
        for each in product(question.micro_batch_sizes or (1,), question.accumulations or (1,)):
            yield [each]
        return
    found = []
    for micro_batch in divisors(total // data) if total % data == 0 else ():
        accumulation = total // data // micro_batch
        if question.micro_batch_sizes is not None and micro_batch not in question.micro_batch_sizes:
            continue
        if question.accumulations is None or accumulation in question.accumulations:
            found.append((micro_batch, accumulation))
    if found:
        yield found
