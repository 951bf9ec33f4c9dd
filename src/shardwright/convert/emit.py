"""Conversion of a plan to another system's configuration."""

from __future__ import annotations

from collections.abc import Callable

from shardwright.convert import accelerate, deepspeed, megatron, torchtitan
from shardwright.convert.emitted_config import EmitRequest, EmittedConfig
from shardwright.errors import InputError, suggest_name

CONFIG_WRITERS: dict[str, Callable[[EmitRequest], EmittedConfig]] = {
    "deepspeed": deepspeed.write,
    "accelerate": accelerate.write,
    "torchtitan": torchtitan.write,
    "megatron": megatron.write,
}


def emit(system: str, request: EmitRequest) -> EmittedConfig:
    """Return the plan as a configuration of one of `CONFIG_WRITERS`; notes list what it cannot
    express.

    Raises:
        InputError: an unknown system, or 8-bit or 4-bit products.
    """
    check_system(system)
    if request.recipe.precision.kind in ("fp8", "nvfp4"):
        raise InputError(
            "recipes of 8-bit and 4-bit products differ between systems and are not converted",
            field="precision.kind",
            got=request.recipe.precision.kind,
            remedy="Plan with --precision bf16, and set such products in the other system",
        )
    return CONFIG_WRITERS[system](request)


def check_system(system: str) -> None:
    """Raise InputError if the system is unknown."""
    if system not in CONFIG_WRITERS:
        raise InputError(
            "unknown system",
            field="--emit",
            got=system,
            allowed=", ".join(CONFIG_WRITERS),
            remedy=suggest_name(system, CONFIG_WRITERS),
        )
