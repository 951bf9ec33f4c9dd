"""Attention work of context ranks over packed rows: as in the chunks that a run assigns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.layout import Layout
from shardwright.layout.context_method import assign_chunks, count_chunks_by_work
from shardwright.parallel.context.row_split import assign_chunks_by_work, count_visible_keys
from shardwright.planner.candidate import Candidate
from shardwright.planner.context_loads import (
    assign_context_chunks,
    compute_attention_loads,
    compute_mean_load,
    count_chunk_keys,
    count_context_work,
)
from shardwright.planner.model_costs import ModelFacts, get_model_facts
from shardwright.planner.predictor import Predictor
from shardwright.planner.rates.efficiency import Efficiency
from shardwright.planner.training_rows import (
    TrainingRows,
    compare_context_splits,
    predict_rows,
)
from tests.unit.planner import models

LENGTH = 512
RING = Layout(cp=2, cp_method="ring", zero_stage=3)


def draw_documents(num_rows: int, seed: int, length: int = LENGTH) -> tuple[tuple[int, ...], ...]:
    """Draw documents of very different lengths that fill each row."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(num_rows):
        row: list[int] = []
        while sum(row) < length:
            drawn = int(random.lognormal(np.log(length / 8), 1.2)) + 1
            row.append(min(drawn, length - sum(row)))
        rows.append(tuple(row))
    return tuple(rows)


def list_ids(documents: tuple[tuple[int, ...], ...]) -> np.ndarray:
    return np.stack([np.repeat(np.arange(len(row)), row) for row in documents])


@given(
    documents=st.lists(st.integers(1, 24), min_size=1, max_size=8),
    window=st.none() | st.integers(1, 12),
)
def test_visible_keys_are_those_that_a_run_counts(documents: list[int], window: int | None) -> None:
    row = [*documents, 8 - sum(documents) % 8]
    counted = count_visible_keys(list_ids((tuple(row),)), (window,), 8)
    assert count_chunk_keys(row, window, 8) == counted.tolist()


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("model", ["llama", "gemma2"])
def test_chunks_and_work_are_those_of_a_run(model: str, degree: int) -> None:
    facts = get_model_facts(models.read_shape(model))
    windows = facts.shape.windows
    documents = draw_documents(3, seed=degree)
    ids_BT = list_ids(documents)
    for split in ("zigzag", "work"):
        layout = replace(RING, cp=degree, cp_split=split)
        candidate = Candidate(layout, LENGTH, 3)
        chunks = (
            assign_chunks("ring", degree)
            if split == "zigzag"
            else assign_chunks_by_work(
                count_visible_keys(ids_BT, windows, count_chunks_by_work(degree, LENGTH)), degree
            )
        )
        assert assign_context_chunks(facts, candidate, documents) == chunks
        num_chunks = sum(map(len, chunks))
        works = count_context_work(facts, candidate, documents)
        assert sum(work.num_layers for work in works) == len(windows)
        for work in works:
            keys = count_visible_keys(ids_BT, (work.window,), num_chunks)
            assert work.busiest == max(sum(keys[chunk] for chunk in own) for own in chunks)
            assert work.mean * degree == keys.sum()
        assert dict(compute_attention_loads(works)) == {
            work.window: work.busiest / work.mean for work in works
        }


def test_ranks_that_compute_whole_rows_have_the_same_work() -> None:
    facts = get_model_facts(models.read_shape("llama"))
    documents = draw_documents(2, seed=0)
    for layout in (replace(RING, cp_method="ulysses"), Layout(), replace(RING, cp_method="auto")):
        assert count_context_work(facts, Candidate(layout, LENGTH, 2), documents) == ()
    assert count_context_work(facts, Candidate(RING, LENGTH, 2), ()) == ()
    assert compute_mean_load(()) == 1.0
    one_document = count_context_work(facts, Candidate(RING, LENGTH, 1), ((LENGTH,),))
    assert compute_mean_load(one_document) == 1.0


def build_predictor() -> Predictor:
    facts: ModelFacts = get_model_facts(models.read_shape("llama"))
    return Predictor(facts, models.make_cluster(2), Efficiency())


def test_rows_are_predicted_with_the_busiest_context_rank() -> None:
    predictor = build_predictor()
    documents = draw_documents(16, seed=3)
    rows = TrainingRows(documents, LENGTH, is_packed=True, is_uneven=False, pad_multiple=None)
    zigzag = Candidate(RING, LENGTH, 2, 2)
    work = replace(zigzag, layout=replace(RING, cp_split="work"))
    compared = compare_context_splits(predictor, zigzag, rows)
    assert compared is not None
    assert compared.zigzag_load > 1.05 > compared.work_load >= 1.0
    predicted = {
        "zigzag": predict_rows(predictor, zigzag, rows),
        "work": predict_rows(predictor, work, rows),
    }
    assert compared.zigzag_seconds == predicted["zigzag"].time.step
    assert compared.work_seconds == predicted["work"].time.step
    assert predicted["zigzag"].time.imbalance > predicted["work"].time.imbalance >= 0.0
    assert predicted["zigzag"].time.compute == predicted["work"].time.compute
    # Every micro-batch waits for its own busiest rank: ranks exchange something in every layer.
    expected = 0.0
    for step in range(rows.count_steps(zigzag)):
        for by_rank in rows.list_micro_batches(zigzag, step):
            (each,) = by_rank
            loads = compute_attention_loads(
                count_context_work(predictor.facts, zigzag, each.documents)
            )
            resized = replace(zigzag, document_tokens=each.document_tokens)
            expected += models.compute_pass_seconds(
                predictor, replace(resized, attention_loads=loads)
            ) - models.compute_pass_seconds(predictor, resized)
    assert predicted["zigzag"].time.imbalance == pytest.approx(
        expected / rows.count_steps(zigzag), rel=1e-9
    )
    assert "zigzag" in compared.describe()


def test_attention_takes_as_much_longer_as_the_busiest_rank_has_more_work() -> None:
    predictor = build_predictor()
    explicit = Candidate(RING, LENGTH, 2, flash_attention=False)
    for candidate in (Candidate(RING, LENGTH, 2), explicit):
        seconds = [
            models.compute_pass_seconds(
                predictor, replace(candidate, attention_loads=((None, load),))
            )
            for load in (1.0, 2.0, 3.0)
        ]
        plain = models.compute_pass_seconds(predictor, candidate)
        assert seconds[0] == plain
        assert seconds[2] - seconds[1] == pytest.approx(seconds[1] - seconds[0], rel=0.3)
        assert seconds[1] > plain


def test_layouts_without_shared_packed_rows_are_not_compared() -> None:
    predictor = build_predictor()
    rows = TrainingRows(draw_documents(16, 1), LENGTH, True, False, None)
    unpacked = replace(rows, documents=((LENGTH,),) * 16, is_packed=False)
    assert compare_context_splits(predictor, Candidate(RING, LENGTH, 2), unpacked) is None
    assert compare_context_splits(predictor, Candidate(Layout(), LENGTH, 2), rows) is None
