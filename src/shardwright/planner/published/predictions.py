"""Predictions for published rows, with unstated settings chosen as a user would."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardwright.planner.candidate import Candidate
from shardwright.planner.memory.peaks import predict_memory
from shardwright.planner.model_costs import get_model_facts
from shardwright.planner.prediction import Prediction
from shardwright.planner.predictor import predict
from shardwright.planner.published.measurements import PublishedRun
from shardwright.planner.published.nanotron_memory import (
    compute_reserved_bytes,
    has_simulated_memory,
)
from shardwright.planner.rates.calibration import EfficiencyTable, load_efficiencies
from shardwright.planner.rates.efficiency import Efficiency
from shardwright.planner.time.pipeline import get_pipeline
from shardwright.planner.uncertainty import MIN_FIT_PROBABILITY, Uncertainty
from shardwright.units import GIB_BYTES

MICRO_BATCH_SIZES = (1, 2, 4, 8, 16)
"""Sizes tried if a row states none; the fastest that fits is used."""


OUTPUT_COLUMNS = (
    "id", "pred_tok", "pred_mem", "fits", "pred_tok_low", "pred_tok_high", "pred_mem_low",
    "pred_mem_high", "fit_probability",
)  # fmt: skip
"""Columns of `PredictedRow.as_row`."""


@dataclass(frozen=True)
class PredictedRow:
    """Output of `predict` for one row."""

    id: str
    tokens_per_second_per_gpu: float
    memory_gib: float
    fits: bool
    fit_probability: float
    uncertainty: Uncertainty

    def as_row(self) -> dict[str, str]:
        """Return the output columns: pred_tok in tokens/s per GPU, pred_mem in GiB per GPU, each
        with the ends of its interval."""
        slow, fast = self.uncertainty.time.apply(1.0)
        small, large = self.uncertainty.memory.apply(self.memory_gib)
        return {
            "id": self.id,
            "pred_tok": f"{self.tokens_per_second_per_gpu:.6g}",
            "pred_mem": f"{self.memory_gib:.4g}",
            "fits": str(int(self.fits)),
            "pred_tok_low": f"{self.tokens_per_second_per_gpu / fast:.6g}",
            "pred_tok_high": f"{self.tokens_per_second_per_gpu / slow:.6g}",
            "pred_mem_low": f"{small:.4g}",
            "pred_mem_high": f"{large:.4g}",
            "fit_probability": f"{self.fit_probability:.3g}",
        }


def predict_row(run: PublishedRun, efficiencies: EfficiencyTable | None = None) -> PredictedRow:
    """Predict throughput, memory in the row's own metric, and whether the row's configuration
    fits."""
    prediction = predict_published_run(run, efficiencies)
    fits = prediction.fits
    fit_probability = prediction.fit_probability
    memory = compute_reported_memory_bytes(run, prediction, efficiencies)
    if not fits and _predict_with_recompute(run, prediction, efficiencies).fits:
        # It recomputes as much as necessary: parts of some layers, which takes little time and
        # leaves the device full.
        fits = True
        fit_probability = max(fit_probability, MIN_FIT_PROBABILITY)
        memory = min(memory, run.cluster.accelerator.memory_bytes)
    return PredictedRow(
        run.id,
        prediction.tokens_per_second_per_gpu,
        memory / GIB_BYTES,
        fits,
        fit_probability,
        prediction.uncertainty,
    )


def compute_reported_memory_bytes(
    run: PublishedRun, prediction: Prediction, efficiencies: EfficiencyTable | None = None
) -> float:
    """Return the predicted memory in the row's own metric, on the rank that it reports."""
    parts = prediction.memory
    if run.is_first_rank_memory:
        facts = get_model_facts(run.shape)
        candidate = prediction.candidate
        steps = candidate.gradient_accumulation_steps
        first = get_pipeline(
            facts, candidate.layout, steps, candidate.sequence_length, candidate.engine
        ).build_rank_load(0)
        if has_simulated_memory(run):
            return compute_reserved_bytes(run, first)
        parts = predict_memory(facts, candidate, first, _find_efficiency(run, efficiencies))
    return {"allocated": parts.live, "reserved": parts.reserved, "device": parts.total}[
        run.memory_metric
    ]


def _find_efficiency(run: PublishedRun, efficiencies: EfficiencyTable | None) -> Efficiency:
    return (efficiencies or load_efficiencies()).get_efficiency(
        run.cluster.accelerator, run.framework, run.features
    )


def _predict_with_recompute(
    run: PublishedRun, prediction: Prediction, efficiencies: EfficiencyTable | None
) -> Prediction:
    """Predict a row that does not state its recomputation with full recomputation; return the
    prediction of another row unchanged."""
    if run.is_recompute_stated:
        return prediction
    recomputed = replace(prediction.candidate, recompute="full")
    return predict_published_run(
        replace(run, candidate=recomputed, is_micro_batch_stated=True, is_recompute_stated=True),
        efficiencies,
    )


def predict_least_memory(
    run: PublishedRun, efficiencies: EfficiencyTable | None = None
) -> Prediction:
    """Predict a row. If it does not state its recomputation and does not fit, its memory is that
    with full recomputation, and its time without: it recomputes as little as necessary."""
    prediction = predict_published_run(run, efficiencies)
    if prediction.fits:
        return prediction
    recomputed = _predict_with_recompute(run, prediction, efficiencies)
    return replace(prediction, memory=recomputed.memory)


def predict_published_run(
    run: PublishedRun, efficiencies: EfficiencyTable | None = None
) -> Prediction:
    """Predict the row's configuration. Unstated settings are the fastest choice that fits, or
    the smallest if none does."""
    efficiency = _find_efficiency(run, efficiencies)
    predictions = [
        predict(run.shape, candidate, run.cluster, efficiency, run.framework)
        for candidate in list_row_candidates(run)
    ]
    fitting = [prediction for prediction in predictions if prediction.fits]
    if fitting:
        return max(fitting, key=lambda prediction: prediction.tokens_per_second)
    return min(predictions, key=lambda prediction: prediction.memory.total)


def list_row_candidates(run: PublishedRun) -> Iterator[Candidate]:
    """Yield the row's candidate or, if it does not state the micro-batch, one candidate per
    possible micro-batch."""
    stated = run.candidate
    per_rank = stated.micro_batch_size * stated.gradient_accumulation_steps
    sizes = (
        [stated.micro_batch_size]
        if run.is_micro_batch_stated
        else [m for m in MICRO_BATCH_SIZES if per_rank % m == 0] or [1]
    )
    for size in sizes:
        steps = max(1, per_rank // size)
        if stated.layout.virtual_stages and steps % stated.layout.pp:
            continue
        candidate = replace(stated, micro_batch_size=size, gradient_accumulation_steps=steps)
        yield candidate
        if run.conventions.num_unreleased_sequences:
            yield replace(candidate, engine=replace(run.conventions, num_unreleased_sequences=0.0))
