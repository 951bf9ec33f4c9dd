"""Why the chosen layout won, in sentences with numbers. Nothing here is a rule: each sentence compares predictions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shardwright.config.schema import RecomputeKind
from shardwright.layout import Layout
from shardwright.planner.candidate import Adapter, Candidate
from shardwright.planner.predict import Predictor
from shardwright.planner.prediction import MEMORY_ERROR_SHARE, Prediction
from shardwright.planner.rejections import why_not_at_all
from shardwright.planner.rules import divisors
from shardwright.planner.search import Found, search
from shardwright.planner.space import Question
from shardwright.units import format_bytes, format_seconds

LORA_RANK = 16


def explain(predictor: Predictor, question: Question, found: Found) -> list[str]:
    """Sentences about links, pipelines, sharding against cutting, recomputation and adapters; those that apply."""
    chosen = found.chosen
    if chosen is None:
        return []
    sentences: list[str | None] = [
        _chosen(found),
        _tensor_links(predictor, question),
        _micro_batches(predictor, question),
        _sharding_or_cutting(predictor, question, found),
        _recomputation(predictor, question, chosen),
        _adapters(predictor, question, chosen),
    ]
    return [sentence for sentence in sentences if sentence is not None]


def _chosen(found: Found) -> str | None:
    chosen, fastest = found.chosen, found.predictions[0]
    assert chosen is not None
    if found.with_room is not None and found.best is not None:
        passed_over = found.best
        return (
            f"{passed_over.candidate.describe()} would take {format_seconds(passed_over.time.step)} a step and "
            f"{format_bytes(passed_over.memory.total)} of {format_bytes(chosen.memory_capacity_bytes)}; "
            f"{chosen.candidate.describe()} takes {format_seconds(chosen.time.step)} and {format_bytes(chosen.memory.total)}, "
            f"which leaves room for {MEMORY_ERROR_SHARE:.0%} more memory than predicted."
        )
    if chosen is fastest:
        return f"{chosen.candidate.describe()} is the fastest of all that fit."
    slower = chosen.time.step / fastest.time.step - 1
    return (
        f"{chosen.candidate.describe()} is {slower:.1%} behind the fastest ({fastest.candidate.describe()}), "
        "which is less than predictions can tell apart, and is cut less."
    )


def _tensor_links(predictor: Predictor, question: Question) -> str | None:
    """Tensor parallel within a domain against twice as far."""
    cluster = predictor.cluster
    inside = max((d for d in divisors(question.num_gpus) if d <= cluster.domain_size), default=1)
    outside = 2 * inside
    if inside == 1 or question.num_gpus % outside:
        return None
    within, across = (_predict(predictor, question, tp=tp, recompute="full") for tp in (inside, outside))
    if within is None or across is None:
        return None
    assert cluster.inter is not None
    return (
        f"Tensor parallel over {inside} GPUs stays on {cluster.intra.name}: its traffic takes {_share(within, 'tensor')} "
        f"of the step; over {outside} it crosses {cluster.inter.name} and takes {_share(across, 'tensor')} "
        f"({_per_gpu(within)} against {_per_gpu(across)} tokens/s per GPU)."
    )


def _micro_batches(predictor: Predictor, question: Question) -> str | None:
    """The wait of a pipeline at one, two and four micro-batches a stage."""
    layers = predictor.facts.shape.num_layers
    stages = max((d for d in divisors(question.num_gpus) if 1 < d <= min(layers, 8)), default=1)
    if stages == 1:
        return None
    told = []
    for rounds in (1, 2, 4):
        candidate = _candidate(question, recompute="full", pp=stages)
        candidate = replace(candidate, micro_batch_size=1, gradient_accumulation_steps=rounds * stages)
        prediction = predictor.predict(candidate)
        told.append(f"{prediction.time.bubble / prediction.time.step:.0%} with {rounds * stages}")
    return f"A pipeline of {stages} stages (1F1B) waits for {', '.join(told)} micro-batches a step."


def _sharding_or_cutting(predictor: Predictor, question: Question, found: Found) -> str | None:
    """The best without tensor parallelism against the best with it."""
    if question.num_gpus == 1:
        return None
    whole = _best(predictor, question, found, lambda candidate: candidate.layout.tp == 1)
    cut = _best(predictor, question, found, lambda candidate: candidate.layout.tp > 1)
    if whole is None or cut is None:
        missing, there = ("without", cut) if whole is None else ("with", whole)
        return None if there is None else f"Nothing fits {missing} tensor parallelism."
    ahead, behind = sorted((whole, cut), key=lambda prediction: prediction.time.step)
    return (
        f"Without tensor parallelism the best is {whole.candidate.describe()} ({format_seconds(whole.time.step)}, "
        f"{format_seconds(whole.time.exposed)} of it traffic that nothing hides); with it {cut.candidate.describe()} "
        f"({format_seconds(cut.time.step)}, {format_seconds(cut.time.exposed)}): "
        f"{behind.time.step / ahead.time.step - 1:.1%} apart."
    )


def _recomputation(predictor: Predictor, question: Question, chosen: Prediction) -> str | None:
    """What recomputing blocks saves and costs, against what sharding further does."""
    plain = replace(chosen.candidate, recompute="none")
    full = predictor.predict(replace(plain, recompute="full"))
    none = predictor.predict(plain)
    saved, cost = none.memory.total - full.memory.total, full.time.step / none.time.step - 1
    told = f"With this layout recomputing whole blocks saves {format_bytes(saved)} a GPU and costs {cost:.0%} of time"
    layout = chosen.candidate.layout
    stage = layout.zero_stage
    if layout.data_ranks * layout.cp > 1 and stage < 3:
        further = replace(layout, zero_stage=stage + 1, dp_shard=layout.data_ranks, dp_replicate=1)  # type: ignore[arg-type]
        sharded = predictor.predict(replace(plain, layout=further))
        told += (
            f"; zero_stage {stage + 1} saves {format_bytes(none.memory.total - sharded.memory.total)} "
            f"and costs {sharded.time.step / none.time.step - 1:.0%}"
        )
    return told + f" (without either: {format_bytes(none.memory.total)}{'' if none.fits else ', which does not fit'})."


def _adapters(predictor: Predictor, question: Question, chosen: Prediction) -> str | None:
    """Low-rank adapters in place of all weights."""
    if question.template.adapter is not None:
        return None
    light = replace(question, template=replace(question.template, adapter=Adapter(LORA_RANK)))
    best = search(predictor, light, top=1).chosen
    if best is None:
        return None
    return (
        f"Low-rank adapters (rank {LORA_RANK}) in place of all weights would take {format_bytes(best.memory.total)} a GPU "
        f"and run at {best.tokens_per_second:,.0f} tokens/s ({best.candidate.describe()}), "
        f"against {format_bytes(chosen.memory.total)} and "
        f"{chosen.tokens_per_second:,.0f}."
    )


def _candidate(question: Question, recompute: RecomputeKind, **degrees: Any) -> Candidate:
    """Degrees with ZeRO-1 over the ranks that are left, and micro batch 1."""
    used = 1
    for degree in degrees.values():
        used *= degree
    data = question.num_gpus // used
    layout: Layout = replace(
        question.template.layout,
        **degrees,
        dp_shard=data,
        zero_stage=1 if data > 1 else 0,
    )
    total = question.global_batch_size or data * (question.accumulations or (1,))[0]
    return replace(
        question.template,
        layout=layout,
        recompute=recompute,
        micro_batch_size=1,
        gradient_accumulation_steps=max(1, total // data),
    )


def _predict(predictor: Predictor, question: Question, recompute: RecomputeKind, **degrees: Any) -> Prediction | None:
    candidate = _candidate(question, recompute, **degrees)
    return predictor.predict(candidate) if why_not_at_all(predictor, question, candidate) is None else None


def _best(predictor: Predictor, question: Question, found: Found, wanted: Callable[[Candidate], bool]) -> Prediction | None:
    for prediction in found.predictions:
        if wanted(prediction.candidate):
            return prediction
    allowed = question.allowed
    limited = replace(question, allowed=lambda candidate: wanted(candidate) and (allowed is None or allowed(candidate)))
    others = search(predictor, limited, top=1).predictions
    return others[0] if others else None


def _share(prediction: Prediction, part: str) -> str:
    return f"{getattr(prediction.time, part) / prediction.time.step:.0%}"


def _per_gpu(prediction: Prediction) -> str:
    return f"{prediction.tokens_per_second_per_gpu:,.0f}"
