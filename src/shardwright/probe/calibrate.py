"""What the planner would like to know of this cluster, and the answers as the profile that it prefers to data sheets.

The planner is asked to predict the recipe with a profile that knows nothing and writes down every
look-up: those products, rows of attention and messages are what is then measured, beside a few usual
ones. What would take too much memory is measured with fewer rows, and a message larger than is usual
with the largest usual one; look-ups take the nearest shape, and grow with the bytes. The examination
reduces or leaves out what would take too long (`examination.Order.budget_seconds`).
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
from shardwright.hardware import AttentionRate, CollectiveRate, ElementwiseRate, MatmulRate, MeasuredProfile, parse_cluster
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
"""Of one problem, which bounds its memory. The examination bounds its time, by what smaller ones take."""
_MOST_BYTES = {"cpu": 64 * MIB_BYTES, "cuda": 1024 * MIB_BYTES}
_MOST_SIZES = 6
"""Messages of a recipe that are tried per collective and group, beside the usual ones."""
_LADDER = {"cpu": (256, 512, 1024), "cuda": (512, 2048, 4096)}
"""Sides of products without a recipe; m, n and k each take these."""

_ROWS = {"cpu": (128, 512, 2048), "cuda": (512, 2048, 8192, 32768)}
"""Tokens of the rows that attention is tried with, beside a recipe's own."""
_HEADS = {"cpu": (8, 8, 64), "cuda": (32, 8, 128)}
"""Heads, key/value heads and their width without a recipe."""
_TOKENS = {"cpu": 1024, "cuda": 8192}
"""Of a micro-batch without a recipe."""

_MOST_ELEMENTS = 2**26
"""Of one tensor that element-wise operations are tried on."""

Message = tuple[CollectiveKind, int, int]


@dataclass(frozen=True)
class _Curious(MeasuredProfile):
    """Knows nothing, and writes down what it was asked."""

    products: dict[Shape, None] = field(default_factory=dict)
    messages: dict[Message, None] = field(default_factory=dict)
    rows: dict[tuple[str, int], None] = field(default_factory=dict)
    """Of attention: precision and tokens of a row."""
    tensors: dict[tuple[str, int, int], None] = field(default_factory=dict)
    """Between products: precision, tokens and width."""

    def matmul_flops_per_second(self, precision: str, m: int, n: int, k: int) -> float | None:
        self.products[(precision, m, n, k)] = None
        return None

    def collective_seconds(self, kind: CollectiveKind, num_ranks: int, ranks_per_node: int, message_bytes: float) -> float | None:
        self.messages[(kind, num_ranks, round(message_bytes))] = None
        return None

    def attention_flops_per_second(self, precision: str, row_tokens: float, head_dim: int, *, backward: bool) -> float | None:
        self.rows[(precision, round(row_tokens))] = None
        return None

    def elementwise_bytes_per_second(self, precision: str, tokens: int, width: int, *, backward: bool) -> float | None:
        self.tensors[(precision, min(tokens, _MOST_ELEMENTS // width), width)] = None
        return None


@dataclass(frozen=True)
class _Questions:
    """What is to be measured for the planner."""

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
    """What to examine: the layout's groups, the recipe's folders (else the usual ones), and to calibrate what the planner asks."""
    order = Order(
        layout=layout,
        folders=folders_of(recipe),
        device=device,
        timeout_seconds=timeout_seconds,
        inter_link=None if recipe is None or recipe.cluster is None else recipe.cluster.link,
        budget_seconds=budget_seconds,
    )
    if not calibrates:
        return order
    kind = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    asked = _usual_questions(kind) if recipe is None else _questions(recipe, layout, kind)
    return replace(
        order,
        products=tuple(asked.products),
        messages=tuple(asked.messages),
        attention=tuple(asked.attention),
        elementwise=tuple(asked.elementwise),
    )


def folders_of(recipe: Recipe | None) -> tuple[Folder, ...]:
    """Local folders that a run writes to; without a recipe, where runs and tokenised data usually go."""
    if recipe is None:
        return (Folder("runs", "runs", True), Folder("data cache", str(cache_root(None)), False))
    run = RunFolder.of(recipe)
    found = [Folder("run folder", str(run.path), True)]
    if isinstance(run.checkpoints, Path) and recipe.checkpoint.dir is not None:
        found.append(Folder("checkpoints", str(run.checkpoints), True))
    return (*found, Folder("data cache", str(cache_root(recipe.data.cache_dir)), False))


def catalogue_name(device_kind: str, device_name: str) -> str | None:
    """What the catalogue calls a device; CPUs are all `CPU` to it, whose data sheet a profile then overrides."""
    try:
        return find_accelerator("CPU" if device_kind == "cpu" else device_name).name
    except InputError:
        return None


def _usual_products(kind: str) -> list[Shape]:
    sides = _LADDER[kind]
    precisions = ("fp32", "bf16")
    return [(precision, m, n, k) for precision in precisions for m in sides for n in sides for k in sides if not m == n == k]


def _usual_questions(kind: str) -> _Questions:
    """Where no recipe says what, or the catalogue does not know the device."""
    num_heads, num_kv_heads, head_dim = _HEADS[kind]
    usual = [Rows("bf16", max(1, _TOKENS[kind] // length), length, num_heads, num_kv_heads, head_dim) for length in _ROWS[kind]]
    tensors = [(precision, _TOKENS[kind], num_heads * head_dim) for precision in ("fp32", "bf16")]
    return _Questions(_usual_products(kind), _shortened(usual, kind), elementwise=tensors)


def _questions(recipe: Recipe, layout: Layout, kind: str) -> _Questions:
    """Products, attention and messages of the recipe on this layout, as the planner asks for them.

    Raises:
        InputError: the recipe's batch does not divide by the layout, or the model has no size without its tokenizer.
    """
    candidate = candidate_of(recipe, template_of(recipe), layout.world_size)
    if candidate is None:
        raise InputError(
            "the recipe's batch does not divide by this layout",
            field="--layout",
            got=str(layout),
            remedy="shardwright doctor --checklist says what does",
        )
    found = _asked(shape_of(recipe), replace(candidate, layout=layout), kind)
    return _usual_questions(kind) if found is None else found


def order_of_runs(runs: Sequence[tuple[ModelShape, Candidate]], layout: Layout, *, device: DeviceKind = "auto") -> Order:
    """What the planner asks about several runs at once, measured over the groups of `layout`, which has as many ranks as any."""
    kind = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    found = [_asked(shape, candidate, kind) or _usual_questions(kind) for shape, candidate in runs]
    return Order(
        budget_seconds=len(runs) * CALIBRATION_SECONDS,
        layout=layout,
        device=device,
        products=tuple(dict.fromkeys(shape for asked in found for shape in asked.products)),
        messages=tuple(dict.fromkeys(message for asked in found for message in asked.messages)),
        attention=tuple(dict.fromkeys(rows for asked in found for rows in asked.attention)),
        elementwise=tuple(dict.fromkeys(tensor for asked in found for tensor in asked.elementwise)),
    )


def _asked(shape: ModelShape, candidate: Candidate, kind: str) -> _Questions | None:
    """Products, attention and messages of one run, as the planner asks for them; None of a device that the catalogue lacks."""
    name = catalogue_name(kind, torch.cuda.get_device_name() if kind == "cuda" else "")
    if name is None:
        return None
    layout = candidate.layout
    cluster = resized(parse_cluster(f"{layout.world_size}x{name}"), layout.world_size)
    accelerator = cluster.accelerator
    curious = _Curious("", None, "", accelerator.memory_bytes, accelerator.memory_bytes_per_second)
    predict(shape, candidate, replace(cluster, profile=curious), load_efficiencies().of(accelerator))
    tokens = candidate.micro_batch_size * candidate.sequence_length // layout.cp
    return _Questions(
        _few_products(curious.products, kind),
        _attention_of(shape, curious.rows, tokens, layout.tp, kind),
        _few_messages(curious.messages, layout, kind),
        list(curious.tensors),
    )


def _attention_of(shape: ModelShape, asked: dict[tuple[str, int], None], tokens: int, tp: int, kind: str) -> list[Rows]:
    """Rows of the model's heads: those asked for, and usual lengths around them, as many as make up a micro-batch's tokens."""
    num_heads, num_kv_heads = max(1, shape.num_heads // tp), max(1, shape.num_kv_heads // tp)
    lengths = {(precision, length) for precision, row in asked for length in (row, *_ROWS[kind])}
    wanted = [
        Rows(precision, max(1, tokens // length), length, num_heads, num_kv_heads, shape.head_dim)
        for precision, length in sorted(lengths)
    ]
    return _shortened(wanted, kind)


def _shortened(wanted: list[Rows], kind: str) -> list[Rows]:
    """The same with fewer rows, then fewer heads, where they would take too long; without those that still would."""
    reduced = [reduce_rows(rows, _MOST_FLOPS[kind]) for rows in wanted]
    return [rows for rows in reduced if rows.flops <= _MOST_FLOPS[kind]]


def _few_products(asked: dict[Shape, None], kind: str) -> list[Shape]:
    """Those asked for, with fewer rows where one would take too long."""
    found: dict[Shape, None] = {}
    for precision, m, n, k in asked:
        found[(precision, *reduce_product(m, n, k, _MOST_FLOPS[kind]))] = None
    return list(found)


def _few_messages(asked: dict[Message, None], layout: Layout, kind: str) -> list[Message]:
    """Those asked for whose groups this layout has: of each collective and group the smallest, the largest and some between."""
    sizes = {groups.size for groups in groups_of(layout)}
    found: list[Message] = []
    for collective in KINDS:
        for size in sizes:
            of_kind = sorted({min(num, _MOST_BYTES[kind]) for name, members, num in asked if (name, members) == (collective, size)})
            if len(of_kind) > _MOST_SIZES:
                last = _MOST_SIZES - 1
                of_kind = [of_kind[i * (len(of_kind) - 1) // last] for i in range(_MOST_SIZES)]
            found += [(collective, size, num) for num in of_kind]
    return found


def profile_of(diagnosis: Diagnosis, order: Order) -> MeasuredProfile:
    """The measured profile: of a rank's own rates the median rank, of each collective the slowest group.

    Raises:
        InputError: nothing was measured, because the examination broke off before.
    """
    rates = diagnosis.rates
    memory = [rate["bytes_per_second"] for rate in rates.get("copies", ()) if rate["kind"] == "memory"]
    if not memory or not diagnosis.memory_bytes:
        raise InputError(
            "there is nothing to write: the examination broke off", field="--calibrate", remedy="Mend what fails first"
        )
    products: dict[Shape, list[float]] = {}
    for rate in rates["products"]:
        products.setdefault((rate["precision"], rate["m"], rate["n"], rate["k"]), []).append(rate["flops_per_second"])
    attention: dict[tuple[str, int, int], list[tuple[float, float]]] = {}
    for rate in rates.get("attention", ()):
        found = (rate["forward_flops_per_second"], rate["backward_flops_per_second"])
        attention.setdefault((rate["precision"], rate["row_tokens"], rate["head_dim"]), []).append(found)
    elementwise: dict[tuple[str, int, int], list[tuple[float, float]]] = {}
    for rate in rates.get("elementwise", ()):
        found = (rate["forward_bytes_per_second"], rate["backward_bytes_per_second"])
        elementwise.setdefault((rate["precision"], rate["tokens"], rate["width"]), []).append(found)
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
        matmuls=tuple(MatmulRate(*shape, median(found)) for shape, found in products.items()),
        collectives=tuple(CollectiveRate(*key, seconds) for key, seconds in collectives.items()),
        attention=tuple(AttentionRate(*key, *map(median, zip(*pairs, strict=True))) for key, pairs in attention.items()),
        elementwise=tuple(ElementwiseRate(*key, *map(median, zip(*pairs, strict=True))) for key, pairs in elementwise.items()),
        handoff_seconds=median(handoffs) if handoffs else None,
        software={"shardwright": __version__, "torch": torch.__version__, "layout": str(order.layout)},
    )
