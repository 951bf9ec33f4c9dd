"""Compilers of torch.compile on this machine, and the choice of `model.compile: auto` from them.

Inductor generates Triton code for CUDA and C++ for a CPU. Triton itself compiles a small C module
for every kernel, with Python's headers, so it needs both in addition to its own package.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
from sysconfig import get_path

import torch

from shardwright.placement.compilation import CompileChoice

_TRITON_CAPABILITY = (7, 0)
"""First CUDA compute capability for which Inductor generates Triton code."""


def find_compiler(device: torch.device) -> str:
    """Find the compiler that Inductor needs: triton on CUDA, a C++ compiler on the CPU.

    Empty if there is none.
    """
    if device.type == "cuda":
        return "triton" if importlib.util.find_spec("triton") else ""
    return _find_program("CXX", "g++", "clang++", "c++")


def find_compiler_obstacle(device: torch.device) -> str | None:
    """Return why torch.compile cannot compile for a device, as one clause; None if it can."""
    if not find_compiler(device):
        return (
            "Triton is not installed" if device.type == "cuda" else "no C++ compiler is installed"
        )
    if device.type != "cuda":
        return None
    capability = torch.cuda.get_device_capability(device)
    # ROCm's architecture numbers are not CUDA's.
    if torch.version.hip is None and capability < _TRITON_CAPABILITY:
        return f"Triton does not support compute capability {capability[0]}.{capability[1]}"
    if not _find_program("CC", "gcc", "clang", "cc"):
        return "no C compiler is installed, which Triton needs"
    if not (Path(get_path("include")) / "Python.h").is_file():
        return "Python's C headers are not installed, which Triton needs"
    return None


def compiles_wide_attention() -> bool:
    """Return True if compilers know the dtype of the sums of fp64 attention on a CPU."""
    rows = torch.empty(1, 1, 1, 1, dtype=torch.float64, device="meta")
    _, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(rows, rows, rows)
    return bool(sums.dtype == torch.float64)


def choose_compilation(device: torch.device) -> CompileChoice:
    """Resolve `model.compile: auto` for a device: on for CUDA if Triton works there."""
    if device.type != "cuda":
        return CompileChoice(False, "the device is a CPU")
    obstacle = find_compiler_obstacle(device)
    if obstacle is not None:
        return CompileChoice(False, obstacle)
    return CompileChoice(True, "the device is CUDA's, and Triton is installed")


def _find_program(variable: str, *names: str) -> str:
    """Return the program that an environment variable names, or else the first one installed."""
    named = os.environ.get(variable)
    return next((name for name in ([named] if named else names) if shutil.which(name)), "")
