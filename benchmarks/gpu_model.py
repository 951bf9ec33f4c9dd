"""Model and micro-batch of a benchmark on one device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwright.architecture import read_config
from shardwright.config.training import PrecisionSection
from shardwright.data.loader import MicroBatch
from shardwright.layout import Layout
from shardwright.model.decoder import Decoder
from shardwright.model.weight_init import initialise_parameter
from shardwright.numerics.chunked_loss import ChunkedLoss
from shardwright.numerics.precision import resolve_dtypes
from shardwright.parallel import ParallelModel, apply_layout
from shardwright.plans import BatchPlan, build_plan


def build_model(
    config: dict[str, Any],
    section: PrecisionSection,
    device: torch.device,
    batch_shape: tuple[int, int],
    seed: int,
) -> ParallelModel:
    """Build the model with random weights on one rank.

    Args:
        batch_shape: rows and tokens of a micro-batch.
    """
    shape = read_config(config)
    specs = {spec.name: spec for spec in shape.list_parameters()}
    with torch.device("meta"):
        decoder = Decoder(
            shape,
            loss_function=ChunkedLoss(8192),  # as a run with free memory
            compute_dtype=resolve_dtypes(section).compute,
        )
    rows, tokens = batch_shape
    return apply_layout(
        decoder,
        build_plan(shape, Layout(), BatchPlan(tokens, rows, 1, 1), section),
        None,
        device,
        read_slice=lambda name, narrow: initialise_parameter(
            specs[name], seed, dtype=torch.float32, narrow=narrow
        ),
    )


def make_batch(ids_BT: Tensor) -> MicroBatch:
    """Build a micro-batch of whole rows."""
    rows, tokens = ids_BT.shape
    labels_BT = torch.nn.functional.pad(ids_BT[:, 1:], (0, 1), value=-100)
    return MicroBatch(
        ids_BT,
        labels_BT,
        torch.arange(tokens).expand(rows, -1),
        None,
        torch.arange(rows),
        int((labels_BT != -100).sum()),
    )
