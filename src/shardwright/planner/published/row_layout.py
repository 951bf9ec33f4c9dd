"""Layout, cluster and adapters of a published row, with defaults for what it does not state."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import gcd, prod

from shardwright.architecture import ModelShape
from shardwright.hardware import Cluster, find_node, parse_cluster
from shardwright.layout import Layout
from shardwright.planner.candidate import LowRankAdapter
from shardwright.planner.published.framework_names import is_performance_recipe
from shardwright.planner.published.frameworks import FrameworkDefaults
from shardwright.planner.published.moe_recipes import resolve_expert_parallel
from shardwright.planner.published.normalisation import normalise_count


def read_integer(row: Mapping[str, str], name: str) -> int | None:
    """Read a column or note as a whole number, None if it is not stated."""
    text = normalise_count(row.get(name) or "")
    return round(float(text)) if text else None


DEFAULT_ACCELERATOR = "B200"
"""Device of torchtitan's rows without one: they state 184 GiB of memory, which is a B200's."""


def read_cluster(row: Mapping[str, str], framework: FrameworkDefaults) -> Cluster:
    """Build the cluster of a row."""
    name = row["gpu"] or DEFAULT_ACCELERATOR
    node = find_node(name)
    num_gpus = read_integer(row, "gpus") or prod(
        read_integer(row, axis) or 1 for axis in ("tp", "pp", "cp", "dp")
    )
    per_node = min(read_integer(row, "gpus_per_node") or node.num_accelerators, num_gpus)
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


def read_layout(
    row: Mapping[str, str], framework: FrameworkDefaults, shape: ModelShape, cluster: Cluster
) -> Layout:
    """Build the layout of a row, with the framework's defaults."""
    tp, pp = _read_model_parallel_degrees(row, framework, shape, cluster)
    cp = read_integer(row, "cp") or 1
    data_ranks = max(1, cluster.num_gpus // (tp * pp * cp))
    # A dispatch kernel is of no use unless the experts are on different ranks.
    num_dispatched = shape.experts.num_experts if row["notes.dispatch"] and shape.experts else 1
    stated_ep = read_integer(row, "ep") or gcd(num_dispatched, data_ranks * cp)
    ep, _ = resolve_expert_parallel(row, stated_ep, tp, data_ranks * cp)
    stated = row["zero_stage"]
    default_stage = (
        0
        if framework.should_replicate_adapted and read_adapter(row) is not None
        else framework.zero_stage
    )
    stage = int(stated) if stated in ("0", "1", "2", "3") else default_stage
    stage = 1 if stage == 0 and (ep > 1 or cp > 1) else stage
    if stage == 3 and pp > 1 and framework.zero_stage_in_pipeline is not None:
        stage = framework.zero_stage_in_pipeline
    stage = 0 if data_ranks * cp == 1 else stage
    virtual_stages = read_integer(row, "virtual_pp") or (2 if row["notes.schedule"] else 1)
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


def has_long_bubble(row: Mapping[str, str]) -> bool:
    """Return True if the bubble without interleaving would exceed a fifth of the step."""
    pp, data, total = (read_integer(row, name) or 1 for name in ("pp", "dp", "global_batch"))
    return total // (data * (read_integer(row, "micro_batch") or 1)) < 4 * (pp - 1)


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
    is_sharded = stage in ("2", "3") or read_adapter(row) is not None
    tp = read_integer(row, "tp")
    pp = read_integer(row, "pp")
    data_ranks = read_integer(row, "dp")
    product = read_integer(row, "notes.model_parallel") or (
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


_ATTENTION_ROLES = {"q": "query", "k": "key", "v": "value", "o": "attention_out"}
_FEED_FORWARD_ROLES = ("gate", "up", "down")


def read_adapter(row: Mapping[str, str]) -> LowRankAdapter | None:
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
    rank = read_integer(row, "notes.rank") or 16
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
