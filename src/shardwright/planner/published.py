"""Predictions for published rows: what a row leaves unsaid is what its users would have picked. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardwright.planner.achieved import Efficiencies, load_efficiencies
from shardwright.planner.candidate import Candidate
from shardwright.planner.efficiency import Efficiency
from shardwright.planner.facts import facts_of
from shardwright.planner.measurements import Case
from shardwright.planner.memory import predict_memory
from shardwright.planner.pipeline import pipeline_of
from shardwright.planner.predict import predict
from shardwright.planner.prediction import Prediction
from shardwright.units import GIB_BYTES

MICRO_BATCHES = (1, 2, 4, 8, 16)
"""Tried where a row does not say; the fastest that fits is taken."""


@dataclass(frozen=True)
class PredictedRow:
    """What `predict` writes of one row."""

    id: str
    tokens_per_second_per_gpu: float
    memory_gib: float
    fits: bool

    def as_row(self) -> dict[str, str]:
        """In the words of the table: pred_tok is tokens/s per GPU, pred_mem GiB per GPU."""
        return {
            "id": self.id,
            "pred_tok": f"{self.tokens_per_second_per_gpu:.6g}",
            "pred_mem": f"{self.memory_gib:.4g}",
            "fits": str(int(self.fits)),
        }


def predict_row(case: Case, efficiencies: Efficiencies | None = None) -> PredictedRow:
    """One row's throughput, memory in the row's own metric, and whether it fits."""
    prediction = predict_case(case, efficiencies)
    fits, memory = prediction.fits, memory_bytes(case, prediction, efficiencies)
    if not fits and _fits_recomputed(case, prediction, efficiencies):
        # It recomputes as much as it must: parts of some layers, which takes little time and leaves the device full.
        fits, memory = True, min(memory, case.cluster.accelerator.memory_bytes)
    return PredictedRow(case.id, prediction.tokens_per_second_per_gpu, memory / GIB_BYTES, fits)


def memory_bytes(case: Case, prediction: Prediction, efficiencies: Efficiencies | None = None) -> float:
    """What the row's own way to read memory would show: of its rank, its total."""
    parts = prediction.memory
    if case.first_rank:
        facts, candidate = facts_of(case.shape), prediction.candidate
        steps, rule = candidate.gradient_accumulation_steps, candidate.engine.stage_rule
        first = pipeline_of(facts, candidate.layout, steps, candidate.sequence_length, rule).load_of(0)
        parts = predict_memory(facts, candidate, first, _achieved(case, efficiencies))
    return {"allocated": parts.live, "reserved": parts.reserved, "device": parts.total}[case.metric]


def _achieved(case: Case, efficiencies: Efficiencies | None) -> Efficiency:
    return (efficiencies or load_efficiencies()).of(case.cluster.accelerator, case.framework, case.features)


def _fits_recomputed(case: Case, prediction: Prediction, efficiencies: Efficiencies | None) -> bool:
    """Whether a row that says nothing of recomputation fits when it recomputes everything."""
    if case.recompute_stated:
        return False
    leanest = replace(prediction.candidate, recompute="full")
    return predict_case(replace(case, candidate=leanest, micro_batch_stated=True, recompute_stated=True), efficiencies).fits


def predict_case(case: Case, efficiencies: Efficiencies | None = None) -> Prediction:
    """The row's configuration; of what it does not state, the fastest choice that fits (the leanest where none does)."""
    achieved = _achieved(case, efficiencies)
    tried = [predict(case.shape, candidate, case.cluster, achieved) for candidate in choices(case)]
    fitting = [prediction for prediction in tried if prediction.fits]
    if fitting:
        return max(fitting, key=lambda prediction: prediction.tokens_per_second)
    return min(tried, key=lambda prediction: prediction.memory.total)


def choices(case: Case) -> Iterator[Candidate]:
    """The row's candidate; where it does not say the micro batch, with every one that it may have had."""
    stated = case.candidate
    per_rank = stated.micro_batch_size * stated.gradient_accumulation_steps
    sizes = [stated.micro_batch_size] if case.micro_batch_stated else [m for m in MICRO_BATCHES if per_rank % m == 0] or [1]
    for size in sizes:
        steps = max(1, per_rank // size)
        if stated.layout.virtual_stages and steps % stated.layout.pp:
            continue
        chosen = replace(stated, micro_batch_size=size, gradient_accumulation_steps=steps)
        yield chosen
        if chosen.engine.waiting_sequences:
            yield replace(chosen, engine=replace(chosen.engine, waiting_sequences=0.0))
