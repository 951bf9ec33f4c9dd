"""Grid of verifications: three small models in layouts of one to four kinds of parallelism.

A cell is a model, a layout and a case. `make verify-all` runs all cells.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from shardwright.architecture import ModelShape, read_config
from shardwright.config.low_precision import FP8Section, LowPrecisionSection, NVFP4Section
from shardwright.config.offload import NOT_OFFLOADED, OffloadSection, OffloadTier
from shardwright.errors import LayoutError
from shardwright.layout import CpMethod, Layout
from shardwright.layout.degrees import ZeroStage
from shardwright.placement import place_model
from shardwright.schedule import PIPELINE_SCHEDULES
from shardwright.verification.cases import VerificationCase, VerificationDtype

GRID_SEQUENCE_LENGTH = 16

_LLAMA_CONFIG: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
GRID_MODELS: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "llama", "intermediate_size": 48, **_LLAMA_CONFIG},
    "tied": {
        "model_type": "gpt2",
        "vocab_size": 61,
        "n_embd": 32,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": 64,
    },
    "moe": {
        "model_type": "qwen3_moe",
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.0,
        **_LLAMA_CONFIG,
    },
}
"""Models of the grid: grouped-query attention; tied embeddings, fused projections and learned
positions; experts and per-head norms."""
NUM_GRID_LAYERS = 4

SCHEDULES = tuple(PIPELINE_SCHEDULES)
CP_METHODS: tuple[CpMethod, ...] = ("ring", "all_gather", "ulysses")
ZERO_STAGES: tuple[ZeroStage, ...] = (1, 2, 3)

GRID_CASES = (
    VerificationCase(1, "none", dropout=False, documents=True),
    VerificationCase(2, "full", dropout=True, documents=True),
    VerificationCase(3, "selective", dropout=True, documents=False),
    VerificationCase(1, "full", dropout=False, documents=False),
    VerificationCase(2, "none", dropout=True, documents=False),
    VerificationCase(3, "full", dropout=True, documents=False),
    VerificationCase(1, "selective", dropout=True, documents=True),
    VerificationCase(2, "selective", dropout=False, documents=True),
    VerificationCase(3, "none", dropout=False, documents=True),
)
"""Cases with every pair of option values. The model sets `tied`; pipelines accumulate more."""

_OFFLOAD_TIERS: tuple[dict[str, OffloadTier], ...] = (
    {"optimizer": "host"},
    {"optimizer": "disk", "parameters": "disk", "activations": "disk"},
    {"optimizer": "host", "parameters": "disk"},
    {"optimizer": "disk", "activations": "disk"},
)
GRID_OFFLOADS = tuple(
    OffloadSection.model_validate(tiers | {"buffer_bytes": 8192}) for tiers in _OFFLOAD_TIERS
)
"""Offloading of cells. On a CPU parameters and activations in `host` would not move."""

CELLS_PER_LAYOUT = 2

COMPILED_CELLS = {
    Layout(dp_replicate=2): "tied",
    Layout(dp_shard=2, zero_stage=3): "dense",
    Layout(tp=2): "dense",
    Layout(pp=2, schedule="zb_h1"): "dense",
    Layout(cp=2, cp_method="ring"): "tied",
    Layout(dp_shard=2, ep=2, zero_stage=2): "moe",
}
"""Layouts, and the model of each, of which a further cell compiles its blocks. Each takes many
times as long as an uncompiled one."""

LOW_PRECISION_CELLS: tuple[tuple[str, Layout, LowPrecisionSection], ...] = (
    ("dense", Layout(dp_shard=2, zero_stage=3), FP8Section()),
    ("tied", Layout(tp=2), FP8Section()),
    ("dense", Layout(cp=2, cp_method="ring"), FP8Section()),
    ("moe", Layout(dp_shard=2, ep=2, zero_stage=2), FP8Section()),
    ("dense", Layout(pp=2, schedule="zb_h1"), NVFP4Section(experimental=True)),
    ("tied", Layout(dp_shard=2, zero_stage=3), NVFP4Section(experimental=True)),
)
"""Models and layouts of which a further cell has quantised products, with equal ones in the
reference. `test_low_precision_matrix` has every recipe under every layout."""


@dataclass(frozen=True)
class GridCell:
    """Model, layout and case; `refusal` says why the model does not support the layout."""

    model: str
    layout: Layout
    case: VerificationCase
    refusal: str | None = None
    num_layers: int = NUM_GRID_LAYERS
    offload: OffloadSection = NOT_OFFLOADED
    is_compiled: bool = False
    low_precision: LowPrecisionSection | None = None
    """Quantised products; None multiplies in the cell's dtype."""

    @property
    def dtype(self) -> VerificationDtype:
        """Dtype of the cell. Sums in float32 could round to other codes."""
        return "float32" if self.low_precision is None else "float64"

    @property
    def offload_properties(self) -> frozenset[str]:
        """Each offloaded kind of state with its tier."""
        tiers = self.offload.tiers.items()
        return frozenset(f"{name} in {tier}" for name, tier in tiers if tier != "none")


def read_grid_shape(name: str, num_layers: int = NUM_GRID_LAYERS) -> ModelShape:
    """Read the shape of one of `GRID_MODELS`, of its first `num_layers` layers."""
    shape = read_config(GRID_MODELS[name])
    return replace(shape, layers=shape.layers[:num_layers])


def list_grid_layouts(max_ranks: int = 16) -> list[Layout]:
    """List the layouts of 2 to `max_ranks` ranks, with one to four kinds of parallelism."""
    every = [
        *_list_single_axes(),
        *_list_axis_pairs(),
        *_list_axis_triples(),
        *_list_full_layouts(),
    ]
    return [layout for layout in dict.fromkeys(every) if 1 < layout.world_size <= max_ranks]


def _list_single_axes() -> Iterator[Layout]:
    yield Layout(dp_replicate=2)
    yield from (Layout(dp_shard=2, zero_stage=stage) for stage in ZERO_STAGES)
    yield Layout(dp_shard=3, zero_stage=3)
    yield from (
        Layout(tp=degree, sequence_parallel=sequence)
        for degree in (2, 4)
        for sequence in (True, False)
    )
    yield from (Layout(pp=2, schedule=schedule) for schedule in SCHEDULES)
    yield Layout(pp=4)
    yield from (Layout(cp=2, cp_method=method) for method in CP_METHODS)
    yield Layout(cp=2, zero_stage=3, cp_method="ring")
    yield Layout(cp=4, zero_stage=1, cp_method="all_gather")
    yield from (Layout(dp_shard=2, ep=2, zero_stage=stage) for stage in ZERO_STAGES)
    yield Layout(dp_shard=4, ep=4, zero_stage=3)


def _list_axis_pairs() -> Iterator[Layout]:
    for stage in ZERO_STAGES:
        yield Layout(dp_replicate=2, dp_shard=2, zero_stage=stage)
        yield Layout(dp_shard=2, tp=2, zero_stage=stage, sequence_parallel=stage != 2)
        yield Layout(dp_shard=2, cp=2, zero_stage=stage, cp_method=CP_METHODS[stage - 1])
        yield Layout(dp_shard=4, ep=2, zero_stage=stage)
        yield Layout(dp_shard=2, ep=2, tp=2, zero_stage=stage, sequence_parallel=stage != 1)
    for number, schedule in enumerate(SCHEDULES):
        yield Layout(dp_shard=2, pp=2, zero_stage=ZERO_STAGES[number % 3], schedule=schedule)
        yield Layout(tp=2, pp=2, schedule=schedule, sequence_parallel=number % 2 == 0)
    for number, method in enumerate(CP_METHODS):
        yield Layout(tp=2, cp=2, cp_method=method, sequence_parallel=number != 1)
        yield Layout(pp=2, cp=2, cp_method=method, schedule=SCHEDULES[2 * number + 1])
    yield Layout(dp_replicate=2, tp=2)
    yield Layout(dp_replicate=2, pp=2)
    yield Layout(dp_replicate=2, cp=2, cp_method="ring")
    yield Layout(cp=2, ep=2, zero_stage=1, cp_method="ring")
    yield Layout(dp_shard=2, ep=2, pp=2, zero_stage=2)
    yield Layout(dp_replicate=2, dp_shard=2, ep=2, zero_stage=3)


def _list_axis_triples() -> Iterator[Layout]:
    yield Layout(dp_replicate=2, dp_shard=2, tp=2, zero_stage=3)
    yield Layout(dp_replicate=2, dp_shard=2, pp=2, zero_stage=1)
    yield Layout(dp_replicate=2, dp_shard=2, cp=2, zero_stage=2, cp_method="all_gather")
    yield Layout(dp_replicate=2, tp=2, pp=2)
    yield Layout(dp_replicate=2, tp=2, cp=2, cp_method="ulysses", sequence_parallel=False)
    yield Layout(dp_replicate=2, pp=2, cp=2, cp_method="ring", schedule="gpipe")
    for stage, schedule in zip(ZERO_STAGES, ("zb_h1", "interleaved_1f1b", "1f1b"), strict=True):
        yield Layout(dp_shard=2, tp=2, pp=2, zero_stage=stage, schedule=schedule)
        yield Layout(dp_shard=2, tp=2, cp=2, zero_stage=stage, cp_method=CP_METHODS[stage - 1])
        yield Layout(
            dp_shard=2,
            pp=2,
            cp=2,
            zero_stage=stage,
            cp_method=CP_METHODS[stage % 3],
            schedule=schedule,
        )
    yield Layout(tp=2, pp=2, cp=2, cp_method="ring")
    yield Layout(tp=2, pp=2, cp=2, cp_method="all_gather", schedule="zbv", sequence_parallel=False)
    yield Layout(dp_shard=2, ep=2, tp=2, pp=2, zero_stage=1)
    yield Layout(dp_shard=2, cp=2, ep=4, zero_stage=3, cp_method="all_gather")
    yield Layout(dp_shard=2, cp=2, tp=2, ep=2, zero_stage=2, cp_method="ring")
    yield Layout(dp_shard=2, pp=4, zero_stage=1)
    yield Layout(tp=4, pp=2)


def _list_full_layouts() -> Iterator[Layout]:
    yield Layout(dp_shard=2, tp=2, pp=2, cp=2, zero_stage=3, cp_method="ring")
    yield Layout(dp_shard=2, tp=2, pp=2, cp=2, zero_stage=1, cp_method="ulysses", schedule="zb_h1")
    yield Layout(dp_replicate=2, dp_shard=2, tp=2, pp=2, zero_stage=2, schedule="interleaved_1f1b")
    yield Layout(dp_replicate=2, tp=2, pp=2, cp=2, cp_method="all_gather")
    yield Layout(dp_replicate=2, dp_shard=2, tp=2, cp=2, zero_stage=3, cp_method="ring")
    yield Layout(dp_shard=2, tp=2, pp=2, cp=2, ep=2, zero_stage=1, cp_method="ring")
    yield Layout(dp_shard=2, tp=2, pp=2, cp=2, ep=4, zero_stage=3, cp_method="all_gather")


def list_cells(max_ranks: int = 16) -> list[GridCell]:
    """List the cells in order of execution; an unsupported layout is a cell with a refusal."""
    cells = []
    for number, (layout, model) in enumerate(
        (layout, model) for layout in list_grid_layouts(max_ranks) for model in GRID_MODELS
    ):
        if layout.ep > 1 and model != "moe":
            continue  # expert parallelism does not apply to models without experts
        shape = read_grid_shape(model)
        refusal = find_refusal(shape, layout)
        for repetition in range(CELLS_PER_LAYOUT):
            case = GRID_CASES[(number + 4 * repetition) % len(GRID_CASES)]
            cell = GridCell(model, layout, _adapt_case(case, layout, shape), refusal)
            if repetition:  # every second cell, each with the next offloading
                cell = replace(cell, offload=GRID_OFFLOADS[number % len(GRID_OFFLOADS)])
            cells.append(cell)
            if refusal is not None:
                break
        if COMPILED_CELLS.get(layout) == model:
            cells.append(replace(cell, offload=NOT_OFFLOADED, is_compiled=True))
    for number, (model, layout, section) in enumerate(LOW_PRECISION_CELLS):
        if layout.world_size <= max_ranks:
            case = _adapt_case(GRID_CASES[number], layout, read_grid_shape(model))
            section = section.model_copy(update={"compute": "fp64", "emulate": True})
            cells.append(GridCell(model, layout, case, low_precision=section))
    return cells


def find_refusal(shape: ModelShape, layout: Layout) -> str | None:
    """Return the error message if the model does not support this layout, else None."""
    try:
        place_model(shape, layout, GRID_SEQUENCE_LENGTH)
    except LayoutError as error:
        return str(error)
    return None


def _adapt_case(case: VerificationCase, layout: Layout, shape: ModelShape) -> VerificationCase:
    """Adapt a case to model and layout: micro-batches of pipelines, router options."""
    case = replace(case, tied=shape.tied_embeddings)
    if shape.experts is not None:
        case = replace(
            case,
            router_losses=case.documents,
            capacity_factor=0.8 if case.recompute == "selective" else None,
        )
    return (
        case
        if layout.pp == 1
        else replace(case, accumulation=2 * layout.pp * (1 + case.accumulation % 2))
    )


def group_by_reference(cells: Iterable[GridCell]) -> list[list[GridCell]]:
    """Group cells that share a reference: same model, layers, case, data ranks and products."""
    grouped: dict[Hashable, list[GridCell]] = {}
    for cell in cells:
        data_ranks = cell.layout.data_ranks
        key = (cell.model, cell.num_layers, cell.case, data_ranks, cell.low_precision)
        grouped.setdefault(key, []).append(cell)
    return list(grouped.values())
