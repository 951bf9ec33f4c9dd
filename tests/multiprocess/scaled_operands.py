"""Quantised operands, captured at the product in every rank, and assembled to whole rows.

Rows are compared as sets: which rank has a token, an output feature or an expert does not matter,
every byte of its row does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.architecture import read_config
from shardwright.architecture.adapter_targets import add_adapters
from shardwright.config.adapter_section import AdapterSection
from shardwright.config.low_precision import (
    FP8Section,
    LowPrecisionRecipe,
    LowPrecisionSection,
    NVFP4Section,
)
from shardwright.config.recipe import RecomputeKind
from shardwright.config.training import PrecisionSection
from shardwright.data.loader import MicroBatch
from shardwright.layout import Layout, RankGrid
from shardwright.model import Decoder
from shardwright.model.products.fp8 import Scaling
from shardwright.model.products.nf4 import read_packed_slice
from shardwright.model.products.nvfp4 import TwoLevelMatrix
from shardwright.model.products.operand import Operand, dequantise
from shardwright.model.products.scaled_product import LayerDim, ScaledProducts
from shardwright.model.weight_init import initialise_parameter
from shardwright.numerics import chunked_cross_entropy
from shardwright.parallel import ParallelModel, apply_layout, build_mesh
from shardwright.plans import BatchPlan, build_plan
from shardwright.training.step import accumulate_gradients
from tests.multiprocess.models import compute_pruned_mask

LENGTH = 128
NUM_ROWS = 4
DENSE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": LENGTH,
}
WIDE = DENSE | {"hidden_size": 128, "head_dim": 64}
"""Every width is a multiple of 128."""
BROAD = DENSE | {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
"""Half of each matrix but keys and values is whole blocks of 128."""
SPARSE = DENSE | {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.0,
}
_SIZES = {name: DENSE[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 61,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": LENGTH,
}
PHI3 = DENSE | {"model_type": "phi3", "head_dim": 16}
GPT_OSS: dict[str, Any] = DENSE | {
    "model_type": "gpt_oss",
    "intermediate_size": 64,
    "sliding_window": 48,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
DEEPSEEK: dict[str, Any] = _SIZES | {
    "model_type": "deepseek_v3",
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": LENGTH,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "num_nextn_predict_layers": 0,
}
BROAD_SPARSE = SPARSE | {"hidden_size": 128, "head_dim": 64, "moe_intermediate_size": 128}

_FUSED_RATIOS = {"gate_up_proj": (1, 1), "c_attn": (1, 1, 1), "qkv_proj": (2, 1, 1)}
"""Widths of the matrices of fused projections, with two query heads per key-value head."""
_NEGATIVE_ZERO = 0x80
_FP64_NOISE = 1e-14
"""Fraction of an operand's largest value below which elements are the noise of a sum in fp64."""

OperandKey = tuple[str, tuple[LayerDim, LayerDim], str]
"""Weight's name, dims of the operand, scaling."""


@dataclass(frozen=True)
class Cell:
    """A model and recipe under a layout."""

    config: dict[str, Any]
    section: LowPrecisionSection
    layout: Layout
    accumulation: int = 1
    recompute: RecomputeKind = "none"
    adapters: AdapterSection | None = None
    is_pruned: bool = False
    """True if every third element of each matrix is zero."""
    length: int = LENGTH
    """Tokens of a row."""
    has_documents: bool = False
    """True if each row has documents of different lengths."""


@dataclass
class StepRecord:
    """Operands that one rank quantised in a step, and the whole gradients."""

    tensor_rank: int
    operands: dict[OperandKey, list[Tensor]]
    """Per operand `[rows, columns, 5]`: each element's code and fp32 value as bytes; of two levels
    of scales `[rows, columns, 10]`, with the block scale and the outer scale."""
    sharded: dict[str, str | None]
    gradients: dict[str, Tensor]
    counts: Tensor


@contextmanager
def record_operands() -> Iterator[dict[OperandKey, list[Tensor]]]:
    """Record what `ScaledProducts.quantise` returns to the products."""
    records: dict[OperandKey, list[Tensor]] = {}
    quantise = ScaledProducts.quantise

    def record(
        self: ScaledProducts,
        values: Tensor,
        scaling: Scaling,
        dims: tuple[LayerDim, LayerDim],
        **options: int,
    ) -> Operand:
        matrix = quantise(self, values, scaling, dims, **options)
        codes = matrix.codes.contiguous().view(torch.uint8)
        values_RC = dequantise(matrix)
        # The gradient of a row's first query is zero but for the noise of a sum in fp64, whose
        # order depends on the layout. Most scales flush it, and keep its sign; those of mxfp8 are
        # small enough for it, and stochastic rounding may round it up.
        is_noise = values_RC.abs() <= _FP64_NOISE * values_RC.abs().amax()
        is_noise |= values.abs() <= _FP64_NOISE * values.abs().amax()
        codes = torch.where(is_noise | (codes == _NEGATIVE_ZERO), 0, codes)[..., None]
        rounded = torch.where(is_noise, 0.0, values_RC).contiguous()[..., None].view(torch.uint8)
        parts = [codes, rounded]
        if isinstance(matrix, TwoLevelMatrix):
            parts += expand_scales(matrix)
        records.setdefault((self.name, dims, str(scaling)), []).append(torch.cat(parts, -1))
        return matrix

    with mock.patch.object(ScaledProducts, "quantise", record):
        yield records


def expand_scales(matrix: TwoLevelMatrix) -> list[Tensor]:
    """Return the bytes of both scales for each element, `[rows, columns, 1]` and `[.., 4]`."""
    num_rows, num_columns = matrix.codes.shape
    blocks = matrix.block_scales.contiguous().view(torch.uint8)
    blocks = blocks.repeat_interleave(matrix.scaling.rows or num_rows, 0)
    blocks = blocks.repeat_interleave(matrix.scaling.columns or num_columns, 1)
    outer = matrix.outer_scales
    outer = outer.repeat_interleave(num_rows // max(1, outer.shape[0]), 0)
    outer = outer.expand(-1, num_columns).contiguous()[..., None]
    return [blocks[:num_rows, :num_columns, None], outer.view(torch.uint8)]


def build_section(recipe: LowPrecisionRecipe) -> LowPrecisionSection:
    """Build the section of a recipe that computes everything else in fp64."""
    if recipe == "nvfp4":
        return NVFP4Section(experimental=True, compute="fp64")
    return FP8Section(recipe=recipe, compute="fp64")


def build_model(
    cell: Cell, *, compute_dtype: torch.dtype = torch.float64, compile_blocks: bool = False
) -> ParallelModel:
    shape = read_config(cell.config)
    if cell.adapters is not None:
        shape = add_adapters(shape, cell.adapters)
    with torch.device("meta"):
        decoder = Decoder(
            shape,
            loss_function=partial(chunked_cross_entropy, chunk_tokens=50),
            compute_dtype=compute_dtype,
        )
    specs = {spec.name: spec for spec in shape.list_parameters()}

    def read_slice(name: str, narrow: Sequence[tuple[int, int]]) -> Tensor:
        spec = specs[name]
        if spec.adapter_part is not None:
            return _make_adapter(spec.shape, narrow)
        if spec.packed_matrix is not None:
            return read_packed_slice(
                spec.packed_matrix,
                narrow,
                lambda _, rows: initialise_parameter(
                    spec.packed_matrix, 3, dtype=torch.float32, narrow=rows
                ),
            )
        values = initialise_parameter(spec, 3, dtype=torch.float64, narrow=narrow)
        if cell.is_pruned and len(narrow) == 2:
            values[compute_pruned_mask(narrow)] = 0.0
        return values

    micro = NUM_ROWS // (cell.layout.data_ranks * cell.accumulation)
    batch = BatchPlan(cell.length, micro, cell.accumulation, cell.layout.data_ranks)
    precision = PrecisionSection.of_low_precision(cell.section)
    return apply_layout(
        decoder,
        build_plan(shape, cell.layout, batch, precision, cell.recompute),
        build_mesh(cell.layout, "cpu"),
        torch.device("cpu"),
        read_slice=read_slice,
        compile_blocks=compile_blocks,
    )


def _make_adapter(shape: tuple[int, ...], narrow: Sequence[tuple[int, int]]) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    for dim, (start, length) in enumerate(narrow):
        values = values.narrow(dim, start, length)
    return values * 0.05


def read_micro_batches(cell: Cell, data_rank: int) -> list[MicroBatch]:
    """Return a data rank's rows of the same global batch under every layout."""
    generator = torch.Generator().manual_seed(7)
    ids_BT = torch.randint(0, 61, (NUM_ROWS, cell.length), generator=generator)
    positions_BT = torch.arange(cell.length).expand(NUM_ROWS, cell.length)
    document_ids_BT = None
    if cell.has_documents:
        firsts_B = torch.tensor([37, 64, 90, 5])[:, None]
        document_ids_BT = (positions_BT >= firsts_B).long()
        positions_BT = positions_BT - firsts_B * document_ids_BT
    own = torch.arange(NUM_ROWS).chunk(cell.layout.data_ranks)[data_rank]
    return [
        MicroBatch(
            ids_BT[rows],
            ids_BT[rows].roll(-1, 1),
            positions_BT[rows],
            None if document_ids_BT is None else document_ids_BT[rows],
            rows,
            len(rows) * cell.length,
        )
        for rows in own.chunk(cell.accumulation)
    ]


def run_cell(
    cell: Cell, mutate: Callable[[], AbstractContextManager[object]] = nullcontext
) -> StepRecord:
    """Compute one step's gradients on this rank."""
    with mutate():
        return record_step(cell, build_model(cell))


def record_step(cell: Cell, model: ParallelModel) -> StepRecord:
    """Compute one step's gradients with a model of this cell on this rank."""
    rank = dist.get_rank() if cell.layout.world_size > 1 else 0
    grid = RankGrid(cell.layout)
    assert model.decoder.rounding_totals is not None
    model.decoder.rounding_totals.is_counting = True
    with record_operands() as operands:
        accumulate_gradients(model, read_micro_batches(cell, grid.data_rank(rank)), seed=0, step=0)
        counts = model.decoder.rounding_totals.pop_table(torch.device("cpu"))
    gradients = {name: model.gather_gradient(name) for name in model.layouts}
    sharded = {
        module.scaled.name: module.scaled.sharded
        for module in model.decoder.modules()
        if getattr(module, "scaled", None) is not None
    }
    return StepRecord(
        grid.coordinates(rank)["tp"],
        operands,
        sharded,
        {name: gradient for name, gradient in gradients.items() if gradient is not None},
        counts,
    )


def assemble_rows(cell: Cell, records: Sequence[StepRecord]) -> dict[OperandKey, set[bytes]]:
    """Assemble the operands of all ranks to sets of whole rows."""
    rows: dict[OperandKey, set[bytes]] = {}
    tp = cell.layout.tp
    for first in range(0, len(records), tp):  # tp varies fastest
        group = records[first : first + tp]
        for key in group[0].operands:
            name, dims, _ = key
            parts = [record.operands[key] for record in group]
            is_split = dims[1] == group[0].sharded[name]
            for operands in zip(*parts, strict=True):
                wholes = [_join_columns(name, operands)] if is_split else operands
                for whole in wholes:
                    rows.setdefault(key, set()).update(row.numpy().tobytes() for row in whole)
    return rows


def _join_columns(name: str, shards: Sequence[Tensor]) -> Tensor:
    """Join the ranks' columns; of a fused projection, those of its first matrix first."""
    ratios = next((found for part, found in _FUSED_RATIOS.items() if part in name), (1,))
    widths = [shards[0].shape[1] * ratio // sum(ratios) for ratio in ratios]
    parts = zip(*(shard.split(widths, 1) for shard in shards), strict=True)
    return torch.cat([column for part in parts for column in part], 1)
