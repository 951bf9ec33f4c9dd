"""Calibration: rates to measure on this cluster, and the profile that results from them.

The planner predicts the recipe with an empty profile that records every lookup. The recorded
matrix products, attention rows and messages are measured, and a few default ones. Problems that
need too much memory are measured with fewer rows, and messages up to a size limit; lookups use
the nearest shape and scale with the bytes. The examination reduces or omits problems that take
too long (`examination.Order.budget_seconds`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import torch

from shardwright import __version__
from shardwright.architecture import ModelShape
from shardwright.config import Recipe
from shardwright.config.upkeep import DeviceKind
from shardwright.data.cache import cache_root
from shardwright.errors import InputError
from shardwright.hardware import (
    AttentionRate,
    CollectiveRate,
    ElementwiseRate,
    MatmulRate,
    MeasuredProfile,
    parse_cluster,
)
from shardwright.hardware.load import find_accelerator
from shardwright.hardware.profile import CollectiveKind
from shardwright.layout import Layout
from shardwright.planner.achieved import load_efficiencies
from shardwright.planner.candidate import Candidate
from shardwright.planner.predict import predict
from shardwright.planner.question import candidate_of, shape_of, template_of
from shardwright.planner.scaling import resized
from shardwright.probe.bandwidth import KINDS, groups_of
from shardwright.probe.doctor import Diagnosis
from shardwright.probe.examination import CALIBRATION_SECONDS, Order
from shardwright.probe.matmul import Rows, Shape, reduce_product, reduce_rows
from shardwright.probe.storage import Folder
from shardwright.train.folder import RunFolder
from shardwright.units import MIB_BYTES

_MOST_FLOPS = {"cpu": 1e11, "cuda": 4e13}
"""FLOPs of one problem, which limits its memory. The examination limits its time."""
_MOST_BYTES = {"cpu": 64 * MIB_BYTES, "cuda": 1024 * MIB_BYTES}
_MOST_SIZES = 6
"""Messages of a recipe that are measured per collective and group, besides the default ones."""
_LADDER = {"cpu": (256, 512, 1024), "cuda": (512, 2048, 4096)}
"""Values of m, n and k of matrix products if there is no recipe."""

_ROWS = {"cpu": (128, 512, 2048), "cuda": (512, 2048, 8192, 32768)}
"""Row lengths in tokens at which attention is measured, besides a recipe's own."""
_HEADS = {"cpu": (8, 8, 64), "cuda": (32, 8, 128)}
"""Query heads, key-value heads and head size if there is no recipe."""
_TOKENS = {"cpu": 1024, "cuda": 8192}
"""Tokens of a micro-batch if there is no recipe."""

_MOST_ELEMENTS = 2**26
"""Elements of one tensor in measurements of element-wise operations."""

Message = tuple[CollectiveKind, int, int]


@dataclass(frozen=True)
class _Curious(MeasuredProfile):
    """Empty profile that records the planner's lookups."""

    products: dict[Shape, None] = field(default_factory=dict)
    messages: dict[Message, None] = field(default_factory=dict)
    rows: dict[tuple[str, int], None] = field(default_factory=dict)
    """Precision and row length in tokens of attention lookups."""
    tensors: dict[tuple[str, int, int], None] = field(default_factory=dict)
    """Precision, tokens and width of lookups of element-wise operations."""

    def matmul_flops_per_second(self, precision: str, m: int, n: int, k: int) -> float | None:
        self.products[(precision, m, n, k)] = None
        return None

    def collective_seconds(
        self, kind: CollectiveKind, num_ranks: int, ranks_per_node: int, message_bytes: float
    ) -> float | None:
        self.messages[(kind, num_ranks, round(message_bytes))] = None
        return None

    def attention_flops_per_second(
        self, precision: str, row_tokens: float, head_dim: int, *, backward: bool
    ) -> float | None:
        self.rows[(precision, round(row_tokens))] = None
        return None

    def elementwise_bytes_per_second(
        self, precision: str, tokens: int, width: int, *, backward: bool
    ) -> float | None:
        self.tensors[(precision, min(tokens, _MOST_ELEMENTS // width), width)] = None
        return None


@dataclass(frozen=True)
class _Questions:
    """Problems to measure for the planner."""

    products: list[Shape]
    attention: list[Rows]
    messages: list[Message] = field(default_factory=list)
    elementwise: list[tuple[str, int, int]] = field(default_factory=list)


def order_of(
    recipe: Recipe | None,
    layout: Layout,
    *,
    device: DeviceKind = "auto",
    timeout_seconds: float = 60.0,
    calibrates: bool = False,
    budget_seconds: float = CALIBRATION_SECONDS,
) -> Order:
    """Build the request of an examination.

    It contains the layout's groups, the recipe's folders or the default ones and, for a
    calibration, the planner's lookups.
    """
    request = Order(
        layout=layout,
        folders=folders_of(recipe),
        device=device,
        timeout_seconds=timeout_seconds,
        inter_link=None if recipe is None or recipe.cluster is None else recipe.cluster.link,
        budget_seconds=budget_seconds,
    )
    if not calibrates:
        return request
    device_kind = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    lookups = (
        _usual_questions(device_kind) if recipe is None else _questions(recipe, layout, device_kind)
    )
    return replace(
        request,
        products=tuple(lookups.products),
        messages=tuple(lookups.messages),
        attention=tuple(lookups.attention),
        elementwise=tuple(lookups.elementwise),
    )


def folders_of(recipe: Recipe | None) -> tuple[Folder, ...]:
    """List the local folders that a run of the recipe writes to, or the default folders."""
    if recipe is None:
        return (Folder("runs", "runs", True), Folder("data cache", str(cache_root(None)), False))
    run = RunFolder.of(recipe)
    folders = [Folder("run folder", str(run.path), True)]
    if isinstance(run.checkpoints, Path) and recipe.checkpoint.dir is not None:
        folders.append(Folder("checkpoints", str(run.checkpoints), True))
    return (*folders, Folder("data cache", str(cache_root(recipe.data.cache_dir)), False))


def catalogue_name(device_kind: str, device_name: str) -> str | None:
    """Return a device's name in the catalogue, None if unknown; all CPUs are `CPU` there."""
    try:
        return find_accelerator("CPU" if device_kind == "cpu" else device_name).name
    except InputError:
        return None


def _usual_products(kind: str) -> list[Shape]:
    sides = _LADDER[kind]
    precisions = ("fp32", "bf16")
    return [
        (precision, m, n, k)
        for precision in precisions
        for m in sides
        for n in sides
        for k in sides
        if not m == n == k
    ]


def _usual_questions(kind: str) -> _Questions:
    """List the problems to measure without a recipe or for a device the catalogue lacks."""
    num_heads, num_kv_heads, head_dim = _HEADS[kind]
    workloads = [
        Rows("bf16", max(1, _TOKENS[kind] // length), length, num_heads, num_kv_heads, head_dim)
        for length in _ROWS[kind]
    ]
    tensors = [(precision, _TOKENS[kind], num_heads * head_dim) for precision in ("fp32", "bf16")]
    return _Questions(_usual_products(kind), _shortened(workloads, kind), elementwise=tensors)


def _questions(recipe: Recipe, layout: Layout, kind: str) -> _Questions:
    """List the planner's lookups for the recipe on this layout.

    Raises:
        InputError: the layout does not divide the recipe's batch, or the model's size depends
            on a tokenizer that is missing.
    """
    candidate = candidate_of(recipe, template_of(recipe), layout.world_size)
    if candidate is None:
        raise InputError(
            "this layout does not divide the recipe's batch",
            field="--layout",
            got=str(layout),
            remedy="shardwright doctor --checklist shows the nearest layout that does",
        )
    lookups = _asked(shape_of(recipe), replace(candidate, layout=layout), kind)
    return _usual_questions(kind) if lookups is None else lookups


def order_of_runs(
    runs: Sequence[tuple[ModelShape, Candidate]], layout: Layout, *, device: DeviceKind = "auto"
) -> Order:
    """Build one request from the planner's lookups for several runs.

    They are measured over the groups of `layout`, which has as many ranks as the largest run.
    """
    device_kind = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    lookups = [
        _asked(shape, candidate, device_kind) or _usual_questions(device_kind)
        for shape, candidate in runs
    ]
    return Order(
        budget_seconds=len(runs) * CALIBRATION_SECONDS,
        layout=layout,
        device=device,
        products=tuple(
            dict.fromkeys(shape for run_lookups in lookups for shape in run_lookups.products)
        ),
        messages=tuple(
            dict.fromkeys(message for run_lookups in lookups for message in run_lookups.messages)
        ),
        attention=tuple(
            dict.fromkeys(rows for run_lookups in lookups for rows in run_lookups.attention)
        ),
        elementwise=tuple(
            dict.fromkeys(tensor for run_lookups in lookups for tensor in run_lookups.elementwise)
        ),
    )


def _asked(shape: ModelShape, candidate: Candidate, kind: str) -> _Questions | None:
    """Record the planner's lookups for one run; None if the catalogue lacks the device."""
    name = catalogue_name(kind, torch.cuda.get_device_name() if kind == "cuda" else "")
    if name is None:
        return None
    layout = candidate.layout
    cluster = resized(parse_cluster(f"{layout.world_size}x{name}"), layout.world_size)
    accelerator = cluster.accelerator
    recorder = _Curious("", None, "", accelerator.memory_bytes, accelerator.memory_bytes_per_second)
    predict(
        shape, candidate, replace(cluster, profile=recorder), load_efficiencies().of(accelerator)
    )
    tokens = candidate.micro_batch_size * candidate.sequence_length // layout.cp
    return _Questions(
        _few_products(recorder.products, kind),
        _attention_of(shape, recorder.rows, tokens, layout.tp, kind),
        _few_messages(recorder.messages, layout, kind),
        list(recorder.tensors),
    )


def _attention_of(
    shape: ModelShape, asked: dict[tuple[str, int], None], tokens: int, tp: int, kind: str
) -> list[Rows]:
    """List attention with the model's heads at the recorded and the default row lengths.

    Each has as many rows as fit into a micro-batch's tokens.
    """
    num_heads = max(1, shape.num_heads // tp)
    num_kv_heads = max(1, shape.num_kv_heads // tp)
    lengths = {(precision, length) for precision, row in asked for length in (row, *_ROWS[kind])}
    workloads = [
        Rows(precision, max(1, tokens // length), length, num_heads, num_kv_heads, shape.head_dim)
        for precision, length in sorted(lengths)
    ]
    return _shortened(workloads, kind)


def _shortened(wanted: list[Rows], kind: str) -> list[Rows]:
    """Reduce rows, then heads, to the limit of FLOPs; drop attention that still exceeds it."""
    reduced = [reduce_rows(rows, _MOST_FLOPS[kind]) for rows in wanted]
    return [rows for rows in reduced if rows.flops <= _MOST_FLOPS[kind]]


def _few_products(asked: dict[Shape, None], kind: str) -> list[Shape]:
    """Reduce the rows of products that exceed the limit of FLOPs."""
    products: dict[Shape, None] = {}
    for precision, m, n, k in asked:
        products[(precision, *reduce_product(m, n, k, _MOST_FLOPS[kind]))] = None
    return list(products)


def _few_messages(asked: dict[Message, None], layout: Layout, kind: str) -> list[Message]:
    """Select messages over the groups of this layout.

    Of each collective and group size: the smallest, the largest and some between.
    """
    sizes = {groups.size for groups in groups_of(layout)}
    messages: list[Message] = []
    for collective in KINDS:
        for size in sizes:
            message_bytes = sorted(
                {
                    min(num_bytes, _MOST_BYTES[kind])
                    for name, num_ranks, num_bytes in asked
                    if (name, num_ranks) == (collective, size)
                }
            )
            if len(message_bytes) > _MOST_SIZES:
                last = _MOST_SIZES - 1
                top = len(message_bytes) - 1
                message_bytes = [message_bytes[i * top // last] for i in range(_MOST_SIZES)]
            messages += [(collective, size, num_bytes) for num_bytes in message_bytes]
    return messages


def profile_of(diagnosis: Diagnosis, order: Order) -> MeasuredProfile:
    """Build the measured profile: median of the ranks' rates, slowest group of each collective.

    Raises:
        InputError: nothing was measured, because the examination stopped before.
    """
    rates = diagnosis.rates
    memory = [
        rate["bytes_per_second"] for rate in rates.get("copies", ()) if rate["kind"] == "memory"
    ]
    if not memory or not diagnosis.memory_bytes:
        raise InputError(
            "there is no profile to write: the examination stopped early",
            field="--calibrate",
            remedy="Fix the findings that fail first",
        )
    products: dict[Shape, list[float]] = {}
    for rate in rates["products"]:
        products.setdefault((rate["precision"], rate["m"], rate["n"], rate["k"]), []).append(
            rate["flops_per_second"]
        )
    attention: dict[tuple[str, int, int], list[tuple[float, float]]] = {}
    for rate in rates.get("attention", ()):
        rate_pair = (rate["forward_flops_per_second"], rate["backward_flops_per_second"])
        attention_key = (rate["precision"], rate["row_tokens"], rate["head_dim"])
        attention.setdefault(attention_key, []).append(rate_pair)
    elementwise: dict[tuple[str, int, int], list[tuple[float, float]]] = {}
    for rate in rates.get("elementwise", ()):
        rate_pair = (rate["forward_bytes_per_second"], rate["backward_bytes_per_second"])
        elementwise_key = (rate["precision"], rate["tokens"], rate["width"])
        elementwise.setdefault(elementwise_key, []).append(rate_pair)
    handoffs = [rate["seconds"] for rate in rates.get("handoffs", ())]
    collectives: dict[tuple[CollectiveKind, int, int, int], float] = {}
    for rate in rates["collectives"]:
        key = (rate["kind"], rate["num_ranks"], rate["ranks_per_node"], rate["message_bytes"])
        collectives[key] = max(collectives.get(key, 0.0), rate["seconds"])
    return MeasuredProfile(
        accelerator=diagnosis.device_name or diagnosis.device_kind,
        catalog_name=catalogue_name(diagnosis.device_kind, diagnosis.device_name),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        memory_bytes=diagnosis.memory_bytes,
        memory_bytes_per_second=median(memory),
        matmuls=tuple(
            MatmulRate(*shape, median(shape_rates)) for shape, shape_rates in products.items()
        ),
        collectives=tuple(CollectiveRate(*key, seconds) for key, seconds in collectives.items()),
        attention=tuple(
            AttentionRate(*key, *map(median, zip(*pairs, strict=True)))
            for key, pairs in attention.items()
        ),
        elementwise=tuple(
            ElementwiseRate(*key, *map(median, zip(*pairs, strict=True)))
            for key, pairs in elementwise.items()
        ),
        handoff_seconds=median(handoffs) if handoffs else None,
        software={
            "shardwright": __version__,
            "torch": torch.__version__,
            "layout": str(order.layout),
        },
    )
