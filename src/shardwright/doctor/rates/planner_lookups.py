"""Problems that the planner looks up in a profile, and which of them a calibration measures.

The planner predicts the recipe with an empty profile that records every lookup. The recorded
matrix products, attention rows and messages are measured, and a few default ones. Problems that
need too much memory are measured with fewer rows, and messages up to a size limit; lookups use
the nearest shape and scale with the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from shardwright.architecture import ModelShape
from shardwright.config import Recipe
from shardwright.doctor.rates.collective_bandwidth import COLLECTIVE_KINDS, list_axis_groups
from shardwright.doctor.rates.device_rates import (
    AttentionWorkload,
    MatmulShape,
    reduce_attention,
    reduce_matmul,
)
from shardwright.errors import InputError
from shardwright.hardware import (
    MeasuredProfile,
    parse_cluster,
)
from shardwright.hardware.catalog_loading import find_accelerator
from shardwright.hardware.collective_rate import CollectiveKind
from shardwright.layout import Layout
from shardwright.planner.candidate import Candidate
from shardwright.planner.model_costs import get_model_facts
from shardwright.planner.predictor import build_predictor
from shardwright.planner.problem import build_recipe_candidate, build_template, read_planning_shape
from shardwright.planner.scaling import resize_cluster
from shardwright.units import MIB_BYTES

_MAX_FLOPS = {"cpu": 1e11, "cuda": 4e13}
"""FLOPs of one problem, which limits its memory. The examination limits its time."""
_MAX_MESSAGE_BYTES = {"cpu": 64 * MIB_BYTES, "cuda": 1024 * MIB_BYTES}
_MAX_NUM_MESSAGES = 6
"""Messages of a recipe that are measured per collective and group, besides the default ones."""
_DEFAULT_MATMUL_SIDES = {"cpu": (256, 512, 1024), "cuda": (512, 2048, 4096)}
"""Values of m, n and k of matrix products if there is no recipe."""

_DEFAULT_ROW_TOKENS = {"cpu": (128, 512, 2048), "cuda": (512, 2048, 8192, 32768)}
"""Row lengths in tokens at which attention is measured, besides a recipe's own."""
_DEFAULT_HEADS = {"cpu": (8, 8, 64), "cuda": (32, 8, 128)}
"""Query heads, key-value heads and head size if there is no recipe."""
_DEFAULT_TOKENS = {"cpu": 1024, "cuda": 8192}
"""Tokens of a micro-batch if there is no recipe."""

_MAX_ELEMENTS = 2**26
"""Elements of one tensor in measurements of element-wise operations."""

CollectiveMessage = tuple[CollectiveKind, int, int]


@dataclass(frozen=True)
class _RecordingProfile(MeasuredProfile):
    """Empty profile that records the planner's lookups."""

    recorded_matmuls: dict[MatmulShape, None] = field(default_factory=dict)
    messages: dict[CollectiveMessage, None] = field(default_factory=dict)
    recorded_attention_rows: dict[tuple[str, int], None] = field(default_factory=dict)
    """Precision and row length in tokens of attention lookups."""
    tensors: dict[tuple[str, int, int], None] = field(default_factory=dict)
    """Precision, tokens and width of lookups of element-wise operations."""

    def find_matmul_flops_per_second(self, precision: str, m: int, n: int, k: int) -> float | None:
        self.recorded_matmuls[(precision, m, n, k)] = None
        return None

    def find_scaled_product_ratio(self, recipe: str) -> float | None:
        # Every examination measures the ratio; products of a recipe then take their rates in bf16.
        return 1.0

    def find_collective_seconds(
        self, kind: CollectiveKind, num_ranks: int, ranks_per_node: int, message_bytes: float
    ) -> float | None:
        self.messages[(kind, num_ranks, round(message_bytes))] = None
        return None

    def find_attention_flops_per_second(
        self, precision: str, row_tokens: float, head_dim: int, *, is_backward: bool
    ) -> float | None:
        self.recorded_attention_rows[(precision, round(row_tokens))] = None
        return None

    def find_elementwise_bytes_per_second(
        self, precision: str, tokens: int, width: int, *, is_backward: bool
    ) -> float | None:
        self.tensors[(precision, min(tokens, _MAX_ELEMENTS // width), width)] = None
        return None


@dataclass(frozen=True)
class PlannerLookups:
    """Problems to measure for the planner."""

    matmuls: list[MatmulShape]
    attention: list[AttentionWorkload]
    messages: list[CollectiveMessage] = field(default_factory=list)
    elementwise: list[tuple[str, int, int]] = field(default_factory=list)

    def as_request_fields(self) -> dict[str, Any]:
        """Return the problems as fields of an `ExaminationRequest`."""
        return {kind: tuple(problems) for kind, problems in vars(self).items()}


def find_catalog_name(device_kind: str, device_name: str) -> str | None:
    """Return a device's name in the catalogue, None if unknown; all CPUs are `CPU` there."""
    try:
        return find_accelerator("CPU" if device_kind == "cpu" else device_name).name
    except InputError:
        return None


def _list_default_matmuls(device_kind: str) -> list[MatmulShape]:
    sides = _DEFAULT_MATMUL_SIDES[device_kind]
    precisions = ("fp32", "bf16")
    return [
        (precision, m, n, k)
        for precision in precisions
        for m in sides
        for n in sides
        for k in sides
        if not m == n == k
    ]


def list_default_lookups(device_kind: str) -> PlannerLookups:
    """List the problems to measure if there is no recipe, or if the catalogue lacks the device."""
    num_heads, num_kv_heads, head_dim = _DEFAULT_HEADS[device_kind]
    workloads = [
        AttentionWorkload(
            "bf16",
            max(1, _DEFAULT_TOKENS[device_kind] // length),
            length,
            num_heads,
            num_kv_heads,
            head_dim,
        )
        for length in _DEFAULT_ROW_TOKENS[device_kind]
    ]
    tensors = [
        (precision, _DEFAULT_TOKENS[device_kind], num_heads * head_dim)
        for precision in ("fp32", "bf16")
    ]
    return PlannerLookups(
        _list_default_matmuls(device_kind),
        _limit_attention_flops(workloads, device_kind),
        elementwise=tensors,
    )


def list_recipe_lookups(recipe: Recipe, layout: Layout, device_kind: str) -> PlannerLookups:
    """List the planner's lookups for the recipe on this layout.

    Raises:
        InputError: the layout does not divide the recipe's batch, the model's size depends on a
            tokenizer that is missing, or the device lacks the recipe's precision.
    """
    candidate = build_recipe_candidate(recipe, build_template(recipe), layout.world_size)
    if candidate is None:
        raise InputError(
            "the recipe's batch cannot be divided over this layout's ranks",
            field="--layout",
            got=str(layout),
            remedy="shardwright doctor --checklist shows the nearest layout that does",
        )
    lookups = record_lookups(
        read_planning_shape(recipe), replace(candidate, layout=layout), device_kind
    )
    return list_default_lookups(device_kind) if lookups is None else lookups


def record_lookups(
    shape: ModelShape, candidate: Candidate, device_kind: str
) -> PlannerLookups | None:
    """Record the planner's lookups for one run; None if the catalogue lacks the device."""
    name = find_catalog_name(
        device_kind, torch.cuda.get_device_name() if device_kind == "cuda" else ""
    )
    if name is None:
        return None
    layout = candidate.layout
    cluster = resize_cluster(parse_cluster(f"{layout.world_size}x{name}"), layout.world_size)
    accelerator = cluster.accelerator
    recorder = _RecordingProfile(
        "", None, "", accelerator.memory_bytes, accelerator.memory_bytes_per_second
    )
    build_predictor(get_model_facts(shape), replace(cluster, profile=recorder)).predict(candidate)
    tokens = candidate.micro_batch_size * candidate.sequence_length // layout.cp
    return PlannerLookups(
        _limit_matmul_flops(recorder.recorded_matmuls, device_kind),
        _list_attention_workloads(
            shape, recorder.recorded_attention_rows, tokens, layout.tp, device_kind
        ),
        _select_messages(recorder.messages, layout, device_kind),
        list(recorder.tensors),
    )


def _list_attention_workloads(
    shape: ModelShape, lookups: dict[tuple[str, int], None], tokens: int, tp: int, device_kind: str
) -> list[AttentionWorkload]:
    """List attention with the model's heads at the recorded and the default row lengths.

    Each has as many rows as fit into a micro-batch's tokens.
    """
    num_heads = max(1, shape.num_heads // tp)
    num_kv_heads = max(1, shape.num_kv_heads // tp)
    lengths = {
        (precision, length)
        for precision, row in lookups
        for length in (row, *_DEFAULT_ROW_TOKENS[device_kind])
    }
    workloads = [
        AttentionWorkload(
            precision, max(1, tokens // length), length, num_heads, num_kv_heads, shape.head_dim
        )
        for precision, length in sorted(lengths)
    ]
    return _limit_attention_flops(workloads, device_kind)


def _limit_attention_flops(
    workloads: list[AttentionWorkload], device_kind: str
) -> list[AttentionWorkload]:
    """Reduce rows, then heads, to the limit of FLOPs; drop attention that still exceeds it."""
    reduced = [reduce_attention(rows, _MAX_FLOPS[device_kind]) for rows in workloads]
    return [rows for rows in reduced if rows.flops <= _MAX_FLOPS[device_kind]]


def _limit_matmul_flops(lookups: dict[MatmulShape, None], device_kind: str) -> list[MatmulShape]:
    """Reduce the rows of products that exceed the limit of FLOPs."""
    products: dict[MatmulShape, None] = {}
    for precision, m, n, k in lookups:
        products[(precision, *reduce_matmul(m, n, k, _MAX_FLOPS[device_kind]))] = None
    return list(products)


def _select_messages(
    lookups: dict[CollectiveMessage, None], layout: Layout, device_kind: str
) -> list[CollectiveMessage]:
    """Select messages over the groups of this layout.

    Of each collective and group size: the smallest, the largest and some between.
    """
    sizes = {groups.size for groups in list_axis_groups(layout)}
    messages: list[CollectiveMessage] = []
    for collective in COLLECTIVE_KINDS:
        for size in sizes:
            message_bytes = sorted(
                {
                    min(num_bytes, _MAX_MESSAGE_BYTES[device_kind])
                    for name, num_ranks, num_bytes in lookups
                    if (name, num_ranks) == (collective, size)
                }
            )
            if len(message_bytes) > _MAX_NUM_MESSAGES:
                last = _MAX_NUM_MESSAGES - 1
                top = len(message_bytes) - 1
                message_bytes = [message_bytes[i * top // last] for i in range(_MAX_NUM_MESSAGES)]
            messages += [(collective, size, num_bytes) for num_bytes in message_bytes]
    return messages
