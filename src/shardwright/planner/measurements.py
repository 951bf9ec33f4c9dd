"""Published rows -> what the planner predicts from: shape, candidate, cluster, trainer. Torch-free.

A row is read through `configuration`, which keeps the configuration columns and, of `notes`, the keys of `planner.notes`.
Everything else (throughput, times, memory, utilisation, `verification`, ids, and every other word of the notes, among them those
that tell how a run ended) is blanked there, before anything reads it.
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
    "source_group", "source", "model_name", "params_b", "layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab",
    "seq_len", "num_experts", "top_k", "gpu", "gpus", "gpus_per_node", "tp", "pp", "cp", "ep", "dp", "virtual_pp", "zero_stage",
    "micro_batch", "global_batch", "recompute", "sequence_parallel", "precision", "flash_attention", "compile", "task",
    "mem_metric",
)  # fmt: skip
"""Columns that are read. `source` names the trainer and its release only, and `mem_metric` which of a prediction's totals is
written down."""

MemoryMetric = Literal["allocated", "reserved", "device"]


@dataclass(frozen=True)
class Case:
    """One row in the planner's terms. `micro_batch_stated` False: the planner picks the fastest that fits. `recompute_stated`
    False: the candidate's is its trainer's habit."""

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
    """Whether the memory is that of the rank that writes the log, the first one, rather than the fullest's."""
    features: tuple[str, ...] = ()
    """Kernels and settings that have efficiencies of their own, in words of `efficiencies.yaml`."""


def configuration(row: Mapping[str, str]) -> dict[str, str]:
    """The row without what came of it: configuration columns as they are, notes reduced to their keys, all else gone.

    >>> configuration({"gpu": "H100", "notes": "OOM; kernel=torch; great", "step_time_s": "3"})["notes.kernel"]
    'torch'
    """
    kept = {name: (row.get(name) or "").strip() for name in CONFIGURATION}
    notes = row.get("notes") or ""
    kept |= {f"notes.{key}": value for key, value in read_notes(notes).items()}
    if not kept["notes.release"] and (found := re.search(r"dgxc-benchmarking@v(2\d\.\d\d)", kept["source"])):
        kept["notes.release"] = found[1]
    return fill_from_notes(spell_row(kept | read_columns(kept)))


def read_cases(path: str | Path) -> Iterator[Case]:
    """Every row of a table of measurements as a case, in order.

    Raises:
        DataError: no such file, or columns missing, by name.
        InputError: a row that names an unknown accelerator, or a model about which it says too little; with the row's id.
    """
    for row in read_rows(path):
        yield read_case(row["id"], configuration(row))


def read_rows(path: str | Path) -> list[dict[str, str]]:
    """The table as it stands; only `configuration` of a row may reach a prediction."""
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
            "this is no table of measurements",
            field="--measurements",
            got=f"no column {', '.join(missing)}",
            allowed=f"columns {', '.join(CONFIGURATION)}",
        )
    return rows


def read_case(name: str, row: Mapping[str, str]) -> Case:
    """One row, already reduced to its configuration, in the planner's terms.

    Raises:
        InputError: an accelerator, a precision, a model or a task that is not predicted, by name.
    """
    if row["task"] == "rollouts":
        raise InputError("steps that also generate text are not predicted", field="measurements.task", got=row["task"])
    named = name_framework(row["notes.framework"], row["source_group"], row["source"])
    trainer = named or _likely_framework(row)
    if trainer == "megatron-lm" and "Hopper" in find_node(row["gpu"] or _UNNAMED).accelerator.generation:
        trainer = "megatron-core"  # what Megatron-LM is built on since 2023
    framework = FRAMEWORKS[trainer]
    if named is None:
        framework = replace(framework, interleaves=framework.interleaves and _waits_long(row))  # somebody's run, not a recipe
    shape = shape_of_row(
        row,
        tied={"tied": True, "untied": False}.get(row["notes.embeddings"]),
        expert_width=_whole(row, "notes.expert_width"),
    )
    shape = with_prediction_layer(row, shape)
    cluster = _cluster(row, framework)
    layout = _layout(row, framework, shape, cluster)
    length = _whole(row, "seq_len") or _USUAL_LENGTH
    if length < layout.cp:
        raise InputError(
            "a row has fewer tokens than ranks share it", field="measurements.seq_len", got=length, allowed=f"{layout.cp}, cp"
        )
    if framework.engine.stage_rule != "running_sum":
        shape = _fill_stages(shape, layout)
    local = _whole(row, "notes.local_batch")
    micro = _whole(row, "micro_batch") or (max(1, local // layout.pp) if local else None)  # torchtitan: as many parts as stages
    return Case(
        id=name,
        source=row["source_group"],
        framework=trainer,
        shape=shape,
        candidate=_candidate(row, framework, layout, micro or 1, _recompute(row, framework)),
        cluster=cluster,
        metric=_metric(row["mem_metric"]),
        first_rank="logging rank" in row["mem_metric"],
        micro_batch_stated=micro is not None,
        recompute_stated=row["recompute"] in ("none", "selective", "full") or not framework.recompute_varies,
        features=(*_trainer_on(trainer, cluster), *_features(row, shape)),
    )


def _fill_stages(shape: ModelShape, layout: Layout) -> ModelShape:
    """The shape with a layer for every stage: empty ones would go at the full ones' pace all the same."""
    missing = layout.pp * (layout.virtual_stages or 1) - shape.num_layers
    return shape if missing <= 0 else replace(shape, layers=shape.layers + shape.layers[-1:] * missing)


def _likely_framework(row: Mapping[str, str]) -> str:
    """Of a row that names no trainer: Megatron where the model is cut, Hugging Face's where it is fine-tuned, else PyTorch's."""
    if any((_whole(row, axis) or 1) > 1 for axis in ("tp", "pp", "cp", "ep")):
        return "megatron-core"
    return "torchtitan" if row["task"] in ("", "pretrain") else "huggingface"


def _whole(row: Mapping[str, str], name: str) -> int | None:
    text = spell_number(row.get(name) or "")
    return round(float(text)) if text else None


_USUAL_LENGTH = 2048
"""Tokens of a row where it does not say."""

_UNNAMED = "B200"
"""torchtitan's rows without a device say 184 GiB of memory, which is a B200's."""


def _cluster(row: Mapping[str, str], framework: Framework) -> Cluster:
    name = row["gpu"] or _UNNAMED
    node = find_node(name)
    num_gpus = _whole(row, "gpus") or prod(_whole(row, axis) or 1 for axis in ("tp", "pp", "cp", "dp"))
    per_node = min(_whole(row, "gpus_per_node") or node.num_accelerators, num_gpus)
    link = _fabric(row["notes.fabric"]) or framework.links.get(node.accelerator.generation)
    return parse_cluster(f"{per_node}x{name}", nodes=-(-num_gpus // per_node), link=link if per_node < num_gpus else None)


def _fabric(note: str) -> str | None:
    """A link of the catalogue from what the notes say of the network between nodes."""
    if note == "EFA":
        return "efa-p5"
    if found := re.search(r"(\d+)x(Omni-Path |)(\d+)Gbps", note):
        return f"{found[1]}x{'opa' if found[2] else 'ib'}{found[3]}"
    if found := re.search(r"interconnect (\d+)Gbps RoCE/node$", note):
        return f"{int(found[1]) // 200}xroce200"
    return None


def _layout(row: Mapping[str, str], framework: Framework, shape: ModelShape, cluster: Cluster) -> Layout:
    tp, pp = _model_parallel(row, framework, shape, cluster)
    cp = _whole(row, "cp") or 1
    data = max(1, cluster.num_gpus // (tp * pp * cp))
    ep, _ = expert_parallel(row, _whole(row, "ep") or 1, tp, data * cp)
    stated = row["zero_stage"]
    usual = 0 if framework.copies_adapted and _adapter(row) is not None else framework.zero_stage
    stage = int(stated) if stated in ("0", "1", "2", "3") else usual
    stage = 1 if stage == 0 and (ep > 1 or cp > 1) else stage
    if stage == 3 and pp > 1 and framework.zero_stage_in_pipeline is not None:
        stage = framework.zero_stage_in_pipeline
    stage = 0 if data * cp == 1 else stage
    virtual = _whole(row, "virtual_pp") or (2 if row["notes.schedule"] else 1)
    if framework.interleaves and not row["virtual_pp"] and pp > 1:
        ends = 2 if shape.num_layers % pp and (shape.num_layers + 2) % pp == 0 else 0  # the first and the last count as one more
        virtual = max(virtual, _usual_stages(shape.num_layers + ends, pp))
    interleaved = pp > 1 and virtual > 1
    sequence_parallel = {"yes": True, "no": False}.get(row["sequence_parallel"], framework.sequence_parallel)
    replicas = _replicas(row, data, tp, cluster) if stage else data
    return Layout(
        dp_replicate=replicas,
        dp_shard=data // replicas,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        zero_stage=stage,  # type: ignore[arg-type]
        sequence_parallel=sequence_parallel and tp > 1,
        schedule="interleaved_1f1b" if interleaved else "1f1b",
        virtual_stages=virtual if interleaved else None,
    )


def _replicas(row: Mapping[str, str], data: int, tp: int, cluster: Cluster) -> int:
    """Copies of the model where the row shards within a node only (HSDP), else one."""
    within = max(1, cluster.gpus_per_node // tp)
    return data // within if row["notes.within_node"] and data % within == 0 else 1


def _waits_long(row: Mapping[str, str]) -> bool:
    """Whether a plain pipeline would wait for more than a fifth of its step, which is what interleaving is for."""
    pp, data, total = (_whole(row, name) or 1 for name in ("pp", "dp", "global_batch"))
    return total // (data * (_whole(row, "micro_batch") or 1)) < 4 * (pp - 1)


def _usual_stages(num_layers: int, pp: int) -> int:
    """Stages of a rank in a recipe that interleaves: of two layers each, or of the fewest more that divide.

    >>> _usual_stages(96, 8), _usual_stages(80, 4), _usual_stages(61, 4)
    (6, 10, 1)
    """
    each, rest = divmod(num_layers, pp)
    return 1 if rest or each < 2 else each // next(n for n in range(2, each + 1) if each % n == 0)


_HELD_BYTES = 6.0
"""Per parameter, between steps: a weight in half precision, and its gradient's sum in fp32."""


def _model_parallel(row: Mapping[str, str], framework: Framework, shape: ModelShape, cluster: Cluster) -> tuple[int, int]:
    """Tensor and pipeline degrees; where only their product or the data degree is stated, tensor first, within a node.

    Where nothing is stated, one of each if the trainer shards parameters or trains adapters, else the least product that leaves
    weights, gradients and their sums half of the memory.
    """
    stage = row["zero_stage"] or str(framework.zero_stage)
    sharded = stage in ("2", "3") or _adapter(row) is not None
    tp, pp, data = _whole(row, "tp"), _whole(row, "pp"), _whole(row, "dp")
    product = _whole(row, "notes.model_parallel") or (cluster.num_gpus // data if data else None)
    if tp is None and pp is None and product is None and not sharded:
        wanted = shape.num_parameters * _HELD_BYTES / (0.5 * cluster.accelerator.memory_bytes)
        product = next((n for n in range(1, cluster.num_gpus + 1) if n >= wanted and cluster.num_gpus % n == 0), cluster.num_gpus)
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
"""Sequences of a rank and a step, for each stage, where a row says nothing of its batch: the largest micro batch that is tried."""


def _candidate(row: Mapping[str, str], framework: Framework, layout: Layout, micro: int, recompute: RecomputeKind) -> Candidate:
    silent = not (row["micro_batch"] or row["notes.local_batch"] or row["notes.grad_accum"])
    usual = _UNSAID_ROWS * layout.pp if silent else _whole(row, "notes.grad_accum") or layout.pp
    total = _whole(row, "global_batch") or micro * layout.data_ranks * usual
    steps = max(1, round(total / (micro * layout.data_ranks)))
    if layout.virtual_stages and steps % layout.pp:
        # Interleaving wants whole rounds of micro-batches; a row that has none ran something else.
        layout = replace(layout, schedule="1f1b", virtual_stages=None)
    engine = engine_of(row, framework, layout, find_node(row["gpu"] or _UNNAMED).accelerator)
    _, whole = expert_parallel(row, _whole(row, "ep") or 1, layout.tp, layout.fsdp)
    engine = replace(engine, whole_experts=whole)
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
    """The row's; bf16 where it says none, fp16 on an accelerator that has no units for that."""
    usual = "bf16" if "bf16" in find_node(row["gpu"] or _UNNAMED).accelerator.peak_flops_per_second else "fp16"
    return row["precision"] or usual  # type: ignore[return-value]


_ATTENTION = {"q": "query", "k": "key", "v": "value", "o": "attention_out"}
_FEED_FORWARD = ("gate", "up", "down")


def _adapter(row: Mapping[str, str]) -> Adapter | None:
    """LoRA as the notes have it, else as the row's trainer has it: litgpt rank 8 on queries and values, NVIDIA's recipes rank 16 on
    those and keys, others rank 16 on all."""
    named = row["notes.adapter"].lower() if row["task"] != "pretrain" else ""
    if row["task"] not in ("lora", "qlora") and not named:
        return None
    quantised = row["task"] == "qlora" or named == "qlora" or bool(row["notes.quantization"])
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
    """The notes' optimizer, by what it keeps of a parameter (Lion what momentum does); AdamW where they name none."""
    word = note.lower()
    for sign, kind in (("8", "adamw_8bit"), ("adafactor", "adafactor"), ("lion", "sgd_momentum"), ("muon", "muon"), ("sgd", "sgd")):
        if sign in word:
            return kind  # type: ignore[return-value]
    return "adamw"


def _offload(row: Mapping[str, str]) -> Offload:
    note = row["notes.offload"].lower()
    return "none" if not note else "parameters" if "param" in note or "inf" in note else "optimizer"


def _reference(row: Mapping[str, str]) -> Reference:
    """What a preference run is held to: the frozen model, or the model without its adapters."""
    return "none" if row["task"] != "dpo" else "frozen" if _adapter(row) is None else "adapter_off"


def _trainer_on(trainer: str, cluster: Cluster) -> tuple[str, ...]:
    """A trainer's own kernels, and its host's pace, on these accelerators."""
    return f"{trainer} on {cluster.accelerator.generation}", f"{trainer} on {cluster.accelerator.name}"


def _features(row: Mapping[str, str], shape: ModelShape) -> tuple[str, ...]:
    named = [row["notes.kernel"], "async_tp" if row["notes.async_tp"] else "", row["notes.scaling"].lower()]
    named.append("attention_sinks" if shape.attention_sinks else "")
    named.append("hybrid" if is_hybrid(row["model_name"]) else "")
    named.append("latent_experts" if has_latent_experts(row["model_name"]) else "")
    named.append("power_limited" if "power limited" in row["gpu"] else "")
    named += expert_features(row, shape, find_node(row["gpu"] or _UNNAMED), hybrid=is_hybrid(row["model_name"]))
    return tuple(name for name in named if name)


def _metric(text: str) -> MemoryMetric:
    """Which total a row's memory is: the allocator's live bytes, what it reserves, or what the device's monitor shows."""
    if "nvidia-smi" in text:
        return "device"
    # Also where a source does not say which of the two it is; NeMo's "peak_memory_usage" is torch.cuda.max_memory_reserved.
    if "reserved" in text or "torchtitan" in text or "peak_memory_usage" in text:
        return "reserved"
    return "allocated" if text else "device"
