"""Frozen weights on disk: windows of pages that are read, and their place in the model's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import save_file

from shardwright.architecture import read_config
from shardwright.layout import Layout, RankGrid, compute_local_boxes, compute_local_shape
from shardwright.model.hf.hf_weights import WEIGHTS_FILE_NAME, WeightsFolder
from shardwright.model.hf.weight_bytes import NotStored, StoredWeights
from shardwright.offload.weight_store import DiskWeightStore, StoredRange, WrittenRange
from shardwright.placement import build_parameter_layouts

CPU = torch.device("cpu")
SPARSE: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48,
    "moe_intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}  # fmt: skip
FUSED: dict[str, Any] = {
    "model_type": "phi3", "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(
    pieces=st.lists(st.tuples(st.integers(0, 40000), st.integers(1, 30000)), max_size=8),
    written=st.lists(st.integers(1, 30000), max_size=3),
    pages=st.integers(1, 4),
)
def test_a_read_returns_the_bytes_of_files_and_scratch(
    tmp_path_factory: pytest.TempPathFactory,
    pieces: list[tuple[int, int]],
    written: list[int],
    pages: int,
) -> None:
    folder = tmp_path_factory.mktemp("store")
    content = torch.randint(0, 256, (70001,), dtype=torch.uint8)
    path = folder / "weights"
    path.write_bytes(content.numpy().tobytes())
    ranges: list[StoredRange | WrittenRange] = []
    parts = []
    size = 0
    for position, num_bytes in pieces:
        ranges.append(StoredRange(path, position, num_bytes, size))
        parts.append(content[position : position + num_bytes])
        size += num_bytes
    for num_bytes in written:
        values = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
        ranges.append(WrittenRange(num_bytes, size, lambda values=values: values.split(777)))
        parts.append(values)
        size += num_bytes
    store = DiskWeightStore(folder, 4096 * pages, CPU)
    try:
        place = store.add(size, ranges)
        target = torch.zeros(size, dtype=torch.uint8)
        store.read(place, target)()
        assert torch.equal(target, torch.cat([*parts, torch.empty(0, dtype=torch.uint8)]))
        assert store.counts.read_bytes == size
        assert all(window.num_bytes <= 4096 * pages for window in place)
    finally:
        store.close()


@pytest.mark.parametrize("config", [SPARSE, FUSED], ids=["experts", "fused"])
@pytest.mark.parametrize(
    "layout", [Layout(), Layout(tp=2), Layout(dp_shard=2, ep=2, zero_stage=1)], ids=str
)
def test_located_bytes_are_those_that_the_folder_reads(
    tmp_path: Path, config: dict[str, Any], layout: Layout
) -> None:
    """Whole matrices, rows, sections of fused rows and experts of a stack are found."""
    if layout.ep > 1 and config is FUSED:
        pytest.skip("no experts")
    shape = read_config(config)
    generator = torch.Generator().manual_seed(0)
    pieces = [piece for spec in shape.list_parameters() for piece in spec.file_slices]
    save_file(
        {piece.name: torch.randn(piece.shape, generator=generator).bfloat16() for piece in pieces},
        tmp_path / WEIGHTS_FILE_NAME,
    )
    folder = WeightsFolder(tmp_path)
    folder.check(shape)
    stored = StoredWeights(folder)
    layouts = build_parameter_layouts(shape, layout)
    content = (tmp_path / WEIGHTS_FILE_NAME).read_bytes()
    reasons = {}
    for rank in range(layout.world_size):
        coordinates = RankGrid(layout).coordinates(rank)
        for spec in shape.list_parameters():
            parameter = layouts[spec.name]
            boxes = compute_local_boxes(parameter, layout, coordinates, with_zero=False)
            local_shape = compute_local_shape(parameter, layout, coordinates, with_zero=False)
            found = stored.locate(spec, boxes, local_shape, torch.bfloat16)
            if isinstance(found, NotStored):
                reasons[spec.name] = found.reason
                continue
            expected = torch.zeros(local_shape, dtype=torch.bfloat16)
            for box in boxes:
                target = expected
                for dim, (start, length) in enumerate(box.local_bounds):
                    target = target.narrow(dim, start, length)
                target.copy_(folder.read(spec.name, narrow=box.global_bounds))
            got = bytearray(expected.numel() * 2)
            for item in found:
                got[item.target : item.target + item.num_bytes] = content[
                    item.position : item.position + item.num_bytes
                ]
            assert bytes(got) == expected.view(torch.uint8).numpy().tobytes(), spec.name
            wrong_dtype = stored.locate(spec, boxes, local_shape, torch.float32)
            assert wrong_dtype == NotStored("stored as BF16, computed in float32")
    columns = {name for name in layouts if name.endswith(("o_proj.weight", "down_proj"))}
    columns |= {name for name in layouts if name.endswith("down_proj.weight")}
    assert set(reasons) == (columns if layout.tp > 1 else set())
    assert set(reasons.values()) <= {"this rank has a part of each row"}
