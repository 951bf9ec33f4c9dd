"""Installation of quantised products in a decoder, with scales of whole tensors."""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch

from shardwright.config.low_precision import NVFP4Section
from shardwright.hashing import hash_numbers
from shardwright.layout import ParameterLayout
from shardwright.model.decoder import Decoder
from shardwright.model.moe import ExpertStack
from shardwright.model.products.linear import Linear
from shardwright.model.products.operand import PRODUCT_SCALINGS
from shardwright.model.products.scaled_product import RoundingTotals, ScaledProducts
from shardwright.parallel.collectives import reduce_maxima
from shardwright.parallel.mesh import Mesh
from shardwright.placement import select_scaled_weights
from shardwright.plans import Plan


def install_low_precision(
    decoder: Decoder, plan: Plan, mesh: Mesh | None, device: torch.device
) -> None:
    """Let the targeted layers multiply quantised operands; no effect for other precisions."""
    section = plan.precision.low_precision
    if section is None:
        return
    shape = plan.shape
    names = select_scaled_weights(shape, section)
    totals = RoundingTotals(list(names))
    decoder.rounding_totals = totals
    if isinstance(section, NVFP4Section) and section.gradient_rounding == "stochastic":
        decoder.rounding_key = torch.zeros((), dtype=torch.int32, device="cpu")
    group = None if mesh is None else mesh.group("tp")
    name_of_weight = {parameter: name for name, parameter in decoder.named_parameters()}
    for module in decoder.modules():
        if not isinstance(module, Linear | ExpertStack):
            continue
        name = name_of_weight[module.weight]
        if name not in names:
            continue
        module.scaled = ScaledProducts(
            PRODUCT_SCALINGS[section.recipe],
            name,
            find_sharded_dim(plan.placement.parameters[name], is_transposed=module.is_transposed),
            None if group is None else partial(reduce_maxima, group=group),
            is_emulated=section.emulate or device.type == "cpu",
            fast_products=section.fast_products,
            totals=totals,
            rounding_key=decoder.rounding_key,
        )


def set_rounding_step(decoder: Decoder, seed: int, step: int) -> None:
    """Let stochastic rounding draw the random numbers of a step; no effect without it."""
    if decoder.rounding_key is not None:
        decoder.rounding_key.copy_(hash_numbers(seed, step))


def find_sharded_dim(
    parameter: ParameterLayout, *, is_transposed: bool
) -> Literal["inputs", "outputs"] | None:
    """Return the dim of a weight that tensor parallelism shards; None if it is whole."""
    for shard in parameter.shards:
        if shard.axis == "tp":
            is_last = shard.dim == len(parameter.shape) - 1
            return "outputs" if is_last == is_transposed else "inputs"
    return None
