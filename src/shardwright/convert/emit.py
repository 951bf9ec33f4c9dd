"""Conversion of a plan to another system's configuration."""

from __future__ import annotations

from collections.abc import Callable

from shardwright.convert import accelerate, deepspeed, megatron, torchtitan
from shardwright.convert.emitted_config import EmitRequest, EmittedConfig
from shardwright.errors import InputError, find_closest_name

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
        InputError: an unknown system.
    """
    check_system(system)
    return CONFIG_WRITERS[system](request)


def check_system(system: str) -> None:
    """Raise InputError if the system is unknown."""
    if system not in CONFIG_WRITERS:
        guess = find_closest_name(system, CONFIG_WRITERS)
        remedy = f"Did you mean `{guess}`?" if guess else None
        raise InputError(
            "unknown system",
            field="--emit",
            got=system,
            allowed=", ".join(CONFIG_WRITERS),
            remedy=remedy,
        )
