"""Low-rank adapters of a decoder's matrices, as one frozen value, with parameters by name.

Torch-free. A matrix W gets A `[rank, in]` and B `[out, rank]`, for W stored `[out, in]` and
`[in, out]` alike; stacked experts get `[E, rank, in]` and `[E, out, rank]`. Names are those of
peft's files without their prefix: `...q_proj.lora_A.weight`. A stacked parameter is not a
module; its adapters are named `...experts.gate_up_proj_lora_A`.

Sources: LoRA, arXiv 2106.09685; rsLoRA, arXiv 2312.03732; DoRA, arXiv 2402.09353.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from shardwright.architecture.flop_count import EXPERT_ROLES
from shardwright.architecture.parameter_spec import (
    AdapterPart,
    ParameterRole,
    ParameterSpec,
    RowNormsInit,
    UniformInit,
    ZerosInit,
)
from shardwright.config.adapter_section import AdapterKind, QuantizeKind

ADAPTABLE_ROLES: tuple[ParameterRole, ...] = (
    "query", "key", "value", "qkv", "attention_out", "query_latent", "key_value_latent",
    "key_value", "gate", "up", "gate_up", "down", "projection", *EXPERT_ROLES,
)  # fmt: skip
"""Roles of matrices that can have adapters: projections of attention, MLP and experts."""


@dataclass(frozen=True)
class AdapterShape:
    """Adapters of one kind and size, for the matrices of `modules`.

    `modules` holds module names; stacked experts are named by their parameter.
    """

    kind: AdapterKind
    rank: int
    alpha: float
    modules: frozenset[str]
    dropout: float = 0.0
    quantize: QuantizeKind | None = None
    """Quantisation of the frozen projections, with or without adapters. None: not quantised."""

    @property
    def scale(self) -> float:
        """Factor of the product B A."""
        return self.alpha / (math.sqrt(self.rank) if self.kind == "rslora" else self.rank)

    @property
    def is_additive(self) -> bool:
        """True if an adapted product is x W + scale x A B, of the same x."""
        return self.kind != "dora" and self.dropout == 0.0

    @property
    def has_row_norms(self) -> bool:
        """True if each use of an adapted matrix also computes norms of its rows."""
        return self.kind == "dora"


def get_module_name(spec: ParameterSpec) -> str:
    """Return the name of the matrix's module; for a stacked parameter its own name."""
    return spec.name.removesuffix(".weight")


def add_adapter_parameters(
    specs: Iterable[ParameterSpec],
    adapters: AdapterShape,
    is_in_out: Callable[[ParameterSpec], bool],
) -> Iterator[ParameterSpec]:
    """Yield the model's parameters, each module's followed by those of its adapters.

    Args:
        is_in_out: returns True for a matrix (or experts' matrices) stored `[in, out]`.
    """
    for _, members in groupby(specs, key=_get_layer_name):
        module_specs = list(members)
        yield from module_specs
        for spec in module_specs:
            if (
                spec.role in ADAPTABLE_ROLES
                and not spec.is_bias
                and get_module_name(spec) in adapters.modules
            ):
                yield from _build_adapter_parts(spec, adapters, is_in_out=is_in_out(spec))


def _get_layer_name(spec: ParameterSpec) -> str:
    """Return the name that a matrix and its bias share."""
    if spec.role in EXPERT_ROLES:
        return spec.name.removesuffix("_bias")
    return spec.name.rpartition(".")[0]


def _build_adapter_parts(
    spec: ParameterSpec, adapters: AdapterShape, *, is_in_out: bool
) -> Iterator[ParameterSpec]:
    *stack, num_out, num_in = spec.shape
    if is_in_out:
        num_out, num_in = num_in, num_out

    def build(
        part: AdapterPart, size: Sequence[int], init: UniformInit | ZerosInit | RowNormsInit
    ) -> ParameterSpec:
        return ParameterSpec(
            build_part_name(spec, part),
            (*stack, *size),
            spec.role,
            spec.layer,
            init,
            adapter_part=part,
            adapted_matrix=spec,
        )

    if adapters.kind == "dora":
        yield build("lora_magnitude_vector", (num_out,), RowNormsInit())
    # nn.Linear's default, which peft uses for A: kaiming_uniform with a = sqrt(5) is uniform
    # within 1 / sqrt(in).
    yield build("lora_A", (adapters.rank, num_in), UniformInit(1.0 / math.sqrt(num_in)))
    yield build("lora_B", (num_out, adapters.rank), ZerosInit())


def build_part_name(spec: ParameterSpec, part: AdapterPart) -> str:
    """Return the parameter name of one part of a matrix's adapter."""
    if spec.role in EXPERT_ROLES:
        return f"{spec.name}_{part}"
    return f"{get_module_name(spec)}.{part}" + (
        "" if part == "lora_magnitude_vector" else ".weight"
    )
