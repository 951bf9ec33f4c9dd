"""Devices whose kernels multiply the operands of each low-precision recipe.

Sources: torch's checks of `scaled_mm` and `scaled_grouped_mm`; NVIDIA's CUDA C++ Programming Guide,
"Compute capabilities".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwright.config.low_precision import LowPrecisionRecipe

Capability = tuple[int, int]

_CAPABILITIES: dict[LowPrecisionRecipe, tuple[Capability, Capability | None]] = {
    "tensorwise": ((8, 9), None),
    "rowwise": ((9, 0), None),
    "rowwise_with_gw_hp": ((9, 0), None),
    "blockwise": ((9, 0), (9, 9)),
    "mxfp8": ((10, 0), None),
    "nvfp4": ((10, 0), None),
}
"""First and last compute capability with a kernel for a recipe's scales; None: no last one."""
_GROUPED_CAPABILITIES: dict[LowPrecisionRecipe, tuple[Capability, ...]] = {
    "rowwise": ((9, 0), (10, 0)),
    "rowwise_with_gw_hp": ((9, 0), (10, 0)),
    "blockwise": ((9, 0),),
    "mxfp8": ((10, 0),),
}
"""Compute capabilities with a kernel for stacked experts. `blockwise` has one product per expert,
of the kernel for one matrix."""
_CPU_RECIPES: tuple[LowPrecisionRecipe, ...] = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
"""Recipes whose scales the CPU kernel takes, in builds of torch that have it: 2.11 has none."""
_GROUPED_BLOCK_FLAGS = ("-DUSE_MSLK", "-DUSE_FBGEMM_GENAI")
"""Flags of builds of torch with a grouped kernel for blocks of 32, since 2.11 and before."""
_FIRST_8BIT_CAPABILITY = (8, 9)
_FIRST_4BIT_CAPABILITY = (10, 0)
_FIRST_BF16_CAPABILITY = (8, 0)
_FIRST_CUDA_OF_BLOCKS = (12, 9)
"""First CUDA release whose cuBLAS takes scales per block."""


@dataclass(frozen=True)
class KernelDevice:
    """Properties of a CUDA device on which its 8-bit and 4-bit kernels depend."""

    name: str
    capability: Capability
    cuda_version: tuple[int, int] | None
    """CUDA release that torch was built for; None for ROCm."""
    has_grouped_blocks: bool = True
    """True if torch was built with a grouped kernel for blocks of 32."""


def describe_device(device: torch.device | None = None) -> KernelDevice:
    """Describe a CUDA device, by default the current one."""
    return KernelDevice(
        torch.cuda.get_device_name(device),
        torch.cuda.get_device_capability(device),
        None if torch.version.hip else parse_cuda_version(torch.version.cuda or "0"),
        any(flag in torch.__config__.show() for flag in _GROUPED_BLOCK_FLAGS),
    )


def parse_cuda_version(text: str) -> tuple[int, int]:
    """Parse a CUDA release.

    >>> parse_cuda_version("12.8"), parse_cuda_version("13")
    ((12, 8), (13, 0))
    """
    major, _, rest = text.partition(".")
    return int(major), int(rest.partition(".")[0] or 0)


def explain_missing_kernel(
    recipe: LowPrecisionRecipe, device: KernelDevice, *, is_grouped: bool = False
) -> str | None:
    """Explain why a device cannot multiply a recipe's operands; None if it can.

    Args:
        is_grouped: of stacked experts.
    """
    place = f"{device.name} (compute capability {format_capability(device.capability)})"
    if device.cuda_version is None:
        return f"{place}: only NVIDIA's formats are supported, and torch is built for ROCm"
    if recipe == "nvfp4" and device.capability < _FIRST_4BIT_CAPABILITY:
        return (
            f"{place} has no 4-bit floating-point units: they begin with "
            f"{format_capability(_FIRST_4BIT_CAPABILITY)} (Blackwell)"
        )
    if device.capability < _FIRST_8BIT_CAPABILITY:
        precisions = "bf16, fp16, TF32 and fp32"
        if device.capability < _FIRST_BF16_CAPABILITY:
            precisions = "fp16 and fp32"
        return (
            f"{place} has no 8-bit floating-point units: it multiplies {precisions}; the units "
            f"begin with {format_capability(_FIRST_8BIT_CAPABILITY)} (Ada, Hopper, Blackwell)"
        )
    first, last = _CAPABILITIES[recipe]
    if device.capability < first or (last is not None and device.capability > last):
        return f"torch has no kernel for {recipe} scales on {place}; {_list_kernels(device)}"
    if recipe in ("blockwise", "mxfp8", "nvfp4") and device.cuda_version < _FIRST_CUDA_OF_BLOCKS:
        built, needed = map(format_capability, (device.cuda_version, _FIRST_CUDA_OF_BLOCKS))
        return f"{recipe} kernels need CUDA {needed}, and this torch is built for CUDA {built}"
    if is_grouped and device.capability not in _GROUPED_CAPABILITIES.get(recipe, ()):
        return f"torch has no grouped kernel for {recipe} scales of experts on {place}"
    if is_grouped and recipe == "mxfp8" and not device.has_grouped_blocks:
        return (
            "this build of torch has no grouped kernel for mxfp8 scales of experts: its compiler "
            f"flags (torch.__config__.show()) have none of {', '.join(_GROUPED_BLOCK_FLAGS)}"
        )
    return None


def explain_missing_cpu_kernel(recipe: LowPrecisionRecipe) -> str | None:
    """Explain why a CPU cannot multiply a recipe's operands; None if it can."""
    if recipe not in _CPU_RECIPES:
        return f"torch has no CPU kernel for {recipe} scales"
    if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU"):
        return f"torch {torch.__version__} has no CPU kernel for 8-bit operands"
    return None


def format_capability(version: tuple[int, int]) -> str:
    """Format a version of two numbers.

    >>> format_capability((9, 0))
    '9.0'
    """
    return f"{version[0]}.{version[1]}"


def _list_kernels(device: KernelDevice) -> str:
    possible = [
        recipe
        for recipe, (first, last) in _CAPABILITIES.items()
        if recipe != "nvfp4"
        and first <= device.capability
        and (last is None or device.capability <= last)
    ]
    return f"it has kernels for {', '.join(possible)}"
