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

from shardwright.architecture.count import EXPERT_ROLES
from shardwright.architecture.parameters import (
    AdapterPart,
    ParameterSpec,
    Role,
    RowNorms,
    Uniform,
    Zeros,
)
from shardwright.config.adapters import AdapterKind, QuantizeKind

ADAPTED_ROLES: tuple[Role, ...] = (
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


def module_of(spec: ParameterSpec) -> str:
    """Return the name of the matrix's module; for a stacked parameter its own name."""
    return spec.name.removesuffix(".weight")


def adapted_parameters(
    specs: Iterable[ParameterSpec],
    adapters: AdapterShape,
    lies_in_out: Callable[[ParameterSpec], bool],
) -> Iterator[ParameterSpec]:
    """Yield the model's parameters, each module's followed by those of its adapters.

    Args:
        lies_in_out: returns True for a matrix (or experts' matrices) stored `[in, out]`.
    """
    for _, members in groupby(specs, key=lambda spec: spec.name.rpartition(".")[0]):
        module_specs = list(members)
        yield from module_specs
        for spec in module_specs:
            if (
                spec.role in ADAPTED_ROLES
                and not spec.is_bias
                and module_of(spec) in adapters.modules
            ):
                yield from _parts(spec, adapters, in_out=lies_in_out(spec))


def _parts(spec: ParameterSpec, adapters: AdapterShape, *, in_out: bool) -> Iterator[ParameterSpec]:
    *stack, num_out, num_in = spec.shape
    if in_out:
        num_out, num_in = num_in, num_out

    def build(
        part: AdapterPart, size: Sequence[int], init: Uniform | Zeros | RowNorms
    ) -> ParameterSpec:
        return ParameterSpec(
            part_name(spec, part),
            (*stack, *size),
            spec.role,
            spec.layer,
            init,
            part=part,
            beside=spec,
        )

    if adapters.kind == "dora":
        yield build("lora_magnitude_vector", (num_out,), RowNorms())
    # nn.Linear's default, which peft uses for A: kaiming_uniform with a = sqrt(5) is uniform
    # within 1 / sqrt(in).
    yield build("lora_A", (adapters.rank, num_in), Uniform(1.0 / math.sqrt(num_in)))
    yield build("lora_B", (num_out, adapters.rank), Zeros())


def part_name(spec: ParameterSpec, part: AdapterPart) -> str:
    """Return the parameter name of one part of a matrix's adapter."""
    if spec.role in EXPERT_ROLES:
        return f"{spec.name}_{part}"
    return f"{module_of(spec)}.{part}" + ("" if part == "lora_magnitude_vector" else ".weight")
