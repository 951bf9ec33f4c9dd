"""Layouts to verify, and the cases (options of a step) in which each is verified."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from shardwright.architecture import MODEL_FAMILIES, HFShape, ModelShape, read_recipe_shape
from shardwright.architecture.adapter_targets import add_adapters
from shardwright.architecture.config_reading import read_recipe_config
from shardwright.config import Recipe
from shardwright.config.layout import LayoutSection
from shardwright.config.recipe import RecomputeKind
from shardwright.config.recipe_loading import parse_layout
from shardwright.errors import ArchitectureError, InputError, LayoutError
from shardwright.layout import Layout, resolve_layout
from shardwright.model.hf.hf_model import read_model_shape
from shardwright.model.routing import ExpertRules
from shardwright.schedule import count_micro_batches

VerificationDtype = Literal["float32", "float64"]
VERIFICATION_DTYPES: tuple[VerificationDtype, ...] = ("float32", "float64")
DROPOUT_RATE = 0.1


@dataclass(frozen=True)
class VerificationCase:
    """Options of one training step.

    `documents` packs several documents into a row; `dropout` enables every dropout of the
    model; `weights` weights the tokens' losses. For a sparse model, `router_losses` enables
    balance loss, z-loss and updates of balance biases, `capacity_factor` drops tokens beyond an
    expert's capacity, and `idle_experts` starts with router or balance biases with which no
    token chooses the second half of the experts.
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
        """Format the case for tables."""
        parts = [f"accumulation {self.accumulation}"]
        parts += [f"{self.recompute} recompute"] if self.recompute != "none" else []
        parts += ["tied" if self.tied else "untied"]
        parts += ["dropout"] if self.dropout else []
        parts += ["documents"] if self.documents else []
        parts += ["router losses"] if self.router_losses else []
        parts += [f"capacity {self.capacity_factor:g}"] if self.capacity_factor is not None else []
        parts += ["idle experts"] if self.idle_experts else []
        parts += ["loss weights"] if self.weights else []
        return ", ".join(parts)

    def fit_schedule(self, layout: Layout) -> VerificationCase:
        """Return the case with as many micro-batches as the layout's pipeline schedule needs.

        >>> VerificationCase(3).fit_schedule(Layout(pp=2, schedule="dualpipev")).accumulation
        4
        """
        if layout.pp == 1:
            return self
        number = count_micro_batches(layout.schedule, layout.pp, self.accumulation)
        return replace(self, accumulation=number)

    @property
    def expert_rules(self) -> ExpertRules:
        """Expert rules with coefficients so large that router losses change the gradient."""
        if not self.router_losses:
            return ExpertRules(capacity_factor=self.capacity_factor)
        return ExpertRules(0.5, 0.1, self.capacity_factor, bias_update_rate=0.02)

    def apply_to_shape(self, shape: ModelShape) -> ModelShape:
        """Return the model's shape in this case; unchanged for a transformers class."""
        if isinstance(shape, HFShape):
            return shape
        rate = DROPOUT_RATE if self.dropout else 0.0
        return replace(
            shape,
            tied_embeddings=self.tied,
            embedding_dropout=rate,
            attention_dropout=rate,
            residual_dropout=rate,
        )


def choose_cases(is_tied: bool, *, is_full: bool) -> list[VerificationCase]:
    """Choose three cases that cover every value of every option, or the whole product.

    >>> len(choose_cases(True, is_full=False)), len(choose_cases(True, is_full=True))
    (3, 36)
    """
    recomputes: tuple[RecomputeKind, ...] = ("none", "selective", "full")
    if is_full:
        return [
            VerificationCase(
                accumulation, recompute, tied_embeddings, dropout, documents=accumulation != 2
            )
            for accumulation, recompute, tied_embeddings, dropout in product(
                (1, 2, 3), recomputes, (is_tied, not is_tied), (False, True)
            )
        ]
    return [
        VerificationCase(1, "none", is_tied, dropout=False, documents=False),
        VerificationCase(2, "selective", not is_tied, dropout=True, weights=True),
        VerificationCase(3, "full", is_tied, dropout=False),
    ]


def choose_hf_cases(is_tied: bool, *, is_full: bool) -> list[VerificationCase]:
    """Choose three cases, or the whole product, for a model of transformers' own class.

    Its class decides about tied embeddings and dropout.

    >>> [str(case) for case in choose_hf_cases(True, is_full=False)][1]
    'accumulation 2, selective recompute, tied, documents, loss weights'
    """
    recomputes: tuple[RecomputeKind, ...] = ("none", "selective", "full")
    if is_full:
        return [
            VerificationCase(accumulation, recompute, is_tied, documents=documents)
            for accumulation, recompute, documents in product((1, 2, 3), recomputes, (False, True))
        ]
    steps = enumerate(recomputes, start=1)
    return [
        VerificationCase(number, recompute, is_tied, documents=number > 1, weights=number == 2)
        for number, recompute in steps
    ]


def choose_layouts(texts: Iterable[str], max_ranks: int, base: LayoutSection) -> list[Layout]:
    """Choose the layouts to verify.

    Args:
        texts: values of `--layout`. One without a data degree stands for every number of ranks
            that fits it. Without any, all data-parallel layouts of 2 to `max_ranks` ranks.
        max_ranks: largest number of ranks.
        base: the recipe's layout; its sizes (not degrees) are the defaults of `texts`.

    Raises:
        LayoutError: no number of ranks fits a layout.

    >>> [str(layout) for layout in choose_layouts(["zero_stage=3"], 3, LayoutSection())]
    ['dp_shard=2,zero_stage=3', 'dp_shard=3,zero_stage=3']
    >>> len(choose_layouts([], 4, LayoutSection()))
    15
    """
    sizes = {
        name: getattr(base, name)
        for name in ("wrap_blocks", "prefetch_depth", "max_gathers_in_flight", "bucket_size_bytes")
    }
    texts = list(texts)
    if not texts:
        return [
            replace(layout, **sizes)
            for ranks in range(2, max_ranks + 1)
            for layout in _list_data_layouts(ranks)
        ]
    layouts = []
    for text in texts:
        section = LayoutSection.model_validate(sizes | parse_layout(text))
        layouts += _resolve_all_sizes(text, section, max_ranks)
    if any(layout.expert_dispatch == "deep_ep" for layout in layouts):
        raise LayoutError(
            "verification runs on CPUs, and DeepEP's kernels need CUDA",
            field="layout.expert_dispatch",
            got="deep_ep",
            remedy="Verify once_per_rank, which sends the same rows",
        )
    return list(dict.fromkeys(layouts))


def _list_data_layouts(num_ranks: int) -> list[Layout]:
    layouts = [Layout(dp_replicate=num_ranks)]
    for shard in range(num_ranks, 1, -1):
        if num_ranks % shard == 0:
            layouts += [
                Layout(dp_replicate=num_ranks // shard, dp_shard=shard, zero_stage=stage)
                for stage in (1, 2, 3)
            ]
    return layouts


def _resolve_all_sizes(text: str, section: LayoutSection, max_ranks: int) -> list[Layout]:
    layouts = []
    for ranks in range(2, max_ranks + 1):
        try:
            layouts.append(resolve_layout(section, ranks))
        except LayoutError as error:
            conflict = error
    if not layouts:
        model_ranks = section.tp * section.pp * section.cp
        needed = model_ranks * (section.dp_replicate or 1) * (section.dp_shard or 1)
        if needed <= max_ranks:  # more ranks do not help
            raise conflict
        raise LayoutError(
            f"no number of ranks from 2 to {max_ranks} fits this layout",
            field="--layout",
            got=text,
            remedy=f"Raise --nproc: the layout needs a multiple of {needed} ranks",
        )
    return layouts


def shrink_shape(
    shape: ModelShape, *, num_layers: int | None = None, hidden_size: int | None = None
) -> ModelShape:
    """Shrink a model to its first layers, or to a width with fewer heads and a smaller MLP.

    Head size and query heads per key-value head stay the same.

    Raises:
        ArchitectureError: The model cannot be reduced, or the sizes are larger than the model's.
    """
    if isinstance(shape, HFShape) and (num_layers is not None or hidden_size is not None):
        raise ArchitectureError(
            f"a {shape.family} model runs through transformers' class and cannot be reduced",
            field="--num-layers" if num_layers is not None else "--hidden-size",
            got=num_layers if num_layers is not None else hidden_size,
            remedy="Give a smaller config.json inline (model.config)",
        )
    if num_layers is not None:
        if num_layers > shape.num_layers:
            raise ArchitectureError(
                "--num-layers cannot add layers to the model",
                field="--num-layers",
                got=num_layers,
                allowed=f"1 to {shape.num_layers}",
            )
        shape = replace(shape, layers=shape.layers[:num_layers])
    if hidden_size is not None:
        if hidden_size > shape.hidden_size:
            raise ArchitectureError(
                "--hidden-size cannot widen the model",
                field="--hidden-size",
                got=hidden_size,
                allowed=f"1 to {shape.hidden_size}",
            )
        share = hidden_size / shape.hidden_size
        num_kv_heads = max(1, round(shape.num_kv_heads * share))
        shape = replace(
            shape,
            hidden_size=hidden_size,
            intermediate_size=max(1, round(shape.intermediate_size * share)),
            num_kv_heads=num_kv_heads,
            num_heads=num_kv_heads * (shape.num_heads // shape.num_kv_heads),
        )
    return shape


def choose_dtypes(requested: Sequence[str]) -> list[VerificationDtype]:
    """Return the requested dtypes of `verify` in the usual order; all if none is requested.

    Raises:
        InputError: a dtype that is not supported.
    """
    unknown = [name for name in requested if name not in VERIFICATION_DTYPES]
    if unknown:
        raise InputError(
            "unsupported dtype",
            field="dtype",
            got=unknown[0],
            allowed=" or ".join(VERIFICATION_DTYPES),
        )
    return [name for name in VERIFICATION_DTYPES if not requested or name in requested]


def read_verification_shape(recipe: Recipe) -> ModelShape:
    """Return the shape of the recipe's model; of an unknown family, as transformers defines
    it."""
    config = read_recipe_config(recipe)
    if config.get("model_type") in MODEL_FAMILIES:
        return read_recipe_shape(recipe)
    return add_adapters(read_model_shape(config, recipe.model), recipe.adapters)
