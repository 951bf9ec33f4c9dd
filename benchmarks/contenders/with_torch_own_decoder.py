"""Minimal hand-written PyTorch loop around shardwright's decoder and chunked loss.

It differs from `shardwright` only in the engine: layout, reductions, clipping, events.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks.case import Case, shift_labels
from benchmarks.contenders.with_torch import train
from benchmarks.pace import Pace
from shardwright.architecture import read_config
from shardwright.model.decoder import Decoder
from shardwright.numerics import chunked_cross_entropy

LOSS_CHUNK_TOKENS = 1024
"""The recipe's default."""


def run(case: Case, pace: Pace) -> None:
    """Train shardwright's decoder until `pace` returns False."""
    decoder = Decoder(
        read_config(case.weights_dir),
        loss_function=partial(chunked_cross_entropy, chunk_tokens=LOSS_CHUNK_TOKENS),
        compute_dtype=torch.bfloat16 if case.precision == "bf16" else None,
    )
    decoder.load_state_dict(load_file(Path(case.weights_dir) / "model.safetensors"))
    if case.compile:
        decoder.compile_blocks()
    train(
        case,
        pace,
        decoder,
        decoder.blocks,
        _compute_mean_loss,
        autocast=False,
        compile_layers=False,
    )


def _compute_mean_loss(module: nn.Module, input_ids_BT: Tensor) -> Tensor:
    labels_BT = shift_labels(input_ids_BT)
    loss: Tensor = module(input_ids_BT, labels_BT=labels_BT)
    return loss / (labels_BT != -100).sum()
