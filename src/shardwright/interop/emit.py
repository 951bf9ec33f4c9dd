"""A plan as another system's configuration."""

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
    """The plan in the words of one of `SYSTEMS`; its notes say what that system is not told.

    Raises:
        InputError: a system that we do not write for.
    """
    check_system(system)
    return SYSTEMS[system](subject)


def check_system(system: str) -> None:
    """Refuse a system that we do not write for."""
    if system not in SYSTEMS:
        guess = nearest(system, SYSTEMS)
        remedy = f"Did you mean `{guess}`?" if guess else None
        raise InputError("no such system", field="--emit", got=system, allowed=", ".join(SYSTEMS), remedy=remedy)
