"""Degrees that divide a model and a batch, by the rules of `placement.place_model`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import isqrt

from shardwright.errors import LayoutError, ScheduleError
from shardwright.layout import Layout
from shardwright.layout.context_method import check_context_parallel
from shardwright.planner.model_costs import ModelFacts
from shardwright.schedule.registry import (
    PIPELINE_SCHEDULES,
    check_numbers,
    count_stages_per_rank,
)


@lru_cache(maxsize=4096)
def list_divisors(number: int) -> tuple[int, ...]:
    """Return all divisors in ascending order.

    >>> list_divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return tuple(small + [number // d for d in reversed(small) if d * d != number])


def explain_tensor_conflict(facts: ModelFacts, tp: int) -> str | None:
    """Return the reason why the model cannot be sharded over `tp` tensor-parallel ranks. None
    if it can."""
    shape = facts.shape
    if tp == 1:
        return None
    if shape.num_heads % tp:
        return f"{shape.num_heads} heads are not divisible by tp {tp}"
    if shape.latent is None and shape.num_kv_heads % tp and tp % shape.num_kv_heads:
        return f"of {shape.num_kv_heads} key-value heads and tp {tp}, neither divides the other"
    widths = [shape.intermediate_size] if any(not layer.sparse for layer in shape.layers) else []
    if shape.experts is not None:
        widths += [shape.experts.intermediate_size] + [
            w for w in (shape.experts.shared_intermediate_size,) if w
        ]
    for width in widths:
        if width % tp:
            return f"feed-forward width {width} is not divisible by tp {tp}"
    return None


def explain_context_conflict(facts: ModelFacts, layout: Layout, sequence_length: int) -> str | None:
    """Return the reason why rows cannot be sharded over the context-parallel ranks, or the
    residual stream over the tensor-parallel ranks. None if they can."""
    key = (
        "context",
        layout.cp,
        layout.tp,
        layout.cp_method,
        layout.cp_split,
        layout.sequence_parallel,
        sequence_length,
    )
    if key not in facts.pipeline_cache:
        facts.pipeline_cache[key] = _explain_context_conflict(facts, layout, sequence_length)
    reason = facts.pipeline_cache[key]
    assert reason is None or isinstance(reason, str)
    return reason


def _explain_context_conflict(
    facts: ModelFacts, layout: Layout, sequence_length: int
) -> str | None:
    if layout.tp > 1 and layout.sequence_parallel and (sequence_length // layout.cp) % layout.tp:
        tokens = sequence_length // layout.cp
        return f"{tokens} tokens per rank are not divisible by tp {layout.tp}"
    try:
        check_context_parallel(layout, facts.shape, sequence_length)
    except LayoutError as error:
        return error.problem
    return None


def explain_expert_conflict(facts: ModelFacts, ep: int, fsdp: int) -> str | None:
    """Return the reason why experts cannot be distributed over `ep` ranks. None if they can."""
    experts = facts.shape.experts
    if ep == 1:
        return None
    if experts is None:
        return "the model has no experts"
    if experts.num_experts % ep:
        return f"{experts.num_experts} experts are not divisible by ep {ep}"
    if fsdp % ep:
        return f"ep {ep} does not divide dp_shard x cp = {fsdp}"
    return None


def list_schedules(
    facts: ModelFacts, pp: int, num_micro_batches: int
) -> Iterator[tuple[str, int | None]]:
    """Yield schedules and virtual stages that `pp` ranks can run with this number of
    micro-batches.

    GPipe is omitted: 1F1B takes the same time and less memory.
    """
    if pp == 1:
        yield "1f1b", None
        return
    for name, family in PIPELINE_SCHEDULES.items():
        if name == "gpipe" or num_micro_batches < family.min_micro_batches_per_rank * pp:
            continue
        if family.has_divisibility_rule:
            if num_micro_batches % pp == 0:
                for virtual in list_counts(facts.shape.num_layers // pp, 8):
                    if virtual > 1:
                        yield name, virtual
        elif pp * count_stages_per_rank(name) <= facts.shape.num_layers:
            yield name, None


def list_counts(number: int, max_count: int) -> tuple[int, ...]:
    """Return all counts from 1 to the smaller of `max_count` and `number`: stages need not have
    equal depth.

    >>> list_counts(5, 8)
    (1, 2, 3, 4, 5)
    """
    return tuple(range(1, min(number, max_count) + 1))


def explain_layout_conflict(
    facts: ModelFacts, layout: Layout, sequence_length: int, num_micro_batches: int
) -> str | None:
    """Return the reason why a layout cannot distribute the model. None if it can."""
    reason = (
        explain_tensor_conflict(facts, layout.tp)
        or explain_context_conflict(facts, layout, sequence_length)
        or explain_expert_conflict(facts, layout.ep, layout.fsdp)
    )
    if reason is None and layout.pp > facts.shape.num_layers:
        reason = f"{facts.shape.num_layers} layers are fewer than pp {layout.pp}"
    if reason is None and layout.pp > 1 and layout.schedule in PIPELINE_SCHEDULES:
        reason = _explain_schedule_conflict(facts, layout, num_micro_batches)
    return reason


def _explain_schedule_conflict(
    facts: ModelFacts, layout: Layout, num_micro_batches: int
) -> str | None:
    try:
        _, stages_per_rank = check_numbers(
            layout.schedule, layout.pp, num_micro_batches, layout.virtual_stages
        )
    except ScheduleError as error:
        return error.problem
    num_stages = layout.pp * stages_per_rank
    if num_stages <= facts.shape.num_layers:
        return None
    return f"{facts.shape.num_layers} layers are fewer than {num_stages} stages"
