"""Step of shardwright's own engine under any layout, recorded like that of any other trainer.

    torchrun --nproc-per-node 2 docs/audit/shardwright_engine.py zero_stage=3,dp_shard=2
    torchrun --nproc-per-node 2 docs/audit/shardwright_engine.py zero_stage=3,dp_shard=2,ep=2
    shardwright audit check audit

The engine's parameters are described by its descriptors, and the rows are passed by hand, because
under context and pipeline parallelism no module receives whole rows.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.architecture import read_config
from shardwright.audit import Recorder, ShardBox, ShardInfo
from shardwright.config.recipe_loading import parse_layout
from shardwright.config.training import OptimizerSection, PrecisionSection
from shardwright.data.loader import MicroBatch
from shardwright.layout import Layout, RankGrid
from shardwright.model.hf.hf_decoder import build_decoder
from shardwright.model.weight_init import initialise_parameter
from shardwright.optim import build_optimizer
from shardwright.parallel import ParallelModel, apply_layout, build_mesh
from shardwright.plans import BatchPlan, build_plan
from shardwright.training.step import accumulate_gradients, update_parameters

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 48,
    "hidden_size": 24,
    "intermediate_size": 28,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
SPARSE_CONFIG: dict[str, Any] = CONFIG | {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 12,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.0,
}
LENGTH = 16
NUM_BATCHES = 4
IGNORED = -100


def build_model(config: Mapping[str, Any], layout: Layout) -> ParallelModel:
    shape = read_config(dict(config))
    specs = {spec.name: spec for spec in shape.list_parameters()}
    batch = BatchPlan(LENGTH, 2, NUM_BATCHES, layout.data_ranks)
    with torch.device("meta"):
        decoder = build_decoder(shape, compute_dtype=torch.float32)
    return apply_layout(
        decoder,
        build_plan(shape, layout, batch, PrecisionSection(kind="fp32")),
        build_mesh(layout, "cpu"),
        torch.device("cpu"),
        read_slice=lambda name, narrow: initialise_parameter(
            specs[name], 0, dtype=torch.float32, narrow=narrow
        ),
    )


def read_batches(data_rank: int) -> list[MicroBatch]:
    """Read micro-batches of packed rows; each has another number of supervised tokens."""
    generator = torch.Generator().manual_seed(data_rank)
    batches = []
    for index in range(NUM_BATCHES):
        tokens = torch.randint(0, 48, (2, LENGTH + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        labels[:, : index + 2 * data_rank] = IGNORED
        boundary = 5 + index
        documents = (torch.arange(LENGTH) >= boundary).long().repeat(2, 1)
        labels[:, boundary - 1] = IGNORED
        line = torch.arange(LENGTH).repeat(2, 1)
        batches.append(
            MicroBatch(
                tokens[:, :-1].contiguous(),
                labels,
                torch.where(documents == 0, line, line - boundary),
                documents,
                torch.arange(2),
                int((labels != IGNORED).sum()),
            )
        )
    return batches


def train(
    folder: Path | str,
    layout: Layout,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Train one step of a small model; with expert parallelism of a sparse one.

    Args:
        folder: Where the recorder writes.
        layout: Degrees of parallelism.
        config: Content of config.json, in place of that model's.
    """
    if config is None:
        config = CONFIG if layout.ep == 1 else SPARSE_CONFIG
    model = build_model(config, layout)
    data_rank = RankGrid(layout).data_rank(dist.get_rank())
    optimizer = build_optimizer(
        model.named_parameters(), OptimizerSection(), learning_rate=1e-3, weight_decay=0.1
    )

    def describe(name: str, _parameter: Tensor) -> ShardInfo:
        boxes = tuple(
            ShardBox(
                tuple(start for start, _ in box.local_bounds),
                tuple(start for start, _ in box.global_bounds),
                tuple(length for _, length in box.global_bounds),
            )
            for box in model.local_boxes(name)
        )
        return ShardInfo(model.layouts[name].shape, boxes)

    recorder = Recorder(
        folder, config=config, are_labels_shifted=True, data_rank=data_rank, shard_of=describe
    )
    batches = read_batches(data_rank)
    rows = [
        {key: value for key, value in batch.build_model_arguments().items() if value is not None}
        for batch in batches
    ]
    with recorder.record_step(model, rows, optimizer):
        loss = accumulate_gradients(model, batches, seed=0, step=0)
        recorder.after_backward(model)
        update = update_parameters(model, optimizer, learning_rate=1e-3, max_grad_norm=1.0)
        recorder.report(loss=loss.mean(), gradient_norm=update.gradient_norm, max_grad_norm=1.0)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train("audit", Layout(**parse_layout(sys.argv[1])))
    dist.destroy_process_group()
