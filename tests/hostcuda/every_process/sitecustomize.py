"""Gives every Python process of a command the test device: this folder is in its PYTHONPATH.

Compiled code runs the compiler's traced graphs, operation by operation: the device has no Triton.
"""

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path += [str(ROOT), str(ROOT / "src")]

from tests.hostcuda.device import activate  # noqa: E402

activate()

import torch  # noqa: E402

from shardwright.numerics import compilation  # noqa: E402

_compile = torch.compile


def _compile_without_triton(model: Any = None, **arguments: Any) -> Any:
    for name in ("options", "mode"):
        arguments.pop(name, None)
    return _compile(model, **arguments | {"backend": "aot_eager"})


torch.compile = _compile_without_triton  # type: ignore[assignment]
compilation.find_compiler = lambda device: "that of the test device"
