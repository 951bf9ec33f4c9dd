"""Readers of rotary embeddings in a config.json.

There are two formats: `rope_theta` with `rope_scaling`, and the newer `rope_parameters`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from shardwright.architecture.config_fields import ConfigFields
from shardwright.architecture.model_shape import RopeShape
from shardwright.errors import ArchitectureError


def read_rope(
    fields: ConfigFields,
    head_dim: int,
    max_positions: int,
    *,
    theta: float,
    fraction: float = 1.0,
    original_max_positions: int | None = None,
) -> RopeShape:
    """Read the rotary embedding of all layers; the keywords are the family's defaults."""
    theta = fields.read_number("rope_theta", theta, is_exclusive=True)
    fraction = fields.read_number("partial_rotary_factor", fraction, is_exclusive=True)
    original = original_max_positions
    if "original_max_position_embeddings" in fields:
        original = fields.read_integer("original_max_position_embeddings")
    name, content = _find_rope_mapping(fields)
    return _read_rope_mapping(
        ConfigFields(content, f"{name}."), head_dim, max_positions, theta, fraction, original
    )


def read_ropes_by_layer_type(
    fields: ConfigFields, head_dim: int, max_positions: int
) -> tuple[RopeShape, RopeShape]:
    """Read Gemma 3's two rotary embeddings: of full and of sliding-window attention layers.

    In the older format `rope_theta` and `rope_scaling` belong to the first, and
    `rope_local_base_freq` is the base of the second; the newer format nests both in
    `rope_parameters`.

    Raises:
        ArchitectureError: The value is not a mapping of layer types.
    """
    full_theta = fields.read_number("rope_theta", 1e6, is_exclusive=True)
    sliding_theta = fields.read_number("rope_local_base_freq", 1e4, is_exclusive=True)
    name, content = _find_rope_mapping(fields)
    if name == "rope_scaling":
        content = {"full_attention": content}
    by_type = ConfigFields(content, f"{name}.")
    ropes = []
    for kind, theta in (("full_attention", full_theta), ("sliding_attention", sliding_theta)):
        inner = by_type.read(kind) or {}
        if not isinstance(inner, Mapping):
            raise ArchitectureError(
                "this must be a mapping", field=by_type.get_path(kind), got=repr(inner)
            )
        ropes.append(
            _read_rope_mapping(
                ConfigFields(inner, f"{by_type.get_path(kind)}."),
                head_dim,
                max_positions,
                theta,
                1.0,
                None,
            )
        )
    by_type.reject_unread("gemma3_text", ())
    return ropes[0], ropes[1]


def _find_rope_mapping(fields: ConfigFields) -> tuple[str, dict[str, Any]]:
    """Return name and content of the file's rope mapping; content is empty without one."""
    older = fields.read("rope_scaling")
    newer = fields.read("rope_parameters")
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


def _read_rope_mapping(
    fields: ConfigFields,
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
    older = fields.read("type")
    kind = fields.read("rope_type", older) or older or "default"
    theta = fields.read_number("rope_theta", theta, is_exclusive=True)
    rotary_dim = int(
        head_dim * fields.read_number("partial_rotary_factor", fraction, is_exclusive=True)
    )
    if not isinstance(kind, str) or kind not in _ROPE_READERS:
        raise ArchitectureError(
            "this rope scaling is not supported",
            field=fields.get_path("rope_type"),
            got=repr(kind),
            allowed=", ".join(_ROPE_READERS),
        )
    if not 0 < 2 * math.ceil(rotary_dim / 2) <= head_dim:
        raise ArchitectureError(
            f"features are rotated in pairs, and {rotary_dim} rotated features do not fit "
            f"into a head of {head_dim}",
            field=fields.get_path("partial_rotary_factor"),
            got=rotary_dim / head_dim,
            allowed=f"{2 / head_dim:.3g} to {head_dim // 2 * 2 / head_dim:.3g}",
        )
    if kind in ("llama3", "yarn", "longrope", "su"):
        value = fields.read("original_max_position_embeddings", max_positions)
        if original is None:
            original = (
                value
                if value is None
                else fields.read_integer("original_max_position_embeddings", max_positions)
            )
    elif "original_max_position_embeddings" in fields:
        fields.read("original_max_position_embeddings")  # the other kinds do not use it
    rope = _ROPE_READERS[kind](fields, theta, rotary_dim, max_positions, original or max_positions)
    fields.reject_unread(f"`{kind}` rope", ())
    return rope


def _read_default_rope(
    fields: ConfigFields, theta: float, rotary_dim: int, max_positions: int, original: int
) -> RopeShape:
    return RopeShape(theta, rotary_dim)


def _read_dynamic_rope(
    fields: ConfigFields, theta: float, rotary_dim: int, max_positions: int, original: int
) -> RopeShape:
    """Read dynamic NTK scaling, which changes the base with the sequence length.

    Up to max_position_embeddings, the longest sequence allowed here, the base is unscaled.
    """
    fields.read_number("factor", is_exclusive=True)
    return RopeShape(theta, rotary_dim)


def _read_linear_rope(
    fields: ConfigFields, theta: float, rotary_dim: int, max_positions: int, original: int
) -> RopeShape:
    return RopeShape(
        theta, rotary_dim, "linear", factor=fields.read_number("factor", is_exclusive=True)
    )


def _read_llama3_rope(
    fields: ConfigFields, theta: float, rotary_dim: int, max_positions: int, original: int
) -> RopeShape:
    low = fields.read_number("low_freq_factor", is_exclusive=True)
    high = fields.read_number("high_freq_factor", is_exclusive=True)
    if high <= low:
        raise ArchitectureError(
            "wrong value",
            field=fields.get_path("high_freq_factor"),
            got=high,
            allowed=f"above low_freq_factor, {low}",
        )
    return RopeShape(
        theta,
        rotary_dim,
        "llama3",
        factor=fields.read_number("factor", is_exclusive=True),
        original_max_position_embeddings=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _read_yarn_rope(
    fields: ConfigFields, theta: float, rotary_dim: int, max_positions: int, original: int
) -> RopeShape:
    """Read YaRN (arXiv 2309.00071).

    The attention factor is section 3.4's 0.1 ln(s) + 1 unless the file sets it.
    """
    factor = fields.read_number("factor", max_positions / original, is_exclusive=True)
    mscale = fields.read("mscale")
    mscale_all = fields.read("mscale_all_dim")
    attention_factor = compute_yarn_temperature(factor, 1.0)
    if mscale and mscale_all:
        attention_factor = compute_yarn_temperature(
            factor, fields.read_number("mscale")
        ) / compute_yarn_temperature(factor, fields.read_number("mscale_all_dim"))
    return RopeShape(
        theta,
        rotary_dim,
        "yarn",
        factor=factor,
        attention_factor=fields.read_number(
            "attention_factor", attention_factor, is_exclusive=True
        ),
        original_max_position_embeddings=original,
        beta_fast=fields.read_number("beta_fast", 32.0, is_exclusive=True),
        beta_slow=fields.read_number("beta_slow", 1.0, is_exclusive=True),
        truncate=fields.read_flag("truncate", True),
    )


def compute_yarn_temperature(factor: float, mscale: float) -> float:
    """Compute YaRN's factor on cos and sin for positions scaled by `factor` (section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _read_longrope_rope(
    fields: ConfigFields, theta: float, rotary_dim: int, max_positions: int, original: int
) -> RopeShape:
    """Read LongRoPE (arXiv 2402.13753).

    It divides the frequency of each feature pair by a factor; short and long documents have
    separate lists.
    """
    factor = fields.read_number("factor", max_positions / original, is_exclusive=True)
    attention_factor = (
        1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    )
    return RopeShape(
        theta,
        rotary_dim,
        "longrope",
        factor=factor,
        attention_factor=fields.read_number(
            "attention_factor", attention_factor, is_exclusive=True
        ),
        original_max_position_embeddings=original,
        short_factors=_read_factors(fields, "short_factor", math.ceil(rotary_dim / 2)),
        long_factors=_read_factors(fields, "long_factor", math.ceil(rotary_dim / 2)),
    )


def _read_factors(fields: ConfigFields, name: str, length: int) -> tuple[float, ...]:
    value = fields.read(name)
    is_valid = isinstance(value, list) and all(
        isinstance(x, int | float) and not isinstance(x, bool) and x > 0 for x in value
    )
    if not is_valid or len(value) != length:
        got = f"{len(value)} of them" if is_valid else repr(value)
        raise ArchitectureError(
            "wrong value",
            field=fields.get_path(name),
            got=got,
            allowed=f"a list of {length} positive numbers, one per pair of features",
        )
    return tuple(float(x) for x in value)


_ROPE_READERS: dict[str, Callable[[ConfigFields, float, int, int, int], RopeShape]] = {
    "default": _read_default_rope,
    "linear": _read_linear_rope,
    "dynamic": _read_dynamic_rope,
    "llama3": _read_llama3_rope,
    "yarn": _read_yarn_rope,
    "longrope": _read_longrope_rope,
    "su": _read_longrope_rope,
}
