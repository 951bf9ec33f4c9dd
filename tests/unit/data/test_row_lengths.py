"""Rows trimmed to the longest of their micro-batch: same samples, loss, gradients; fewer tokens."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shardwright.architecture import read_config
from shardwright.data.dataset import WindowDataset
from shardwright.data.loader import (
    MicroBatch,
    collate,
    iterate_evaluation_micro_batches,
    read_step_micro_batches,
)
from shardwright.data.packed_dataset import PackedDataset, pack_documents
from shardwright.data.run_order import build_run_order
from shardwright.data.scheduled_mixture import ScheduledMixture, WeightSchedule
from shardwright.model.decoder import Decoder
from shardwright.plans import BatchPlan

LENGTH = 48
GLOBAL = 12
LENGTHS = np.random.default_rng(0).integers(2, 50, size=30)
STARTS = np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.uint64)
TOKENS = np.random.default_rng(1).integers(1, 61, size=int(STARTS[-1])).astype(np.uint16)
LLAMA = {
    "model_type": "llama",
    "num_key_value_heads": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 61,
}
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
MODELS: dict[str, dict[str, Any]] = {
    "rotary": LLAMA | SIZES | {"max_position_embeddings": LENGTH},
    "learned positions": {
        "model_type": "gpt2",
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": LENGTH,
        "vocab_size": 61,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "windows": {
        "model_type": "mistral",
        "num_key_value_heads": 1,
        "sliding_window": 7,
        "max_position_embeddings": LENGTH,
    }
    | SIZES,
    # The frequencies of a document depend on whether it is longer than 24 tokens, not on its row.
    "longrope": {
        "model_type": "phi3",
        "num_key_value_heads": 1,
        "max_position_embeddings": LENGTH,
        "pad_token_id": 0,
        "original_max_position_embeddings": 24,
        "rope_theta": 10_000.0,
        "rope_scaling": {"type": "longrope", **FACTORS},
    }
    | SIZES,
}


def build_dataset() -> PackedDataset:
    return PackedDataset(
        TOKENS, pack_documents(STARTS, LENGTH, is_unpacked=True), LENGTH, is_unpacked=True
    )


def read_batches(
    plan: BatchPlan, step: int, data: PackedDataset | ScheduledMixture
) -> list[MicroBatch]:
    order = build_run_order(data, 3, plan.global_batch_size)
    return [
        batch
        for rank in range(plan.data_ranks)
        for batch in read_step_micro_batches(data, order, plan, step, rank)
    ]


def count_rows(batches: list[MicroBatch]) -> Counter[tuple[Any, ...]]:
    """Count rows by (global position, supervised inputs, labels)."""
    counts: Counter[tuple[Any, ...]] = Counter()
    for batch in batches:
        for position, ids, labels in zip(
            batch.sample_indices_B, batch.input_ids_BT, batch.labels_BT, strict=True
        ):
            is_supervised = labels != -100
            counts[
                int(position),
                tuple(ids[is_supervised].tolist()),
                tuple(labels[is_supervised].tolist()),
            ] += 1
    return counts


PLANS = [(12, 1, 1), (3, 4, 1), (3, 2, 2), (1, 4, 3), (2, 1, 6)]


@pytest.mark.parametrize(("micro", "accumulation", "ranks"), PLANS)
@pytest.mark.parametrize("step", [0, 2, 3])  # an epoch of 30 rows ends within step 2
def test_every_layout_reads_the_same_rows_as_without_trimming(
    micro: int, accumulation: int, ranks: int, step: int
) -> None:
    full = count_rows(read_batches(BatchPlan(LENGTH, GLOBAL, 1, 1), step, build_dataset()))
    assert sum(full.values()) == GLOBAL
    assert (
        count_rows(
            read_batches(
                BatchPlan(LENGTH, micro, accumulation, ranks, row_multiple=4), step, build_dataset()
            )
        )
        == full
    )


def test_rows_have_the_length_of_the_longest_in_their_micro_batch() -> None:
    batches = read_batches(BatchPlan(LENGTH, 3, 2, 2, row_multiple=8), 0, build_dataset())
    lengths = [batch.input_ids_BT.shape[1] for batch in batches]
    longest = [int((batch.labels_BT != -100).sum(1).max()) for batch in batches]
    assert lengths == [-(-used // 8) * 8 for used in longest]
    assert sum(lengths) < len(lengths) * LENGTH * 0.8
    # Ranks that wait for each other have rows of neighbouring lengths, and the longest come first.
    assert lengths[0] >= lengths[2] >= lengths[1] >= lengths[3]
    assert all(batch.document_ids_BT is None for batch in batches), (
        "one document in a row needs no mask"
    )


def test_a_length_is_rounded_up_to_a_multiple_and_at_most_to_the_row() -> None:
    data = build_dataset()
    sample = data.get_sample(int(LENGTHS[:30].argmin()))
    assert collate([sample], [0], 5).input_ids_BT.shape == (1, 5)
    assert collate([sample], [0], 32).input_ids_BT.shape == (1, 32)
    assert collate([sample], [0], 7 * LENGTH).input_ids_BT.shape == (1, LENGTH)
    assert collate([sample], [0]).input_ids_BT.shape == (1, LENGTH)


def test_evaluation_reads_the_same_rows() -> None:
    for ranks in (1, 2, 4):
        plan = BatchPlan(LENGTH, 4, 1, ranks)
        full, short = (
            [
                b
                for rank in range(ranks)
                for b in iterate_evaluation_micro_batches(build_dataset(), plan_variant, rank)
            ]
            for plan_variant in (plan, BatchPlan(LENGTH, 4, 1, ranks, row_multiple=4))
        )
        assert sum(b.input_ids_BT.numel() for b in short) < sum(
            b.input_ids_BT.numel() for b in full
        )
        assert count_rows(short) == count_rows(full)


def test_only_datasets_with_uneven_rows_are_sorted() -> None:
    packed = PackedDataset(TOKENS, pack_documents(STARTS, 130), 130)
    assert build_dataset().is_uneven
    assert not packed.is_uneven, packed.padding_fraction
    assert not WindowDataset(TOKENS, LENGTH).is_uneven
    (first, second) = read_batches(BatchPlan(130, 1, 2, 1, row_multiple=4), 0, packed)
    assert (first.sample_indices_B.tolist(), second.sample_indices_B.tolist()) == ([0], [1])
    schedule = WeightSchedule(((0, (1.0, 2.0)),))
    mixed = ScheduledMixture((build_dataset(), build_dataset()), schedule, seed=0)
    assert mixed.is_uneven
    batches = read_batches(BatchPlan(LENGTH, 2, 3, 2, row_multiple=4), 1, mixed)
    order = build_run_order(mixed, 3, 12)
    used = [
        mixed.count_used_positions(order.get_index(int(p)), order.get_epoch(int(p)))
        for i in (0, 3, 1, 4, 2, 5)
        for p in batches[i].sample_indices_B
    ]
    assert used == sorted(used, reverse=True)


def compute_gradients(
    config: dict[str, Any], batches: list[MicroBatch]
) -> tuple[float, dict[str, Tensor]]:
    decoder = Decoder(read_config(config)).to(torch.float64)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    total = 0.0
    for batch in batches:
        loss = decoder(
            **{
                name: value
                for name, value in batch.build_model_arguments().items()
                if value is not None
            }
        )
        loss.backward()
        total += float(loss.detach())
    return total, {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("config", list(MODELS.values()), ids=list(MODELS))
def test_loss_and_gradients_equal_those_of_full_rows_with_masks(config: dict[str, Any]) -> None:
    # Padding is a document of its own here.
    masked = PackedDataset(TOKENS, pack_documents(STARTS, LENGTH, is_unpacked=True), LENGTH)
    expected_loss, expected = compute_gradients(
        config, read_batches(BatchPlan(LENGTH, GLOBAL, 1, 1), 0, masked)
    )
    loss, actual = compute_gradients(
        config, read_batches(BatchPlan(LENGTH, 3, 4, 1, row_multiple=4), 0, build_dataset())
    )
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    assert actual.keys() == expected.keys()
    for name, gradient in actual.items():
        torch.testing.assert_close(
            gradient,
            expected[name],
            rtol=1e-9,
            atol=1e-10,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def test_the_comparison_detects_a_row_that_is_too_short() -> None:
    (batch,) = read_batches(BatchPlan(LENGTH, GLOBAL, 1, 1), 0, build_dataset())
    end = int((batch.labels_BT != -100).sum(1).max()) - 1
    ids_BT = batch.input_ids_BT[:, :end]
    labels_BT = batch.labels_BT[:, :end]
    positions_BT = batch.positions_BT[:, :end]
    short = MicroBatch(
        ids_BT, labels_BT, positions_BT, None, batch.sample_indices_B, batch.num_supervised - 1
    )
    assert compute_gradients(MODELS["rotary"], [short])[0] != pytest.approx(
        compute_gradients(MODELS["rotary"], [batch])[0], rel=1e-6
    )
