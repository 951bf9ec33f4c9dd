"""Costs of a model that do not depend on the candidate, computed once per shape.

Kinds of layers, their matmuls, and the parameters on a rank. Equal layers form one kind with a
count, so that a 126-layer model costs as much to evaluate as one layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from operator import add
from typing import NamedTuple

from shardwright.architecture import LayerShape, ModelShape, ParameterSpec
from shardwright.architecture.attention_kernel import AttentionKernelName
from shardwright.architecture.flop_count import (
    EXPERT_ROLES,
    ModelFlops,
    compute_mean_visible_keys,
    count_matmul_parameters,
)
from shardwright.architecture.frozen_names import LayerTraining, list_layer_training
from shardwright.config.low_precision import LowPrecisionRecipe
from shardwright.config.recipe import RecomputeMode
from shardwright.layout import Layout, ParameterLayout, compute_local_shape
from shardwright.layout.saved_results import LayerResults
from shardwright.placement import (
    TENSOR_PARALLEL_STYLES,
    build_parameter_layouts,
    has_whole_block_shards,
)
from shardwright.placement.low_precision import TARGET_OF_ROLE

_FIRST_RANK = {
    "pp": 0,
    "dp_replicate": 0,
    "dp_shard": 0,
    "cp": 0,
    "tp": 0,
    "fsdp": 0,
    "ep": 0,
    "efsdp": 0,
}
"""Rank with the largest shards: `torch.chunk` leaves the smaller remainder to the last
ranks."""


@dataclass(frozen=True)
class Matmul:
    """A weight matrix by which every token is multiplied (for an expert: every token sent to
    it)."""

    role: str
    num_inputs: int
    num_outputs: int
    sharding: str
    """`columns`, `rows`, `vocabulary`, or `residual` if tensor parallelism replicates it."""
    has_bias: bool = False
    is_trained: bool = True


@dataclass(frozen=True)
class LayerKind:
    """Equal layers of a model, of which the same is trained. `slot` is the position among the
    kinds, `count` the number of layers, `saved_results` what they keep under `mixed`
    recomputation."""

    shape: LayerShape
    slot: int
    count: int
    matmuls: tuple[Matmul, ...]
    expert_matmuls: tuple[Matmul, ...]
    num_norms: int
    num_tensors: int
    saved_results: LayerResults = None
    has_backward: bool = True
    """False if no gradient passes through the layers."""
    has_frozen_qk_norms: bool = False
    """True if norms of queries and keys are frozen."""

    def is_frozen(self, *roles: str) -> bool:
        """Return True if the layer has matrices of these roles, and none of them is trained."""
        found = [p.is_trained for p in (*self.matmuls, *self.expert_matmuls) if p.role in roles]
        return bool(found) and not any(found)


def get_layer_recompute(kind: LayerKind, recompute: RecomputeMode) -> RecomputeMode:
    """Return the recomputation of a layer: under `mixed`, `none` if it saves everything."""
    return "none" if recompute == "mixed" and kind.saved_results is None else recompute


class ParameterElements(NamedTuple):
    """Elements of some parameters on the rank with the most: `local` is its tensor- and
    expert-parallel shard, `sharded` the ZeRO shard of that. `expert_*` are the elements of
    experts among them, `local_matrices` those of tensors with two or more dims (of `local`),
    `movable` and `movable_sharded` those of matrices that `offload.parameters` moves, `in_rows` and
    `in_blocks_*` those of matrices whose ZeRO shards are equal numbers of whole rows, or of blocks
    of so many rows (of `local`)."""

    local: float = 0.0
    sharded: float = 0.0
    expert_local: float = 0.0
    expert_sharded: float = 0.0
    local_matrices: float = 0.0
    movable: float = 0.0
    movable_sharded: float = 0.0
    in_rows: float = 0.0
    in_blocks_16: float = 0.0
    in_blocks_32: float = 0.0
    in_blocks_128: float = 0.0

    def add(self, other: ParameterElements) -> ParameterElements:
        """Return the sum."""
        return _make_elements(map(add, self, other))

    def multiply(self, count: float) -> ParameterElements:
        """Return `count` times the elements."""
        return _make_elements([elements * count for elements in self])

    def count_in_blocks(self, block_rows: int) -> float:
        """Return the elements of matrices whose ZeRO shards are whole blocks of so many rows."""
        by_rows = {
            1: self.in_rows,
            16: self.in_blocks_16,
            32: self.in_blocks_32,
            128: self.in_blocks_128,
        }
        return by_rows[block_rows]


_make_elements = partial(tuple.__new__, ParameterElements)
"""As `ParameterElements._make`, in half of its time."""


@dataclass(frozen=True)
class ParameterElementsByPart:
    """Elements on a rank: for one layer of each kind, for parameters before the layers, and for
    those after them."""

    layers: tuple[ParameterElements, ...]
    embedding: ParameterElements
    head: ParameterElements
    """Elements of the final norm and the head. With tied embeddings, of the norm alone."""

    def sum_layers(self, counts: Sequence[int]) -> ParameterElements:
        """Sum the elements of so many layers of each kind."""
        total = ParameterElements()
        for layer, count in zip(self.layers, counts, strict=True):
            total = total.add(layer.multiply(count))
        return total


class ModelFacts:
    """A model shape with its layers grouped into kinds.

    Layers of one kind are equal, keep the same results (`saved_results`, one per layer), and the
    same of them is frozen (`frozen_names`, of the whole model).
    """

    def __init__(
        self,
        shape: ModelShape,
        saved_results: tuple[LayerResults, ...] | None = None,
        frozen_names: Collection[str] = (),
    ) -> None:
        self.shape = shape
        self.frozen_names = frozenset(frozen_names)
        training = [LayerTraining()] * len(shape.layers)
        if self.frozen_names:
            training = list(list_layer_training(shape, self.frozen_names))
        results = saved_results or [None] * len(shape.layers)
        layers = list(zip(shape.layers, results, training, strict=True))
        counts = Counter(layers)
        self.unique_layers = tuple(layer for layer, _, _ in counts)
        self.slot_of_layer = tuple(
            map({layer: slot for slot, layer in enumerate(counts)}.__getitem__, layers)
        )
        # One layer of each kind has all parameters of the model, except for the layer number.
        self.sample = replace(shape, layers=self.unique_layers)
        self.sample_parameters = self.sample.list_parameters()
        self._frozen_samples = self._list_frozen_samples([part for _, _, part in counts])
        self.kinds = tuple(
            self._build_layer_kind(slot, layer, count, saved_results, part.has_backward)
            for slot, ((layer, saved_results, part), count) in enumerate(counts.items())
        )
        self._element_counts: dict[tuple[int, ...], ParameterElementsByPart] = {}
        self._flops_per_token: dict[int, float] = {}
        self.pipeline_cache: dict[tuple[object, ...], object] = {}
        """Cache of `planner.time.pipeline`."""
        self.kernel_cache: dict[tuple[object, ...], AttentionKernelName] = {}
        """Cache of `planner.memory.attention_activations`."""
        self.activation_cache: dict[tuple[object, ...], object] = {}
        """Cache of `planner.memory.activations`."""

    def _list_frozen_samples(self, training: list[LayerTraining]) -> frozenset[str]:
        """List the names of frozen parameters of the sample: of one layer of each kind."""
        names = {
            spec.name
            for spec in self.sample_parameters
            if spec.layer is None and spec.name in self.frozen_names
        }
        for slot, part in enumerate(training):
            specs = [spec for spec in self.sample_parameters if spec.layer == slot]
            names.update(specs[place].name for place in part.frozen_places)
        return frozenset(names)

    def _build_layer_kind(
        self,
        slot: int,
        layer: LayerShape,
        count: int,
        saved_results: LayerResults,
        has_backward: bool,
    ) -> LayerKind:
        specs = [spec for spec in self.sample_parameters if spec.layer == slot]
        products = [
            self._build_matmul(spec, specs)
            for spec in specs
            if len(spec.shape) >= 2 and not spec.is_bias
        ]
        return LayerKind(
            shape=layer,
            slot=slot,
            count=count,
            matmuls=tuple(product for product in products if product.role not in EXPERT_ROLES),
            expert_matmuls=tuple(product for product in products if product.role in EXPERT_ROLES),
            num_tensors=len(specs),
            num_norms=sum(spec.role == "norm" and not spec.is_bias for spec in specs),
            saved_results=saved_results,
            has_backward=has_backward,
            has_frozen_qk_norms=any(
                spec.role in ("query_norm", "key_norm") and spec.name in self._frozen_samples
                for spec in specs
            ),
        )

    def _build_matmul(self, spec: ParameterSpec, siblings: list[ParameterSpec]) -> Matmul:
        first, second = spec.shape[-2:]
        expert = spec.role in EXPERT_ROLES
        layout = (
            self.shape.experts.matrix_layout
            if expert and self.shape.experts
            else self.shape.matrix_layout
        )
        num_out, num_in = (first, second) if layout == "out_in" else (second, first)
        biased = any(other.is_bias and other.role == spec.role for other in siblings)
        return Matmul(
            spec.role,
            num_in,
            num_out,
            TENSOR_PARALLEL_STYLES.get(spec.role, "residual"),
            biased,
            spec.name not in self._frozen_samples,
        )

    def count_local_matrices(self, kind: LayerKind, product: Matmul, ep: int) -> float:
        """Count the matrices of a product that a rank stores: one per local expert, otherwise 1."""
        if product not in kind.expert_matmuls:
            return 1.0
        assert self.shape.experts is not None
        return self.shape.experts.num_experts / ep

    @cached_property
    def head(self) -> Matmul:
        """Output projection to the vocabulary."""
        role = "embedding" if self.shape.tied_embeddings else "head"
        return Matmul(
            "head",
            self.shape.hidden_size,
            self.shape.vocab_size,
            "vocabulary",
            is_trained=self._is_any_trained(role),
        )

    @cached_property
    def trained_parameters(self) -> tuple[ParameterSpec, ...]:
        """Parameters of `sample_parameters` that are not frozen."""
        return tuple(
            spec for spec in self.sample_parameters if spec.name not in self._frozen_samples
        )

    @cached_property
    def is_embedding_trained(self) -> bool:
        """True if the table of token embeddings is trained."""
        return self._is_any_trained("embedding")

    @cached_property
    def has_hidden_gradient(self) -> bool:
        """True if the loss needs the gradient of the head's input: more than the head is
        trained."""
        return any(kind.has_backward for kind in self.kinds) or self._is_any_trained("norm")

    def _is_any_trained(self, *roles: str) -> bool:
        """Return True if a parameter outside the layers that has one of the roles is trained."""
        return any(
            spec.name not in self._frozen_samples
            for spec in self.sample_parameters
            if spec.layer is None and spec.role in roles
        )

    @cached_property
    def num_parameters(self) -> int:
        """Number of parameters of the whole model."""
        per_kind = [0] * len(self.kinds)
        rest = 0
        for spec in self.sample_parameters:
            if spec.layer is None:
                rest += spec.num_elements
            else:
                per_kind[spec.layer] += spec.num_elements
        return rest + sum(
            kind.count * elements for kind, elements in zip(self.kinds, per_kind, strict=True)
        )

    def compute_flops_per_token(self, tokens: int, *, is_frozen: bool = False) -> float:
        """Compute `ModelShape.count_flops_per_token` for documents of `tokens`.

        Frozen matrices need no weight gradient: 4 FLOPs per element instead of 6.
        """
        saved = 2.0 * self._num_matmul_parameters if is_frozen else 0.0
        if tokens not in self._flops_per_token:
            self._flops_per_token[tokens] = self._model_flops.count_per_token(tokens)
        return self._flops_per_token[tokens] - saved

    @cached_property
    def _model_flops(self) -> ModelFlops:
        return self.shape.count_flops(self.frozen_names)

    @cached_property
    def _num_matmul_parameters(self) -> float:
        return count_matmul_parameters(
            self.shape.list_parameters(),
            is_tied=self.shape.tied_embeddings,
            active_share=self.shape.active_share,
        )

    def compute_mean_visible_keys(self, kind: LayerKind, tokens: int) -> float:
        """Compute the mean number of keys that a token of a causal document of `tokens` attends
        to."""
        return compute_mean_visible_keys(tokens, kind.shape.window)

    def count_elements(
        self, layout: Layout, *, should_skip_frozen: bool = False
    ) -> ParameterElementsByPart:
        """Count the elements on the rank of a stage with the most, from
        `placement.build_parameter_layouts`: of all parameters, or of those that are not frozen."""
        skipped = self._frozen_samples if should_skip_frozen else frozenset()
        key = (layout.tp, layout.ep, layout.fsdp, layout.zero_stage >= 1, bool(skipped))
        if key not in self._element_counts:
            specs = [spec for spec in self.sample_parameters if spec.name not in skipped]
            self._element_counts[key] = self._count_elements(layout, specs)
        return self._element_counts[key]

    def _count_elements(
        self, layout: Layout, specs: Collection[ParameterSpec]
    ) -> ParameterElementsByPart:
        single_stage = replace(layout, pp=1, dp_replicate=1)
        layouts = build_parameter_layouts(self.sample, single_stage)
        layers = [ParameterElements() for _ in self.kinds]
        embedding = ParameterElements()
        head = ParameterElements()
        for spec in specs:
            part = _count_parameter_elements(layouts[spec.name], spec, single_stage)
            if spec.layer is not None:
                layers[spec.layer] = layers[spec.layer].add(part)
            elif spec.role in ("embedding", "positions"):
                embedding = embedding.add(part)
            else:
                head = head.add(part)
        return ParameterElementsByPart(tuple(layers), embedding, head)


def _count_parameter_elements(
    parameter_layout: ParameterLayout, spec: ParameterSpec, layout: Layout
) -> ParameterElements:
    whole = 1.0
    shard = 1.0
    local_shape = compute_local_shape(parameter_layout, layout, _FIRST_RANK, with_zero=False)
    for size in local_shape:
        whole *= size
    for size in compute_local_shape(parameter_layout, layout, _FIRST_RANK):
        shard *= size
    matrices = whole if len(spec.shape) >= 2 else 0.0
    can_move = spec.layer is not None and spec.is_product_matrix
    if spec.role in ("projection", "other"):  # of transformers' own classes, which move no weights
        can_move = False
    moved = (whole, shard) if can_move else (0.0, 0.0)
    experts = (whole, shard) if spec.role in EXPERT_ROLES else (0.0, 0.0)
    num_shards = layout.fsdp // (layout.ep if spec.role in EXPERT_ROLES else 1)
    can_be_coded = spec.role in TARGET_OF_ROLE and not spec.is_bias and num_shards > 1
    coded = [
        whole * (can_be_coded and has_whole_block_shards(recipe, local_shape, num_shards))
        for recipe in _RECIPES_BY_BLOCK
    ]
    return ParameterElements(whole, shard, *experts, matrices, *moved, *coded)


_RECIPES_BY_BLOCK: tuple[LowPrecisionRecipe, ...] = (
    "rowwise_with_gw_hp",
    "nvfp4",
    "mxfp8",
    "blockwise",
)
"""Recipes with blocks of 1, 16, 32 and 128 rows of a weight."""


@lru_cache(maxsize=1024)
def get_model_facts(
    shape: ModelShape,
    saved_results: tuple[LayerResults, ...] | None = None,
    frozen_names: frozenset[str] = frozenset(),
) -> ModelFacts:
    """Return the cached facts of a shape, of the results that its layers keep, and of what is
    frozen."""
    return ModelFacts(shape, saved_results, frozen_names)
