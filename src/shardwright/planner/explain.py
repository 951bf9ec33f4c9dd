"""Reasons for the chosen layout: sentences that compare predictions."""

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
    """Return the sentences that apply: links, pipelines, tensor parallelism against sharding,
    recomputation and adapters."""
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
    chosen = found.chosen
    fastest = found.predictions[0]
    assert chosen is not None
    if found.with_room is not None and found.best is not None:
        passed_over = found.best
        return (
            f"{passed_over.candidate.describe()} would take "
            f"{format_seconds(passed_over.time.step)} per step and "
            f"{format_bytes(passed_over.memory.total)} of "
            f"{format_bytes(chosen.memory_capacity_bytes)}; "
            f"{chosen.candidate.describe()} takes {format_seconds(chosen.time.step)} "
            f"and {format_bytes(chosen.memory.total)}, "
            f"which leaves room for {MEMORY_ERROR_SHARE:.0%} more memory than predicted."
        )
    if chosen is fastest:
        return f"{chosen.candidate.describe()} is the fastest layout that fits."
    slower = chosen.time.step / fastest.time.step - 1
    name = fastest.candidate.describe()
    return (
        f"{chosen.candidate.describe()} is only {slower:.1%} slower than the fastest ({name}) "
        "and has less partitioning; predictions are not that precise."
    )


def _tensor_links(predictor: Predictor, question: Question) -> str | None:
    """Compare tensor parallelism within a domain with twice its degree."""
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
        f"Tensor parallelism over {inside} GPUs uses {cluster.intra.name} only: "
        f"its communication takes {_share(within, 'tensor')} of the step; "
        f"over {outside} it also uses {cluster.inter.name}, {_share(across, 'tensor')} of the step "
        f"({_per_gpu(within)} against {_per_gpu(across)} tokens/s per GPU)."
    )


def _micro_batches(predictor: Predictor, question: Question) -> str | None:
    """Compare the bubble of a pipeline with one, two and four micro-batches per stage."""
    layers = predictor.facts.shape.num_layers
    stages = max((d for d in divisors(question.num_gpus) if 1 < d <= min(layers, 8)), default=1)
    if stages == 1:
        return None
    bubbles = []
    for rounds in (1, 2, 4):
        candidate = _candidate(question, recompute="full", pp=stages)
        candidate = replace(candidate, micro_batch_size=1, gradient_accumulation_steps=rounds * stages)
        prediction = predictor.predict(candidate)
        share = prediction.time.bubble / prediction.time.step
        bubbles.append(f"{share:.0%} with {rounds * stages}")
    shares = ", ".join(bubbles)
    return f"A pipeline of {stages} stages (1F1B) idles for {shares} micro-batches per step."


def _sharding_or_cutting(predictor: Predictor, question: Question, found: Found) -> str | None:
    """Compare the best layout without tensor parallelism with the best one with it."""
    if question.num_gpus == 1:
        return None
    without = _best(predictor, question, found, lambda candidate: candidate.layout.tp == 1)
    with_tensor = _best(predictor, question, found, lambda candidate: candidate.layout.tp > 1)
    if without is None or with_tensor is None:
        missing, other = ("without", with_tensor) if without is None else ("with", without)
        return None if other is None else f"Nothing fits {missing} tensor parallelism."
    ahead, behind = sorted((without, with_tensor), key=lambda prediction: prediction.time.step)
    return (
        f"Without tensor parallelism the best is {without.candidate.describe()} "
        f"({format_seconds(without.time.step)}, {format_seconds(without.time.exposed)} of it "
        f"exposed communication); with it {with_tensor.candidate.describe()} "
        f"({format_seconds(with_tensor.time.step)}, "
        f"{format_seconds(with_tensor.time.exposed)}): "
        f"{behind.time.step / ahead.time.step - 1:.1%} apart."
    )


def _recomputation(predictor: Predictor, question: Question, chosen: Prediction) -> str | None:
    """Compare the saved memory and added time of full recomputation with those of a higher ZeRO
    stage."""
    plain = replace(chosen.candidate, recompute="none")
    full = predictor.predict(replace(plain, recompute="full"))
    none = predictor.predict(plain)
    saved = format_bytes(none.memory.total - full.memory.total)
    cost = full.time.step / none.time.step - 1
    sentence = f"Full recomputation saves {saved} per GPU and adds {cost:.0%} of time"
    layout = chosen.candidate.layout
    stage = layout.zero_stage
    if layout.data_ranks * layout.cp > 1 and stage < 3:
        more_sharded = replace(layout, zero_stage=stage + 1, dp_shard=layout.data_ranks, dp_replicate=1)  # type: ignore[arg-type]
        sharded = predictor.predict(replace(plain, layout=more_sharded))
        sentence += (
            f"; zero_stage {stage + 1} saves "
            f"{format_bytes(none.memory.total - sharded.memory.total)} "
            f"and adds {sharded.time.step / none.time.step - 1:.0%}"
        )
    fit = "" if none.fits else ", which does not fit"
    return sentence + f" (without either: {format_bytes(none.memory.total)}{fit})."


def _adapters(predictor: Predictor, question: Question, chosen: Prediction) -> str | None:
    """Compare low-rank adapters with training all weights."""
    if question.template.adapter is not None:
        return None
    adapted = replace(question, template=replace(question.template, adapter=Adapter(LORA_RANK)))
    best = search(predictor, adapted, top=1).chosen
    if best is None:
        return None
    return (
        f"Low-rank adapters (rank {LORA_RANK}) in place of all weights would take "
        f"{format_bytes(best.memory.total)} per GPU "
        f"and run at {best.tokens_per_second:,.0f} tokens/s ({best.candidate.describe()}), "
        f"against {format_bytes(chosen.memory.total)} and "
        f"{chosen.tokens_per_second:,.0f}."
    )


def _candidate(question: Question, recompute: RecomputeKind, **degrees: Any) -> Candidate:
    """Build a candidate with these degrees, ZeRO-1 over the remaining ranks, and micro-batch
    1."""
    model_ranks = 1
    for degree in degrees.values():
        model_ranks *= degree
    data = question.num_gpus // model_ranks
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
    predictions = search(predictor, limited, top=1).predictions
    return predictions[0] if predictions else None


def _share(prediction: Prediction, part: str) -> str:
    return f"{getattr(prediction.time, part) / prediction.time.step:.0%}"


def _per_gpu(prediction: Prediction) -> str:
    return f"{prediction.tokens_per_second_per_gpu:,.0f}"
