"""What is verified: layouts, and the ways of computing under which each must give the gradients of one process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from shardwright.architecture import ForeignShape, ModelShape
from shardwright.config.layout import LayoutSection
from shardwright.config.load import parse_layout
from shardwright.config.schema import RecomputeKind
from shardwright.errors import ArchitectureError, LayoutError
from shardwright.layout import Layout, resolve_layout
from shardwright.model.routing import ExpertRules

Dtype = Literal["float32", "float64"]
DTYPES: tuple[Dtype, ...] = ("float32", "float64")
DROPOUT = 0.1


@dataclass(frozen=True)
class Case:
    """One way of computing a step.

    `documents` packs several documents into a row; `dropout` switches on every dropout of the model; `weights` weighs the tokens'
    losses. Of a sparse model,
    `router_losses` switches balance and z-loss on and lets balance biases move, `capacity_factor` drops what an expert has no room
    for, and `idle_experts` begins with router (or balance) biases by which no token chooses the second half of the experts.
    """

    accumulation: int = 1
    recompute: RecomputeKind = "none"
    tied: bool = False
    dropout: bool = False
    documents: bool = True
    router_losses: bool = False
    capacity_factor: float | None = None
    idle_experts: bool = False
    weights: bool = False

    def __str__(self) -> str:
        """As shown in tables."""
        words = [f"accumulation {self.accumulation}"]
        words += [f"{self.recompute} recompute"] if self.recompute != "none" else []
        words += ["tied" if self.tied else "untied"]
        words += ["dropout"] if self.dropout else []
        words += ["documents"] if self.documents else []
        words += ["router losses"] if self.router_losses else []
        words += [f"capacity {self.capacity_factor:g}"] if self.capacity_factor is not None else []
        words += ["idle experts"] if self.idle_experts else []
        words += ["loss weights"] if self.weights else []
        return ", ".join(words)

    @property
    def expert_rules(self) -> ExpertRules:
        """Large coefficients: what the router's losses add must show in its gradient."""
        if not self.router_losses:
            return ExpertRules(capacity_factor=self.capacity_factor)
        return ExpertRules(0.5, 0.1, self.capacity_factor, bias_update_rate=0.02)

    def shape(self, shape: ModelShape) -> ModelShape:
        """The model's shape in this case; a foreign one is what its class makes it."""
        if isinstance(shape, ForeignShape):
            return shape
        rate = DROPOUT if self.dropout else 0.0
        return replace(shape, tied_embeddings=self.tied, embedding_dropout=rate, attention_dropout=rate, residual_dropout=rate)


def choose_cases(tied: bool, *, full: bool) -> list[Case]:
    """Cases for a model that is tied or not: three that meet every value of every option, or the whole product.

    >>> len(choose_cases(True, full=False)), len(choose_cases(True, full=True))
    (3, 36)
    """
    recomputes: tuple[RecomputeKind, ...] = ("none", "selective", "full")
    if full:
        return [
            Case(accumulation, recompute, is_tied, dropout, documents=accumulation != 2)
            for accumulation, recompute, is_tied, dropout in product((1, 2, 3), recomputes, (tied, not tied), (False, True))
        ]
    return [
        Case(1, "none", tied, dropout=False, documents=False),
        Case(2, "selective", not tied, dropout=True, weights=True),
        Case(3, "full", tied, dropout=False),
    ]


def choose_foreign_cases(tied: bool, *, full: bool) -> list[Case]:
    """Cases for a foreign model, whose ties and dropout are its own: three, or the whole product.

    >>> [str(case) for case in choose_foreign_cases(True, full=False)][1]
    'accumulation 2, selective recompute, tied, documents, loss weights'
    """
    recomputes: tuple[RecomputeKind, ...] = ("none", "selective", "full")
    if full:
        return [
            Case(accumulation, recompute, tied, documents=documents)
            for accumulation, recompute, documents in product((1, 2, 3), recomputes, (False, True))
        ]
    steps = enumerate(recomputes, start=1)
    return [Case(number, recompute, tied, documents=number > 1, weights=number == 2) for number, recompute in steps]


def choose_layouts(texts: Iterable[str], most_ranks: int, base: LayoutSection) -> list[Layout]:
    """The layouts to verify.

    Args:
        texts: as given to `--layout`; one that leaves a data degree out stands for every number of ranks that fits it. None at
            all: every layout of data ranks that 2 to `most_ranks` ranks allow.
        most_ranks: upper end of the numbers of ranks.
        base: the recipe's layout, whose sizes (not degrees) are taken where `texts` are silent.

    Raises:
        LayoutError: a layout that no number of ranks fits.

    >>> [str(layout) for layout in choose_layouts(["zero_stage=3"], 3, LayoutSection())]
    ['dp_shard=2,zero_stage=3', 'dp_shard=3,zero_stage=3']
    >>> len(choose_layouts([], 4, LayoutSection()))
    15
    """
    sizes = {name: getattr(base, name) for name in ("wrap_blocks", "prefetch_depth", "max_gathers_in_flight", "bucket_size_bytes")}
    texts = list(texts)
    if not texts:
        return [replace(layout, **sizes) for ranks in range(2, most_ranks + 1) for layout in _data_layouts(ranks)]
    layouts = []
    for text in texts:
        section = LayoutSection.model_validate(sizes | parse_layout(text))
        layouts += _fitting(text, section, most_ranks)
    return list(dict.fromkeys(layouts))


def _data_layouts(ranks: int) -> list[Layout]:
    layouts = [Layout(dp_replicate=ranks)]
    for shard in range(ranks, 1, -1):
        if ranks % shard == 0:
            layouts += [Layout(dp_replicate=ranks // shard, dp_shard=shard, zero_stage=stage) for stage in (1, 2, 3)]
    return layouts


def _fitting(text: str, section: LayoutSection, most_ranks: int) -> list[Layout]:
    found = []
    for ranks in range(2, most_ranks + 1):
        try:
            found.append(resolve_layout(section, ranks))
        except LayoutError:
            continue
    if not found:
        degrees = (section.dp_replicate or 1) * (section.dp_shard or 1)
        raise LayoutError(
            f"no number of ranks from 2 to {most_ranks} fits this layout",
            field="--layout",
            got=text,
            remedy=f"It takes a multiple of {degrees} ranks; verify runs up to --nproc",
        )
    return found


def cut_shape(shape: ModelShape, *, num_layers: int | None = None, hidden_size: int | None = None) -> ModelShape:
    """A smaller model of the same make: its first layers, its width; heads and feed-forward shrink with the width.

    A head keeps its size, and groups of query heads to a key-value head keep theirs.
    """
    if isinstance(shape, ForeignShape) and (num_layers is not None or hidden_size is not None):
        raise ArchitectureError(
            f"a {shape.family} model runs through transformers' class and is not cut down here",
            field="--num-layers" if num_layers is not None else "--hidden-size",
            got=num_layers if num_layers is not None else hidden_size,
            remedy="Give a smaller config.json inline (model.config)",
        )
    if num_layers is not None:
        if num_layers > shape.num_layers:
            raise ArchitectureError(
                "a cut cannot add layers", field="--num-layers", got=num_layers, allowed=f"1 to {shape.num_layers}"
            )
        shape = replace(shape, layers=shape.layers[:num_layers])
    if hidden_size is not None:
        if hidden_size > shape.hidden_size:
            raise ArchitectureError(
                "a cut cannot widen the model", field="--hidden-size", got=hidden_size, allowed=f"1 to {shape.hidden_size}"
            )
        kept = hidden_size / shape.hidden_size
        num_kv_heads = max(1, round(shape.num_kv_heads * kept))
        shape = replace(
            shape,
            hidden_size=hidden_size,
            intermediate_size=max(1, round(shape.intermediate_size * kept)),
            num_kv_heads=num_kv_heads,
            num_heads=num_kv_heads * (shape.num_heads // shape.num_kv_heads),
        )
    return shape
