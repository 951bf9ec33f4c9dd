"""Packed rows train like unpacked rows: loss and gradients are equal in float64."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardwright.architecture import read_config
from shardwright.data.dataset import TokenDataset
from shardwright.data.loader import MicroBatch, collate
from shardwright.data.preparation import prepare_data
from shardwright.model.decoder import Decoder
from tests.unit.data.chat_tokenizers import turns, write_records
from tests.unit.data.test_conversations import chat_recipe

LENGTH = 160
CHATS = [
    {
        "messages": turns(
            *[
                f"turn {number} {turn} " + "the end " * (number * 3 % 4)
                for turn in range(2 + 2 * (number % 2))
            ]
        )
    }
    for number in range(14)
]
LLAMA = {
    "model_type": "llama",
    "num_key_value_heads": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": LENGTH,
    "vocab_size": 400,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": LENGTH,
    "vocab_size": 400,
}


def build_batch(dataset: TokenDataset) -> MicroBatch:
    return collate(
        [dataset.get_sample(index) for index in range(len(dataset))], range(len(dataset))
    )


def train_once(config: dict[str, Any], batch: MicroBatch) -> tuple[float, dict[str, torch.Tensor]]:
    """Compute summed loss and gradients of a decoder with fixed pseudo-random weights."""
    decoder = Decoder(read_config(config)).to(torch.float64)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    loss = decoder(
        batch.input_ids_BT,
        positions_BT=batch.positions_BT,
        document_ids_BT=batch.document_ids_BT,
        labels_BT=batch.labels_BT,
    )
    loss.backward()
    return float(loss.detach()), {
        name: p.grad for name, p in decoder.named_parameters() if p.grad is not None
    }


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> tuple[MicroBatch, MicroBatch]:
    folder = tmp_path_factory.mktemp("packed")
    path = write_records(folder / "a.jsonl", *CHATS)
    packed = prepare_data(chat_recipe(folder, path, length=LENGTH)).train
    unpacked = prepare_data(chat_recipe(folder, path, length=LENGTH, packing="none")).train
    assert len(packed) < len(unpacked) == len(CHATS)
    assert json.dumps(packed.num_supervised) == json.dumps(unpacked.num_supervised)
    return build_batch(packed), build_batch(unpacked)


@pytest.mark.parametrize("config", [SIZES | LLAMA, GPT2], ids=["rotary", "learned positions"])
def test_loss_and_gradients_equal_those_of_unpacked_rows(
    batches: tuple[MicroBatch, MicroBatch], config: dict[str, Any]
) -> None:
    (packed_loss, packed), (unpacked_loss, unpacked) = (
        train_once(config, batch) for batch in batches
    )
    assert packed_loss == pytest.approx(unpacked_loss, rel=1e-12)
    assert packed.keys() == unpacked.keys()
    for name, gradient in packed.items():
        torch.testing.assert_close(
            gradient,
            unpacked[name],
            rtol=1e-9,
            atol=1e-10,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def drop_document_ids(batch: MicroBatch) -> MicroBatch:
    return MicroBatch(
        batch.input_ids_BT,
        batch.labels_BT,
        batch.positions_BT,
        torch.zeros_like(batch.input_ids_BT),
        batch.sample_indices_B,
        batch.num_supervised,
    )


def drop_document_positions(batch: MicroBatch) -> MicroBatch:
    whole = torch.arange(LENGTH).expand_as(batch.positions_BT)
    return MicroBatch(
        batch.input_ids_BT,
        batch.labels_BT,
        whole,
        batch.document_ids_BT,
        batch.sample_indices_B,
        batch.num_supervised,
    )


@pytest.mark.parametrize(
    ("damage", "config"), [(drop_document_ids, SIZES | LLAMA), (drop_document_positions, GPT2)]
)
def test_the_comparison_detects_a_leak(
    batches: tuple[MicroBatch, MicroBatch],
    damage: Callable[[MicroBatch], MicroBatch],
    config: dict[str, Any],
) -> None:
    """Rotary positions are relative: positions not reset per document matter only if learned."""
    correct = train_once(config, batches[0])
    wrong = train_once(config, damage(batches[0]))
    assert wrong[0] != pytest.approx(correct[0], rel=1e-6)
    assert any(
        not torch.allclose(correct[1][name], wrong[1][name], rtol=1e-3) for name in correct[1]
    )
