"""Conversion of a plan to another system's configuration."""

from __future__ import annotations

from collections.abc import Callable

from shardwright.errors import InputError, nearest
from shardwright.interop import accelerate, deepspeed, megatron, torchtitan
from shardwright.interop.emitted import Emitted, Subject

SYSTEMS: dict[str, Callable[[Subject], Emitted]] = {
    "deepspeed": deepspeed.write,
    "accelerate": accelerate.write,
    "torchtitan": torchtitan.write,
    "megatron": megatron.write,
}


def emit(system: str, subject: Subject) -> Emitted:
    """Return the plan as a configuration of one of `SYSTEMS`; notes list what it cannot
    express.

    Raises:
        InputError: an unknown system.
    """
    check_system(system)
    return SYSTEMS[system](subject)


def check_system(system: str) -> None:
    """Raise InputError if the system is unknown."""
    if system not in SYSTEMS:
        guess = nearest(system, SYSTEMS)
        remedy = f"Did you mean `{guess}`?" if guess else None
        raise InputError(
            "unknown system", field="--emit", got=system, allowed=", ".join(SYSTEMS), remedy=remedy
        )
