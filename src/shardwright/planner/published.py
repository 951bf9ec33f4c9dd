"""Predictions for published rows, with unstated settings chosen as a user would."""

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
"""Sizes tried if a row states none; the fastest that fits is used."""


@dataclass(frozen=True)
class PredictedRow:
    """Output of `predict` for one row."""

    id: str
    tokens_per_second_per_gpu: float
    memory_gib: float
    fits: bool

    def as_row(self) -> dict[str, str]:
        """Return the output columns: pred_tok in tokens/s per GPU, pred_mem in GiB per GPU."""
        return {
            "id": self.id,
            "pred_tok": f"{self.tokens_per_second_per_gpu:.6g}",
            "pred_mem": f"{self.memory_gib:.4g}",
            "fits": str(int(self.fits)),
        }


def predict_row(case: Case, efficiencies: Efficiencies | None = None) -> PredictedRow:
    """Predict throughput, memory in the row's own metric, and whether the row's configuration
    fits."""
    prediction = predict_case(case, efficiencies)
    fits = prediction.fits
    memory = memory_bytes(case, prediction, efficiencies)
    if not fits and _fits_recomputed(case, prediction, efficiencies):
        # It recomputes as much as necessary: parts of some layers, which takes little time and
        # leaves the device full.
        fits = True
        memory = min(memory, case.cluster.accelerator.memory_bytes)
    return PredictedRow(case.id, prediction.tokens_per_second_per_gpu, memory / GIB_BYTES, fits)


def memory_bytes(case: Case, prediction: Prediction, efficiencies: Efficiencies | None = None) -> float:
    """Return the predicted memory in the row's own metric, on the rank that it reports."""
    parts = prediction.memory
    if case.first_rank:
        facts = facts_of(case.shape)
        candidate = prediction.candidate
        steps = candidate.gradient_accumulation_steps
        rule = candidate.engine.stage_rule
        first = pipeline_of(facts, candidate.layout, steps, candidate.sequence_length, rule).load_of(0)
        parts = predict_memory(facts, candidate, first, _achieved(case, efficiencies))
    return {"allocated": parts.live, "reserved": parts.reserved, "device": parts.total}[case.metric]


def _achieved(case: Case, efficiencies: Efficiencies | None) -> Efficiency:
    return (efficiencies or load_efficiencies()).of(case.cluster.accelerator, case.framework, case.features)


def _fits_recomputed(case: Case, prediction: Prediction, efficiencies: Efficiencies | None) -> bool:
    """Return True if a row that does not state its recomputation fits with full
    recomputation."""
    if case.recompute_stated:
        return False
    recomputed = replace(prediction.candidate, recompute="full")
    return predict_case(replace(case, candidate=recomputed, micro_batch_stated=True, recompute_stated=True), efficiencies).fits


def predict_case(case: Case, efficiencies: Efficiencies | None = None) -> Prediction:
    """Predict the row's configuration. Unstated settings are the fastest choice that fits, or
    the smallest if none does."""
    efficiency = _achieved(case, efficiencies)
    predictions = [predict(case.shape, candidate, case.cluster, efficiency) for candidate in choices(case)]
    fitting = [prediction for prediction in predictions if prediction.fits]
    if fitting:
        return max(fitting, key=lambda prediction: prediction.tokens_per_second)
    return min(predictions, key=lambda prediction: prediction.memory.total)


def choices(case: Case) -> Iterator[Candidate]:
    """Yield the row's candidate or, if it does not state the micro-batch, one candidate per
    possible micro-batch."""
    stated = case.candidate
    per_rank = stated.micro_batch_size * stated.gradient_accumulation_steps
    sizes = [stated.micro_batch_size] if case.micro_batch_stated else [m for m in MICRO_BATCHES if per_rank % m == 0] or [1]
    for size in sizes:
        steps = max(1, per_rank // size)
        if stated.layout.virtual_stages and steps % stated.layout.pp:
            continue
        candidate = replace(stated, micro_batch_size=size, gradient_accumulation_steps=steps)
        yield candidate
        if candidate.engine.waiting_sequences:
            yield replace(candidate, engine=replace(candidate.engine, waiting_sequences=0.0))
