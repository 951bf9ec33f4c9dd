"""Reasons for the chosen layout: sentences that compare predictions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shardwright.config.recipe import RecomputeKind
from shardwright.layout import Layout
from shardwright.planner.candidate import Candidate, LowRankAdapter
from shardwright.planner.memory_settings import reset_memory_settings, search_run_layouts
from shardwright.planner.model_costs import ModelFacts, ParameterElements
from shardwright.planner.prediction import Prediction
from shardwright.planner.predictor import Predictor
from shardwright.planner.rejections import explain_conflict
from shardwright.planner.search.divisibility import list_divisors
from shardwright.planner.search.result import SearchResult
from shardwright.planner.search.space import PlanningProblem
from shardwright.planner.time.compute import compute_scaled_product_seconds
from shardwright.planner.uncertainty import format_probability
from shardwright.units import format_bytes, format_items, format_seconds

EXAMPLE_LORA_RANK = 16


def explain(predictor: Predictor, problem: PlanningProblem, result: SearchResult) -> list[str]:
    """Return the sentences that apply: links, pipelines, tensor parallelism against sharding,
    recomputation and adapters."""
    chosen = result.chosen
    if chosen is None:
        return []
    sentences: list[str | None] = [
        _explain_choice(result),
        _explain_settings(predictor, problem, chosen),
        _explain_tensor_links(predictor, problem),
        _explain_micro_batches(predictor, problem),
        _explain_tensor_parallelism(predictor, problem, result),
        _explain_recomputation(predictor, chosen),
        _explain_low_precision(predictor, chosen),
        _explain_adapters(predictor, problem, chosen),
    ]
    return [sentence for sentence in sentences if sentence is not None]


def _explain_choice(result: SearchResult) -> str | None:
    chosen = result.chosen
    fastest = result.predictions[0]
    assert chosen is not None
    if result.best_with_margin is not None and result.best is not None:
        passed_over = result.best
        return (
            f"{passed_over.candidate.describe()} would take "
            f"{format_seconds(passed_over.time.step)} per step and "
            f"{format_bytes(passed_over.memory.total)} of "
            f"{format_bytes(chosen.memory_capacity_bytes)}; "
            f"{chosen.candidate.describe()} takes {format_seconds(chosen.time.step)} "
            f"and {format_bytes(chosen.memory.total)}, "
            f"which fits with a probability of {format_probability(chosen.fit_probability)} "
            f"instead of {format_probability(passed_over.fit_probability)}."
        )
    if chosen is fastest:
        return f"{chosen.candidate.describe()} is the fastest layout that fits."
    slower = f"{chosen.time.step / fastest.time.step - 1:.1%}"
    name = fastest.candidate.describe()
    comparison = (
        f"as fast as {name}"
        if slower == "0.0%"
        else f"only {slower} slower than the fastest ({name})"
    )
    return (
        f"{chosen.candidate.describe()} is {comparison} and is simpler; "
        "predictions are not that precise."
    )


def _explain_settings(
    predictor: Predictor, problem: PlanningProblem, chosen: Prediction
) -> str | None:
    """Name the settings that a run on GPUs chooses, and compare those that take free memory with
    the values that need the least. None on a CPU."""
    if predictor.cluster.accelerator.kind == "cpu":
        return None
    candidate = chosen.candidate
    lean = predictor.predict(reset_memory_settings(candidate, problem.template))
    chunks = f"chunks of {candidate.loss_chunk_tokens:,} tokens"
    settings = [
        f"the loss by Liger's kernel (predicted as {chunks})"
        if candidate.has_liger_loss
        else f"the loss in {chunks}"
    ]
    if candidate.has_working_weights:
        settings.append("copies of weights in the compute precision")
    if candidate.read_ahead_bytes:
        settings.append(f"{format_bytes(candidate.read_ahead_bytes)} of moments read ahead")
    blocks = "compiled" if candidate.compile else "not compiled"
    sentence = f"`train` will choose: blocks {blocks}, {', '.join(settings)}"
    if lean.time == chosen.time:
        return f"{sentence}. No choice needs free memory."
    return (
        f"{sentence}. These use free memory ({format_bytes(chosen.memory.total)} instead of "
        f"{format_bytes(lean.memory.total)}) and save "
        f"{format_seconds(lean.time.step - chosen.time.step)} per step."
    )


def _explain_tensor_links(predictor: Predictor, problem: PlanningProblem) -> str | None:
    """Compare the largest `tp` within one domain of fast links with twice that degree."""
    cluster = predictor.cluster
    inside = max(
        (d for d in list_divisors(problem.num_gpus) if d <= cluster.domain_size), default=1
    )
    outside = 2 * inside
    if inside == 1 or problem.num_gpus % outside:
        return None
    within, across = (
        _predict(predictor, problem, tp=tp, recompute="full") for tp in (inside, outside)
    )
    if within is None or across is None:
        return None
    assert cluster.inter is not None
    return (
        f"Tensor parallelism over {inside} GPUs uses {cluster.intra.name} only: "
        f"its communication takes {_format_share(within, 'tensor')} of the step; "
        f"over {outside} it also uses {cluster.inter.name}, "
        f"{_format_share(across, 'tensor')} of the step "
        f"({_format_tokens_per_second_per_gpu(within)} against "
        f"{_format_tokens_per_second_per_gpu(across)} tokens/s per GPU)."
    )


def _explain_micro_batches(predictor: Predictor, problem: PlanningProblem) -> str | None:
    """Compare the bubble of a pipeline with one, two and four micro-batches per stage."""
    layers = predictor.facts.shape.num_layers
    stages = max((d for d in list_divisors(problem.num_gpus) if 1 < d <= min(layers, 8)), default=1)
    if stages == 1:
        return None
    bubbles = []
    for rounds in (1, 2, 4):
        candidate = _build_candidate(problem, recompute="full", pp=stages)
        candidate = replace(
            candidate, micro_batch_size=1, gradient_accumulation_steps=rounds * stages
        )
        prediction = predictor.predict(candidate)
        share = prediction.time.bubble / prediction.time.step
        bubbles.append(f"{share:.0%} with {rounds * stages}")
    shares = ", ".join(bubbles)
    return f"A pipeline of {stages} stages (1F1B) idles for {shares} micro-batches per step."


def _explain_tensor_parallelism(
    predictor: Predictor, problem: PlanningProblem, result: SearchResult
) -> str | None:
    """Compare the best layout without tensor parallelism with the best one with it."""
    if problem.num_gpus == 1:
        return None
    without = _find_best(predictor, problem, result, lambda candidate: candidate.layout.tp == 1)
    with_tensor = _find_best(predictor, problem, result, lambda candidate: candidate.layout.tp > 1)
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


def _explain_recomputation(predictor: Predictor, chosen: Prediction) -> str | None:
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
        more_sharded = replace(
            layout,
            zero_stage=stage + 1,  # type: ignore[arg-type]
            dp_shard=layout.data_ranks,
            dp_replicate=1,
        )
        sharded = predictor.predict(replace(plain, layout=more_sharded))
        sentence += (
            f"; zero_stage {stage + 1} saves "
            f"{format_bytes(none.memory.total - sharded.memory.total)} "
            f"and adds {sharded.time.step / none.time.step - 1:.0%}"
        )
    fit = "" if none.fits else ", which does not fit"
    return sentence + f" (without either: {format_bytes(none.memory.total)}{fit})."


def _explain_low_precision(predictor: Predictor, chosen: Prediction) -> str | None:
    """Compare quantised products with bf16 on the same layout, and state what limits the gain."""
    candidate = chosen.candidate
    shares = candidate.quantised_shares
    if shares is None:
        return None
    unscaled = replace(candidate, precision="bf16", scaled_shares=None)
    plain = predictor.predict(unscaled)
    wide, narrow = (predictor.get_rates(each) for each in (unscaled, candidate))
    micro_batches = candidate.gradient_accumulation_steps / candidate.layout.pp
    wide_products, _ = compute_scaled_product_seconds(predictor.facts, candidate, wide)
    narrow_products, quantisation = compute_scaled_product_seconds(
        predictor.facts, candidate, narrow
    )
    share = micro_batches * wide_products / plain.time.step
    saved = micro_batches * (wide_products - narrow_products) / plain.time.step
    added = micro_batches * quantisation / plain.time.step
    factor = plain.time.step / chosen.time.step
    change = f"{factor:.2f} times faster" if factor >= 1 else f"{1 / factor:.2f} times slower"
    gradients = "gradients of weights, " if shares.has_wide_weight_gradients else ""
    width = "4-bit" if candidate.precision == "nvfp4" else "8-bit"
    compilation = "" if candidate.compile else ", which is not compiled,"
    return (
        f"{candidate.precision} takes {format_seconds(chosen.time.step)} per step and bf16 "
        f"{format_seconds(plain.time.step)} on this layout: {change}. Products that become {width} "
        f"are {share:.0%} of the bf16 step; {gradients}attention, the head and everything between "
        f"products stay as they are. Narrower products save {saved:.0%} of the step, and "
        f"quantising the operands of each{compilation} adds {added:.0%}. "
        + explain_gathers(predictor.facts, candidate)
    )


def explain_gathers(facts: ModelFacts, candidate: Candidate) -> str:
    """Say which share of the blocks' weights is gathered in 8 bits, and why not more."""
    if not candidate.is_sharded:
        return "Weights are not gathered."
    total = ParameterElements()
    for layer, kind in zip(facts.count_elements(candidate.layout).layers, facts.kinds, strict=True):
        total = total.add(layer.multiply(kind.count))
    share = candidate.compute_coded_share(total)
    shares = candidate.quantised_shares
    gathers = None if shares is None else shares.code_gathers
    if gathers is None:
        return "Weights are gathered in bf16: they are stored as [in, out]."
    if candidate.adapter is not None and candidate.adapter.has_magnitudes:
        return "Weights are gathered in bf16: DoRA computes the norms of their rows."
    rows = format_items(gathers.block_rows, "row")
    blocks = f"8-bit gathers need whole blocks of {rows} on each rank."
    if share:
        return (
            f"{share:.0%} of the blocks' parameters are gathered in 8 bits, the others in bf16: "
            + blocks
        )
    if gathers.has_one_set:
        return f"Weights are gathered in bf16: {blocks}"
    return (
        f"Weights are gathered in bf16: {gathers.recipe} has different codes for the output and "
        "for the input gradient. A gather has one set of them, which needs zero_stage 3 and blocks "
        f"that are neither recomputed nor compiled. {blocks}"
    )


def _explain_adapters(
    predictor: Predictor, problem: PlanningProblem, chosen: Prediction
) -> str | None:
    """Compare low-rank adapters with training all weights."""
    if problem.template.adapter is not None or predictor.facts.frozen_names:
        return None
    adapted = replace(
        problem, template=replace(problem.template, adapter=LowRankAdapter(EXAMPLE_LORA_RANK))
    )
    best = search_run_layouts(predictor, adapted, num_layouts=1).chosen
    if best is None:
        return None
    return (
        f"Low-rank adapters (rank {EXAMPLE_LORA_RANK}) in place of all weights would take "
        f"{format_bytes(best.memory.total)} per GPU "
        f"and run at {best.tokens_per_second:,.0f} tokens/s ({best.candidate.describe()}), "
        f"against {format_bytes(chosen.memory.total)} and "
        f"{chosen.tokens_per_second:,.0f}."
    )


def _build_candidate(
    problem: PlanningProblem, recompute: RecomputeKind, **degrees: Any
) -> Candidate:
    """Build a candidate with these degrees, ZeRO-1 over the remaining ranks, and micro-batch
    1."""
    model_ranks = 1
    for degree in degrees.values():
        model_ranks *= degree
    data = problem.num_gpus // model_ranks
    layout: Layout = replace(
        problem.template.layout,
        **degrees,
        dp_shard=data,
        zero_stage=1 if data > 1 else 0,
    )
    total = problem.global_batch_size or data * (problem.accumulation_steps or (1,))[0]
    return replace(
        problem.template,
        layout=layout,
        recompute=recompute,
        micro_batch_size=1,
        gradient_accumulation_steps=max(1, total // data),
    )


def _predict(
    predictor: Predictor, problem: PlanningProblem, recompute: RecomputeKind, **degrees: Any
) -> Prediction | None:
    candidate = _build_candidate(problem, recompute, **degrees)
    return (
        predictor.predict(candidate)
        if explain_conflict(predictor, problem, candidate) is None
        else None
    )


def _find_best(
    predictor: Predictor,
    problem: PlanningProblem,
    result: SearchResult,
    is_accepted: Callable[[Candidate], bool],
) -> Prediction | None:
    for prediction in result.predictions:
        if is_accepted(prediction.candidate):
            return prediction
    allowed = problem.is_allowed
    limited = replace(
        problem,
        is_allowed=lambda candidate: (
            is_accepted(candidate) and (allowed is None or allowed(candidate))
        ),
    )
    predictions = search_run_layouts(predictor, limited, num_layouts=1).predictions
    return predictions[0] if predictions else None


def _format_share(prediction: Prediction, part: str) -> str:
    return f"{getattr(prediction.time, part) / prediction.time.step:.0%}"


def _format_tokens_per_second_per_gpu(prediction: Prediction) -> str:
    return f"{prediction.tokens_per_second_per_gpu:,.0f}"
