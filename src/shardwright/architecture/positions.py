"""Rotary embeddings of a config.json, in the older spelling (`rope_theta`, `rope_scaling`) and the newer (`rope_parameters`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.architecture.fields import Fields
from shardwright.architecture.shape import RopeShape
from shardwright.errors import ArchitectureError


def read_ropes(
    fields: Fields, head_dim: int, max_positions: int, *, default_theta: float = 10_000.0, default_fraction: float = 1.0
) -> tuple[RopeShape, ...]:
    """The one rotary embedding of a model whose layers all turn alike."""
    theta = fields.number("rope_theta", default_theta, exclusive=True)
    fraction = fields.number("partial_rotary_factor", default_fraction, exclusive=True)
    older, newer = fields.take("rope_scaling"), fields.take("rope_parameters")
    original = fields.take("original_max_position_embeddings")
    content = newer or older or {}
    if not isinstance(content, Mapping):
        raise ArchitectureError("this must be a mapping", field="rope_parameters" if newer else "rope_scaling", got=repr(content))
    prefix = "rope_parameters." if newer else "rope_scaling."
    return (read_rope(Fields(content, prefix), head_dim, max_positions, theta, fraction, original),)


def read_rope(fields: Fields, head_dim: int, max_positions: int, theta: float, fraction: float, original: Any = None) -> RopeShape:
    """One rotary embedding from its mapping; `theta`, `fraction` and `original` are what the mapping's absence means."""
    older = fields.take("type")
    kind = fields.take("rope_type", older) or older or "default"
    theta = fields.number("rope_theta", theta, exclusive=True)
    rotary_dim = int(head_dim * fields.number("partial_rotary_factor", fraction, exclusive=True))
    reader = _KINDS.get(kind)
    if reader is None:
        raise ArchitectureError(
            "this rope scaling is not supported", field=fields.path("rope_type"), got=repr(kind), allowed=", ".join(_KINDS)
        )
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ArchitectureError(
            "rotation needs an even number of features per head, at most the head's width",
            field=fields.path("partial_rotary_factor"),
            got=rotary_dim,
            allowed=f"2, 4, ..., {head_dim}",
        )
    rope = reader(fields, theta, rotary_dim, max_positions, original)
    fields.refuse_rest(f"`{kind}` rope", ())
    return rope


def _default(fields: Fields, theta: float, rotary_dim: int, max_positions: int, original: Any) -> RopeShape:
    return RopeShape(theta, rotary_dim)


def _linear(fields: Fields, theta: float, rotary_dim: int, max_positions: int, original: Any) -> RopeShape:
    return RopeShape(theta, rotary_dim, "linear", factor=fields.number("factor", exclusive=True))


def _llama3(fields: Fields, theta: float, rotary_dim: int, max_positions: int, original: Any) -> RopeShape:
    low = fields.number("low_freq_factor", exclusive=True)
    high = fields.number("high_freq_factor", exclusive=True)
    if high <= low:
        raise ArchitectureError(
            "this must be above low_freq_factor", field=fields.path("high_freq_factor"), got=high, allowed=f"above {low}"
        )
    return RopeShape(
        theta,
        rotary_dim,
        "llama3",
        factor=fields.number("factor", exclusive=True),
        original_max_position_embeddings=fields.integer("original_max_position_embeddings", original or max_positions),
        low_freq_factor=low,
        high_freq_factor=high,
    )


_KINDS = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
}
