"""Read published rows as planner inputs: shape, candidate, cluster, framework.

`extract_configuration` keeps the configuration columns of a row and, of `notes`, the keys of
`planner.published.notes`. It removes everything else (throughput, times, memory, utilisation,
`verification`, ids, and all other words of the notes, including those that state how a run
ended) before any other code reads the row.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from shardwright.architecture import ModelShape
from shardwright.errors import DataError, InputError
from shardwright.files import open_regular_file
from shardwright.hardware import Cluster, find_node
from shardwright.hardware.catalog_loading import states_memory
from shardwright.layout import Layout
from shardwright.planner.candidate import Candidate
from shardwright.planner.published.conventions import FrameworkConventions
from shardwright.planner.published.framework_names import find_framework_name
from shardwright.planner.published.frameworks import (
    FRAMEWORK_DEFAULTS,
    FrameworkDefaults,
)
from shardwright.planner.published.moe_recipes import add_prediction_layer, list_expert_features
from shardwright.planner.published.named_models import (
    build_row_shape,
    has_latent_experts,
    is_hybrid,
)
from shardwright.planner.published.normalisation import normalise_row
from shardwright.planner.published.notes import fill_from_notes, read_note_columns, read_notes
from shardwright.planner.published.row_candidate import (
    DEFAULT_SEQUENCE_LENGTH,
    build_row_candidate,
    read_recompute,
)
from shardwright.planner.published.row_layout import (
    DEFAULT_ACCELERATOR,
    has_long_bubble,
    read_cluster,
    read_integer,
    read_layout,
)
from shardwright.planner.published.stage_rules import StageRule

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
    assumptions: tuple[str, ...] = ()
    """Unstated settings on which the prediction depends, each with the value taken."""

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


def read_rows(path: str | Path) -> list[dict[str, str]]:
    """Read the unfiltered table. Only `extract_configuration` of a row may be used for a
    prediction.

    Raises:
        DataError: The file is not a table of measurements, or cannot be read.
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
        and "Hopper" in find_node(row["gpu"] or DEFAULT_ACCELERATOR).accelerator.generation
    ):
        framework_name = "megatron-core"  # what Megatron-LM is built on since 2023
    framework = FRAMEWORK_DEFAULTS[framework_name]
    if stated_framework is None:
        framework = replace(
            framework,
            has_interleaved_schedule=framework.has_interleaved_schedule and has_long_bubble(row),
        )  # a user's run, not a published recipe
    shape = build_row_shape(
        row,
        has_tied_embeddings={"tied": True, "untied": False}.get(row["notes.embeddings"]),
        expert_width=read_integer(row, "notes.expert_width"),
    )
    shape = add_prediction_layer(row, shape)
    cluster = read_cluster(row, framework)
    layout = read_layout(row, framework, shape, cluster)
    sequence_length = read_integer(row, "seq_len") or DEFAULT_SEQUENCE_LENGTH
    if sequence_length < layout.cp:
        raise InputError(
            "the row has fewer tokens than context-parallel ranks",
            field="measurements.seq_len",
            got=sequence_length,
            allowed=f"at least {layout.cp} (cp)",
        )
    shape = _fill_stages(shape, layout, framework.conventions.stage_rule)
    local_batch = read_integer(row, "notes.local_batch")
    micro_batch = read_integer(row, "micro_batch") or (
        max(1, local_batch // layout.pp) if local_batch else None
    )  # torchtitan: one micro-batch per stage
    return PublishedRun(
        id=row_id,
        source=row["source_group"],
        framework=framework_name,
        shape=shape,
        candidate=build_row_candidate(
            row, framework, layout, micro_batch or 1, read_recompute(row, framework)
        ),
        cluster=cluster,
        memory_metric=_read_memory_metric(row["mem_metric"]),
        is_first_rank_memory="logging rank" in row["mem_metric"],
        is_micro_batch_stated=micro_batch is not None,
        is_recompute_stated=row["recompute"] in ("none", "selective", "full")
        or not framework.is_recompute_variable,
        features=(
            *_name_framework_features(row, framework_name, cluster),
            *_list_features(row, shape, framework_name),
        ),
        assumptions=_list_assumptions(row, cluster),
    )


def _list_assumptions(row: Mapping[str, str], cluster: Cluster) -> tuple[str, ...]:
    name = row["gpu"]
    if not name:
        return (f"no accelerator stated: {cluster.accelerator.name}",)
    if not states_memory(name):
        return (f"memory of {name} not stated: {cluster.accelerator.name}",)
    return ()


def _fill_stages(shape: ModelShape, layout: Layout, rule: StageRule) -> ModelShape:
    """Return the shape with at least one layer per stage, because an empty stage would run at the
    pace of the others.

    nanotron leaves late stages empty. With `even`, stages of the embedding or the head alone count
    as full.
    """
    missing = layout.pp * (layout.virtual_stages or 1) - shape.num_layers
    num_empty = {"even": 2, "weighed": 0}.get(rule, missing)
    return (
        shape
        if missing <= num_empty
        else replace(shape, layers=shape.layers + shape.layers[-1:] * missing)
    )


def _guess_framework(row: Mapping[str, str]) -> str:
    """Guess the framework of a row that names none: Megatron with model parallelism, Hugging
    Face for fine-tuning, else PyTorch's."""
    if any((read_integer(row, axis) or 1) > 1 for axis in ("tp", "pp", "cp", "ep")):
        return "megatron-core"
    return "torchtitan" if row["task"] in ("", "pretrain") else "huggingface"


def _name_framework_features(
    row: Mapping[str, str], framework_name: str, cluster: Cluster
) -> tuple[str, ...]:
    """Name a framework's own kernels and host speed on these accelerators."""
    generation = cluster.accelerator.generation
    return (
        *_name_attention_kernel(row, FRAMEWORK_DEFAULTS[framework_name], generation),
        f"{framework_name} on {generation}",
        f"{framework_name} on {cluster.accelerator.name}",
    )


def _name_attention_kernel(
    row: Mapping[str, str], framework: FrameworkDefaults, generation: str
) -> tuple[str, ...]:
    """Name the attention kernel if it is not the one whose rate the generation's numbers are."""
    if row["notes.padding_mask"]:
        # The only fused kernel that takes a mask.
        precision = " in fp32" if row["precision"] == "fp32" else ""
        return (f"memory-efficient attention{precision} on {generation}",)
    if framework.has_hopper_attention and generation == "Hopper":
        return ()
    kernel = re.search(r"(?i)^(?:flash.*|fa.?)([34])$", row["notes.attention"])
    if kernel:
        return (f"FlashAttention-{kernel[1]} on {generation}",)
    if not framework.has_flash_attention_2:
        return ("Ampere attention on Hopper",) if generation == "Hopper" else ()
    # PyTorch's own attention is cuDNN's kernel on Hopper, elsewhere FlashAttention-2.
    is_cudnn = generation == "Hopper" and "sdpa" in row["notes.attention"].lower()
    return () if is_cudnn else (f"FlashAttention-2 on {generation}",)


def _list_features(
    row: Mapping[str, str], shape: ModelShape, framework_name: str
) -> tuple[str, ...]:
    names = [
        row["notes.kernel"],
        "async_tp" if row["notes.async_tp"] else "",
        row["notes.scaling"].lower(),
    ]
    # Transformer Engine's kernels of attention sinks, and of experts.
    is_megatron = framework_name == "megatron-core"
    names.append("attention_sinks" if shape.attention_sinks and is_megatron else "")
    names.append("hybrid" if is_hybrid(row["model_name"]) else "")
    names.append("latent_experts" if has_latent_experts(row["model_name"]) else "")
    names.append("power_limited" if "power limited" in row["gpu"] else "")
    if is_megatron:
        names += list_expert_features(
            row,
            shape,
            find_node(row["gpu"] or DEFAULT_ACCELERATOR),
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
