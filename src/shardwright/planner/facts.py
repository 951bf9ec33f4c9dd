"""Costs of a model that do not depend on the candidate, computed once per shape.

Kinds of layers, their matmuls, and the parameters on a rank. Equal layers form one kind with a
count, so that a 126-layer model costs as much to evaluate as one layer.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import add
from typing import NamedTuple

from shardwright.architecture import LayerShape, ModelShape, ParameterSpec
from shardwright.architecture.count import EXPERT_ROLES, matmul_parameters, mean_visible_keys
from shardwright.layout import Layout, ParameterLayout, local_shape
from shardwright.placement import TENSOR_CUTS, place

_ORIGIN = {"pp": 0, "dp_replicate": 0, "dp_shard": 0, "cp": 0, "tp": 0, "fsdp": 0, "ep": 0, "efsdp": 0}
"""Rank with the largest shards: `torch.chunk` leaves the smaller remainder to the last
ranks."""


@dataclass(frozen=True)
class Product:
    """A weight matrix by which every token is multiplied (for an expert: every token sent to
    it)."""

    role: str
    num_in: int
    num_out: int
    cut: str
    """`columns`, `rows`, `vocabulary`, or `residual` if tensor parallelism replicates it."""
    biased: bool = False


@dataclass(frozen=True)
class LayerKind:
    """Equal layers of a model. `slot` is the position among the kinds, `count` the number of
    layers."""

    shape: LayerShape
    slot: int
    count: int
    products: tuple[Product, ...]
    expert_products: tuple[Product, ...]
    num_norms: int
    num_tensors: int


class Held(NamedTuple):
    """Elements of some parameters on the rank with the most: `whole` is its tensor- and
    expert-parallel shard, `shard` the ZeRO shard of that. `expert_*` are the elements of
    experts among them, `matrices` those of tensors with two or more dims (of `whole`)."""

    whole: float = 0.0
    shard: float = 0.0
    expert_whole: float = 0.0
    expert_shard: float = 0.0
    matrices: float = 0.0

    def plus(self, other: Held) -> Held:
        """Return the sum."""
        return Held._make(map(add, self, other))

    def times(self, count: float) -> Held:
        """Return `count` times the elements."""
        return Held._make([elements * count for elements in self])


@dataclass(frozen=True)
class HeldByPart:
    """Elements on a rank: for one layer of each kind, for parameters before the layers, and for
    those after them."""

    layers: tuple[Held, ...]
    embedding: Held
    head: Held
    """Elements of the final norm and the head. With tied embeddings, of the norm alone."""


class ModelFacts:
    """A model shape with its layers grouped into kinds."""

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        counts = Counter(shape.layers)
        self.layer_shapes = tuple(counts)
        self.slot_of_layer = tuple(map({layer: slot for slot, layer in enumerate(counts)}.__getitem__, shape.layers))
        # One layer of each kind has all parameters of the model, except for the layer number.
        self.sample = replace(shape, layers=self.layer_shapes)
        self.sample_parameters = self.sample.parameters()
        self.kinds = tuple(self._kind(slot, layer, counts[layer]) for slot, layer in enumerate(counts))
        self._held: dict[tuple[int, ...], HeldByPart] = {}
        self.pipelines: dict[tuple[object, ...], object] = {}
        """Cache of `planner.pipeline`."""
        self.activations: dict[tuple[object, ...], object] = {}
        """Cache of `planner.activations`."""

    def _kind(self, slot: int, layer: LayerShape, count: int) -> LayerKind:
        specs = [spec for spec in self.sample_parameters if spec.layer == slot]
        products = [self._product(spec, specs) for spec in specs if len(spec.shape) >= 2 and not spec.is_bias]
        return LayerKind(
            shape=layer,
            slot=slot,
            count=count,
            products=tuple(product for product in products if product.role not in EXPERT_ROLES),
            expert_products=tuple(product for product in products if product.role in EXPERT_ROLES),
            num_tensors=len(specs),
            num_norms=sum(spec.role == "norm" and not spec.is_bias for spec in specs),
        )

    def _product(self, spec: ParameterSpec, siblings: list[ParameterSpec]) -> Product:
        first, second = spec.shape[-2:]
        expert = spec.role in EXPERT_ROLES
        layout = self.shape.experts.matrix_layout if expert and self.shape.experts else self.shape.matrix_layout
        num_out, num_in = (first, second) if layout == "out_in" else (second, first)
        biased = any(other.is_bias and other.role == spec.role for other in siblings)
        return Product(spec.role, num_in, num_out, TENSOR_CUTS.get(spec.role, "residual"), biased)

    @cached_property
    def head(self) -> Product:
        """Output projection to the vocabulary."""
        return Product("head", self.shape.hidden_size, self.shape.vocab_size, "vocabulary")

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
        return rest + sum(kind.count * elements for kind, elements in zip(self.kinds, per_kind, strict=True))

    def model_flops_per_token(self, tokens: int, *, frozen: bool = False) -> float:
        """Compute `ModelShape.flops_per_token` for documents of `tokens`.

        Frozen matrices need no weight gradient: 4 FLOPs per element instead of 6.
        """
        saved = 0.0
        if frozen:
            specs = self.shape.parameters()
            saved = 2.0 * matmul_parameters(specs, tied=self.shape.tied_embeddings, active_share=self.shape.active_share)
        return self._flops(tokens) - saved

    @lru_cache(maxsize=64)  # noqa: B019 - one cache entry per model, and there are few models
    def _flops(self, sequence_length: int) -> float:
        return self.shape.flops_per_token(sequence_length)

    def visible_keys(self, kind: LayerKind, tokens: int) -> float:
        """Compute the mean number of keys that a token of a causal document of `tokens` attends
        to."""
        return mean_visible_keys(tokens, kind.shape.window)

    def held(self, layout: Layout) -> HeldByPart:
        """Count the elements on the rank of a stage with the most, from `placement.place`."""
        key = (layout.tp, layout.ep, layout.fsdp, layout.zero_stage >= 1)
        if key not in self._held:
            self._held[key] = self._hold(layout)
        return self._held[key]

    def _hold(self, layout: Layout) -> HeldByPart:
        single_stage = replace(layout, pp=1, dp_replicate=1)
        layouts = place(self.sample, single_stage)
        layers = [Held() for _ in self.kinds]
        embedding = Held()
        head = Held()
        for spec in self.sample_parameters:
            part = _hold_one(layouts[spec.name], spec, single_stage)
            if spec.layer is not None:
                layers[spec.layer] = layers[spec.layer].plus(part)
            elif spec.role in ("embedding", "positions"):
                embedding = embedding.plus(part)
            else:
                head = head.plus(part)
        return HeldByPart(tuple(layers), embedding, head)


def _hold_one(placed: ParameterLayout, spec: ParameterSpec, layout: Layout) -> Held:
    whole = 1.0
    shard = 1.0
    for size in local_shape(placed, layout, _ORIGIN, zero=False):
        whole *= size
    for size in local_shape(placed, layout, _ORIGIN):
        shard *= size
    matrices = whole if len(spec.shape) >= 2 else 0.0
    if spec.role in EXPERT_ROLES:
        return Held(whole, shard, whole, shard, matrices)
    return Held(whole, shard, matrices=matrices)


@lru_cache(maxsize=1024)
def facts_of(shape: ModelShape) -> ModelFacts:
    """Return the cached facts of a shape."""
    return ModelFacts(shape)
