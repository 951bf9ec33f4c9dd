"""Messages of an export of adapters: the base that they fit is named."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.architecture import read_config
from shardwright.architecture.adapter_targets import add_adapters
from shardwright.config.adapter_section import AdapterSection
from shardwright.inference.adapter_export import export_adapters
from shardwright.inference.model_source import ModelSource

CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 16, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("quantize", "intermediate_size", "text"),
    [
        ("nf4", 128, 'bnb_4bit_quant_type="nf4"), or export with --merge'),
        ("nf4", 96, "not multiples of 64 elements (model.layers.0.mlp.down_proj.weight)"),
        (None, 96, ""),
    ],
)
def test_the_base_that_adapters_fit_is_named(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    quantize: Any,
    intermediate_size: int,
    text: str,
) -> None:
    """On the original base their results differ, although peft loads them."""
    shape = add_adapters(
        read_config(CONFIG | {"intermediate_size": intermediate_size}),
        AdapterSection(rank=2, quantize=quantize),
    )
    shapes = {spec.name: spec.shape for spec in shape.list_parameters()}

    def read(name: str) -> torch.Tensor:
        return torch.zeros(shapes[name])

    source = ModelSource(
        "run", shape, read, torch.float32, tmp_path, base="base", read_full_precision=read
    )
    with caplog.at_level(logging.INFO, logger="shardwright"):
        export_adapters(source, tmp_path / "out", check=False)
    assert text in caplog.text
    assert ("base in 4 bits" in caplog.text) == (quantize is not None)
