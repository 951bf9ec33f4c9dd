"""Maxima of weights whose scales span several ranks, agreed once for a step or an evaluation.

Weights are the same in all products of a step. So the ranks agree on the maxima of all of them in
one all-reduce per mesh axis that shards them, before the first forward pass, instead of one in each
product. Nothing is kept from one step to the next: maxima cannot be those of former weights,
however the weights were changed. A rank computes those of its shard. Rounding to the compute
precision keeps the order of numbers, so rounded maxima are the maxima of rounded weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from shardwright.layout import ZERO_AXES, ParameterLayout
from shardwright.model.decoder import Decoder
from shardwright.model.moe import ExpertStack
from shardwright.model.products.fp8 import Scaling, compute_block_maxima
from shardwright.model.products.linear import Linear
from shardwright.model.products.operand import get_widest_blocks, limit_rows
from shardwright.model.products.scaled_product import ScaledProducts
from shardwright.numerics import get_local_tensor
from shardwright.parallel.mesh import Mesh

MaximaAttribute = Literal["output_maxima", "input_gradient_maxima"]


class _Entry(NamedTuple):
    """The maxima of one weight in one product."""

    products: ScaledProducts
    attribute: MaximaAttribute
    scaling: Scaling
    parameter: nn.Parameter
    is_transposed: bool


class WeightMaxima:
    """The maxima of a model's weights."""

    def __init__(
        self, entries: Mapping[tuple[str, ...], Sequence[_Entry]], mesh: Mesh, dtype: torch.dtype
    ) -> None:
        self._entries_of_axes = entries
        self._mesh = mesh
        self._dtype = dtype

    @contextmanager
    def agree(self) -> Iterator[None]:
        """Pass the maxima of all ranks to the products while weights are fixed (a collective)."""
        for axes, entries in self._entries_of_axes.items():
            parts = [_compute_own_maxima(entry) for entry in entries]
            flat = torch.cat([part.flatten() for part in parts])
            largest = self._mesh.maximise_over(flat, axes).to(self._dtype)
            sizes = [part.numel() for part in parts]
            for entry, part, maxima in zip(entries, parts, largest.split(sizes), strict=True):
                setattr(entry.products, entry.attribute, maxima.view(part.shape))
        try:
            yield
        finally:
            for entries in self._entries_of_axes.values():
                for entry in entries:
                    setattr(entry.products, entry.attribute, None)


def agree_on_maxima(maxima: WeightMaxima | None) -> AbstractContextManager[None]:
    """Return the context of passes between which weights do not change; every rank enters it."""
    return nullcontext() if maxima is None else maxima.agree()


def build_weight_maxima(
    decoder: Decoder,
    layouts: Mapping[str, ParameterLayout],
    mesh: Mesh | None,
    dtype: torch.dtype,
    offloaded_names: Collection[str],
) -> WeightMaxima | None:
    """Build the exchange of a decoder with quantised products; None if it has nothing to exchange.

    If ZeRO quantises shards of a weight before it gathers them, its ranks agree on the scale of a
    whole matrix, too. Weights that are offloaded or packed are left out. Their values are not at
    hand before a step, so their products agree on the maxima one by one.

    Args:
        dtype: compute precision of the products.
    """
    if mesh is None:
        return None
    entries: dict[tuple[str, ...], list[_Entry]] = {}
    for module in decoder.modules():
        products = getattr(module, "scaled", None)
        if products is None or products.name in offloaded_names:
            continue
        assert isinstance(module, Linear | ExpertStack)
        if not module.weight.is_floating_point():
            continue
        axes = tuple(
            axis for axis in layouts[products.name].shard_axes if axis == "tp" or axis in ZERO_AXES
        )
        scalings: dict[MaximaAttribute, Scaling] = {
            "output_maxima": products.scaling.output[1],
            "input_gradient_maxima": products.scaling.input_gradient[1],
        }
        entries.setdefault(axes, []).extend(
            _Entry(products, attribute, scaling, module.weight, module.is_transposed)
            for attribute, scaling in scalings.items()
            if products.spans_ranks(scaling, ("outputs", "inputs"))
            or (
                products.is_gathered_as_codes
                and module.weight.ndim == 2
                and get_widest_blocks(scaling).rows is None
            )
        )
    entries = {axes: found for axes, found in entries.items() if found}
    return WeightMaxima(entries, mesh, dtype) if entries else None


@torch.no_grad()
def _compute_own_maxima(entry: _Entry) -> Tensor:
    """Compute the maxima of the weight that ZeRO gathers; zero for blocks that other ranks have."""
    local = get_local_tensor(entry.parameter.detach())
    matrices = local.mT if entry.is_transposed else local
    scaling = get_widest_blocks(entry.scaling)
    if local.ndim == 3:
        scaling = limit_rows(scaling, matrices.shape[-2])
    own = compute_block_maxima(matrices.flatten(0, -2), scaling)
    if not isinstance(entry.parameter, DTensor):
        return own
    # ZeRO shards the first dim as it is stored: outputs, the inputs if transposed, or experts.
    dim = int(entry.is_transposed and local.ndim == 2)
    if (scaling.rows, scaling.columns)[dim] is None:
        return own
    blocks = matrices.shape[-2] // scaling.rows if local.ndim == 3 and scaling.rows else 1
    _, offset = compute_local_shape_and_global_offset(
        entry.parameter.shape, entry.parameter.device_mesh, entry.parameter.placements
    )
    shape = list(own.shape)
    shape[dim] = entry.parameter.shape[0] * blocks
    whole = own.new_zeros(shape)
    whole.narrow(dim, offset[0] * blocks, own.shape[dim]).copy_(own)
    return whole
