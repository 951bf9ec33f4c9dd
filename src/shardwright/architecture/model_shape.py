"""Shape of a decoder as one frozen value, with every parameter by name. Torch-free.

Families differ only in the values of these fields: decoder, counts and sharding read fields and
never the family's name.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from shardwright.architecture import flop_count
from shardwright.architecture.adapter_shape import AdapterShape, add_adapter_parameters
from shardwright.architecture.expert_shape import ExpertShape, build_expert_parameters
from shardwright.architecture.latent_shape import LatentShape, build_latent_parameters
from shardwright.architecture.module_names import LLAMA, ModuleNames
from shardwright.architecture.nf4_layout import pack_parameters
from shardwright.architecture.parameter_spec import (
    NormalInit,
    OnesInit,
    ParameterInit,
    ParameterRole,
    ParameterSpec,
    ZerosInit,
)
from shardwright.errors import ArchitectureError

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True)
class RopeShape:
    """Rotation frequencies of one rotary embedding.

    For longrope `short_factors` divide the frequency of each feature pair in documents of at
    most `original_max_position_embeddings` tokens, `long_factors` in longer ones.
    `attention_factor` multiplies cos and sin.
    """

    theta: float
    rotary_dim: int
    kind: Literal["default", "linear", "llama3", "yarn", "longrope"] = "default"
    factor: float = 1.0
    attention_factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class LayerShape:
    """Properties that may differ between layers.

    `window` is the number of tokens that a token attends to, itself included; None for all
    preceding tokens. `rope` is an index into `ModelShape.ropes`; None for no rotary embedding.
    `attention_scale` multiplies the products of queries and keys. `sparse` layers have experts
    in place of one feed-forward.
    """

    attention_scale: float
    window: int | None = None
    rope: int | None = None
    sparse: bool = False


@dataclass(frozen=True)
class ModelShape:
    """Complete description of a decoder and its parameters, without their values.

    `matrix_layout` is `[out, in]` (Linear) or `[in, out]` (GPT-2's Conv1D). `qkv_layout` is the
    order of a fused projection's features: "blocks" for all queries, then all keys, then all
    values; "heads" for q, k, v of head 0, then of head 1 and so on. `norm_offset` is added to a
    norm's weight (Gemma's 1 + w). `qk_norm` normalises queries and keys per head, or over the
    full width before it is split into heads. With `latent`, `head_dim` is the width of a query
    head. `attention_sinks` are learned logits, one per head, that enter the softmax denominator
    without a value. `experts` describes the sparse layers. With `adapters`, all other
    parameters are frozen.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    layers: tuple[LayerShape, ...]
    ropes: tuple[RopeShape, ...] = ()
    names: ModuleNames = LLAMA
    activation: Activation = "silu"
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    norm_bias: bool = False
    qk_norm: Literal["head", "full"] | None = None
    qkv_layout: Literal["separate", "blocks", "heads"] = "separate"
    matrix_layout: Literal["out_in", "in_out"] = "out_in"
    parallel_residual: bool = False
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    tied_embeddings: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    attention_soft_cap: float | None = None
    attention_sinks: bool = False
    latent: LatentShape | None = None
    experts: ExpertShape | None = None
    adapters: AdapterShape | None = None
    final_soft_cap: float | None = None
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    initializer_range: float = 0.02
    residual_init_std: float | None = None
    padding_row: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict, hash=False, compare=False, repr=False)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Attention window of each layer, in tokens; None for a layer without one."""
        return tuple(layer.window for layer in self.layers)

    @property
    def num_layers(self) -> int:
        """Number of decoder blocks."""
        return len(self.layers)

    @property
    def query_width(self) -> int:
        """Features of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Features of all key (or value) heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Features of all heads' outputs, the input width of attention's output projection."""
        return self.query_width if self.latent is None else self.num_heads * self.latent.value_dim

    @property
    def cache_widths(self) -> tuple[int, int, int]:
        """Sizes of one token in a layer's cache: heads, width of keys and width of values.

        For latent attention: 1, width of the latent and width of the rotated key.
        """
        if self.latent is not None:
            return 1, self.latent.key_value_rank, self.latent.rope_dim
        return self.num_kv_heads, self.head_dim, self.head_dim

    @property
    def is_gated(self) -> bool:
        """True if the feed-forward multiplies an activated gate with a second projection."""
        return self.names.gate is not None or self.names.gate_up is not None

    @property
    def is_block_end_read(self) -> bool:
        """True if the backward pass reads the result of a block's last product: a norm or dropout
        follows it."""
        return self.names.post_mlp_norm is not None or self.residual_dropout > 0.0

    @property
    def tied_names(self) -> dict[str, str]:
        """Names that a checkpoint may omit -> the parameter that they are tied to."""
        if not self.tied_embeddings:
            return {}
        return {f"{self.names.head}.weight": f"{self.names.root}.{self.names.embedding}.weight"}

    @property
    def base_shape(self) -> ModelShape:
        """Shape of the model without its adapters."""
        return self if self.adapters is None else replace(self, adapters=None)

    def list_parameters(self) -> tuple[ParameterSpec, ...]:
        """List all parameters in the decoder's order, adapters after their matrix.

        A tied parameter is listed once, under the name of the parameter it is tied to.
        """
        specs = map(self._find_fp32_folders, _build_parameters(self))
        if self.adapters is None:
            return tuple(specs)
        adapted = add_adapter_parameters(specs, self.adapters, self.is_in_out)
        return tuple(adapted if self.adapters.quantize is None else pack_parameters(adapted))

    def _find_fp32_folders(self, spec: ParameterSpec) -> ParameterSpec:
        if spec.role in self.names.fp32_roles:
            return replace(spec, fp32_folders=("bf16", "fp16"))
        if spec.role in self.names.fp32_roles_in_fp16:
            return replace(spec, fp32_folders=("fp16",))
        return spec

    def is_in_out(self, spec: ParameterSpec) -> bool:
        """Return True if a matrix, or the matrix of each expert, is stored `[in, out]`."""
        if spec.role in flop_count.EXPERT_ROLES:
            assert self.experts is not None
            return self.experts.matrix_layout == "in_out"
        return self.matrix_layout == "in_out"

    @property
    def num_parameters(self) -> int:
        """Number of elements of all parameters, tied ones counted once."""
        return sum((spec.packed_matrix or spec).num_elements for spec in self.list_parameters())

    @property
    def active_share(self) -> float:
        """Fraction of a sparse layer's experts that one token uses; 1 for a dense model."""
        return 1.0 if self.experts is None else self.experts.active_share

    def count_flops_per_token(
        self, sequence_length: int, frozen_names: Collection[str] = ()
    ) -> float:
        """Count forward and backward model FLOPs per token of a causal sequence.

        Arguments as of `count_flops`, which counts many lengths faster.
        """
        return self.count_flops(frozen_names).count_per_token(sequence_length)

    def count_flops(self, frozen_names: Collection[str] = ()) -> flop_count.ModelFlops:
        """Count forward and backward model FLOPs, for sequences of any length.

        The convention is that of `flop_count`. Only experts that the token uses count. A frozen
        matrix costs 4 FLOPs per token and element, because it gets no gradient. Blocks below all
        trained parameters have no backward pass: 2, and a third of the attention.

        Args:
            frozen_names: Parameters that are not trained; with adapters all others are.
        """
        specs = list(self.base_shape.list_parameters())
        specs += [spec for spec in self.list_parameters() if spec.adapter_part is not None]
        trained = {
            spec.name
            for spec in specs
            if (spec.is_trained and spec.name not in frozen_names)
            and (self.adapters is None or spec.adapter_part is not None)
        }
        first_block = flop_count.find_first_trained_block(specs, trained)
        matmul_flops = flop_count.count_matmul_flops_per_token(
            specs,
            trained,
            first_block,
            is_tied=self.tied_embeddings,
            active_share=self.active_share,
        )
        return flop_count.ModelFlops(
            matmul_flops,
            self.query_width,
            self.value_width,
            tuple((layer.window, index >= first_block) for index, layer in enumerate(self.layers)),
        )

    def check_sequence_length(self, num_tokens: int) -> None:
        """Refuse sequences of more than `max_position_embeddings` tokens."""
        if num_tokens > self.max_position_embeddings:
            raise ArchitectureError(
                "the sequence is longer than the model allows",
                field="training.sequence_length",
                got=num_tokens,
                allowed=f"at most {self.max_position_embeddings} (max_position_embeddings)",
                remedy="Reduce training.sequence_length, or use a model or rope scaling "
                "with more positions",
            )

    def to_config(self) -> dict[str, Any]:
        """Return the config.json that this shape was read from."""
        return copy.deepcopy(dict(self.config))


def _build_parameters(shape: ModelShape) -> Iterator[ParameterSpec]:
    names = shape.names
    std = shape.initializer_range
    root = names.root
    width = shape.hidden_size
    embedding = (shape.vocab_size, width)
    yield ParameterSpec(
        f"{root}.{names.embedding}.weight",
        embedding,
        "embedding",
        None,
        NormalInit(std, shape.padding_row),
    )
    if names.positions is not None:
        positions = (shape.max_position_embeddings, width)
        yield ParameterSpec(
            f"{root}.{names.positions}.weight", positions, "positions", None, NormalInit(std)
        )
    for layer in range(shape.num_layers):
        yield from _build_block_parameters(shape, layer)
    yield from _build_norm_parameters(shape, f"{root}.{names.final_norm}", width, "norm", None)
    if not shape.tied_embeddings:
        yield ParameterSpec(f"{names.head}.weight", embedding, "head", None, NormalInit(std))


def _build_block_parameters(shape: ModelShape, layer: int) -> Iterator[ParameterSpec]:
    names = shape.names
    width = shape.hidden_size
    block = f"{names.root}.{names.layers}.{layer}"
    for norm, specs in (
        (names.pre_attention_norm, None),
        (None, _build_attention_parameters(shape, f"{block}.{names.attention}", layer)),
        (names.post_attention_norm, None),
        (names.pre_mlp_norm, None),
        (None, _build_feed_forward_parameters(shape, f"{block}.{names.mlp}", layer)),
        (names.post_mlp_norm, None),
    ):
        if specs is not None:
            yield from specs
        elif norm is not None:
            yield from _build_norm_parameters(shape, f"{block}.{norm}", width, "norm", layer)


def _build_attention_parameters(
    shape: ModelShape, module: str, layer: int
) -> Iterator[ParameterSpec]:
    names = shape.names
    width = shape.hidden_size
    q_width = shape.query_width
    kv_width = shape.kv_width
    if shape.latent is not None:
        std = shape.initializer_range
        bias = shape.attention_out_bias
        yield from build_latent_parameters(
            shape.latent, names, module, layer, width, shape.num_heads, std, bias
        )
        return
    if shape.attention_sinks:
        yield ParameterSpec(
            f"{module}.{names.sinks}",
            (shape.num_heads,),
            "sinks",
            layer,
            NormalInit(shape.initializer_range),
        )
    if names.qkv is not None:
        yield from _build_linear_parameters(
            shape,
            f"{module}.{names.qkv}",
            width,
            q_width + 2 * kv_width,
            "qkv",
            layer,
            shape.qkv_bias,
        )
    else:
        yield from _build_linear_parameters(
            shape, f"{module}.{names.query}", width, q_width, "query", layer, shape.qkv_bias
        )
        yield from _build_linear_parameters(
            shape, f"{module}.{names.key}", width, kv_width, "key", layer, shape.qkv_bias
        )
        yield from _build_linear_parameters(
            shape, f"{module}.{names.value}", width, kv_width, "value", layer, shape.qkv_bias
        )
    yield from _build_linear_parameters(
        shape,
        f"{module}.{names.attention_out}",
        q_width,
        width,
        "attention_out",
        layer,
        shape.attention_out_bias,
    )
    if shape.qk_norm is not None:
        is_per_head = shape.qk_norm == "head"
        query_norm_width = shape.head_dim if is_per_head else q_width
        key_norm_width = shape.head_dim if is_per_head else kv_width
        yield from _build_norm_parameters(
            shape, f"{module}.{names.query_norm}", query_norm_width, "query_norm", layer
        )
        yield from _build_norm_parameters(
            shape, f"{module}.{names.key_norm}", key_norm_width, "key_norm", layer
        )


def _build_feed_forward_parameters(
    shape: ModelShape, module: str, layer: int
) -> Iterator[ParameterSpec]:
    if not shape.layers[layer].sparse:
        yield from _build_mlp_parameters(shape, module, layer, shape.intermediate_size)
        return
    assert shape.experts is not None
    yield from build_expert_parameters(
        shape.experts, shape.names, module, layer, shape.hidden_size, shape.initializer_range
    )
    if shape.experts.shared_intermediate_size:
        shared = f"{module}.{shape.names.shared_experts}"
        yield from _build_mlp_parameters(
            shape, shared, layer, shape.experts.shared_intermediate_size
        )


def _build_mlp_parameters(
    shape: ModelShape, module: str, layer: int, inner: int
) -> Iterator[ParameterSpec]:
    names = shape.names
    width = shape.hidden_size
    if names.gate_up is not None:
        yield from _build_linear_parameters(
            shape, f"{module}.{names.gate_up}", width, 2 * inner, "gate_up", layer, shape.mlp_bias
        )
    else:
        if names.gate is not None:
            yield from _build_linear_parameters(
                shape, f"{module}.{names.gate}", width, inner, "gate", layer, shape.mlp_bias
            )
        yield from _build_linear_parameters(
            shape, f"{module}.{names.up}", width, inner, "up", layer, shape.mlp_bias
        )
    yield from _build_linear_parameters(
        shape, f"{module}.{names.down}", inner, width, "down", layer, shape.mlp_bias
    )


def _build_linear_parameters(
    shape: ModelShape,
    module: str,
    num_in: int,
    num_out: int,
    role: ParameterRole,
    layer: int | None,
    has_bias: bool,
) -> Iterator[ParameterSpec]:
    size = (num_out, num_in) if shape.matrix_layout == "out_in" else (num_in, num_out)
    std = shape.initializer_range
    if role in ("attention_out", "down") and shape.residual_init_std is not None:
        std = shape.residual_init_std
    yield ParameterSpec(f"{module}.weight", size, role, layer, NormalInit(std))
    if has_bias:
        yield ParameterSpec(f"{module}.bias", (num_out,), role, layer, ZerosInit())


def _build_norm_parameters(
    shape: ModelShape, module: str, width: int, role: ParameterRole, layer: int | None
) -> Iterator[ParameterSpec]:
    # A norm that adds 1 to its weight is initially the identity if the weight is 0.
    init: ParameterInit = OnesInit() if shape.norm_offset == 0.0 else ZerosInit()
    yield ParameterSpec(f"{module}.weight", (width,), role, layer, init)
    if shape.norm_bias:
        yield ParameterSpec(f"{module}.bias", (width,), role, layer, ZerosInit())
