"""Deterministic algorithms: a step repeated on the same machine gives the same bits.

What decides it on CUDA, and what `use_deterministic_algorithms` does about each:

    torch's kernels     sums by atomic additions (gradients of indexing, attention) have a
                        deterministic version, or raise an error that names the operation
    attention           the backward passes of the flash and the memory-efficient kernel have a
                        deterministic version; cuDNN's has none, so that kernel is disabled
    cuBLAS              the workspace of a stream must have a fixed size, or the kernel that is
                        chosen depends on what else runs: CUBLAS_WORKSPACE_CONFIG
    NCCL                rings and trees add in a fixed order; sums inside the switches (NVLS)
                        do not: NCCL_NVLS_ENABLE=0
    compiler            Inductor must not choose kernels by measuring them
                        (`Decoder.compile_blocks`)
    DDP                 changes its buckets, and so the order of sums, after the first step of
                        a process; gradients of replicas are summed without it
                        (`parallel.apply_layout`)

docs/decisions/0062-deterministic-runs.md has the reasons and sources.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardwright.errors import InputError

CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
_CUBLAS_WORKSPACES = (":4096:8", ":16:8")
"""Workspaces with which cuBLAS is deterministic; the first is faster and takes 24 MiB."""
NVLS_VARIABLE = "NCCL_NVLS_ENABLE"
_FIELD = "training.deterministic"
_values_of_process: dict[str, str] = {}
"""Variables that an earlier run of this process has set, also after their removal from the
environment (`launch.rank_service`): the libraries have read them.
"""

_MISSING_IMPLEMENTATION = re.compile(r"(\S+) does not have a deterministic implementation")
"""Error of torch's operations under `torch.use_deterministic_algorithms`."""


@contextmanager
def use_deterministic_algorithms(*, is_cuda: bool) -> Iterator[None]:
    """Use deterministic algorithms only, during the block.

    Enter it before CUDA is initialised, because cuBLAS and NCCL read their variables once. The
    variables stay set afterwards: the libraries still use what they have read.

    Raises:
        InputError: CUDA was initialised without the variable, or a variable has a value with
            which results vary; in the block: an operation has no deterministic implementation.
    """
    if is_cuda:
        _set_library_variables()
    was_enabled = torch.are_deterministic_algorithms_enabled()
    was_warning_only = torch.is_deterministic_algorithms_warn_only_enabled()
    was_cudnn_enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    except RuntimeError as error:
        found = _MISSING_IMPLEMENTATION.search(str(error))
        if found is None:
            raise
        raise InputError(
            f"the operation {found[1]} has no deterministic implementation in torch "
            f"{torch.__version__}",
            field=_FIELD,
            got=True,
            remedy="Remove it, or what needs the operation",
        ) from error
    finally:
        torch.use_deterministic_algorithms(was_enabled, warn_only=was_warning_only)
        torch.backends.cuda.enable_cudnn_sdp(was_cudnn_enabled)


def _set_library_variables() -> None:
    """Set the variables of cuBLAS and NCCL, or check the values that the user has set."""
    for name, value in _values_of_process.items():
        os.environ.setdefault(name, value)
    workspace = os.environ.get(CUBLAS_VARIABLE)
    if workspace is None and torch.cuda.is_initialized():
        raise InputError(
            "CUDA was initialised without it, and cuBLAS reads it only then",
            field=CUBLAS_VARIABLE,
            got="not set",
            allowed=" or ".join(_CUBLAS_WORKSPACES),
            remedy="Set it before the process starts CUDA",
        )
    if workspace is not None and workspace not in _CUBLAS_WORKSPACES:
        raise InputError(
            f"cuBLAS is not deterministic with it ({_FIELD}: true)",
            field=CUBLAS_VARIABLE,
            got=workspace,
            allowed=" or ".join(_CUBLAS_WORKSPACES),
            remedy="Unset it",
        )
    if os.environ.get(NVLS_VARIABLE, "0") != "0":
        raise InputError(
            f"sums inside NVSwitch have no fixed order ({_FIELD}: true)",
            field=NVLS_VARIABLE,
            got=os.environ[NVLS_VARIABLE],
            allowed="0",
            remedy="Unset it",
        )
    _values_of_process[CUBLAS_VARIABLE] = workspace or _CUBLAS_WORKSPACES[0]
    _values_of_process[NVLS_VARIABLE] = "0"
    os.environ.update(_values_of_process)
