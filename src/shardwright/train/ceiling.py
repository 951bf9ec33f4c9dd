"""The rate of matrix products that a run's MFU is a share of, at shapes like those of its model."""

from __future__ import annotations

import torch

from shardwright.numerics.ceiling import Product, measure_matmul_flops_per_second
from shardwright.numerics.precision import dtypes
from shardwright.train.preflight import Checked

_MOST_PRODUCTS = 4
"""Of different shapes; the largest of a model are measured."""


def measure_ceiling(checked: Checked, device: torch.device) -> float:
    """Measure the FLOP/s that one device reaches in the run's dtype; leaves nothing in a GPU's memory."""
    dtype = dtypes(checked.plan.precision).compute
    found = measure_matmul_flops_per_second(device, dtype, model_products(checked))
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return found


def model_products(checked: Checked) -> tuple[Product, ...]:
    """List the largest products of the model's matrices, with the tokens of a rank's micro-batch."""
    layout, batch = checked.plan.layout, checked.plan.batch
    num_tokens = max(1, batch.micro_batch_size * batch.sequence_length // layout.cp)
    matrices = set()
    for spec in checked.shape.parameters():
        shape = (spec.packed or spec).shape
        if len(shape) > 1 and spec.part is None:
            rows, columns = shape[-2:]
            matrices.add((columns, rows) if checked.shape.lies_in_out(spec) else (rows, columns))
    largest = sorted(matrices, key=lambda sizes: sizes[0] * sizes[1])[-_MOST_PRODUCTS:]
    return tuple((num_tokens, outputs, inputs) for outputs, inputs in largest)
