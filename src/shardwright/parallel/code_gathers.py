"""Gathers of quantised weights: FSDP2 sends 8-bit codes and scales instead of bf16.

Both products of a weight read the same codes in `blockwise`. If a rank's shard is whole blocks of
128 x 128 elements, its scales are known before the gather, so the ranks send codes: half the bytes
of bf16, and the operands of the products are the same, byte by byte. A weight is quantised once per
gather, each rank its shard, instead of whole in every product.

[Note: FSDP2's extension] FSDP2 asks the local tensor of a shard for two methods: one returns what
is gathered, the other the gathered weight. torch documents them for subclasses of tensors, and
looks them up on the object. Here they are attributes of a plain tensor, so optimizers, checkpoints
and offloading see no other class. The gathered weight that modules and autograd see is one NaN that
is expanded to the weight's shape: it has no memory, it takes the gradient, and a reader that is not
a product of codes computes NaN.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from shardwright.model.products.fp8 import E4M3, QuantisedMatrix, Scaling, quantise
from shardwright.model.products.scaled_product import ScaledProducts
from shardwright.optim.sharded_optimizer import get_local_tensor
from shardwright.parallel.sharded_weights import list_parameter_groups
from shardwright.placement import has_whole_block_shards

logger = logging.getLogger(__name__)


def gather_codes(fsdp_modules: Sequence[FSDPModule]) -> list[str]:
    """Let FSDP2 gather the codes of weights whose shards are whole blocks; return their names.

    The parameters must have their memory.
    """
    gathered: list[str] = []
    whole: list[str] = []
    groups = [group for module in fsdp_modules for group in list_parameter_groups(module)]
    for parameter in [parameter for group in groups for parameter in group.fsdp_params]:
        info = parameter._module_info
        products: ScaledProducts | None = getattr(info.module, "scaled", None)
        scaling = None if products is None else products.scaling.gathered_weight
        if products is None or scaling is None or info.param_name != "weight":
            continue
        shape = tuple(parameter._orig_size)
        num_shards = parameter.mesh_info.shard_mesh_size
        if num_shards == 1:  # experts, if every rank has its own
            continue
        if info.module.is_transposed or not has_whole_block_shards(shape, num_shards):
            whole.append(products.name)
            continue
        _extend(parameter, _CodeGather(products, scaling))
        gathered.append(products.name)
    if whole:
        logger.info(
            "%d of %d quantised weights are gathered in the compute precision, not in 8 bits: "
            "their shards are no whole blocks of 128 rows, or they are stored as [in, out] (%s)",
            len(whole),
            len(whole) + len(gathered),
            ", ".join(whole[:3]) + (", .." if len(whole) > 3 else ""),
        )
    return gathered


def _extend(parameter: Any, gather: _CodeGather) -> None:
    """Add the methods of code gathers to FSDP2's parameter; see the note above."""
    local = parameter._sharded_local_tensor
    local.fsdp_pre_all_gather = gather.quantise_shard
    local.fsdp_post_all_gather = gather.take_codes
    parameter._init_extensions()
    # The gathered weight is a view of one element.
    parameter._contiguous_orig_stride = (0,) * len(parameter._orig_size)


class _CodeGather:
    """The gather of one weight."""

    def __init__(self, products: ScaledProducts, scaling: Scaling) -> None:
        self._products = products
        self._scaling = scaling

    def quantise_shard(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[Tensor, Tensor], None]:
        """Return the codes of this rank's shard as bytes, and their multipliers."""
        shard = get_local_tensor(module.get_parameter("weight").detach())
        values = shard.to(mp_policy.param_dtype or shard.dtype).flatten(0, -2)
        matrix = quantise(values, self._scaling)
        totals = self._products.totals
        if totals is not None and totals.is_counting:
            totals.add(self._products.name, values, matrix)
        return (matrix.codes.view(torch.uint8).view(shard.shape), matrix.multipliers), None

    def take_codes(
        self,
        outputs: tuple[Tensor, Tensor],
        metadata: None,
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Pass the gathered codes to the products; FSDP2 itself frees and fills their memory."""
        if out is not None:
            return None
        codes, multipliers = outputs
        self._products.gathered = QuantisedMatrix(
            codes.view(E4M3).flatten(0, -2), multipliers, self._scaling
        )
        return torch.full((1,), math.nan, dtype=dtype, device=codes.device), ()
