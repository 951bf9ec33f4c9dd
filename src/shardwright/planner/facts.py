"""What the planner needs to know of a model, worked out once per shape: kinds of layers, their products, their parameters' shares.

Layers that are alike are one kind with a count, so that the cost of a 126-layer model is that of one layer.
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
"""The rank whose pieces are never smaller than another's: `torch.chunk` leaves the remainder to the last ones."""


@dataclass(frozen=True)
class Product:
    """A matrix that every token (of an expert's: every token that is sent to it) is multiplied with."""

    role: str
    num_in: int
    num_out: int
    cut: str
    """`columns`, `rows`, `vocabulary`, or `residual` where tensor parallelism leaves it whole."""
    biased: bool = False


@dataclass(frozen=True)
class LayerKind:
    """Layers that are alike. `index` is the first of them in the model, `slot` its place among the kinds."""

    shape: LayerShape
    slot: int
    count: int
    products: tuple[Product, ...]
    expert_products: tuple[Product, ...]
    num_norms: int
    num_tensors: int


class Held(NamedTuple):
    """Elements that the fullest rank holds of some parameters: `whole` is its tensor- and expert-parallel slice, `shard` what
    ZeRO leaves of that. Of them, `expert_*` belong to experts. `matrices` are those of two dimensions or more (of `whole`)."""

    whole: float = 0.0
    shard: float = 0.0
    expert_whole: float = 0.0
    expert_shard: float = 0.0
    matrices: float = 0.0

    def plus(self, other: Held) -> Held:
        """Both together."""
        return Held._make(map(add, self, other))

    def times(self, count: float) -> Held:
        """So many of them."""
        return Held._make([elements * count for elements in self])


@dataclass(frozen=True)
class HeldByPart:
    """The same for each kind of layer (of one layer), for what stands before the layers, and for what stands after them."""

    layers: tuple[Held, ...]
    embedding: Held
    head: Held
    """The final norm and the head; where the head is the embedding, the norm alone."""


class ModelFacts:
    """A shape, with its layers sorted into kinds."""

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        counts = Counter(shape.layers)
        self.layer_shapes = tuple(counts)
        self.slot_of_layer = tuple(map({layer: slot for slot, layer in enumerate(counts)}.__getitem__, shape.layers))
        # One layer of each kind has every parameter that the whole model has, but for the layer's number.
        self.sample = replace(shape, layers=self.layer_shapes)
        self.sample_parameters = self.sample.parameters()
        self.kinds = tuple(self._kind(slot, layer, counts[layer]) for slot, layer in enumerate(counts))
        self._held: dict[tuple[int, ...], HeldByPart] = {}
        self.pipelines: dict[tuple[object, ...], object] = {}
        """Kept by `planner.pipeline`."""
        self.activations: dict[tuple[object, ...], object] = {}
        """Kept by `planner.activations`."""

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
        """The projection to the vocabulary."""
        return Product("head", self.shape.hidden_size, self.shape.vocab_size, "vocabulary")

    @cached_property
    def num_parameters(self) -> int:
        """Of the whole model."""
        per_kind = [0] * len(self.kinds)
        rest = 0
        for spec in self.sample_parameters:
            if spec.layer is None:
                rest += spec.num_elements
            else:
                per_kind[spec.layer] += spec.num_elements
        return rest + sum(kind.count * elements for kind, elements in zip(self.kinds, per_kind, strict=True))

    def model_flops_per_token(self, tokens: int, *, frozen: bool = False) -> float:
        """As `ModelShape.flops_per_token` in documents of `tokens`. Frozen matrices take no gradient: 4 FLOPs an element, not 6."""
        saved = 0.0
        if frozen:
            specs = self.shape.parameters()
            saved = 2.0 * matmul_parameters(specs, tied=self.shape.tied_embeddings, active_share=self.shape.active_share)
        return self._flops(tokens) - saved

    @lru_cache(maxsize=64)  # noqa: B019 - one per model, and models are few
    def _flops(self, sequence_length: int) -> float:
        return self.shape.flops_per_token(sequence_length)

    def visible_keys(self, kind: LayerKind, tokens: int) -> float:
        """Keys that a token of a causal document of `tokens` sees on average."""
        return mean_visible_keys(tokens, kind.shape.window)

    def held(self, layout: Layout) -> HeldByPart:
        """What the fullest rank of a stage holds, by the descriptors that the engine cuts by (`placement.place`)."""
        key = (layout.tp, layout.ep, layout.fsdp, layout.zero_stage >= 1)
        if key not in self._held:
            self._held[key] = self._hold(layout)
        return self._held[key]

    def _hold(self, layout: Layout) -> HeldByPart:
        alone = replace(layout, pp=1, dp_replicate=1)
        placed = place(self.sample, alone)
        layers = [Held() for _ in self.kinds]
        embedding, head = Held(), Held()
        for spec in self.sample_parameters:
            part = _hold_one(placed[spec.name], spec, alone)
            if spec.layer is not None:
                layers[spec.layer] = layers[spec.layer].plus(part)
            elif spec.role in ("embedding", "positions"):
                embedding = embedding.plus(part)
            else:
                head = head.plus(part)
        return HeldByPart(tuple(layers), embedding, head)


def _hold_one(placed: ParameterLayout, spec: ParameterSpec, layout: Layout) -> Held:
    whole, shard = 1.0, 1.0
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
    """The facts of a shape, kept for the next question about it."""
    return ModelFacts(shape)
