"""Measured matmul rate at the model's shapes, the denominator of a run's MFU."""

from __future__ import annotations

import torch

from shardwright.numerics.peak_flops import Product, measure_matmul_flops_per_second
from shardwright.numerics.precision import resolve_dtypes
from shardwright.train.run_checks import ValidatedRun

_MAX_PRODUCTS = 4
"""Number of matrix shapes that are measured: the largest of the model."""


def measure_ceiling(checked: ValidatedRun, device: torch.device) -> float:
    """Measure the FLOP/s of one device in the run's dtype, and free the GPU memory used."""
    dtype = resolve_dtypes(checked.plan.precision).compute
    flops_per_second = measure_matmul_flops_per_second(device, dtype, list_model_products(checked))
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return flops_per_second


def list_model_products(checked: ValidatedRun) -> tuple[Product, ...]:
    """List the model's largest matrix products, at the tokens of one rank's micro-batch."""
    layout = checked.plan.layout
    batch = checked.plan.batch
    num_tokens = max(1, batch.micro_batch_size * batch.sequence_length // layout.cp)
    matrices = set()
    for spec in checked.shape.list_parameters():
        shape = (spec.packed_matrix or spec).shape
        if len(shape) > 1 and spec.adapter_part is None:
            rows, columns = shape[-2:]
            matrices.add((columns, rows) if checked.shape.is_in_out(spec) else (rows, columns))
    largest = sorted(matrices, key=lambda sizes: sizes[0] * sizes[1])[-_MAX_PRODUCTS:]
    return tuple((num_tokens, outputs, inputs) for outputs, inputs in largest)
