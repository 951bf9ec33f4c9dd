"""Steps over real rows: assigned as the loader does, and combined by when ranks wait."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardwright.data.loader import read_step_micro_batches
from shardwright.data.packed_dataset import PackedDataset, pack_documents
from shardwright.data.run_order import list_row_documents
from shardwright.data.sample_order import SampleOrder
from shardwright.hardware import parse_cluster
from shardwright.layout import Layout
from shardwright.planner.candidate import Candidate
from shardwright.planner.model_costs import get_model_facts
from shardwright.planner.predictor import Predictor
from shardwright.planner.rates.calibration import load_efficiencies
from shardwright.planner.rates.efficiency import Efficiency
from shardwright.planner.search.best_first import search_layouts
from shardwright.planner.search.space import PlanningProblem
from shardwright.planner.time.compute import _count_masked_keys
from shardwright.planner.time.step_costs import LayerCompute
from shardwright.planner.training_rows import TrainingRows, order_by_rows, predict_rows
from shardwright.plans import BatchPlan, compute_row_multiple
from tests.unit.planner import models

LENGTH = 512
DDP = Layout(dp_replicate=2)
ZERO_3 = Layout(dp_shard=2, zero_stage=3)


def build_predictor(num_gpus: int = 2) -> Predictor:
    facts = get_model_facts(models.read_shape("llama"))
    return Predictor(facts, models.make_cluster(num_gpus), Efficiency())


def build_rows(*lengths: int, is_uneven: bool = False) -> TrainingRows:
    """Return rows of one document each."""
    documents = tuple((length,) for length in lengths)
    return TrainingRows(documents, LENGTH, False, is_uneven, pad_multiple=8)


@pytest.mark.parametrize("layout", [DDP, ZERO_3, Layout(pp=2), Layout(tp=2)], ids=str)
def test_full_rows_are_predicted_as_without_rows(layout: Layout) -> None:
    candidate = Candidate(layout, LENGTH, 2, 4)
    predictor = build_predictor()
    real = predict_rows(predictor, candidate, build_rows(*[LENGTH] * 32))
    plain = predictor.predict(candidate)
    assert real.time.imbalance == pytest.approx(0.0, abs=1e-12)
    assert real.time.step == pytest.approx(plain.time.step, rel=1e-9)
    assert real.step_tokens == candidate.global_batch_tokens
    assert real.tokens_per_second == pytest.approx(plain.tokens_per_second)
    assert real.model_flops_utilisation == pytest.approx(plain.model_flops_utilisation)
    assert real.memory == plain.memory


def test_short_rows_take_the_time_of_a_shorter_sequence() -> None:
    predictor = build_predictor()
    candidate = Candidate(ZERO_3, LENGTH, 2, 4)
    real = predict_rows(predictor, candidate, build_rows(*[LENGTH // 4] * 32))
    short = predictor.predict(replace(candidate, sequence_length=LENGTH // 4))
    assert real.time.step == pytest.approx(short.time.step)
    assert real.step_tokens == candidate.global_batch_tokens / 4
    assert real.model_flops_utilisation == pytest.approx(short.model_flops_utilisation)


def test_ranks_wait_for_each_other_where_they_exchange_something() -> None:
    """Rank 0 has a long and a short micro-batch, rank 1 the same in the other order."""
    predictor = build_predictor()
    rows = build_rows(512, 64, 64, 512)
    replicated, sharded = (
        predict_rows(predictor, Candidate(layout, LENGTH, 1, 2), rows) for layout in (DDP, ZERO_3)
    )
    long, short = (
        models.compute_pass_seconds(predictor, Candidate(ZERO_3, length, 1, 2))
        for length in (512, 64)
    )
    assert replicated.time.imbalance == pytest.approx(0.0, abs=1e-12)
    assert sharded.time.imbalance == pytest.approx(2 * long - (long + short))
    uneven = predict_rows(predictor, Candidate(DDP, LENGTH, 1, 2), build_rows(512, 64, 512, 64))
    assert uneven.time.imbalance > 0.9 * sharded.time.imbalance


def test_a_pipeline_is_simulated_with_each_micro_batch() -> None:
    """The formula of 1F1B with two stages and two micro-batches, for both orders."""
    predictor = build_predictor()
    candidate = Candidate(Layout(pp=2), LENGTH, 1, 2)
    step = predictor.build_step(candidate)
    full = step.predict()
    rest = full.step - full.compute - full.bubble - full.pipeline
    found = []
    for lengths in ((512, 64), (64, 512)):
        real = predict_rows(predictor, candidate, build_rows(*lengths)).time
        of_a, of_b = (
            step.replace_rows(replace(candidate, sequence_length=length), LayerCompute())
            for length in lengths
        )
        a = of_a.stage_seconds
        b = of_b.stage_seconds
        sa = of_a.send_seconds
        sb = of_b.send_seconds
        sent_a = a[0].forward + sa
        sent_b = max(a[0].forward + b[0].forward, sent_a) + sb
        back_a = sent_a + a[1].total
        back_b = max(back_a, sent_b) + b[1].total
        end_a = max(a[0].forward + b[0].forward, back_a + sa) + a[0].backward
        end = max(end_a, back_b + sb) + b[0].backward
        assert real.compute + real.bubble + real.pipeline == pytest.approx(end)
        assert real.imbalance == 0.0
        assert real.step - end == pytest.approx(rest)
        found.append(end)
    assert found[0] != pytest.approx(found[1], rel=0.01)


def test_data_ranks_wait_for_the_slowest_pipeline() -> None:
    predictor = build_predictor(4)
    candidate = Candidate(Layout(dp_replicate=2, pp=2), LENGTH, 1, 2)
    alone = Candidate(Layout(pp=2), LENGTH, 1, 2)
    rows = build_rows(512, 64, 512, 64)
    real = predict_rows(predictor, candidate, rows).time
    slow, fast = (
        predict_rows(predictor, alone, build_rows(length, length)).time for length in (512, 64)
    )
    slow_end, fast_end = (each.compute + each.bubble + each.pipeline for each in (slow, fast))
    assert real.imbalance == pytest.approx((slow_end - fast_end) / 2, rel=1e-6)
    assert real.compute + real.bubble + real.pipeline == pytest.approx((slow_end + fast_end) / 2)


def test_rows_are_assigned_as_the_loader_does() -> None:
    random = np.random.default_rng(0)
    for layout, is_unpacked in [(DDP, True), (Layout(dp_shard=2, tp=2), True), (ZERO_3, False)]:
        lengths = random.integers(3, 200, size=96)
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.uint64)
        packing = pack_documents(starts, 256, is_unpacked=is_unpacked)
        tokens = np.arange(int(starts[-1]), dtype=np.uint32)
        dataset = PackedDataset(tokens, packing, 256, is_unpacked=is_unpacked)
        order = SampleOrder(5, len(dataset))
        batch = BatchPlan(256, 3, 2, 2, row_multiple=compute_row_multiple(layout, 8))
        candidate = Candidate(layout, 256, 3, 2)
        rows = TrainingRows(
            list_row_documents(dataset, order, 3 * batch.global_batch_size),
            256,
            is_packed=not is_unpacked,
            is_uneven=dataset.is_uneven,
            pad_multiple=8,
        )
        assert rows.count_steps(candidate) == 3
        for step in range(3):
            expected = rows.list_micro_batches(candidate, step)
            for rank in range(2):
                for number, found in enumerate(
                    read_step_micro_batches(dataset, order, batch, step, rank)
                ):
                    planned = expected[number][rank]
                    assert found.input_ids_BT.shape[1] == planned.row_tokens
                    if is_unpacked:
                        assert planned.document_tokens is None
                        continue
                    assert found.document_ids_BT is not None
                    ids = found.document_ids_BT
                    same = (ids[:, :, None] == ids[:, None, :]).tril()
                    visible = float(same.sum()) / ids.numel()
                    assert planned.document_tokens is not None
                    assert (planned.document_tokens + 1) / 2 == pytest.approx(visible, abs=0.5)


def test_rows_that_cannot_end_early_are_full() -> None:
    rows = replace(build_rows(64, 64), pad_multiple=None)
    assert rows.list_micro_batches(Candidate(DDP, LENGTH), 0)[0][0].row_tokens == LENGTH
    compiled = Candidate(Layout(tp=2), LENGTH, compile=True)
    assert build_rows(61).list_micro_batches(compiled, 0)[0][0].row_tokens == 64
    with pytest.raises(ValueError, match="2 rows are fewer than one step needs"):
        predict_rows(build_predictor(), Candidate(DDP, LENGTH, 2), rows)


def test_layouts_are_ordered_by_their_time_with_rows() -> None:
    cluster = parse_cluster("2xA100-80GB")
    predictor = Predictor(
        build_predictor().facts, cluster, load_efficiencies().get_efficiency(cluster.accelerator)
    )
    problem = PlanningProblem(Candidate(Layout(), LENGTH), 2, 16)
    result = search_layouts(predictor, problem)
    random = np.random.default_rng(1)
    rows = build_rows(*random.integers(16, LENGTH, size=64).tolist(), is_uneven=True)
    predictions, chosen = order_by_rows(predictor, result, rows)
    assert len(predictions) >= len(result.predictions)
    steps = [prediction.time.step for prediction in predictions]
    assert steps == sorted(steps)
    assert chosen is not None
    assert chosen.time.step <= 1.05 * steps[0]
    assert all(prediction.step_tokens is not None for prediction in predictions)


def test_a_dense_mask_skips_no_block_of_keys() -> None:
    candidate = Candidate(Layout(), 512)
    # One block: causal order skips nothing either.
    assert _count_masked_keys(512, candidate) == 513 / 2
    # Two blocks: half of the queries skip the second one, so causal order computes 3/4.
    assert _count_masked_keys(1024, candidate) == pytest.approx(1025 / 2 * 4 / 3)
    predictor = build_predictor(1)
    causal = Candidate(Layout(), 2048, precision="fp32")
    masked = replace(causal, document_tokens=64)
    assert predictor.predict(masked).time.compute > predictor.predict(causal).time.compute
    with_kernels = replace(masked, precision="bf16", has_masked_kernels=True)
    assert (
        predictor.predict(with_kernels).time.compute
        < predictor.predict(replace(with_kernels, document_tokens=None)).time.compute
    )
