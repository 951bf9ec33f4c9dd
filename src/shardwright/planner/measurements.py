"""Read published rows as planner inputs: shape, candidate, cluster, framework.

`configuration` keeps the configuration columns of a row and, of `notes`, the keys of
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
from shardwright.config.schema import RecomputeKind
from shardwright.errors import DataError, InputError
from shardwright.files import open_regular
from shardwright.hardware import Cluster, find_node, parse_cluster
from shardwright.layout import Layout
from shardwright.planner.candidate import Adapter, Candidate, Offload, OptimizerKind, Precision, Reference
from shardwright.planner.frameworks import FRAMEWORKS, Framework, engine_of, follows_performance_recipe, name_framework
from shardwright.planner.named_models import has_latent_experts, is_hybrid, shape_of_row
from shardwright.planner.notes import fill_from_notes, read_columns, read_notes
from shardwright.planner.sparse_recipes import expert_features, expert_parallel, with_prediction_layer
from shardwright.planner.spelling import spell_number, spell_row

CONFIGURATION = (
    "source_group", "source", "model_name", "params_b", "layers", "hidden", "heads", "kv_heads",
    "ffn_hidden", "vocab", "seq_len", "num_experts", "top_k", "gpu", "gpus", "gpus_per_node", "tp",
    "pp", "cp", "ep", "dp", "virtual_pp", "zero_stage", "micro_batch", "global_batch", "recompute",
    "sequence_parallel", "precision", "flash_attention", "compile", "task", "mem_metric",
)  # fmt: skip
"""Columns that are read. `source` only names the framework and its release, and `mem_metric`
the total that the row reports."""

MemoryMetric = Literal["allocated", "reserved", "device"]


@dataclass(frozen=True)
class Case:
    """One published row as planner inputs. If `micro_batch_stated` is False, the planner picks
    the fastest micro-batch that fits. If `recompute_stated` is False, the candidate has the
    framework's default."""

    id: str
    source: str
    framework: str
    shape: ModelShape
    candidate: Candidate
    cluster: Cluster
    metric: MemoryMetric = "device"
    micro_batch_stated: bool = True
    recompute_stated: bool = True
    first_rank: bool = False
    """True if the memory is that of the logging rank, the first one, instead of the rank with
    the most."""
    features: tuple[str, ...] = ()
    """Kernels and settings with efficiencies of their own, as named in `efficiencies.yaml`."""


def configuration(row: Mapping[str, str]) -> dict[str, str]:
    """Return the row without its results: configuration columns and the keys of its notes.

    >>> row = {"gpu": "H100", "notes": "OOM; kernel=torch; great", "step_time_s": "3"}
    >>> configuration(row)["notes.kernel"]
    'torch'
    """
    columns = {name: (row.get(name) or "").strip() for name in CONFIGURATION}
    notes = row.get("notes") or ""
    columns |= {f"notes.{key}": value for key, value in read_notes(notes).items()}
    if not columns["notes.release"] and (match := re.search(r"dgxc-benchmarking@v(2\d\.\d\d)", columns["source"])):
        columns["notes.release"] = match[1]
    return fill_from_notes(spell_row(columns | read_columns(columns)))


def read_cases(path: str | Path) -> Iterator[Case]:
    """Yield every row of a table of measurements, in order.

    Raises:
        DataError: the file cannot be read, or columns are missing; names them.
        InputError: a row names an unknown accelerator, or too few sizes of its model; includes
            the row's id.
    """
    for row in read_rows(path):
        yield read_case(row["id"], configuration(row))


def read_rows(path: str | Path) -> list[dict[str, str]]:
    """Read the unfiltered table. Only `configuration` of a row may be used for a prediction."""
    try:
        with io.TextIOWrapper(open_regular(path), encoding="utf-8", newline="") as file:
            table = csv.DictReader(file)
            columns = table.fieldnames or ()
            rows = list(table)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"the measurements cannot be read: {error}", field="--measurements", got=path) from error
    missing = [name for name in ("id", "model_name", "gpu", "gpus") if name not in columns]
    if missing:
        raise DataError(
            "not a table of measurements",
            field="--measurements",
            got=f"no column {', '.join(missing)}",
            allowed=f"columns {', '.join(CONFIGURATION)}",
        )
    return rows


def read_case(name: str, row: Mapping[str, str]) -> Case:
    """Convert a row, already reduced to its configuration, into planner inputs.

    Raises:
        InputError: an accelerator, precision, model or task that is not supported; names it.
    """
    if row["task"] == "rollouts":
        raise InputError("steps that also generate text are not predicted", field="measurements.task", got=row["task"])
    stated_framework = name_framework(row["notes.framework"], row["source_group"], row["source"])
    framework_name = stated_framework or _likely_framework(row)
    if framework_name == "megatron-lm" and "Hopper" in find_node(row["gpu"] or _UNNAMED).accelerator.generation:
        framework_name = "megatron-core"  # what Megatron-LM is built on since 2023
    framework = FRAMEWORKS[framework_name]
    if stated_framework is None:
        framework = replace(
            framework, interleaves=framework.interleaves and _waits_long(row)
        )  # a user's run, not a published recipe
    shape = shape_of_row(
        row,
        tied={"tied": True, "untied": False}.get(row["notes.embeddings"]),
        expert_width=_whole(row, "notes.expert_width"),
    )
    shape = with_prediction_layer(row, shape)
    cluster = _cluster(row, framework)
    layout = _layout(row, framework, shape, cluster)
    sequence_length = _whole(row, "seq_len") or _USUAL_LENGTH
    if sequence_length < layout.cp:
        raise InputError(
            "the row has fewer tokens than context-parallel ranks",
            field="measurements.seq_len",
            got=sequence_length,
            allowed=f"at least {layout.cp} (cp)",
        )
    if framework.engine.stage_rule != "running_sum":
        shape = _fill_stages(shape, layout)
    local_batch = _whole(row, "notes.local_batch")
    micro_batch = _whole(row, "micro_batch") or (
        max(1, local_batch // layout.pp) if local_batch else None
    )  # torchtitan: one micro-batch per stage
    return Case(
        id=name,
        source=row["source_group"],
        framework=framework_name,
        shape=shape,
        candidate=_candidate(row, framework, layout, micro_batch or 1, _recompute(row, framework)),
        cluster=cluster,
        metric=_metric(row["mem_metric"]),
        first_rank="logging rank" in row["mem_metric"],
        micro_batch_stated=micro_batch is not None,
        recompute_stated=row["recompute"] in ("none", "selective", "full") or not framework.recompute_varies,
        features=(*_trainer_on(framework_name, cluster), *_features(row, shape)),
    )


def _fill_stages(shape: ModelShape, layout: Layout) -> ModelShape:
    """Return the shape with at least one layer per stage. An empty stage would run at the pace
    of the others."""
    missing = layout.pp * (layout.virtual_stages or 1) - shape.num_layers
    return shape if missing <= 0 else replace(shape, layers=shape.layers + shape.layers[-1:] * missing)


def _likely_framework(row: Mapping[str, str]) -> str:
    """Guess the framework of a row that names none: Megatron with model parallelism, Hugging
    Face for fine-tuning, else PyTorch's."""
    if any((_whole(row, axis) or 1) > 1 for axis in ("tp", "pp", "cp", "ep")):
        return "megatron-core"
    return "torchtitan" if row["task"] in ("", "pretrain") else "huggingface"


def _whole(row: Mapping[str, str], name: str) -> int | None:
    text = spell_number(row.get(name) or "")
    return round(float(text)) if text else None


_USUAL_LENGTH = 2048
"""Tokens of a row if the table does not state them."""

_UNNAMED = "B200"
"""Device of torchtitan's rows without one: they state 184 GiB of memory, which is a B200's."""


def _cluster(row: Mapping[str, str], framework: Framework) -> Cluster:
    name = row["gpu"] or _UNNAMED
    node = find_node(name)
    num_gpus = _whole(row, "gpus") or prod(_whole(row, axis) or 1 for axis in ("tp", "pp", "cp", "dp"))
    per_node = min(_whole(row, "gpus_per_node") or node.num_accelerators, num_gpus)
    link = _fabric(row["notes.fabric"]) or framework.links.get(node.accelerator.generation)
    return parse_cluster(f"{per_node}x{name}", nodes=-(-num_gpus // per_node), link=link if per_node < num_gpus else None)


def _fabric(note: str) -> str | None:
    """Return the catalogue name of the network between nodes that the notes describe."""
    if note == "EFA":
        return "efa-p5"
    if match := re.search(r"(\d+)x(Omni-Path |)(\d+)Gbps", note):
        return f"{match[1]}x{'opa' if match[2] else 'ib'}{match[3]}"
    if match := re.search(r"interconnect (\d+)Gbps RoCE/node$", note):
        return f"{int(match[1]) // 200}xroce200"
    return None


def _layout(row: Mapping[str, str], framework: Framework, shape: ModelShape, cluster: Cluster) -> Layout:
    tp, pp = _model_parallel(row, framework, shape, cluster)
    cp = _whole(row, "cp") or 1
    data_ranks = max(1, cluster.num_gpus // (tp * pp * cp))
    ep, _ = expert_parallel(row, _whole(row, "ep") or 1, tp, data_ranks * cp)
    stated = row["zero_stage"]
    default_stage = 0 if framework.copies_adapted and _adapter(row) is not None else framework.zero_stage
    stage = int(stated) if stated in ("0", "1", "2", "3") else default_stage
    stage = 1 if stage == 0 and (ep > 1 or cp > 1) else stage
    if stage == 3 and pp > 1 and framework.zero_stage_in_pipeline is not None:
        stage = framework.zero_stage_in_pipeline
    stage = 0 if data_ranks * cp == 1 else stage
    virtual_stages = _whole(row, "virtual_pp") or (2 if row["notes.schedule"] else 1)
    if framework.interleaves and not row["virtual_pp"] and pp > 1:
        num_end_layers = (
            2 if shape.num_layers % pp and (shape.num_layers + 2) % pp == 0 else 0
        )  # embedding and head count as one layer each
        virtual_stages = max(virtual_stages, _usual_stages(shape.num_layers + num_end_layers, pp))
    interleaved = pp > 1 and virtual_stages > 1
    sequence_parallel = {"yes": True, "no": False}.get(row["sequence_parallel"], framework.sequence_parallel)
    replicas = _replicas(row, data_ranks, tp, cluster) if stage else data_ranks
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


def _replicas(row: Mapping[str, str], data: int, tp: int, cluster: Cluster) -> int:
    """Count model replicas: several if the row shards within a node only (HSDP), else one."""
    within = max(1, cluster.gpus_per_node // tp)
    return data // within if row["notes.within_node"] and data % within == 0 else 1


def _waits_long(row: Mapping[str, str]) -> bool:
    """Return True if the bubble without interleaving would exceed a fifth of the step."""
    pp, data, total = (_whole(row, name) or 1 for name in ("pp", "dp", "global_batch"))
    return total // (data * (_whole(row, "micro_batch") or 1)) < 4 * (pp - 1)


def _usual_stages(num_layers: int, pp: int) -> int:
    """Choose the stages per rank of an interleaved recipe: two layers each, or the smallest
    larger number that divides.

    >>> _usual_stages(96, 8), _usual_stages(80, 4), _usual_stages(61, 4)
    (6, 10, 1)
    """
    layers_per_rank, rest = divmod(num_layers, pp)
    return (
        1
        if rest or layers_per_rank < 2
        else layers_per_rank // next(n for n in range(2, layers_per_rank + 1) if layers_per_rank % n == 0)
    )


_HELD_BYTES = 6.0
"""Bytes per parameter between steps: a half-precision weight, and its gradient's fp32 sum."""


def _model_parallel(row: Mapping[str, str], framework: Framework, shape: ModelShape, cluster: Cluster) -> tuple[int, int]:
    """Return tensor and pipeline degrees. If only their product or the data degree is stated,
    prefer tensor parallelism within a node.

    If nothing is stated: one of each if the framework shards parameters or trains adapters,
    otherwise the smallest product for which weights, gradients and their sums take at most half
    of the memory.
    """
    stage = row["zero_stage"] or str(framework.zero_stage)
    is_sharded = stage in ("2", "3") or _adapter(row) is not None
    tp = _whole(row, "tp")
    pp = _whole(row, "pp")
    data_ranks = _whole(row, "dp")
    product = _whole(row, "notes.model_parallel") or (cluster.num_gpus // data_ranks if data_ranks else None)
    if tp is None and pp is None and product is None and not is_sharded:
        min_ranks = shape.num_parameters * _HELD_BYTES / (0.5 * cluster.accelerator.memory_bytes)
        product = next(
            (n for n in range(1, cluster.num_gpus + 1) if n >= min_ranks and cluster.num_gpus % n == 0), cluster.num_gpus
        )
    if tp is None and pp is None and product:
        tp = max(degree for degree in (1, 2, 4, 8) if product % degree == 0)
        return tp, product // tp
    return tp or 1, pp or (product // tp if product and tp and product % tp == 0 else 1)


def _recompute(row: Mapping[str, str], framework: Framework) -> RecomputeKind:
    stated = row["recompute"]
    if stated in ("none", "selective", "full"):
        return stated  # type: ignore[return-value]
    if framework.recompute_of_quantised and row["task"] == "qlora":
        return framework.recompute_of_quantised
    if framework.recompute_of_shards and (_whole(row, "gpus") or 1) > 1:
        return framework.recompute_of_shards
    return "selective" if row["notes.selective"] else framework.recompute


_UNSAID_ROWS = 16
"""Sequences per rank and step, for each stage, if a row states no batch: the largest
micro-batch that is tried."""


def _candidate(row: Mapping[str, str], framework: Framework, layout: Layout, micro: int, recompute: RecomputeKind) -> Candidate:
    has_no_batch = not (row["micro_batch"] or row["notes.local_batch"] or row["notes.grad_accum"])
    default_steps = _UNSAID_ROWS * layout.pp if has_no_batch else _whole(row, "notes.grad_accum") or layout.pp
    total = _whole(row, "global_batch") or micro * layout.data_ranks * default_steps
    steps = max(1, round(total / (micro * layout.data_ranks)))
    if layout.virtual_stages and steps % layout.pp:
        # Interleaving needs complete rounds of micro-batches. A row without them used another
        # schedule.
        layout = replace(layout, schedule="1f1b", virtual_stages=None)
    engine = engine_of(row, framework, layout, find_node(row["gpu"] or _UNNAMED).accelerator)
    _, has_unsharded_experts = expert_parallel(row, _whole(row, "ep") or 1, layout.tp, layout.fsdp)
    engine = replace(engine, whole_experts=has_unsharded_experts)
    return Candidate(
        layout=layout,
        sequence_length=_whole(row, "seq_len") or _USUAL_LENGTH,
        micro_batch_size=micro,
        gradient_accumulation_steps=steps,
        precision=_precision(row),
        recompute=recompute,
        adapter=_adapter(row),
        offload=_offload(row),
        optimizer=_optimizer(row["notes.optimizer"]),
        reference=_reference(row),
        compile=row["compile"] == "yes",
        flash_attention={"yes": True, "no": False}.get(row["flash_attention"], framework.flash_attention),
        fp4_layers=int(row["notes.fp4_layers"]) + 1 if row["notes.fp4_layers"] else None,
        loss_chunk_tokens=1024 if row["notes.chunked_loss"] else None,
        reduce_in_bf16=row["notes.mixed_precision"] == "PURE",
        engine=engine,
    )


def _precision(row: Mapping[str, str]) -> Precision:
    """Return the row's precision. Default: bf16, or fp16 on an accelerator without bf16
    units."""
    default = "bf16" if "bf16" in find_node(row["gpu"] or _UNNAMED).accelerator.peak_flops_per_second else "fp16"
    return row["precision"] or default  # type: ignore[return-value]


_ATTENTION = {"q": "query", "k": "key", "v": "value", "o": "attention_out"}
_FEED_FORWARD = ("gate", "up", "down")


def _adapter(row: Mapping[str, str]) -> Adapter | None:
    """Return the LoRA settings of the notes, or the defaults of the row's framework.

    litgpt: rank 8 on queries and values. NVIDIA's recipes: rank 16 on those and keys. Others:
    rank 16 on all.
    """
    adapter_name = row["notes.adapter"].lower() if row["task"] != "pretrain" else ""
    if row["task"] not in ("lora", "qlora") and not adapter_name:
        return None
    quantised = row["task"] == "qlora" or adapter_name == "qlora" or bool(row["notes.quantization"])
    if row["notes.trainable"]:
        return Adapter(rank=8, roles=("query", "value"), quantised=quantised, unquantised=("query", "key", "value"))
    rank = _whole(row, "notes.rank") or 16
    targets = row["notes.targets"].lower()
    if targets.startswith("mlp"):
        return Adapter(rank, _FEED_FORWARD, quantised)
    if targets and not targets.startswith("all"):
        letters = "qkvo" if targets.startswith("att") else re.sub(r"_?proj|[^qkvo]", "", targets)
        return Adapter(rank, tuple(role for letter, role in _ATTENTION.items() if letter in letters), quantised)
    if follows_performance_recipe(row["source_group"], row["source"]):
        return Adapter(rank, ("query", "key", "value", "qkv"), quantised)
    return Adapter(rank, quantised=quantised)


def _optimizer(note: str) -> OptimizerKind:
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


def _offload(row: Mapping[str, str]) -> Offload:
    note = row["notes.offload"].lower()
    return "none" if not note else "parameters" if "param" in note or "inf" in note else "optimizer"


def _reference(row: Mapping[str, str]) -> Reference:
    """Return the reference of preference training: a frozen model, or the model without its
    adapters."""
    return "none" if row["task"] != "dpo" else "frozen" if _adapter(row) is None else "adapter_off"


def _trainer_on(trainer: str, cluster: Cluster) -> tuple[str, ...]:
    """Name a framework's own kernels and host speed on these accelerators."""
    return f"{trainer} on {cluster.accelerator.generation}", f"{trainer} on {cluster.accelerator.name}"


def _features(row: Mapping[str, str], shape: ModelShape) -> tuple[str, ...]:
    names = [row["notes.kernel"], "async_tp" if row["notes.async_tp"] else "", row["notes.scaling"].lower()]
    names.append("attention_sinks" if shape.attention_sinks else "")
    names.append("hybrid" if is_hybrid(row["model_name"]) else "")
    names.append("latent_experts" if has_latent_experts(row["model_name"]) else "")
    names.append("power_limited" if "power limited" in row["gpu"] else "")
    names += expert_features(row, shape, find_node(row["gpu"] or _UNNAMED), hybrid=is_hybrid(row["model_name"]))
    return tuple(name for name in names if name)


def _metric(text: str) -> MemoryMetric:
    """Return the total that a row's memory reports: live bytes, reserved bytes, or the device
    monitor's."""
    if "nvidia-smi" in text:
        return "device"
    # Also for sources that do not state which of the two it is. NeMo's "peak_memory_usage" is
    # torch.cuda.max_memory_reserved.
    if "reserved" in text or "torchtitan" in text or "peak_memory_usage" in text:
        return "reserved"
    return "allocated" if text else "device"
