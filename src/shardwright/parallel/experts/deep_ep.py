"""The package DeepEP (github.com/deepseek-ai/DeepEP), whose `Buffer` sends rows to experts.

It is not a dependency: `expert_dispatch: deep_ep` needs it installed. What is used was read in
versions 1.2.1 (`deep_ep/buffer.py`, `tests/test_intranode.py`) and 2.1.0 (`docs/legacy.md`), which
have the same `Buffer`.
"""

from __future__ import annotations

import inspect
from importlib import import_module, metadata
from typing import Any

import torch

from shardwright.errors import LayoutError

PACKAGE = "deep_ep"
_MAJORS = ("1", "2")
_SIGNATURES = {
    "__init__": ("group", "num_nvl_bytes", "num_rdma_bytes"),
    "get_dispatch_config": ("num_ranks",),
    "get_combine_config": ("num_ranks",),
    "capture": (),
    "get_dispatch_layout": ("topk_idx", "num_experts"),
    "dispatch": (
        "x",
        "handle",
        "num_tokens_per_rank",
        "num_tokens_per_rdma_rank",
        "is_token_in_rank",
        "num_tokens_per_expert",
        "topk_idx",
        "topk_weights",
        "previous_event",
        "async_finish",
        "allocate_on_comm_stream",
    ),
    "combine": (
        "x",
        "handle",
        "topk_weights",
        "previous_event",
        "async_finish",
        "allocate_on_comm_stream",
    ),
}
"""Methods of `Buffer` and their parameters that the exchange uses."""


def find_version_obstacle() -> str | None:
    """Return why the installed package cannot be used; None if its version can."""
    try:
        version = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return f"the package {PACKAGE} is not installed"
    if version.split(".")[0] in _MAJORS:
        return None
    return f"{PACKAGE} {version} is installed, and Buffer is known in versions 1 and 2"


def load_buffer_class() -> Any:
    """Import `deep_ep.Buffer` and check the signatures that the exchange calls.

    Raises:
        LayoutError: the package is missing or its `Buffer` is another one.
    """
    try:
        package = import_module(PACKAGE)
    except ImportError as error:
        raise _build_error(f"the package {PACKAGE} cannot be imported: {error}") from error
    buffer = getattr(package, "Buffer", None)
    for method, names in _SIGNATURES.items():
        function = getattr(buffer, method, None)
        known = () if function is None else tuple(inspect.signature(function).parameters)
        missing = [name for name in names if name not in known]
        if function is None or missing:
            lacks = f"has no parameter {', '.join(missing)}" if function else "does not exist"
            raise _build_error(f"{PACKAGE}.Buffer.{method} {lacks}")
    index_dtype = getattr(package, "topk_idx_t", torch.int64)
    if index_dtype is not torch.int64:
        raise _build_error(f"{PACKAGE} was built for indices of experts in {index_dtype}")
    return buffer


def _build_error(problem: str) -> LayoutError:
    return LayoutError(
        problem,
        field="layout.expert_dispatch",
        got="deep_ep",
        allowed="whole, halves, once_per_rank, padded",
        remedy=f"Use once_per_rank, or install {PACKAGE} 1 or 2, built for indices in int64",
    )
