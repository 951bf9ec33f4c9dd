"""Prediction of steps over the rows that a run reads, instead of full rows.

The rows of several steps are assigned to data ranks and micro-batches as in the run. Every
micro-batch is predicted with its own length and documents. The passes of a step are combined by
when ranks wait for each other: after each micro-batch if parameters or gradients are exchanged
then, otherwise at the end of the step. A pipeline's schedule is simulated with the seconds of each
micro-batch on each stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import NamedTuple

from shardwright.layout import Layout
from shardwright.placement.row_assignment import (
    WorkBalance,
    balance_rows,
    round_up_row_length,
    sort_by_length,
    split_into_micro_batches,
    waits_after_each_micro_batch,
)
from shardwright.planner.candidate import Candidate
from shardwright.planner.context_loads import (
    DocumentLengths,
    compute_attention_loads,
    compute_mean_load,
    count_context_work,
    has_uneven_contexts,
)
from shardwright.planner.prediction import Prediction, TimeParts
from shardwright.planner.predictor import Predictor
from shardwright.planner.search.result import SearchResult, recommend
from shardwright.planner.time.pipeline import PipelineStages
from shardwright.planner.time.pipeline_simulation import simulate_micro_batches
from shardwright.planner.time.step_costs import LayerCompute
from shardwright.planner.time.step_time import PlannedStep
from shardwright.plans import compute_row_multiple
from shardwright.units import format_seconds

MAX_STEPS = 16
"""Largest number of steps that are predicted one by one."""
_MAX_MICRO_BATCHES = 512
"""Largest number of micro-batches among them, of all ranks together."""

_PASSES = ("compute", "tensor", "context", "expert", "offload")
"""Parts of a step's time in which a rank computes its micro-batches."""


class MicroBatchRows(NamedTuple):
    """Rows of one micro-batch: their common length in tokens, padding included, and the length of
    equal documents with the same attention (None if every row is one document)."""

    row_tokens: int
    document_tokens: int | None
    documents: tuple[tuple[int, ...], ...] = ()
    """Lengths of the documents of each row, padding included. Empty unless context-parallel ranks
    share packed rows."""


@dataclass(frozen=True)
class TrainingRows:
    """Rows of the first steps, in the order in which the run reads them."""

    documents: tuple[tuple[int, ...], ...]
    """Positions of each document of each row, without padding."""
    sequence_length: int
    is_packed: bool
    """True if rows have several documents, which do not attend to each other."""
    is_uneven: bool
    """True if rows are sorted by length before they are assigned."""
    pad_multiple: int | None
    """Rows end with the longest of their micro-batch, rounded up to a multiple of this and of the
    parts into which the layout shards a row. None: all have `sequence_length`."""
    balance: WorkBalance | None = None
    """Rows are assigned by work, with the waits and pipeline of each candidate."""

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Positions of each row, without padding."""
        return tuple(map(sum, self.documents))

    def get_row_multiple(self, candidate: Candidate) -> int | None:
        """Return the multiple to which the candidate pads its rows; None: to the full length."""
        if self.pad_multiple is None:
            return None
        return compute_row_multiple(candidate.layout, self.pad_multiple)

    def describe(self) -> str:
        """Describe the rows in one line."""
        num_rows = len(self.documents)
        used = sum(self.lengths) / num_rows / self.sequence_length
        text = (
            f"rows of the data: {num_rows:,} of the first steps, {used:.0%} of their positions used"
        )
        if self.is_packed:
            text += f", {sum(map(len, self.documents)) / num_rows:.1f} documents per row"
        return text

    def count_steps(self, candidate: Candidate) -> int:
        """Count the steps of the candidate that the rows are enough for, up to the limits."""
        per_step = candidate.layout.data_ranks * candidate.gradient_accumulation_steps
        limit = max(1, min(MAX_STEPS, _MAX_MICRO_BATCHES // per_step))
        return min(limit, len(self.documents) // candidate.global_batch_size)

    def list_micro_batches(self, candidate: Candidate, step: int) -> list[list[MicroBatchRows]]:
        """List the micro-batches of a step, by accumulation step and data rank."""
        size = candidate.global_batch_size
        first = step * size
        multiple = self.get_row_multiple(candidate)
        lengths = self.lengths[first : first + size]
        is_sorted = multiple is not None and self.is_uneven and size > candidate.micro_batch_size
        order = sort_by_length(lengths) if is_sorted else list(range(size))
        if self.balance is not None:
            order = balance_rows(
                self.documents[first : first + size],
                replace(
                    self.balance,
                    waits_each_micro_batch=waits_after_each_micro_batch(candidate.layout),
                    is_pipeline=candidate.layout.pp > 1,
                ),
                candidate.micro_batch_size,
                candidate.layout.data_ranks,
            )
        return [
            [
                self._describe([first + row for row in rows], multiple, candidate.layout)
                for rows in rows_by_rank
            ]
            for rows_by_rank in split_into_micro_batches(
                order, candidate.micro_batch_size, candidate.layout.data_ranks
            )
        ]

    def _describe(
        self, rows: Sequence[int], multiple: int | None, layout: Layout
    ) -> MicroBatchRows:
        row_tokens = self.sequence_length
        if multiple is not None:
            longest = max(self.lengths[row] for row in rows)
            row_tokens = min(row_tokens, round_up_row_length(longest, multiple))
        if not self.is_packed:
            return MicroBatchRows(row_tokens, None)
        # Padding at the end of a row is a document of its own.
        documents = tuple(
            (*self.documents[row], row_tokens - self.lengths[row])
            if row_tokens > self.lengths[row]
            else self.documents[row]
            for row in rows
        )
        # Equal documents of this length have as many pairs of token and visible key per token.
        pairs = sum(length * (length + 1) / 2 for row in documents for length in row)
        document_tokens = max(1, round(2 * pairs / (row_tokens * len(rows)) - 1))
        return MicroBatchRows(row_tokens, document_tokens, documents if layout.cp > 1 else ())


def predict_rows(
    predictor: Predictor,
    candidate: Candidate,
    rows: TrainingRows | None,
    compute: LayerCompute | None = None,
) -> Prediction:
    """Predict the mean step of a candidate over real rows.

    The memory is that of full rows, which a step may have. Without rows, all are full.

    Args:
        compute: seconds of layers that predictions of other layouts have computed.

    Raises:
        ValueError: the rows are fewer than those of one step.
    """
    if rows is None:
        return predictor.predict(candidate)
    num_steps = rows.count_steps(candidate)
    if num_steps < 1:
        raise ValueError(f"{len(rows.documents)} rows are fewer than one step needs")
    steps = [rows.list_micro_batches(candidate, step) for step in range(num_steps)]
    micro_batches = [each for step in steps for by_rank in step for each in by_rank]
    compute = compute or LayerCompute()
    full_step = predictor.build_step(candidate)
    pipeline = full_step.pipeline
    step_of = {
        each: full_step.replace_rows(_resize(candidate, each), compute)
        for each in dict.fromkeys(micro_batches)
    }
    seconds_of = {each: _sum_stages(step) for each, step in step_of.items()}
    waiting_of = {
        each: full_step.replace_rows(
            _slow_attention(predictor, step.costs.candidate, each.documents), compute
        )
        if each.documents
        else step
        for each, step in step_of.items()
    }
    mean_seconds: float = fmean(seconds_of[each] for each in micro_batches)
    # A step of equal micro-batches has the traffic and the update of the mean one.
    mean = min(step_of, key=lambda each: abs(seconds_of[each] - mean_seconds))
    full = predictor.predict(candidate, step=full_step)
    time = step_of[mean].predict()
    scale = mean_seconds / seconds_of[mean]
    time = replace(
        time, **{name: getattr(time, name) * scale for name in (*_PASSES, "bubble", "reference")}
    )
    if candidate.layout.pp > 1:
        time = _simulate_passes(time, pipeline, steps, waiting_of)
    else:
        waits = {each: _sum_stages(step) for each, step in waiting_of.items()}
        passes = fmean(
            _combine_passes(candidate, [[waits[each] for each in by_rank] for by_rank in step])
            for step in steps
        )
        even_passes = mean_seconds * candidate.gradient_accumulation_steps
        time = replace(time, imbalance=passes - even_passes)
    tokens = candidate.global_batch_size * fmean(each.row_tokens for each in micro_batches)
    flops = fmean(
        each.row_tokens
        * predictor.facts.compute_flops_per_token(
            min(each.row_tokens, each.document_tokens or each.row_tokens),
            is_frozen=candidate.adapter is not None,
        )
        for each in micro_batches
    )
    return replace(
        full,
        time=time,
        step_tokens=tokens,
        model_flops_per_step=flops * candidate.global_batch_size,
    )


def _sum_stages(step: PlannedStep) -> float:
    """Sum the seconds of a micro-batch over all stages."""
    seconds = [stage.total for stage in step.stage_seconds]
    return sum(seconds[kind] for kind in step.pipeline.partition.kind_of_stage)


def _slow_attention(
    predictor: Predictor, candidate: Candidate, documents: DocumentLengths
) -> Candidate:
    """Return the candidate with context ranks that wait, in every layer, for the one with the most
    attention work."""
    works = count_context_work(predictor.facts, candidate, documents)
    return replace(candidate, attention_loads=compute_attention_loads(works))


class ContextSplit(NamedTuple):
    """A layout with both values of `layout.cp_split`: attention work of the busiest context rank of
    each layer over the mean of all, and seconds of a step."""

    layout: str
    zigzag_load: float
    work_load: float
    zigzag_seconds: float
    work_seconds: float

    def describe(self) -> str:
        """Describe both in one line."""
        return (
            f"{self.layout}: attention of the busiest context rank / mean: {self.zigzag_load:.2f} "
            f"with cp_split: zigzag ({format_seconds(self.zigzag_seconds)} per step), "
            f"{self.work_load:.2f} with work ({format_seconds(self.work_seconds)})"
        )


def compare_context_splits(
    predictor: Predictor, candidate: Candidate, rows: TrainingRows
) -> ContextSplit | None:
    """Predict a layout with both values of `layout.cp_split`; None if its context ranks share no
    packed rows."""
    if not rows.is_packed or not has_uneven_contexts(predictor.facts, candidate):
        return None
    loads = []
    seconds = []
    for split in ("zigzag", "work"):
        variant = replace(candidate, layout=replace(candidate.layout, cp_split=split))
        works = [
            work
            for step in range(rows.count_steps(variant))
            for by_rank in rows.list_micro_batches(variant, step)
            for each in by_rank
            for work in count_context_work(predictor.facts, variant, each.documents)
        ]
        loads.append(compute_mean_load(works))
        seconds.append(predict_rows(predictor, variant, rows).time.step)
    return ContextSplit(candidate.describe(), *loads, *seconds)


def order_by_rows(
    predictor: Predictor, result: SearchResult, rows: TrainingRows
) -> tuple[list[Prediction], Prediction | None]:
    """Return the layouts of a search as predicted with real rows, best first, and the
    recommended one by the rule for full rows."""
    found = [*result.predictions]
    if result.chosen is not None and result.chosen not in found:
        found.append(result.chosen)
    compute = LayerCompute()
    predictions = sorted(
        (predict_rows(predictor, each.candidate, rows, compute) for each in found),
        key=lambda each: each.time.step,
    )
    return predictions, recommend(predictions)


def _resize(candidate: Candidate, rows: MicroBatchRows) -> Candidate:
    return replace(candidate, sequence_length=rows.row_tokens, document_tokens=rows.document_tokens)


def _simulate_passes(
    time: TimeParts,
    pipeline: PipelineStages,
    steps: Sequence[Sequence[Sequence[MicroBatchRows]]],
    step_of: Mapping[MicroBatchRows, PlannedStep],
) -> TimeParts:
    """Return the time with the bubble of a pipeline's steps, and the waits of its data ranks.

    Args:
        time: a step of equal micro-batches.
        steps: micro-batches of each step, by accumulation step and data rank.
    """
    ends = [
        [
            simulate_micro_batches(
                pipeline,
                [(step_of[each].stage_seconds, step_of[each].send_seconds) for each in of_rank],
            )
            for of_rank in zip(*step, strict=True)
        ]
        for step in steps
    ]
    mean_end = fmean(end for by_rank in ends for end in by_rank)
    passes = sum(getattr(time, name) for name in _PASSES)
    return replace(
        time,
        bubble=max(0.0, mean_end - passes - time.pipeline),
        imbalance=fmean(map(max, ends)) - mean_end,
    )


def _combine_passes(candidate: Candidate, seconds: Sequence[Sequence[float]]) -> float:
    """Return the seconds until the passes of a step end on all ranks, without a pipeline.

    Args:
        seconds: of each micro-batch through the whole model, by accumulation step and rank.
    """
    by_rank: list[tuple[float, ...]] = list(zip(*seconds, strict=True))
    if waits_after_each_micro_batch(candidate.layout):
        return sum(max(times) for times in seconds)
    return max(sum(times) for times in by_rank)
