"""Settings whose `auto` takes memory where it is free: `model.loss_chunk_tokens`, then
`precision.working_weights`, then `offload.read_ahead_bytes`.

The sum of the head's weight gradient, in fp32, is read and written once per chunk. Working weights
take 2 bytes per parameter, and save reading the master weights and writing casts. Moments that are
read ahead shorten the update by their transfer.

A run on GPUs resolves them by its free memory, the planner by that of an empty device. The search
compares layouts with the values that need the least memory; what it lists is predicted again.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.architecture import HFShape
from shardwright.config.recipe import Recipe
from shardwright.planner.candidate import Candidate
from shardwright.planner.model_costs import ModelFacts
from shardwright.planner.prediction import MemoryParts, Prediction
from shardwright.planner.predictor import Predictor, predict_rank_memory
from shardwright.planner.search.best_first import search_layouts
from shardwright.planner.search.result import SearchResult, recommend, select_simplest
from shardwright.planner.search.space import PlanningProblem
from shardwright.planner.time.update_time import saves_casts
from shardwright.plans import Plan
from shardwright.units import format_bytes

LARGER_CHUNKS = (8192, 4096, 2048)
"""Tokens of a chunk of the loss, the best first."""
USED_SHARE = 0.85
"""Share of the free memory that a prediction with a larger chunk, or with copies, may need."""
_ALL_BYTES = 2**40
"""More than the moments of any rank."""


def resolve_memory_settings(
    facts: ModelFacts | None, candidate: Candidate, free_bytes: float
) -> tuple[Candidate, tuple[str, ...]]:
    """Resolve the settings of a candidate that are `auto`, on GPUs.

    Args:
        facts: None for a transformers class, whose memory is not predicted.
        free_bytes: free memory of the fullest device.

    Returns:
        The candidate, and for each setting a line with its value and the reason.
    """
    lines: list[str] = []
    for choose in (_choose_loss_chunk, _choose_working_weights, _choose_read_ahead):
        candidate, line = choose(facts, candidate, free_bytes)
        if line is not None:
            lines.append(line)
    return candidate, tuple(lines)


def apply_memory_settings(
    recipe: Recipe, plan: Plan, before: Candidate, resolved: Candidate
) -> tuple[Recipe, Plan]:
    """Return recipe and plan with the settings that differ between two candidates of them."""
    if resolved.is_loss_chunk_auto != before.is_loss_chunk_auto:
        model = recipe.model.model_copy(update={"loss_chunk_tokens": resolved.loss_chunk_tokens})
        recipe = recipe.model_copy(update={"model": model})
    if resolved.working_weights != before.working_weights:
        precision = plan.precision.model_copy(update={"working_weights": True})
        plan = replace(plan, precision=precision)
        recipe = recipe.model_copy(update={"precision": precision})
    if resolved.is_read_ahead_auto != before.is_read_ahead_auto:
        section = recipe.offload.model_copy(update={"read_ahead_bytes": resolved.ahead_bytes})
        recipe = recipe.model_copy(update={"offload": section})
    return recipe, plan


def reset_memory_settings(candidate: Candidate, template: Candidate) -> Candidate:
    """Return the candidate with these settings as `template` has them, for example `auto`."""
    return replace(
        candidate,
        loss_chunk_tokens=template.loss_chunk_tokens,
        is_loss_chunk_auto=template.is_loss_chunk_auto,
        working_weights=template.working_weights,
        ahead_bytes=template.ahead_bytes,
        is_read_ahead_auto=template.is_read_ahead_auto,
    )


def predict_run(predictor: Predictor, candidate: Candidate) -> Prediction:
    """Predict a candidate with the settings that a run on empty devices chooses."""
    return predictor.predict(resolve_on_empty_devices(predictor, candidate)[0])


def resolve_on_empty_devices(
    predictor: Predictor, candidate: Candidate
) -> tuple[Candidate, tuple[str, ...]]:
    """Resolve the settings as `resolve_memory_settings` does, by the memory of the cluster's GPUs.
    On CPUs the candidate is returned."""
    if predictor.cluster.accelerator.kind != "gpu":
        return candidate, ()
    # The memory that the driver calls free is without the context.
    free_bytes = predictor.capacity_bytes - predictor.efficiency.context_bytes
    facts = None if isinstance(predictor.facts.shape, HFShape) else predictor.facts
    return resolve_memory_settings(facts, candidate, free_bytes)


def search_run_layouts(
    predictor: Predictor, problem: PlanningProblem, *, num_layouts: int = 10
) -> SearchResult:
    """Search for layouts, then predict and order those found as `predict_run` does."""
    return predict_found(predictor, search_layouts(predictor, problem, num_layouts=num_layouts))


def predict_found(predictor: Predictor, result: SearchResult) -> SearchResult:
    """Return a result with its layouts predicted as `predict_run` does, then ordered and
    recommended. If any of them changes, nothing is proven: the proof is about the search's
    settings."""
    if predictor.cluster.accelerator.kind != "gpu":
        return result
    found = [*result.predictions]
    if result.chosen is not None and not any(each is result.chosen for each in found):
        found.append(result.chosen)
    predictions = [predict_run(predictor, each.candidate) for each in found]
    if all(
        each.time == before.time and each.memory == before.memory
        for each, before in zip(predictions, found, strict=True)
    ):
        return result
    predictions.sort(key=lambda each: each.time.step)
    chosen = recommend(predictions)
    return replace(
        result,
        predictions=predictions,
        num_proven=0,
        best_with_margin=None if chosen is select_simplest(predictions) else chosen,
    )


def _predict_memory(facts: ModelFacts, candidate: Candidate) -> MemoryParts:
    """Predict the bytes on the fullest rank."""
    return max(predict_rank_memory(facts, candidate), key=lambda parts: parts.live)


def _choose_loss_chunk(
    facts: ModelFacts | None, candidate: Candidate, free_bytes: float
) -> tuple[Candidate, str | None]:
    if not candidate.is_loss_chunk_auto:
        return candidate, None
    chunk_tokens, reason = _find_loss_chunk(facts, candidate, free_bytes)
    return (
        replace(candidate, loss_chunk_tokens=chunk_tokens, is_loss_chunk_auto=False),
        f"loss: chunks of {chunk_tokens:,} tokens (auto: {reason})",
    )


def _find_loss_chunk(
    facts: ModelFacts | None, candidate: Candidate, free_bytes: float
) -> tuple[int, str]:
    """Find the tokens of a chunk by free bytes; also return the reason.

    More tokens than a micro-batch has on a rank make no difference.
    """
    smallest = candidate.loss_chunk_tokens
    assert smallest is not None
    num_tokens = candidate.micro_batch_tokens
    if facts is None:
        return smallest, "memory of transformers' own classes is not predicted"
    needed = 0.0
    for chunk_tokens in LARGER_CHUNKS:
        if chunk_tokens >= 2 * num_tokens:
            continue
        needed = _predict_memory(facts, replace(candidate, loss_chunk_tokens=chunk_tokens)).total
        if needed <= USED_SHARE * free_bytes:
            return chunk_tokens, (
                f"{format_bytes(needed)} are predicted, {format_bytes(free_bytes)} free"
            )
    if needed == 0.0:
        return smallest, f"a micro-batch has {num_tokens:,} tokens"
    return smallest, (
        f"with more, {format_bytes(needed)} are predicted, {format_bytes(free_bytes)} free"
    )


def _choose_working_weights(
    facts: ModelFacts | None, candidate: Candidate, free_bytes: float
) -> tuple[Candidate, str | None]:
    """Make working weights if `auto` makes none yet, they save casts and fit."""
    if candidate.working_weights != "auto" or candidate.has_working_weights or facts is None:
        return candidate, None
    copied = replace(candidate, working_weights=True)
    is_faster = candidate.offloads_trained_weights or saves_casts(candidate, "gpu")
    if not copied.has_working_weights or not is_faster:
        return candidate, None
    needed = _predict_memory(facts, copied).total
    has_memory = needed <= USED_SHARE * free_bytes
    return copied if has_memory else candidate, (
        f"working weights: {'yes' if has_memory else 'no'} (auto: with them {format_bytes(needed)} "
        f"are predicted, {format_bytes(free_bytes)} free)"
    )


def _choose_read_ahead(
    facts: ModelFacts | None, candidate: Candidate, free_bytes: float
) -> tuple[Candidate, str | None]:
    """Choose the bytes of moments that are read ahead, in whole buffers.

    At most half of the moments: with more of them on the device nothing further is hidden, unless
    the passes are much shorter than the transfers.
    """
    if (
        not candidate.is_read_ahead_auto
        or candidate.optimizer_tier != "host"
        or candidate.is_updated_on_host
    ):
        return candidate, None
    if facts is None:
        return replace(candidate, ahead_bytes=0, is_read_ahead_auto=False), None
    without = _predict_memory(facts, candidate)
    whole = _predict_memory(facts, replace(candidate, ahead_bytes=_ALL_BYTES))
    spare_bytes = max(0.0, USED_SHARE * free_bytes - without.total)
    share = min(0.5, spare_bytes / max(1.0, whole.total - without.total))
    buffer_bytes = candidate.offload_buffer_bytes
    num_buffers = int(share * (whole.optimizer - without.optimizer) // buffer_bytes)
    ahead_bytes = num_buffers * buffer_bytes
    return replace(candidate, ahead_bytes=ahead_bytes, is_read_ahead_auto=False), (
        f"offload: {format_bytes(ahead_bytes)} of moments are read during the passes before their "
        f"update (auto: {format_bytes(without.total)} are predicted without, "
        f"{format_bytes(free_bytes)} free)"
    )
