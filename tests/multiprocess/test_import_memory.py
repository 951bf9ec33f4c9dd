"""A Hugging Face folder is imported slice by slice: no rank holds more than its share and one
slice.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from shardwright.architecture import read_config
from shardwright.config.training import PrecisionSection
from shardwright.layout import Layout
from shardwright.model import Decoder
from shardwright.model.hf.hf_folder import write_hf_folder
from shardwright.model.hf.hf_weights import WeightsFolder
from shardwright.model.weight_init import initialise_parameter
from shardwright.numerics import chunked_cross_entropy, get_local_tensor
from shardwright.parallel import apply_layout, build_mesh
from shardwright.plans import BatchPlan, build_plan
from tests.multiprocess.pool import RankPool

CONFIG = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32,
}
SHAPE = read_config(CONFIG)
LARGEST_BYTES = 4 * max(spec.num_elements for spec in SHAPE.list_parameters())


def import_folder(layout: Layout, folder: Path) -> tuple[int, int]:
    """Return the rank's bytes after an import and their peak during it, by allocator events."""
    with torch.device("meta"):
        decoder = Decoder(SHAPE, loss_function=partial(chunked_cross_entropy, chunk_tokens=8))
    weights = WeightsFolder(folder)
    weights.check(SHAPE)
    plan = build_plan(
        decoder.shape, layout, BatchPlan(8, 1, 1, layout.data_ranks), PrecisionSection(kind="fp32")
    )
    mesh = build_mesh(layout, "cpu")
    device = torch.device("cpu")
    with profile(
        activities=[ProfilerActivity.CPU], acc_events=True, profile_memory=True
    ) as profiler:
        model = apply_layout(
            decoder,
            plan,
            mesh,
            device,
            read_slice=lambda name, narrow: weights.read(name, narrow=narrow, dtype=torch.float32),
        )
    return sum(
        4 * get_local_tensor(parameter).numel() for _, parameter in model.named_parameters()
    ), compute_peak_bytes(profiler)


def compute_peak_bytes(profiler: profile) -> int:
    """Return the peak of bytes that were allocated while the profiler ran.

    Events are matched by address, because memory of earlier tests in this process may be freed
    at any time.
    """
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    pending = list(profiler.profiler.kineto_results.experimental_event_tree())
    changes = []
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.tag == _EventType.Allocation:
            changes.append(
                (event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size)
            )
    resident_bytes: dict[int, int] = {}
    peak = 0
    for _, address, num_bytes in sorted(changes):
        if num_bytes > 0:
            resident_bytes[address] = num_bytes
        else:
            resident_bytes.pop(address, None)
        peak = max(peak, sum(resident_bytes.values()))
    return peak


@pytest.mark.parametrize(
    ("layout", "share"),
    [
        (Layout(dp_shard=4, zero_stage=3), 0.25),
        (Layout(dp_shard=2, zero_stage=3, tp=2), 0.25),
        (
            Layout(pp=2, dp_shard=2, zero_stage=1),
            0.35,  # embedding and head have the same size; the stages' norms do not
        ),
    ],
    ids=str,
)
def test_no_rank_holds_more_than_its_share_and_one_slice(
    ranks: RankPool, tmp_path: Path, layout: Layout, share: float
) -> None:
    specs = {spec.name: spec for spec in SHAPE.list_parameters()}
    folder = tmp_path / "model"
    written = write_hf_folder(
        folder,
        SHAPE,
        lambda name: initialise_parameter(specs[name], 0, dtype=torch.float32),
        max_shard_bytes=200_000,
    )
    assert len(written.weight_files) > 3
    for resident_bytes, peak in ranks.run(4, import_folder, layout, folder):
        assert resident_bytes <= share * 4 * SHAPE.num_parameters + 4096
        assert peak <= resident_bytes + LARGEST_BYTES * share * 1.5 + 16384
        assert peak >= resident_bytes  # events were recorded
