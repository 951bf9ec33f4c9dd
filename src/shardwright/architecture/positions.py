"""Readers of rotary embeddings in a config.json.

There are two formats: `rope_theta` with `rope_scaling`, and the newer `rope_parameters`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from shardwright.architecture.fields import Fields
from shardwright.architecture.shape import RopeShape
from shardwright.errors import ArchitectureError


def read_rope_of_model(
    fields: Fields,
    head_dim: int,
    max_positions: int,
    *,
    theta: float,
    fraction: float = 1.0,
    original_max_positions: int | None = None,
) -> RopeShape:
    """Read the rotary embedding of all layers; the keywords are the family's defaults."""
    theta = fields.number("rope_theta", theta, exclusive=True)
    fraction = fields.number("partial_rotary_factor", fraction, exclusive=True)
    original = original_max_positions
    if "original_max_position_embeddings" in fields:
        original = fields.integer("original_max_position_embeddings")
    name, content = _mapping(fields)
    return _read_rope(
        Fields(content, f"{name}."), head_dim, max_positions, theta, fraction, original
    )


def read_ropes_by_layer_type(
    fields: Fields,
    head_dim: int,
    max_positions: int,
    *,
    full_theta: float = 1e6,
    sliding_theta: float = 1e4,
) -> tuple[RopeShape, RopeShape]:
    """Read Gemma 3's two rotary embeddings: of full and of sliding-window attention layers.

    In the older format `rope_theta` and `rope_scaling` belong to the first, and
    `rope_local_base_freq` is the base of the second; the newer format nests both in
    `rope_parameters`.
    """
    full_theta = fields.number("rope_theta", full_theta, exclusive=True)
    sliding_theta = fields.number("rope_local_base_freq", sliding_theta, exclusive=True)
    name, content = _mapping(fields)
    if name == "rope_scaling":
        content = {"full_attention": content}
    by_type = Fields(content, f"{name}.")
    ropes = []
    for kind, theta in (("full_attention", full_theta), ("sliding_attention", sliding_theta)):
        inner = by_type.take(kind) or {}
        if not isinstance(inner, Mapping):
            raise ArchitectureError(
                "this must be a mapping", field=by_type.path(kind), got=repr(inner)
            )
        ropes.append(
            _read_rope(
                Fields(inner, f"{by_type.path(kind)}."), head_dim, max_positions, theta, 1.0, None
            )
        )
    by_type.refuse_rest("gemma3_text", ())
    return ropes[0], ropes[1]


def _mapping(fields: Fields) -> tuple[str, dict[str, Any]]:
    """Return name and content of the file's rope mapping; content is empty without one."""
    older = fields.take("rope_scaling")
    newer = fields.take("rope_parameters")
    if older and newer and older != newer:
        raise ArchitectureError(
            "rope_scaling and rope_parameters contradict each other",
            field="rope_parameters",
            got=repr(newer),
            allowed=repr(older),
        )
    name, content = ("rope_parameters", newer) if newer else ("rope_scaling", older or {})
    if not isinstance(content, Mapping):
        raise ArchitectureError("this must be a mapping", field=name, got=repr(content))
    return name, dict(content)


def _read_rope(
    fields: Fields,
    head_dim: int,
    max_positions: int,
    theta: float,
    fraction: float,
    original: int | None,
) -> RopeShape:
    """Read one rotary embedding from its mapping; `theta` and `fraction` are the defaults.

    `original`, if not None, overrides the mapping's original_max_position_embeddings, as in
    transformers.
    """
    older = fields.take("type")
    kind = fields.take("rope_type", older) or older or "default"
    theta = fields.number("rope_theta", theta, exclusive=True)
    rotary_dim = int(head_dim * fields.number("partial_rotary_factor", fraction, exclusive=True))
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ArchitectureError(
            "this rope scaling is not supported",
            field=fields.path("rope_type"),
            got=repr(kind),
            allowed=", ".join(_KINDS),
        )
    if not 0 < 2 * math.ceil(rotary_dim / 2) <= head_dim:
        raise ArchitectureError(
            f"features are rotated in pairs, and {rotary_dim} rotated features do not fit "
            f"into a head of {head_dim}",
            field=fields.path("partial_rotary_factor"),
            got=rotary_dim / head_dim,
            allowed=f"{2 / head_dim:.3g} to {head_dim // 2 * 2 / head_dim:.3g}",
        )
    if kind in ("llama3", "yarn", "longrope", "su"):
        value = fields.take("original_max_position_embeddings", max_positions)
        if original is None:
            original = (
                value
                if value is None
                else fields.integer("original_max_position_embeddings", max_positions)
            )
    elif "original_max_position_embeddings" in fields:
        fields.take("original_max_position_embeddings")  # the other kinds do not use it
    rope = _KINDS[kind](fields, theta, rotary_dim, max_positions, original or max_positions)
    fields.refuse_rest(f"`{kind}` rope", ())
    return rope


def _default(
    fields: Fields, theta: float, rotary_dim: int, max_positions: int, original: int
) -> RopeShape:
    return RopeShape(theta, rotary_dim)


def _dynamic(
    fields: Fields, theta: float, rotary_dim: int, max_positions: int, original: int
) -> RopeShape:
    """Read dynamic NTK scaling, which changes the base with the sequence length.

    Up to max_position_embeddings, the longest sequence allowed here, the base is unscaled.
    """
    fields.number("factor", exclusive=True)
    return RopeShape(theta, rotary_dim)


def _linear(
    fields: Fields, theta: float, rotary_dim: int, max_positions: int, original: int
) -> RopeShape:
    return RopeShape(theta, rotary_dim, "linear", factor=fields.number("factor", exclusive=True))


def _llama3(
    fields: Fields, theta: float, rotary_dim: int, max_positions: int, original: int
) -> RopeShape:
    low = fields.number("low_freq_factor", exclusive=True)
    high = fields.number("high_freq_factor", exclusive=True)
    if high <= low:
        raise ArchitectureError(
            "wrong value",
            field=fields.path("high_freq_factor"),
            got=high,
            allowed=f"above low_freq_factor, {low}",
        )
    return RopeShape(
        theta,
        rotary_dim,
        "llama3",
        factor=fields.number("factor", exclusive=True),
        original_max_position_embeddings=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(
    fields: Fields, theta: float, rotary_dim: int, max_positions: int, original: int
) -> RopeShape:
    """Read YaRN (arXiv 2309.00071).

    The attention factor is section 3.4's 0.1 ln(s) + 1 unless the file sets it.
    """
    factor = fields.number("factor", max_positions / original, exclusive=True)
    mscale = fields.take("mscale")
    mscale_all = fields.take("mscale_all_dim")
    attention_factor = yarn_temperature(factor, 1.0)
    if mscale and mscale_all:
        attention_factor = yarn_temperature(factor, fields.number("mscale")) / yarn_temperature(
            factor, fields.number("mscale_all_dim")
        )
    return RopeShape(
        theta,
        rotary_dim,
        "yarn",
        factor=factor,
        attention_factor=fields.number("attention_factor", attention_factor, exclusive=True),
        original_max_position_embeddings=original,
        beta_fast=fields.number("beta_fast", 32.0, exclusive=True),
        beta_slow=fields.number("beta_slow", 1.0, exclusive=True),
        truncate=fields.flag("truncate", True),
    )


def yarn_temperature(factor: float, mscale: float) -> float:
    """Compute YaRN's factor on cos and sin for positions scaled by `factor` (section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(
    fields: Fields, theta: float, rotary_dim: int, max_positions: int, original: int
) -> RopeShape:
    """Read LongRoPE (arXiv 2402.13753).

    It divides the frequency of each feature pair by a factor; short and long documents have
    separate lists.
    """
    factor = fields.number("factor", max_positions / original, exclusive=True)
    attention_factor = (
        1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    )
    return RopeShape(
        theta,
        rotary_dim,
        "longrope",
        factor=factor,
        attention_factor=fields.number("attention_factor", attention_factor, exclusive=True),
        original_max_position_embeddings=original,
        short_factors=_factors(fields, "short_factor", math.ceil(rotary_dim / 2)),
        long_factors=_factors(fields, "long_factor", math.ceil(rotary_dim / 2)),
    )


def _factors(fields: Fields, name: str, length: int) -> tuple[float, ...]:
    value = fields.take(name)
    is_valid = isinstance(value, list) and all(
        isinstance(x, int | float) and not isinstance(x, bool) and x > 0 for x in value
    )
    if not is_valid or len(value) != length:
        got = f"{len(value)} of them" if is_valid else repr(value)
        raise ArchitectureError(
            "wrong value",
            field=fields.path(name),
            got=got,
            allowed=f"a list of {length} positive numbers, one per pair of features",
        )
    return tuple(float(x) for x in value)


_KINDS: dict[str, Callable[[Fields, float, int, int, int], RopeShape]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
}
