"""Low-rank adapters beside a decoder's matrices, as one frozen value, and their parameters by name. Torch-free.

A matrix W gets A `[rank, in]` and B `[out, rank]` whatever way W itself lies; a stack of experts gets `[E, rank, in]` and
`[E, out, rank]`. Names are those of peft's files without their prefix: `...q_proj.lora_A.weight`; beside a stacked parameter, which
is no module, `...experts.gate_up_proj_lora_A`.

Sources: LoRA, arXiv 2106.09685; rsLoRA, arXiv 2312.03732; DoRA, arXiv 2402.09353.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from shardwright.architecture.count import EXPERT_ROLES
from shardwright.architecture.parameters import AdapterPart, ParameterSpec, Role, RowNorms, Uniform, Zeros
from shardwright.config.adapters import AdapterKind, QuantizeKind

ADAPTED_ROLES: tuple[Role, ...] = (
    "query", "key", "value", "qkv", "attention_out", "query_latent", "key_value_latent", "key_value",
    "gate", "up", "gate_up", "down", "projection", *EXPERT_ROLES,
)  # fmt: skip
"""Of matrices beside which an adapter can stand: the projections of attention and feed-forward, experts included."""


@dataclass(frozen=True)
class AdapterShape:
    """Adapters of one kind and size beside the matrices named in `modules` (a stack of experts: its parameter's name)."""

    kind: AdapterKind
    rank: int
    alpha: float
    modules: frozenset[str]
    dropout: float = 0.0
    quantize: QuantizeKind | None = None
    """How the frozen projections are held, adapted or not; None is as all else."""

    @property
    def scale(self) -> float:
        """What B A is multiplied with."""
        return self.alpha / (math.sqrt(self.rank) if self.kind == "rslora" else self.rank)


def module_of(spec: ParameterSpec) -> str:
    """The module that a matrix belongs to; a stacked parameter is called by its own name."""
    return spec.name.removesuffix(".weight")


def adapted_parameters(
    specs: Iterable[ParameterSpec], adapters: AdapterShape, lies_in_out: Callable[[ParameterSpec], bool]
) -> Iterator[ParameterSpec]:
    """The parameters of a model with its adapters', these behind those of the module that they stand beside.

    Args:
        lies_in_out: whether a matrix's (or each of its experts') inputs come before its outputs.
    """
    for _, members in groupby(specs, key=lambda spec: spec.name.rpartition(".")[0]):
        own = list(members)
        yield from own
        for spec in own:
            if spec.role in ADAPTED_ROLES and not spec.is_bias and module_of(spec) in adapters.modules:
                yield from _parts(spec, adapters, in_out=lies_in_out(spec))


def _parts(spec: ParameterSpec, adapters: AdapterShape, *, in_out: bool) -> Iterator[ParameterSpec]:
    *stack, num_out, num_in = spec.shape
    if in_out:
        num_out, num_in = num_in, num_out

    def part(which: AdapterPart, size: Sequence[int], init: Uniform | Zeros | RowNorms) -> ParameterSpec:
        return ParameterSpec(part_name(spec, which), (*stack, *size), spec.role, spec.layer, init, part=which, beside=spec)

    if adapters.kind == "dora":
        yield part("lora_magnitude_vector", (num_out,), RowNorms())
    # What nn.Linear begins with, and so peft's A: kaiming_uniform with a = sqrt(5) is uniform within 1 / sqrt(in).
    yield part("lora_A", (adapters.rank, num_in), Uniform(1.0 / math.sqrt(num_in)))
    yield part("lora_B", (num_out, adapters.rank), Zeros())


def part_name(spec: ParameterSpec, part: AdapterPart) -> str:
    """What an adapter's part beside a matrix is called."""
    if spec.role in EXPERT_ROLES:
        return f"{spec.name}_{part}"
    return f"{module_of(spec)}.{part}" + ("" if part == "lora_magnitude_vector" else ".weight")
