"""Read published rows as planner inputs: shape, candidate, cluster, framework.

`extract_configuration` keeps the configuration columns of a row and, of `notes`, the keys of
`planner.notes`. It removes everything else (throughput, times, memory, utilisation,
`verification`, ids, and all other words of the notes, including those that state how a run
ended) before any other code reads the row.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Literal

from shardwright.architecture import ModelShape
from shardwright.config.recipe import RecomputeKind
from shardwright.errors import DataError, InputError
from shardwright.files import open_regular_file
from shardwright.hardware import Cluster, find_node, parse_cluster
from shardwright.layout import Layout
from shardwright.planner.candidate import (
    Candidate,
    LowRankAdapter,
    OffloadKind,
    OptimizerKind,
    Precision,
    ReferenceKind,
)
from shardwright.planner.published.conventions import FrameworkConventions
from shardwright.planner.published.frameworks import (
    FRAMEWORK_DEFAULTS,
    FrameworkDefaults,
    build_conventions,
    find_framework_name,
    is_performance_recipe,
)
from shardwright.planner.published.moe_recipes import (
    add_prediction_layer,
    list_expert_features,
    resolve_expert_parallel,
)
from shardwright.planner.published.named_models import (
    build_row_shape,
    has_latent_experts,
    is_hybrid,
)
from shardwright.planner.published.normalisation import normalise_number, normalise_row
from shardwright.planner.published.notes import fill_from_notes, read_note_columns, read_notes

CONFIGURATION_COLUMNS = (
    "source_group", "source", "model_name", "params_b", "layers", "hidden", "heads", "kv_heads",
    "ffn_hidden", "vocab", "seq_len", "num_experts", "top_k", "gpu", "gpus", "gpus_per_node", "tp",
    "pp", "cp", "ep", "dp", "virtual_pp", "zero_stage", "micro_batch", "global_batch", "recompute",
    "sequence_parallel", "precision", "flash_attention", "compile", "task", "mem_metric",
)  # fmt: skip
"""Columns that are read. `source` only names the framework and its release, and `mem_metric`
the total that the row reports."""

MemoryMetric = Literal["allocated", "reserved", "device"]


@dataclass(frozen=True)
class PublishedRun:
    """One published row as planner inputs. If `is_micro_batch_stated` is False, the planner picks
    the fastest micro-batch that fits. If `is_recompute_stated` is False, the candidate has the
    framework's default."""

    id: str
    source: str
    framework: str
    shape: ModelShape
    candidate: Candidate
    cluster: Cluster
    memory_metric: MemoryMetric = "device"
    is_micro_batch_stated: bool = True
    is_recompute_stated: bool = True
    is_first_rank_memory: bool = False
    """True if the memory is that of the logging rank, the first one, instead of the rank with
    the most."""
    features: tuple[str, ...] = ()
    """Kernels and settings with efficiencies of their own, as named in `efficiencies.yaml`."""

    @property
    def conventions(self) -> FrameworkConventions:
        """Conventions of the row's framework."""
        assert isinstance(self.candidate.engine, FrameworkConventions)
        return self.candidate.engine


def extract_configuration(row: Mapping[str, str]) -> dict[str, str]:
    """Return the row without its results: configuration columns and the keys of its notes.

    >>> row = {"gpu": "H100", "notes": "OOM; kernel=torch; great", "step_time_s": "3"}
    >>> extract_configuration(row)["notes.kernel"]
    'torch'
    """
    columns = {name: (row.get(name) or "").strip() for name in CONFIGURATION_COLUMNS}
    notes = row.get("notes") or ""
    columns |= {f"notes.{key}": value for key, value in read_notes(notes).items()}
    if not columns["notes.release"] and (
        match := re.search(r"dgxc-benchmarking@v(2\d\.\d\d)", columns["source"])
    ):
        columns["notes.release"] = match[1]
    return fill_from_notes(normalise_row(columns | read_note_columns(columns)))


def read_published_runs(path: str | Path) -> Iterator[PublishedRun]:
    """Yield every row of a table of measurements, in order.

    Raises:
        DataError: the file cannot be read, or columns are missing; names them.
        InputError: a row names an unknown accelerator, or too few sizes of its model; includes
            the row's id.
    """
    for row in read_rows(path):
        yield read_published_run(row["id"], extract_configuration(row))


def read_rows(path: str | Path) -> list[dict[str, str]]:
    """Read the unfiltered table. Only `extract_configuration` of a row may be used for a
    prediction.
    """
    try:
        with io.TextIOWrapper(open_regular_file(path), encoding="utf-8", newline="") as file:
            table = csv.DictReader(file)
            columns = table.fieldnames or ()
            rows = list(table)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            f"the measurements cannot be read: {error}", field="--measurements", got=path
        ) from error
    missing = [name for name in ("id", "model_name", "gpu", "gpus") if name not in columns]
    if missing:
        raise DataError(
            "not a table of measurements",
            field="--measurements",
            got=f"no column {', '.join(missing)}",
            allowed=f"columns {', '.join(CONFIGURATION_COLUMNS)}",
        )
    return rows


def read_published_run(row_id: str, row: Mapping[str, str]) -> PublishedRun:
    """Convert a row, already reduced to its configuration, into planner inputs.

    Raises:
        InputError: an accelerator, precision, model or task that is not supported; names it.
    """
    if row["task"] == "rollouts":
        raise InputError(
            "steps that also generate text are not predicted",
            field="measurements.task",
            got=row["task"],
        )
    stated_framework = find_framework_name(
        row["notes.framework"], row["source_group"], row["source"]
    )
    framework_name = stated_framework or _guess_framework(row)
    if (
        framework_name == "megatron-lm"
        and "Hopper" in find_node(row["gpu"] or _DEFAULT_ACCELERATOR).accelerator.generation
    ):
        framework_name = "megatron-core"  # what Megatron-LM is built on since 2023
    framework = FRAMEWORK_DEFAULTS[framework_name]
    if stated_framework is None:
        framework = replace(
            framework,
            has_interleaved_schedule=framework.has_interleaved_schedule and _has_long_bubble(row),
        )  # a user's run, not a published recipe
    shape = build_row_shape(
        row,
        has_tied_embeddings={"tied": True, "untied": False}.get(row["notes.embeddings"]),
        expert_width=_read_integer(row, "notes.expert_width"),
    )
    shape = add_prediction_layer(row, shape)
    cluster = _read_cluster(row, framework)
    layout = _read_layout(row, framework, shape, cluster)
    sequence_length = _read_integer(row, "seq_len") or _DEFAULT_SEQUENCE_LENGTH
    if sequence_length < layout.cp:
        raise InputError(
            "the row has fewer tokens than context-parallel ranks",
            field="measurements.seq_len",
            got=sequence_length,
            allowed=f"at least {layout.cp} (cp)",
        )
    if framework.conventions.stage_rule != "running_sum":
        shape = _fill_stages(shape, layout)
    local_batch = _read_integer(row, "notes.local_batch")
    micro_batch = _read_integer(row, "micro_batch") or (
        max(1, local_batch // layout.pp) if local_batch else None
    )  # torchtitan: one micro-batch per stage
    return PublishedRun(
        id=row_id,
        source=row["source_group"],
        framework=framework_name,
        shape=shape,
        candidate=_build_candidate(
            row, framework, layout, micro_batch or 1, _read_recompute(row, framework)
        ),
        cluster=cluster,
        memory_metric=_read_memory_metric(row["mem_metric"]),
        is_first_rank_memory="logging rank" in row["mem_metric"],
        is_micro_batch_stated=micro_batch is not None,
        is_recompute_stated=row["recompute"] in ("none", "selective", "full")
        or not framework.is_recompute_variable,
        features=(*_name_framework_features(framework_name, cluster), *_list_features(row, shape)),
    )


def _fill_stages(shape: ModelShape, layout: Layout) -> ModelShape:
    """Return the shape with at least one layer per stage. An empty stage would run at the pace
    of the others."""
    missing = layout.pp * (layout.virtual_stages or 1) - shape.num_layers
    return (
        shape if missing <= 0 else replace(shape, layers=shape.layers + shape.layers[-1:] * missing)
    )


def _guess_framework(row: Mapping[str, str]) -> str:
    """Guess the framework of a row that names none: Megatron with model parallelism, Hugging
    Face for fine-tuning, else PyTorch's."""
    if any((_read_integer(row, axis) or 1) > 1 for axis in ("tp", "pp", "cp", "ep")):
        return "megatron-core"
    return "torchtitan" if row["task"] in ("", "pretrain") else "huggingface"


def _read_integer(row: Mapping[str, str], name: str) -> int | None:
    text = normalise_number(row.get(name) or "")
    return round(float(text)) if text else None


_DEFAULT_SEQUENCE_LENGTH = 2048
"""Tokens of a row if the table does not state them."""

_DEFAULT_ACCELERATOR = "B200"
"""Device of torchtitan's rows without one: they state 184 GiB of memory, which is a B200's."""


def _read_cluster(row: Mapping[str, str], framework: FrameworkDefaults) -> Cluster:
    name = row["gpu"] or _DEFAULT_ACCELERATOR
    node = find_node(name)
    num_gpus = _read_integer(row, "gpus") or prod(
        _read_integer(row, axis) or 1 for axis in ("tp", "pp", "cp", "dp")
    )
    per_node = min(_read_integer(row, "gpus_per_node") or node.num_accelerators, num_gpus)
    link = _find_link_name(row["notes.fabric"]) or framework.links.get(node.accelerator.generation)
    return parse_cluster(
        f"{per_node}x{name}",
        num_nodes=-(-num_gpus // per_node),
        link=link if per_node < num_gpus else None,
    )


def _find_link_name(note: str) -> str | None:
    """Return the catalogue name of the network between nodes that the notes describe."""
    if note == "EFA":
        return "efa-p5"
    if match := re.search(r"(\d+)x(Omni-Path |)(\d+)Gbps", note):
        return f"{match[1]}x{'opa' if match[2] else 'ib'}{match[3]}"
    if match := re.search(r"interconnect (\d+)Gbps RoCE/node$", note):
        return f"{int(match[1]) // 200}xroce200"
    return None


def _read_layout(
    row: Mapping[str, str], framework: FrameworkDefaults, shape: ModelShape, cluster: Cluster
) -> Layout:
    tp, pp = _read_model_parallel_degrees(row, framework, shape, cluster)
    cp = _read_integer(row, "cp") or 1
    data_ranks = max(1, cluster.num_gpus // (tp * pp * cp))
    ep, _ = resolve_expert_parallel(row, _read_integer(row, "ep") or 1, tp, data_ranks * cp)
    stated = row["zero_stage"]
    default_stage = (
        0
        if framework.should_replicate_adapted and _read_adapter(row) is not None
        else framework.zero_stage
    )
    stage = int(stated) if stated in ("0", "1", "2", "3") else default_stage
    stage = 1 if stage == 0 and (ep > 1 or cp > 1) else stage
    if stage == 3 and pp > 1 and framework.zero_stage_in_pipeline is not None:
        stage = framework.zero_stage_in_pipeline
    stage = 0 if data_ranks * cp == 1 else stage
    virtual_stages = _read_integer(row, "virtual_pp") or (2 if row["notes.schedule"] else 1)
    if framework.has_interleaved_schedule and not row["virtual_pp"] and pp > 1:
        num_end_layers = (
            2 if shape.num_layers % pp and (shape.num_layers + 2) % pp == 0 else 0
        )  # embedding and head count as one layer each
        virtual_stages = max(
            virtual_stages, _choose_virtual_stages(shape.num_layers + num_end_layers, pp)
        )
    interleaved = pp > 1 and virtual_stages > 1
    sequence_parallel = {"yes": True, "no": False}.get(
        row["sequence_parallel"], framework.sequence_parallel
    )
    replicas = _count_replicas(row, data_ranks, tp, cluster) if stage else data_ranks
    return Layout(
        dp_replicate=replicas,
        dp_shard=data_ranks // replicas,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        zero_stage=stage,  # type: ignore[arg-type]
        sequence_parallel=sequence_parallel and tp > 1,
        schedule="interleaved_1f1b" if interleaved else "1f1b",
        virtual_stages=virtual_stages if interleaved else None,
    )


def _count_replicas(row: Mapping[str, str], data_ranks: int, tp: int, cluster: Cluster) -> int:
    """Count model replicas: several if the row shards within a node only (HSDP), else one."""
    within = max(1, cluster.gpus_per_node // tp)
    return data_ranks // within if row["notes.within_node"] and data_ranks % within == 0 else 1


def _has_long_bubble(row: Mapping[str, str]) -> bool:
    """Return True if the bubble without interleaving would exceed a fifth of the step."""
    pp, data, total = (_read_integer(row, name) or 1 for name in ("pp", "dp", "global_batch"))
    return total // (data * (_read_integer(row, "micro_batch") or 1)) < 4 * (pp - 1)


def _choose_virtual_stages(num_layers: int, pp: int) -> int:
    """Choose the stages per rank of an interleaved recipe: two layers each, or the smallest
    larger number that divides.

    >>> _choose_virtual_stages(96, 8), _choose_virtual_stages(80, 4), _choose_virtual_stages(61, 4)
    (6, 10, 1)
    """
    layers_per_rank, rest = divmod(num_layers, pp)
    return (
        1
        if rest or layers_per_rank < 2
        else layers_per_rank
        // next(n for n in range(2, layers_per_rank + 1) if layers_per_rank % n == 0)
    )


_PERSISTENT_BYTES_PER_PARAMETER = 6.0
"""Bytes per parameter between steps: a half-precision weight, and its gradient's fp32 sum."""


def _read_model_parallel_degrees(
    row: Mapping[str, str], framework: FrameworkDefaults, shape: ModelShape, cluster: Cluster
) -> tuple[int, int]:
    """Return tensor and pipeline degrees. If only their product or the data degree is stated,
    prefer tensor parallelism within a node.

    If nothing is stated: one of each if the framework shards parameters or trains adapters,
    otherwise the smallest product for which weights, gradients and their sums take at most half
    of the memory.
    """
    stage = row["zero_stage"] or str(framework.zero_stage)
    is_sharded = stage in ("2", "3") or _read_adapter(row) is not None
    tp = _read_integer(row, "tp")
    pp = _read_integer(row, "pp")
    data_ranks = _read_integer(row, "dp")
    product = _read_integer(row, "notes.model_parallel") or (
        cluster.num_gpus // data_ranks if data_ranks else None
    )
    if tp is None and pp is None and product is None and not is_sharded:
        min_ranks = (
            shape.num_parameters
            * _PERSISTENT_BYTES_PER_PARAMETER
            / (0.5 * cluster.accelerator.memory_bytes)
        )
        product = next(
            (
                n
                for n in range(1, cluster.num_gpus + 1)
                if n >= min_ranks and cluster.num_gpus % n == 0
            ),
            cluster.num_gpus,
        )
    if tp is None and pp is None and product:
        tp = max(degree for degree in (1, 2, 4, 8) if product % degree == 0)
        return tp, product // tp
    return tp or 1, pp or (product // tp if product and tp and product % tp == 0 else 1)


def _read_recompute(row: Mapping[str, str], framework: FrameworkDefaults) -> RecomputeKind:
    stated = row["recompute"]
    if stated in ("none", "selective", "full"):
        return stated  # type: ignore[return-value]
    if framework.quantised_recompute and row["task"] == "qlora":
        return framework.quantised_recompute
    if framework.multi_device_recompute and (_read_integer(row, "gpus") or 1) > 1:
        return framework.multi_device_recompute
    return "selective" if row["notes.selective"] else framework.recompute


_DEFAULT_NUM_ROWS = 16
"""Sequences per rank and step, for each stage, if a row states no batch: the largest
micro-batch that is tried."""


def _build_candidate(
    row: Mapping[str, str],
    framework: FrameworkDefaults,
    layout: Layout,
    micro_batch_size: int,
    recompute: RecomputeKind,
) -> Candidate:
    has_no_batch = not (row["micro_batch"] or row["notes.local_batch"] or row["notes.grad_accum"])
    default_steps = (
        _DEFAULT_NUM_ROWS * layout.pp
        if has_no_batch
        else _read_integer(row, "notes.grad_accum") or layout.pp
    )
    total = (
        _read_integer(row, "global_batch") or micro_batch_size * layout.data_ranks * default_steps
    )
    steps = max(1, round(total / (micro_batch_size * layout.data_ranks)))
    if layout.virtual_stages and steps % layout.pp:
        # Interleaving needs complete rounds of micro-batches. A row without them used another
        # schedule.
        layout = replace(layout, schedule="1f1b", virtual_stages=None)
    engine = build_conventions(
        row, framework, layout, find_node(row["gpu"] or _DEFAULT_ACCELERATOR).accelerator
    )
    _, has_unsharded_experts = resolve_expert_parallel(
        row, _read_integer(row, "ep") or 1, layout.tp, layout.fsdp
    )
    engine = replace(engine, has_unsharded_experts=has_unsharded_experts)
    return Candidate(
        layout=layout,
        sequence_length=_read_integer(row, "seq_len") or _DEFAULT_SEQUENCE_LENGTH,
        micro_batch_size=micro_batch_size,
        gradient_accumulation_steps=steps,
        precision=_read_precision(row),
        recompute=recompute,
        adapter=_read_adapter(row),
        offload=_read_offload(row),
        optimizer=_read_optimizer(row["notes.optimizer"]),
        reference=_read_reference(row),
        compile=row["compile"] == "yes",
        flash_attention={"yes": True, "no": False}.get(
            row["flash_attention"], framework.flash_attention
        ),
        num_fp4_layers=int(row["notes.fp4_layers"]) + 1 if row["notes.fp4_layers"] else None,
        loss_chunk_tokens=1024 if row["notes.chunked_loss"] else None,
        should_reduce_in_bf16=row["notes.mixed_precision"] == "PURE",
        engine=engine,
    )


def _read_precision(row: Mapping[str, str]) -> Precision:
    """Return the row's precision. Default: bf16, or fp16 on an accelerator without bf16
    units."""
    default = (
        "bf16"
        if "bf16" in find_node(row["gpu"] or _DEFAULT_ACCELERATOR).accelerator.peak_flops_per_second
        else "fp16"
    )
    return row["precision"] or default  # type: ignore[return-value]


_ATTENTION_ROLES = {"q": "query", "k": "key", "v": "value", "o": "attention_out"}
_FEED_FORWARD_ROLES = ("gate", "up", "down")


def _read_adapter(row: Mapping[str, str]) -> LowRankAdapter | None:
    """Return the LoRA settings of the notes, or the defaults of the row's framework.

    litgpt: rank 8 on queries and values. NVIDIA's recipes: rank 16 on those and keys. Others:
    rank 16 on all.
    """
    adapter_name = row["notes.adapter"].lower() if row["task"] != "pretrain" else ""
    if row["task"] not in ("lora", "qlora") and not adapter_name:
        return None
    quantised = row["task"] == "qlora" or adapter_name == "qlora" or bool(row["notes.quantization"])
    if row["notes.trainable"]:
        return LowRankAdapter(
            rank=8,
            roles=("query", "value"),
            quantised=quantised,
            unquantised=("query", "key", "value"),
        )
    rank = _read_integer(row, "notes.rank") or 16
    targets = row["notes.targets"].lower()
    if targets.startswith("mlp"):
        return LowRankAdapter(rank, _FEED_FORWARD_ROLES, quantised)
    if targets and not targets.startswith("all"):
        letters = "qkvo" if targets.startswith("att") else re.sub(r"_?proj|[^qkvo]", "", targets)
        return LowRankAdapter(
            rank,
            tuple(role for letter, role in _ATTENTION_ROLES.items() if letter in letters),
            quantised,
        )
    if is_performance_recipe(row["source_group"], row["source"]):
        return LowRankAdapter(rank, ("query", "key", "value", "qkv"), quantised)
    return LowRankAdapter(rank, quantised=quantised)


def _read_optimizer(note: str) -> OptimizerKind:
    """Return the notes' optimizer by its state per parameter (Lion's equals momentum's).
    Default: AdamW."""
    text = note.lower()
    for pattern, kind in (
        ("8", "adamw_8bit"),
        ("adafactor", "adafactor"),
        ("lion", "sgd_momentum"),
        ("muon", "muon"),
        ("sgd", "sgd"),
    ):
        if pattern in text:
            return kind  # type: ignore[return-value]
    return "adamw"


def _read_offload(row: Mapping[str, str]) -> OffloadKind:
    note = row["notes.offload"].lower()
    return "none" if not note else "parameters" if "param" in note or "inf" in note else "optimizer"


def _read_reference(row: Mapping[str, str]) -> ReferenceKind:
    """Return the reference of preference training: a frozen model, or the model without its
    adapters."""
    return (
        "none"
        if row["task"] != "dpo"
        else "frozen"
        if _read_adapter(row) is None
        else "adapter_off"
    )


def _name_framework_features(framework_name: str, cluster: Cluster) -> tuple[str, ...]:
    """Name a framework's own kernels and host speed on these accelerators."""
    return (
        f"{framework_name} on {cluster.accelerator.generation}",
        f"{framework_name} on {cluster.accelerator.name}",
    )


def _list_features(row: Mapping[str, str], shape: ModelShape) -> tuple[str, ...]:
    names = [
        row["notes.kernel"],
        "async_tp" if row["notes.async_tp"] else "",
        row["notes.scaling"].lower(),
    ]
    names.append("attention_sinks" if shape.attention_sinks else "")
    names.append("hybrid" if is_hybrid(row["model_name"]) else "")
    names.append("latent_experts" if has_latent_experts(row["model_name"]) else "")
    names.append("power_limited" if "power limited" in row["gpu"] else "")
    names += list_expert_features(
        row,
        shape,
        find_node(row["gpu"] or _DEFAULT_ACCELERATOR),
        is_hybrid=is_hybrid(row["model_name"]),
    )
    return tuple(name for name in names if name)


def _read_memory_metric(text: str) -> MemoryMetric:
    """Return the total that a row's memory reports: live bytes, reserved bytes, or the device
    monitor's."""
    if "nvidia-smi" in text:
        return "device"
    # Also for sources that do not state which of the two it is. NeMo's "peak_memory_usage" is
    # torch.cuda.max_memory_reserved.
    if "reserved" in text or "torchtitan" in text or "peak_memory_usage" in text:
        return "reserved"
    return "allocated" if text else "device"
