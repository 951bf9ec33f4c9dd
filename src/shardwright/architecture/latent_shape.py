"""Shape and parameters of multi-head latent attention (MLA). Torch-free.

Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.architecture.module_names import ModuleNames
from shardwright.architecture.parameter_spec import (
    NormalInit,
    OnesInit,
    ParameterRole,
    ParameterSpec,
    ZerosInit,
)

LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms over latents. Not the model's: transformers uses its default here."""


@dataclass(frozen=True)
class LatentShape:
    """Widths of latent attention, in features.

    A query or key head has `nope_dim` features without rotary embedding, then `rope_dim` with
    it; the latter are shared by the keys of all heads. A value head has `value_dim` features.
    With `query_rank` None queries are projected from the hidden states without a latent.
    `interleaved` rotates the feature pairs (0, 1), (2, 3)... instead of (i, i + rope_dim / 2).
    """

    query_rank: int | None
    key_value_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool = True


def build_latent_parameters(
    latent: LatentShape,
    names: ModuleNames,
    module: str,
    layer: int,
    width: int,
    num_heads: int,
    std: float,
    bias: bool,
) -> Iterator[ParameterSpec]:
    """Yield projections and norms of one layer's attention in the decoder's order.

    `bias` applies to the projections from and to the hidden states.
    """

    def linear(
        name: str, num_in: int, num_out: int, role: ParameterRole, has_bias: bool
    ) -> Iterator[ParameterSpec]:
        yield ParameterSpec(
            f"{module}.{name}.weight", (num_out, num_in), role, layer, NormalInit(std)
        )
        if has_bias:
            yield ParameterSpec(f"{module}.{name}.bias", (num_out,), role, layer, ZerosInit())

    query_width = num_heads * (latent.nope_dim + latent.rope_dim)
    if latent.query_rank is None:
        yield from linear(names.query, width, query_width, "query", False)
    else:
        yield from linear(names.query_latent, width, latent.query_rank, "query_latent", bias)
        norm = f"{module}.{names.query_latent_norm}.weight"
        yield ParameterSpec(norm, (latent.query_rank,), "query_latent_norm", layer, OnesInit())
        yield from linear(names.query_from_latent, latent.query_rank, query_width, "query", False)
    yield from linear(
        names.key_value_latent,
        width,
        latent.key_value_rank + latent.rope_dim,
        "key_value_latent",
        bias,
    )
    norm = f"{module}.{names.key_value_latent_norm}.weight"
    yield ParameterSpec(norm, (latent.key_value_rank,), "key_value_latent_norm", layer, OnesInit())
    heads_width = num_heads * (latent.nope_dim + latent.value_dim)
    yield from linear(names.key_value, latent.key_value_rank, heads_width, "key_value", False)
    yield from linear(
        names.attention_out, num_heads * latent.value_dim, width, "attention_out", bias
    )
