"""Gathers of quantised weights: FSDP2 sends codes of 8 bits and scales instead of bf16.

A rank's shard is quantised before the gather if its scales are known then: blocks of a fixed size
lie in one shard, and the maxima of larger ones are agreed before the step (`weight_maxima`). That
is half the bytes of bf16, and the operands of the products are the same, byte by byte. A weight is
quantised once per gather, each rank its shard, instead of whole in every product.

Both products of a weight read the same codes in `blockwise` and `nvfp4`. In `rowwise_with_gw_hp`
and `mxfp8` the output and the input gradient read different ones, together as large as bf16. Where
each pass gathers and reads one of them, its gather sends those. A block that recomputes its
products reads both in its backward pass, and a compiled one may read in its forward pass what the
backward pass needs: its weights are gathered in bf16. So are matrices with DoRA, whose row norms
are computed from their values.

[Note: FSDP2's extension] FSDP2 asks the local tensor of a shard for two methods: one returns what
is gathered, the other the gathered weight. torch documents them for subclasses of tensors, and
looks them up on the object. Here they are attributes of a plain tensor, so optimizers, checkpoints
and offloading see no other class. The gathered weight that modules and autograd see is one NaN that
is expanded to the weight's shape: it has no memory, it takes the gradient, and a reader that is not
a product of codes computes NaN. FSDP2 does not say for which pass it gathers. Its group of
parameters has a state, which is that of the backward pass while it gathers for it, ahead of its
use too.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from shardwright.architecture import AdapterShape
from shardwright.model.decoder import Decoder
from shardwright.model.products.fp8 import Scaling
from shardwright.model.products.gathered_weight import GatheredWeight, list_sent_parts
from shardwright.model.products.operand import get_widest_blocks, limit_rows, quantise
from shardwright.model.products.scaled_product import ScaledProducts
from shardwright.parallel.sharded_weights import list_parameter_groups
from shardwright.placement import has_whole_block_shards
from shardwright.plans import Plan

logger = logging.getLogger(__name__)


def gather_codes(
    decoder: Decoder,
    plan: Plan,
    fsdp_modules: Sequence[FSDPModule],
    offloaded_names: Collection[str],
) -> frozenset[str]:
    """Let FSDP2 gather the codes of weights where that is exact and smaller; return their names.

    The parameters must have their memory.
    """
    section = plan.precision.low_precision
    if section is None:
        return frozenset()
    repeating = {
        module
        for block in decoder.blocks
        if block.is_compiled or block.is_recomputed
        for module in block.modules()
    }
    gathered: list[str] = []
    wide: list[str] = []
    for group in [group for module in fsdp_modules for group in list_parameter_groups(module)]:
        for parameter in group.fsdp_params:
            info = parameter._module_info
            products: ScaledProducts | None = getattr(info.module, "scaled", None)
            num_shards = parameter.mesh_info.shard_mesh_size
            # One rank has all of its experts, if every rank has its own. Packed weights have fewer
            # bits than codes.
            if (
                products is None
                or info.param_name != "weight"
                or num_shards == 1
                or not info.module.weight.is_floating_point()
            ):
                continue
            gather = _CodeGather(products, group, parameter)
            shape = tuple(parameter._orig_size)
            adapters: AdapterShape | None = info.module.adapters
            if (
                info.module.is_transposed
                or (adapters is not None and adapters.has_row_norms)
                or not has_whole_block_shards(section.recipe, shape, num_shards)
                or not (gather.has_one_set or group._reshard_after_forward)
                or not (gather.has_one_set or info.module not in repeating)
                or (gather.has_agreed_maxima and products.name in offloaded_names)
            ):
                wide.append(products.name)
                continue
            _extend(parameter, gather)
            products.is_gathered_as_codes = True
            gathered.append(products.name)
    if wide:
        logger.info(
            "%d of %d quantised weights are gathered in the compute precision, not in 8 bits: "
            "their shards are no whole blocks, they are stored as [in, out], DoRA computes norms "
            "of their rows, their maxima are offloaded, or one gather would have to bring two sets "
            "of codes (%s)",
            len(wide),
            len(wide) + len(gathered),
            ", ".join(wide[:3]) + (", .." if len(wide) > 3 else ""),
        )
    return frozenset(gathered)


def _extend(parameter: Any, gather: _CodeGather) -> None:
    """Add the methods of code gathers to FSDP2's parameter; see the note above."""
    local = parameter._sharded_local_tensor
    local.fsdp_pre_all_gather = gather.quantise_shard
    local.fsdp_post_all_gather = gather.take_parts
    parameter._init_extensions()
    # The gathered weight is a view of one element.
    parameter._contiguous_orig_stride = (0,) * len(parameter._orig_size)


class _CodeGather:
    """The gather of one weight."""

    def __init__(self, products: ScaledProducts, group: Any, parameter: Any) -> None:
        """`group` and `parameter` are FSDP2's."""
        self._products = products
        self._group = group
        self._parameter = parameter
        self._shard_number: int = parameter.mesh_info.shard_mesh_rank
        self._is_experts = len(parameter._orig_size) == 3
        self._scalings = (products.scaling.output[1], products.scaling.input_gradient[1])
        self.has_one_set = self._scalings[0] == self._scalings[1]

    @property
    def has_agreed_maxima(self) -> bool:
        """True if a scale spans shards, or ranks that share the weight otherwise."""
        return any(map(self._spans_ranks, self._scalings))

    def _spans_ranks(self, scaling: Scaling) -> bool:
        is_shared = get_widest_blocks(scaling).rows is None and not self._is_experts
        return is_shared or self._products.spans_ranks(scaling, ("outputs", "inputs"))

    def quantise_shard(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[Tensor, ...], None]:
        """Return the parts of this rank's shard for the pass that gathers."""
        # What FSDP2 would gather: of an offloaded weight a copy in the compute precision.
        shard: Tensor = self._parameter._sharded_param_data
        shard = shard.view(self._parameter.padded_sharded_param_size)
        values = shard.to(mp_policy.param_dtype or shard.dtype).flatten(0, -2)
        is_backward = self._group._training_state.name == "PRE_BACKWARD"
        scaling = self._scalings[is_backward]
        maxima = None
        if self._spans_ranks(scaling):
            maxima = self._products.get_agreed_maxima(is_backward=is_backward)
            assert maxima is not None, "maxima are agreed before the first gather"
        if self._is_experts:
            scaling = limit_rows(scaling, shard.shape[1])
        if maxima is not None:
            rows = get_widest_blocks(scaling).rows
            num_blocks = 1 if rows is None else values.shape[0] // rows
            start = self._shard_number * num_blocks if maxima.shape[0] > num_blocks else 0
            maxima = maxima.narrow(0, start, num_blocks).float()
        operand = quantise(values, scaling, maxima)
        totals = self._products.totals
        if totals is not None and totals.is_counting:
            totals.add(self._products.name, values, operand)
        codes, *scales = list_sent_parts(operand)
        return (codes.view(shard.shape), *scales), None

    def take_parts(
        self,
        outputs: tuple[Tensor, ...],
        metadata: None,
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Pass the gathered parts to the products; FSDP2 itself frees and fills their memory."""
        if out is not None:
            return None
        codes, *scales = outputs
        num_matrices = codes.shape[0] if self._is_experts else 1
        self._products.gathered = GatheredWeight((codes.flatten(0, -2), *scales), num_matrices)
        return torch.full((1,), math.nan, dtype=dtype, device=codes.device), ()
