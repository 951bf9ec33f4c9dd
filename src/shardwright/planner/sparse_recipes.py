"""How NVIDIA's performance recipes run mixtures of experts, by release, as far as a published row says which it was. Torch-free.

Sources: the recipes themselves (scripts/performance of NeMo and of NVIDIA-NeMo/Megatron-Bridge, 2025-09 to 2026-08), which change
from release to release in how experts lie over ranks, which kernels multiply, and which choose and send their rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import gcd

from shardwright.architecture import ModelShape
from shardwright.hardware import Node

_FUSED_EXPERTS = (26, 6)
"""The first release whose recipes multiply MXFP8 experts in one kernel that also quantises and gates, and replay a step as one
graph."""
_UNFUSED_ROUTING = ((25, 11), (26, 2, 1))
"""From the first on, and before the second, boards of eight chose and ordered rows with PyTorch's own operations; after that, and
from the beginning in racks of NVLink, one kernel does it (HybridEP). Before the first most dropped tokens, to know all sizes."""


def release_of(row: Mapping[str, str]) -> tuple[int, ...]:
    """The release of NeMo that a row names, as numbers that compare; () where it names none.

    >>> release_of({"notes.release": "26.02.01"}), release_of({"notes.release": ""})
    ((26, 2, 1), ())
    """
    return tuple(map(int, row["notes.release"].split("."))) if row["notes.release"] else ()


def spreads_experts(row: Mapping[str, str]) -> bool:
    """Whether whole experts lie over the tensor-parallel ranks, too (ETP 1): where the row says so, and in every recipe since 2025.

    Megatron-Core by itself cuts each expert as it cuts all else.
    """
    stated = row["notes.expert_tensor"]
    return stated == "1" if stated else bool(release_of(row))


def expert_parallel(row: Mapping[str, str], stated: int, tp: int, data: int) -> tuple[int, bool]:
    """Data ranks that experts lie over, and whether whole ones lie over the tensor-parallel ranks beside them; the stated degree
    then counts both.

    >>> expert_parallel({"notes.expert_tensor": "1", "notes.release": ""}, 64, 2, 32)
    (32, True)
    >>> expert_parallel({"notes.expert_tensor": "4", "notes.release": "25.05"}, 8, 4, 32)
    (8, False)
    """
    everybody = gcd(stated, data * tp)
    if tp > 1 and spreads_experts(row) and everybody % tp == 0:
        return everybody // tp, True
    return gcd(stated, data), False


def expert_features(row: Mapping[str, str], shape: ModelShape, node: Node, *, hybrid: bool) -> list[str]:
    """The kernels by which a row's experts are multiplied and its tokens routed, in words of `efficiencies.yaml`."""
    if shape.experts is None:
        return []
    precision, release = row["precision"], release_of(row)
    # Recipes of hybrid models, and those with Muon, were not moved to the new kernels.
    moved = not hybrid and "muon" not in row["notes.optimizer"].lower()
    named = []
    if release >= _FUSED_EXPERTS and precision == "fp8" and moved and "Blackwell" in node.accelerator.generation:
        named.append("fused experts")
    elif shape.experts.expert_bias:
        named.append("biased experts")
    elif precision in ("fp8", "nvfp4"):
        named.append(f"{precision} experts")
    first, until = _UNFUSED_ROUTING
    if row["notes.routing"] == "tokendrop":
        named.append("token dropping")
    elif first <= release < until and node.domain_size <= 8 and node.accelerator.generation != "Blackwell Ultra":
        named.append("unfused routing")
    return named


def with_prediction_layer(row: Mapping[str, str], shape: ModelShape) -> ModelShape:
    """The shape with the layer that DeepSeek-V3's recipes train to predict one token further, unless the row says it has none."""
    trained = release_of(row) and re.search(r"deepseek-?v3", row["model_name"].lower()) and not row["notes.without_prediction"]
    return replace(shape, layers=(*shape.layers, shape.layers[-1])) if trained else shape
