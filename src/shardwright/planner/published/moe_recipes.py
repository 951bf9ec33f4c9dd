"""Expert settings of NVIDIA's performance recipes by release, if a published row names it.

Sources: the recipes (scripts/performance of NeMo and of NVIDIA-NeMo/Megatron-Bridge, 2025-09 to
2026-08). Releases differ in the distribution of experts over ranks, and in the kernels for
matmuls, routing and dispatch. `_workload_base_configs.py` and `perf_recipes` list each recipe's
dispatcher and overlap.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import gcd

from shardwright.architecture import ModelShape
from shardwright.hardware import Node

_FUSED_EXPERTS_RELEASE = (26, 6)
"""First release whose recipes run MXFP8 experts in one kernel with quantisation and gating, replay
a step as one graph, and overlap the exchange of rows."""
_UNFUSED_ROUTING_RELEASES = ((25, 11), (26, 2, 1))
"""Range of releases (end excluded) whose recipes routed and sorted rows with separate PyTorch
operations on eight-GPU nodes. Afterwards, and always in NVLink racks, one kernel does it
(HybridEP). Earlier releases mostly dropped tokens so that all sizes were static."""


def read_release(row: Mapping[str, str]) -> tuple[int, ...]:
    """Return the NeMo release that a row names, as a comparable tuple. () if it names none.

    >>> read_release({"notes.release": "26.02.01"}), read_release({"notes.release": ""})
    ((26, 2, 1), ())
    """
    return tuple(map(int, row["notes.release"].split("."))) if row["notes.release"] else ()


def has_spread_experts(row: Mapping[str, str]) -> bool:
    """Return True if unsharded experts are distributed over the tensor-parallel ranks too (ETP
    1): as stated, and in every recipe since 2025.

    Megatron-Core's default shards each expert like all other matrices.
    """
    stated = row["notes.expert_tensor"]
    return stated == "1" if stated else bool(read_release(row))


def resolve_expert_parallel(
    row: Mapping[str, str], stated_degree: int, tp: int, data_ranks: int
) -> tuple[int, bool]:
    """Return the data ranks over which experts are distributed, and True if unsharded experts
    span the tensor-parallel ranks too.

    In that case the stated degree counts both.

    >>> resolve_expert_parallel({"notes.expert_tensor": "1", "notes.release": ""}, 64, 2, 32)
    (32, True)
    >>> resolve_expert_parallel({"notes.expert_tensor": "4", "notes.release": "25.05"}, 8, 4, 32)
    (8, False)
    """
    num_expert_ranks = gcd(stated_degree, data_ranks * tp)
    if tp > 1 and has_spread_experts(row) and num_expert_ranks % tp == 0:
        return num_expert_ranks // tp, True
    return gcd(stated_degree, data_ranks), False


def list_expert_features(
    row: Mapping[str, str], shape: ModelShape, node: Node, *, is_hybrid: bool
) -> list[str]:
    """Return the kernels for a row's experts and routing, as named in `efficiencies.yaml`."""
    if shape.experts is None:
        return []
    precision = row["precision"]
    release = read_release(row)
    # Recipes of hybrid models, and those with Muon, do not use the new kernels.
    has_new_kernels = not is_hybrid and "muon" not in row["notes.optimizer"].lower()
    names = []
    if has_new_kernels and _has_fused_experts(row, node):
        names.append("fused experts")
    elif shape.experts.expert_bias:
        names.append("biased experts")
    elif precision in ("fp8", "nvfp4"):
        names.append(f"{precision} experts")
    if row["notes.routing"] == "tokendrop":
        names.append("token dropping")
    elif _has_unfused_routing(release, node):
        names.append("unfused routing")
    if "fused experts" in names or _has_overlapped_exchange(row, node):
        names.append("overlapped experts")
    return names


def has_all_to_all(row: Mapping[str, str], node: Node) -> bool:
    """Return True if a recipe sends a token once per expert (`moe_token_dispatcher_type:
    alltoall`), False if once per rank (DeepEP, HybridEP)."""
    release = read_release(row)
    name = row["model_name"].lower()
    if not release or _has_fused_experts(row, node):
        return False
    if row["notes.routing"] == "tokendrop":
        return True
    if re.search("gpt-?oss", name):
        return node.domain_size > 8 or release < (26, 2, 1)
    if re.search("qwen3-?(235b|next)", name):
        return node.domain_size <= 8
    return "deepseek" not in name and _has_unfused_routing(release, node)


def _has_overlapped_exchange(row: Mapping[str, str], node: Node) -> bool:
    """Return True if the exchange of one micro-batch's rows overlaps with another's backward pass
    (`overlap_moe_expert_parallel_comm`).

    Recipes enable it with interleaved stages on eight-GPU nodes, and for GPT-OSS on GB200. Before
    an all-to-all the host waits for the numbers of rows, so that little overlaps.
    """
    release = read_release(row)
    if node.domain_size > 8:
        is_gpt_oss = re.search("gpt-?oss", row["model_name"].lower()) is not None
        return is_gpt_oss and release >= (26, 4) and node.accelerator.name.startswith("GB200")
    stages = row["virtual_pp"]
    is_interleaved = stages.isdigit() and int(stages) > 1
    return is_interleaved and release >= (25, 11) and not has_all_to_all(row, node)


def _has_fused_experts(row: Mapping[str, str], node: Node) -> bool:
    return (
        read_release(row) >= _FUSED_EXPERTS_RELEASE
        and row["precision"] == "fp8"
        and "Blackwell" in node.accelerator.generation
    )


def _has_unfused_routing(release: tuple[int, ...], node: Node) -> bool:
    first, until = _UNFUSED_ROUTING_RELEASES
    return (
        first <= release < until
        and node.domain_size <= 8
        and node.accelerator.generation != "Blackwell Ultra"
    )


def add_prediction_layer(row: Mapping[str, str], shape: ModelShape) -> ModelShape:
    """Append DeepSeek-V3's multi-token-prediction layer, which its recipes train unless the row
    states otherwise."""
    has_layer = (
        read_release(row)
        and re.search(r"deepseek-?v3", row["model_name"].lower())
        and not row["notes.without_prediction"]
    )
    return replace(shape, layers=(*shape.layers, shape.layers[-1])) if has_layer else shape
