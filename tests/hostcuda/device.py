"""The device of this process: load it, and read what it records.

`import tests.hostcuda.activate` loads it; torch must not be imported yet.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.hostcuda.library import load_library

_SOURCE = Path(__file__).parents[2] / "src"
_LISTENER = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
_SDP_BACKENDS = {"flash": 1, "efficient": 2, "math": 0}
"""Numbers of torch's `at::SDPBackend`."""
_loaded: list[ctypes.CDLL] = []
_registrations: list[Any] = []


def is_active() -> bool:
    """Return True if this process has the device."""
    return bool(_loaded)


def activate() -> None:
    """Give this process the device and import torch; again does nothing.

    Processes of multiprocessing's fork server get it too.
    """
    if _loaded:
        return
    library = load_library()
    _loaded.append(library)
    from tests.hostcuda import cuda_kernels, profiler, torch_cuda

    _registrations.append(cuda_kernels.register())
    torch_cuda.install(library)
    profiler.install()
    multiprocessing.set_forkserver_preload(["tests.hostcuda.activate"])


def get_library() -> ctypes.CDLL:
    """Return the library; the device must be active."""
    assert _loaded, "load the device first: import tests.hostcuda.activate"
    return _loaded[0]


Synchronisations = Counter[tuple[str, str]]
"""Number by (operation, innermost line of shardwright, as `training/step.py update_parameters`)."""


_logs: list[Synchronisations] = []


@contextmanager
def log_synchronisations() -> Iterator[Synchronisations]:
    """Count what makes the host wait for the device, on all threads.

    These are `.item()`, `nonzero`, masks as indices, copies that are not asynchronous, and waits
    for events, streams and devices.
    """
    counts: Synchronisations = Counter()
    library = get_library()
    _logs.append(counts)
    library.hostcuda_set_listener(_listener)
    try:
        yield counts
    finally:
        _logs.pop(next(i for i, log in enumerate(_logs) if log is counts))
        if not _logs:
            library.hostcuda_set_listener(_LISTENER())


def _count_synchronisation(operation: bytes) -> None:
    for counts in tuple(_logs):
        counts[operation.decode(), _find_line(sys._getframe(1))] += 1


# It lives as long as the process: another thread may be about to call it when a log ends.
_listener = _LISTENER(_count_synchronisation)


def _find_line(frame: Any) -> str:
    """Format the innermost frame of the package as `model/mlp.py forward`, else of any file."""
    innermost = "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_SOURCE):
            return f"{path.relative_to(_SOURCE / 'shardwright')} {frame.f_code.co_name}"
        frame = frame.f_back
    return innermost


def list_violations() -> list[str]:
    """Return and forget the violations of the stream model since the last call."""
    found = []
    while (violation := get_library().hostcuda_take_violation()) is not None:
        found.append(violation.decode())
    return found


def has_cuda_kernel(operator: Any) -> bool:
    """Return True if CUDA has a kernel for an operator of `torch.ops`."""
    return bool(get_library().hostcuda_has_kernel(operator.name().encode()))


@contextmanager
def count_attention() -> Iterator[Counter[str]]:
    """Count the kernels chosen for `scaled_dot_product_attention`: flash, efficient, math."""
    library = get_library()
    library.hostcuda_reset_attention()
    counts: Counter[str] = Counter()
    yield counts
    for name, choice in _SDP_BACKENDS.items():
        if number := library.hostcuda_count_attention(choice):
            counts[name] = number
