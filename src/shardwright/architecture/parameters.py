"""One decoder parameter, by name: its shape, what it is for, how it begins and how files hold it. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal


@dataclass(frozen=True)
class Normal:
    """Independent normal values of mean 0; row `zero_row`, where one is named, is zero (an embedding's padding)."""

    std: float
    zero_row: int | None = None


@dataclass(frozen=True)
class Ones:
    """All ones."""


@dataclass(frozen=True)
class Zeros:
    """All zeros."""


@dataclass(frozen=True)
class Uniform:
    """Independent values, uniform between -bound and bound."""

    bound: float


@dataclass(frozen=True)
class RowNorms:
    """The lengths of the rows (one per output) of the matrix that the parameter stands beside."""


@dataclass(frozen=True)
class ByClass:
    """Values that only the code of a foreign model's class knows how to begin."""


@dataclass(frozen=True)
class Codes:
    """The bytes of another matrix's values in 4 bits."""


Init = Codes | Normal | Ones | Zeros | Uniform | RowNorms | ByClass

AdapterPart = Literal["lora_A", "lora_B", "lora_magnitude_vector"]

Role = Literal[
    "embedding", "positions", "head", "norm",
    "query", "key", "value", "qkv", "attention_out", "query_norm", "key_norm", "sinks",
    "query_latent", "query_latent_norm", "key_value_latent", "key_value_latent_norm", "key_value",
    "gate", "up", "gate_up", "down",
    "router", "balance_bias", "expert_gate_up", "expert_down",
    "projection", "other",
]  # fmt: skip


@dataclass(frozen=True)
class FilePiece:
    """One tensor of a weights file, and the box of a parameter that it is: (start, stop) per dimension of the parameter."""

    name: str
    shape: tuple[int, ...]
    box: tuple[tuple[int, int], ...]

    @property
    def num_elements(self) -> int:
        """Elements of the tensor."""
        return prod(self.shape)

    def meet(self, bounds: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...] | None:
        """What the box has in common with a slice of the parameter, both (start, stop) per dimension; None for nothing."""
        common = tuple((max(a, start), min(b, stop)) for (a, b), (start, stop) in zip(self.box, bounds, strict=True))
        return common if all(start < stop for start, stop in common) else None


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter of the decoder: its name and shape, what it is for, and its initial values.

    `layer` is None outside the blocks. A bias carries the role of the module it belongs to; of a foreign model's parameters
    only its class knows the role: here they are `projection` (a matrix of a block that inputs are multiplied with) or `other`.

    `stored` is empty where a weights file holds the parameter under its own name. The parameters of a layer's experts are one
    tensor here, `[experts, sections x rows, columns]`, and many in a file: `stored` then names them, one pattern per section
    (the gate's rows, then the up projection's), with `{expert}` for the number.

    `trained` is False where no gradient reaches the values and a rule of the step sets them; files keep those in fp32.

    A part of an adapter says in `part` which it is, and in `beside` the matrix that it is added to, whose role it shares.
    A matrix that is held as bytes says in `packed` what it is the bytes of; `shape` is that of the bytes.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    layer: int | None
    init: Init
    stored: tuple[str, ...] = ()
    trained: bool = True
    part: AdapterPart | None = None
    beside: ParameterSpec | None = None
    packed: ParameterSpec | None = None

    @property
    def num_elements(self) -> int:
        """Elements of the tensor."""
        return prod(self.shape)

    @property
    def is_bias(self) -> bool:
        """Whether it is added rather than multiplied."""
        return self.name.endswith("bias")

    @property
    def pieces(self) -> tuple[FilePiece, ...]:
        """The file's tensors, in the order in which they fill the parameter.

        >>> spec = ParameterSpec("up_down", (2, 6, 4), "expert_gate_up", 0, Ones(), stored=("{expert}.up", "{expert}.down"))
        >>> [(piece.name, piece.box) for piece in spec.pieces][1:3]
        [('0.down', ((0, 1), (3, 6), (0, 4))), ('1.up', ((1, 2), (0, 3), (0, 4)))]
        """
        if not self.stored:
            return (FilePiece(self.name, self.shape, tuple((0, size) for size in self.shape)),)
        num_experts, rows, *rest = self.shape
        size = rows // len(self.stored)
        whole = tuple((0, length) for length in rest)
        return tuple(
            FilePiece(
                pattern.format(expert=expert),
                (size, *rest),
                ((expert, expert + 1), (section * size, (section + 1) * size), *whole),
            )
            for expert in range(num_experts)
            for section, pattern in enumerate(self.stored)
        )
