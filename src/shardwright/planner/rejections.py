"""Common layouts that do not fit, with the reason and the cheapest change that helps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import Any

from shardwright.config.offload import OffloadTier
from shardwright.layout import Layout
from shardwright.planner.candidate import OPTIMIZER_OFFLOADS, Candidate
from shardwright.planner.memory_settings import predict_run
from shardwright.planner.prediction import Prediction
from shardwright.planner.predictor import Predictor
from shardwright.planner.search.divisibility import explain_layout_conflict, list_divisors
from shardwright.planner.search.space import PlanningProblem, list_batches
from shardwright.units import format_bytes


@dataclass(frozen=True)
class Rejection:
    """A layout that cannot run or does not fit. `change` would make it fit; None if nothing
    does."""

    name: str
    reason: str
    needed_bytes: float | None = None
    change: str | None = None
    changed_prediction: Prediction | None = None


def list_common_layouts(
    predictor: Predictor, problem: PlanningProblem
) -> Iterator[tuple[str, Candidate]]:
    """Yield common layouts for these devices: one GPU, DDP, each ZeRO stage, tensor parallelism
    in a node, a pipeline.

    All have the smallest possible micro-batch and no recomputation.
    """
    num_gpus = problem.num_gpus
    gpus_per_domain = min(problem.num_gpus, predictor.cluster.domain_size)
    plain = problem.template.layout
    yield "one GPU", _build_plain_candidate(problem, plain)
    if num_gpus == 1:
        return
    yield (
        "DDP",
        _build_plain_candidate(problem, replace(plain, dp_replicate=num_gpus, zero_stage=0)),
    )
    for stage in (1, 2, 3):
        yield (
            f"ZeRO-{stage}",
            _build_plain_candidate(problem, replace(plain, dp_shard=num_gpus, zero_stage=stage)),
        )
    if num_gpus % gpus_per_domain == 0 and gpus_per_domain > 1:
        data_ranks = num_gpus // gpus_per_domain
        data_layout: dict[str, Any] = (
            {"dp_shard": data_ranks, "zero_stage": 1} if data_ranks > 1 else {}
        )
        yield (
            f"tp {gpus_per_domain}",
            _build_plain_candidate(problem, replace(plain, tp=gpus_per_domain, **data_layout)),
        )
        yield (
            f"pp {gpus_per_domain}",
            _build_plain_candidate(problem, replace(plain, pp=gpus_per_domain, **data_layout)),
        )


def _build_plain_candidate(problem: PlanningProblem, layout: Layout) -> Candidate:
    data = layout.data_ranks
    possible = list(chain.from_iterable(list_batches(problem, data)))
    micro_batch, accumulation = min(possible) if possible else (1, 0)
    return replace(
        problem.template,
        layout=layout,
        micro_batch_size=micro_batch,
        gradient_accumulation_steps=accumulation,
        recompute="none",
    )


def find_rejections(predictor: Predictor, problem: PlanningProblem) -> list[Rejection]:
    """Return the common layouts that cannot run or do not fit."""
    rejections = []
    for name, candidate in list_common_layouts(predictor, problem):
        reason = explain_conflict(predictor, problem, candidate)
        if reason is not None:
            rejections.append(Rejection(name, reason))
            continue
        prediction = predictor.predict(candidate)
        if not prediction.fits:
            change, changed = find_cheapest_change(predictor, problem, candidate)
            if changed is not None:
                changed = predict_run(predictor, changed.candidate)
            rejections.append(
                Rejection(
                    name, _describe_memory(prediction), prediction.memory.total, change, changed
                )
            )
    return rejections


def explain_conflict(
    predictor: Predictor, problem: PlanningProblem, candidate: Candidate
) -> str | None:
    """Return the reason why a layout cannot run even with unlimited memory. None if it can."""
    if candidate.gradient_accumulation_steps == 0:
        num_ranks = candidate.layout.data_ranks
        return (
            f"global batch {problem.global_batch_size} is not divisible by {num_ranks} data ranks"
        )
    return explain_layout_conflict(
        predictor.facts,
        candidate.layout,
        candidate.sequence_length,
        candidate.gradient_accumulation_steps,
    )


def _describe_memory(prediction: Prediction) -> str:
    memory = prediction.memory
    parts = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations": memory.activations,
        "logits": memory.logits,
        "gathered parameters": memory.gathered,
    }
    largest = sorted(parts, key=lambda part: -parts[part])[:3]
    summary = ", ".join(f"{part} {format_bytes(parts[part])}" for part in largest)
    capacity = format_bytes(prediction.memory_capacity_bytes)
    return f"needs {format_bytes(memory.total)} of {capacity}: {summary}"


def find_cheapest_change(
    predictor: Predictor, problem: PlanningProblem, candidate: Candidate
) -> tuple[str | None, Prediction | None]:
    """Return the fastest change that makes the candidate fit, and the changed prediction.

    One that `train` can run comes before one that is predicted only. Tries combinations of up to
    three changes without offloading, then those with it.
    """
    is_cpu = predictor.cluster.accelerator.kind == "cpu"
    changes = list(_list_changes(problem, candidate, is_cpu=is_cpu))
    for has_offload in (False, True):
        for count in (1, 2, 3):
            fitting = []
            for chosen in combinations(changes, count):
                kinds = {kind for kind, _, _ in chosen}
                if len(kinds) == count and bool(kinds & _OFFLOAD_KINDS) == has_offload:
                    changed = candidate
                    for _, _, apply in chosen:
                        changed = apply(changed)
                    if changed.parameter_offload != "none" and not changed.is_runnable:
                        continue
                    if explain_conflict(predictor, problem, changed) is None:
                        prediction = predictor.predict(changed)
                        if prediction.fits:
                            fitting.append(
                                (" and ".join(name for _, name, _ in chosen), prediction)
                            )
            if fitting:
                return min(
                    fitting, key=lambda pair: (not pair[1].candidate.is_runnable, pair[1].time.step)
                )
    return None, None


_OFFLOAD_KINDS = {"offload", "activation offload", "parameter offload"}
_Change = Callable[[Candidate], Candidate]


def _change_candidate(**values: Any) -> _Change:
    return lambda candidate: replace(candidate, **values)


def _change_layout(**values: Any) -> _Change:
    return lambda candidate: replace(candidate, layout=replace(candidate.layout, **values))


def _list_weight_offloads(
    candidate: Candidate, tier: OffloadTier, *, is_cpu: bool
) -> Iterator[tuple[str, str, _Change]]:
    """Yield the offloading of trained weights, which return for the update with the moments, by
    the place of the update, and with working weights on the device."""
    settings: dict[str, dict[str, Any]] = {
        f"offload.optimizer: {tier}": {"offload": OPTIMIZER_OFFLOADS[tier]},
        f"offload.parameters: {tier}": {"parameter_offload": tier},
    }
    on_host: dict[str, dict[str, Any]] = {
        "offload.update_on: host": {"is_updated_on_host": True},
    }
    copied: dict[str, dict[str, Any]] = {
        "precision.working_weights: true": {"working_weights": True},
    }
    has_copies = (
        candidate.working_weights == "auto" and candidate.activation_bytes < candidate.master_bytes
    )
    for places in ({}, on_host)[: 1 if is_cpu else 2]:
        for copies in ({}, copied)[: 2 if has_copies else 1]:
            chosen = settings | places | copies
            *names, last = chosen
            values = {key: value for part in chosen.values() for key, value in part.items()}
            yield "offload", f"{', '.join(names)} and {last}", _change_candidate(**values)


def _list_changes(
    problem: PlanningProblem, candidate: Candidate, *, is_cpu: bool
) -> Iterator[tuple[str, str, _Change]]:
    """Yield kind, description and function of each change.

    The memory of a CPU device is the host's, so offloading to the host frees none.
    """
    layout = candidate.layout
    for recompute in problem.recompute_kinds:
        if recompute != candidate.recompute and recompute != "none":
            yield "recompute", f"recompute: {recompute}", _change_candidate(recompute=recompute)
    for size in list_divisors(candidate.micro_batch_size)[:-1]:
        steps = candidate.gradient_accumulation_steps * candidate.micro_batch_size // size
        yield (
            "micro batch",
            f"micro batch {size}",
            _change_candidate(micro_batch_size=size, gradient_accumulation_steps=steps),
        )
    data_ranks = layout.data_ranks
    for stage in (1, 2, 3):
        if data_ranks * layout.cp > 1 and stage > layout.zero_stage:
            yield (
                "ZeRO",
                f"zero_stage {stage}",
                _change_layout(zero_stage=stage, dp_shard=data_ranks, dp_replicate=1),
            )
    tiers: tuple[OffloadTier, ...] = ("disk",) if is_cpu else ("host", "disk")
    for tier in tiers:
        states = OPTIMIZER_OFFLOADS[tier]
        yield "offload", f"offload.optimizer: {tier}", _change_candidate(offload=states)
        yield (
            "activation offload",
            f"offload.activations: {tier}",
            _change_candidate(activation_offload=tier),
        )
        if candidate.adapter is None:
            yield from _list_weight_offloads(candidate, tier, is_cpu=is_cpu)
        else:
            yield (
                "parameter offload",
                f"offload.parameters: {tier}",
                _change_candidate(parameter_offload=tier),
            )
