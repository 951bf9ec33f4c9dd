"""Layouts that people ask for first and that do not fit, each with the reason and the cheapest change that would make it fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import Any

from shardwright.layout import Layout
from shardwright.planner.candidate import Candidate
from shardwright.planner.predict import Predictor
from shardwright.planner.prediction import Prediction
from shardwright.planner.rules import divisors, why_not
from shardwright.planner.space import Question, batches
from shardwright.units import format_bytes


@dataclass(frozen=True)
class Rejection:
    """A layout that was turned down. `change` is what would make it fit, None where nothing does."""

    name: str
    reason: str
    needed_bytes: float | None = None
    change: str | None = None
    changed: Prediction | None = None


def familiar(predictor: Predictor, question: Question) -> Iterator[tuple[str, Candidate]]:
    """The layouts of the textbooks for these devices: one, copies, each stage of ZeRO, tensor parallel in a node, a pipeline.

    Each is as plain as can be: micro batch 1, nothing recomputed.
    """
    num, node = question.num_gpus, min(question.num_gpus, predictor.cluster.domain_size)
    plain = question.template.layout
    yield "one GPU", _plain(question, plain)
    if num == 1:
        return
    yield "DDP", _plain(question, replace(plain, dp_replicate=num, zero_stage=0))
    for stage in (1, 2, 3):
        yield f"ZeRO-{stage}", _plain(question, replace(plain, dp_shard=num, zero_stage=stage))
    if num % node == 0 and node > 1:
        data = num // node
        data_layout: dict[str, Any] = {"dp_shard": data, "zero_stage": 1} if data > 1 else {}
        yield f"tp {node}", _plain(question, replace(plain, tp=node, **data_layout))
        yield f"pp {node}", _plain(question, replace(plain, pp=node, **data_layout))


def _plain(question: Question, layout: Layout) -> Candidate:
    data = layout.data_ranks
    possible = list(chain.from_iterable(batches(question, data)))
    micro_batch, accumulation = min(possible) if possible else (1, 0)
    return replace(
        question.template, layout=layout, micro_batch_size=micro_batch, gradient_accumulation_steps=accumulation, recompute="none"
    )


def reject(predictor: Predictor, question: Question) -> list[Rejection]:
    """Those of the familiar layouts that cannot be, or do not fit."""
    found = []
    for name, candidate in familiar(predictor, question):
        reason = why_not_at_all(predictor, question, candidate)
        if reason is not None:
            found.append(Rejection(name, reason))
            continue
        prediction = predictor.predict(candidate)
        if not prediction.fits:
            change, changed = cheapest_change(predictor, question, candidate)
            found.append(Rejection(name, _size(prediction), prediction.memory.total, change, changed))
    return found


def why_not_at_all(predictor: Predictor, question: Question, candidate: Candidate) -> str | None:
    """Why a layout cannot run whatever the memory."""
    if candidate.gradient_accumulation_steps == 0:
        return f"global batch {question.global_batch_size} does not divide by {candidate.layout.data_ranks} data ranks"
    return why_not(predictor.facts, candidate.layout, candidate.sequence_length, candidate.gradient_accumulation_steps)


def _size(prediction: Prediction) -> str:
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
    told = ", ".join(f"{part} {format_bytes(parts[part])}" for part in largest)
    return f"needs {format_bytes(memory.total)} of {format_bytes(prediction.memory_capacity_bytes)}: {told}"


def cheapest_change(predictor: Predictor, question: Question, candidate: Candidate) -> tuple[str | None, Prediction | None]:
    """The change after which the candidate fits and is fastest: one that `train` can run, or two or three; else with offload."""
    changes = list(_changes(question, candidate))
    for runnable in (True, False):
        for count in (1, 2, 3):
            fitting = []
            for chosen in combinations(changes, count):
                kinds = {kind for kind, _, _ in chosen}
                if len(kinds) == count and ("offload" in kinds) != runnable:
                    changed = candidate
                    for _, _, apply in chosen:
                        changed = apply(changed)
                    if why_not_at_all(predictor, question, changed) is None:
                        prediction = predictor.predict(changed)
                        if prediction.fits:
                            fitting.append((" and ".join(name for _, name, _ in chosen), prediction))
            if fitting:
                return min(fitting, key=lambda pair: pair[1].time.step)
    return None, None


_Apply = Callable[[Candidate], Candidate]


def _with(**values: Any) -> _Apply:
    return lambda candidate: replace(candidate, **values)


def _with_layout(**values: Any) -> _Apply:
    return lambda candidate: replace(candidate, layout=replace(candidate.layout, **values))


def _changes(question: Question, candidate: Candidate) -> Iterator[tuple[str, str, _Apply]]:
    """Of each change its kind, how it is told, and what it does."""
    layout = candidate.layout
    for recompute in question.recomputes:
        if recompute != candidate.recompute and recompute != "none":
            yield "recompute", f"recompute: {recompute}", _with(recompute=recompute)
    for size in divisors(candidate.micro_batch_size)[:-1]:
        steps = candidate.gradient_accumulation_steps * candidate.micro_batch_size // size
        yield "micro batch", f"micro batch {size}", _with(micro_batch_size=size, gradient_accumulation_steps=steps)
    data = layout.data_ranks
    for stage in (1, 2, 3):
        if data * layout.cp > 1 and stage > layout.zero_stage:
            yield "ZeRO", f"zero_stage {stage}", _with_layout(zero_stage=stage, dp_shard=data, dp_replicate=1)
    yield "offload", "offload of the optimizer (predicted only)", _with(offload="optimizer")
    yield "offload", "offload of parameters and optimizer (predicted only)", _with(offload="parameters")
