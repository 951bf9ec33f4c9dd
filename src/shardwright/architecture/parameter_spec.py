"""Parameters by name: shape, role, initial values and tensors in files. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal


@dataclass(frozen=True)
class NormalInit:
    """Independent normal values of mean 0; row `zero_row` (an embedding's padding) is zero."""

    std: float
    zero_row: int | None = None


@dataclass(frozen=True)
class OnesInit:
    """Initial values of a norm's weight: all 1.0."""


@dataclass(frozen=True)
class ZerosInit:
    """Initial values of biases, adapters' B and norm weights with offset 1: all 0.0."""


@dataclass(frozen=True)
class UniformInit:
    """Independent values, uniform between -bound and bound."""

    bound: float


@dataclass(frozen=True)
class RowNormsInit:
    """Norm of each row (one per output) of the adapted matrix."""


@dataclass(frozen=True)
class HFClassInit:
    """Initial values that only the code of a transformers class can compute."""


@dataclass(frozen=True)
class QuantisedCodesInit:
    """Bytes of another matrix's values, quantised to 4 bits."""


ParameterInit = (
    QuantisedCodesInit
    | NormalInit
    | OnesInit
    | ZerosInit
    | UniformInit
    | RowNormsInit
    | HFClassInit
)

FolderPrecision = Literal["bf16", "fp16"]
"""Precision of a folder's weights, where less than fp32."""

AdapterPart = Literal["lora_A", "lora_B", "lora_magnitude_vector"]

ParameterRole = Literal[
    "embedding", "positions", "head", "norm",
    "query", "key", "value", "qkv", "attention_out", "query_norm", "key_norm", "sinks",
    "query_latent", "query_latent_norm", "key_value_latent", "key_value_latent_norm", "key_value",
    "gate", "up", "gate_up", "down",
    "router", "balance_bias", "expert_gate_up", "expert_down",
    "projection", "other",
]  # fmt: skip


@dataclass(frozen=True)
class WeightFileSlice:
    """One tensor of a weights file and the slice of a parameter that it holds.

    `box` has (start, stop) per dim of the parameter.
    """

    name: str
    shape: tuple[int, ...]
    box: tuple[tuple[int, int], ...]

    @property
    def num_elements(self) -> int:
        """Elements of the tensor."""
        return prod(self.shape)

    def intersect(self, bounds: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...] | None:
        """Intersect the box with a slice, (start, stop) per dim; None if empty."""
        overlap = tuple(
            (max(a, start), min(b, stop))
            for (a, b), (start, stop) in zip(self.box, bounds, strict=True)
        )
        return overlap if all(start < stop for start, stop in overlap) else None


@dataclass(frozen=True)
class ParameterSpec:
    """Name, shape, role and initial values of one parameter.

    `layer` is None outside the blocks. A bias has the role of its module's matrix. Parameters
    of a transformers class have the role `projection` (a matrix of a block that multiplies
    inputs) or `other`; more is not known of them.

    `file_patterns` is empty if a weights file holds the parameter under its own name. A layer's
    experts are one tensor here, `[experts, sections x rows, columns]`, and many in a file:
    `file_patterns` then has their names, one pattern per section (the gate's rows, then the up
    projection's), with `{expert}` for the expert's number.

    `is_trained` is False if the values get no gradient and the train step sets them by a rule.
    `fp32_folders` are the precisions of folders that store the parameter in fp32 nevertheless.

    For a part of an adapter, `adapter_part` is its kind and `adapted_matrix` the adapted matrix;
    both have the same role. For a quantised matrix, `packed_matrix` is the spec of the original
    matrix, and `shape` the shape of the bytes.
    """

    name: str
    shape: tuple[int, ...]
    role: ParameterRole
    layer: int | None
    init: ParameterInit
    file_patterns: tuple[str, ...] = ()
    is_trained: bool = True
    fp32_folders: tuple[FolderPrecision, ...] = ()
    adapter_part: AdapterPart | None = None
    adapted_matrix: ParameterSpec | None = None
    packed_matrix: ParameterSpec | None = None

    @property
    def num_elements(self) -> int:
        """Elements of the tensor."""
        return prod(self.shape)

    @property
    def is_bias(self) -> bool:
        """True if the parameter is a bias: it is added, not multiplied."""
        return self.name.endswith("bias")

    @property
    def is_block_matrix(self) -> bool:
        """True for a matrix, or a stack of experts' matrices, in a block. Parts of adapters too."""
        num_dims = 3 if self.role in ("expert_gate_up", "expert_down") else 2
        is_matrix = len(self.shape) in (2, num_dims)
        return is_matrix and self.layer is not None and not self.is_bias

    @property
    def is_product_matrix(self) -> bool:
        """True for a matrix that products read in the compute dtype, or packed.

        Not for what is computed in fp32 (norms, biases, routers), nor for parts of adapters.
        """
        return (
            self.adapter_part is None
            and len(self.shape) >= 2
            and not self.is_bias
            and self.role != "router"
        )

    @property
    def file_slices(self) -> tuple[WeightFileSlice, ...]:
        """Tensors of the weights file, in the order in which they fill the parameter.

        >>> patterns = ("{expert}.up", "{expert}.down")
        >>> spec = ParameterSpec("up_down", (2, 6, 4), "expert_gate_up", 0, OnesInit(), patterns)
        >>> [(piece.name, piece.box) for piece in spec.file_slices][1:3]
        [('0.down', ((0, 1), (3, 6), (0, 4))), ('1.up', ((1, 2), (0, 3), (0, 4)))]
        """
        if not self.file_patterns:
            return (
                WeightFileSlice(self.name, self.shape, tuple((0, size) for size in self.shape)),
            )
        num_experts, rows, *rest = self.shape
        size = rows // len(self.file_patterns)
        whole = tuple((0, length) for length in rest)
        return tuple(
            WeightFileSlice(
                pattern.format(expert=expert),
                (size, *rest),
                ((expert, expert + 1), (section * size, (section + 1) * size), *whole),
            )
            for expert in range(num_experts)
            for section, pattern in enumerate(self.file_patterns)
        )
