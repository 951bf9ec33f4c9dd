"""Casts to 16 bits in the code that Inductor generates with PyTorch's rounding.

With the option `emulate_precision_casts` no such cast is left out. torch 2.11 and 2.12 still
leave some out: on every device one that a cast to fp32 follows directly (the pattern
`pointless_convert` of Inductor's joint graph), and on CPUs those within a C++ kernel. The first
defect is repaired here as in torch 2.13, the second one is not (`rounds_casts_on_cpu`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

_PATTERN = "pointless_convert"


def rounds_casts_on_cpu() -> bool:
    """Return True if compiled code of a CPU rounds where uncompiled code casts to 16 bits."""
    return torch.__version__ >= "2.13"  # compared as versions


def repair_casts() -> None:
    """Let Inductor's graphs of PyTorch's rounding have all casts; other graphs do not change.

    Raises:
        RuntimeError: Inductor still leaves one out.
    """
    from torch._inductor import config  # imports the compiler
    from torch._inductor.fx_passes import joint_graph

    if not _drops_casts():
        return
    for entries in joint_graph.patterns.patterns.values():
        for index, entry in enumerate(entries):
            if getattr(getattr(entry, "handler", None), "__name__", "") != _PATTERN:
                continue

            def check(match: Any, earlier: Callable[[Any], bool] = entry.extra_check) -> bool:
                return not config.emulate_precision_casts and earlier(match)

            entries[index] = dataclasses.replace(entry, extra_check=check)
    if _drops_casts():
        raise RuntimeError(
            f"torch {torch.__version__} leaves out casts to 16 bits of compiled code, and "
            f"Inductor's pattern {_PATTERN} is not the reason"
        )


def _drops_casts() -> bool:
    """Return True if Inductor removes a cast to bf16 that a cast to fp32 follows."""
    from torch._inductor import config
    from torch._inductor.fx_passes import joint_graph

    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = torch.empty(1, device="meta")
    for dtype in (torch.bfloat16, torch.float32):
        node = graph.call_function(torch.ops.prims.convert_element_type.default, (node, dtype))
        node.meta["val"] = torch.empty(1, dtype=dtype, device="meta")
    graph.output(node)
    module = fx.GraphModule({}, graph)
    num_nodes = len(module.graph.nodes)
    with config.patch(emulate_precision_casts=True):
        joint_graph.patterns.apply(module)
    return len(module.graph.nodes) < num_nodes
