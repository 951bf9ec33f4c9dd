"""Rules under which products of quantised operands are those of one process. No torch."""

from __future__ import annotations

import fnmatch

from shardwright.architecture import HFShape, ModelShape
from shardwright.architecture.parameter_spec import ParameterRole
from shardwright.config.low_precision import (
    LowPrecisionRecipe,
    LowPrecisionSection,
    LowPrecisionTarget,
)
from shardwright.errors import LayoutError, RecipeError
from shardwright.layout import RankGrid, compute_local_boxes
from shardwright.layout.context_method import MAX_CHUNKS_PER_RANK, count_chunks
from shardwright.placement.model_placement import Placement

TARGET_OF_ROLE: dict[ParameterRole, LowPrecisionTarget] = {
    "query": "attention",
    "key": "attention",
    "value": "attention",
    "qkv": "attention",
    "attention_out": "attention",
    "query_latent": "attention",
    "key_value_latent": "attention",
    "key_value": "attention",
    "gate": "mlp",
    "up": "mlp",
    "gate_up": "mlp",
    "down": "mlp",
    "expert_gate_up": "experts",
    "expert_down": "experts",
}
"""Matrices that may multiply quantised operands."""

BLOCK_OF_RECIPE: dict[LowPrecisionRecipe, int] = {"blockwise": 128, "mxfp8": 32, "nvfp4": 16}
"""Elements of a block of weights, of recipes whose blocks have a fixed size."""

TOKEN_BLOCK_OF_RECIPE: dict[LowPrecisionRecipe, int] = {"blockwise": 128, "mxfp8": 32}
"""Tokens of a block, of recipes whose weight gradients have blocks of a fixed size."""

_INVARIANT = "rowwise_with_gw_hp"


def select_scaled_weights(
    shape: ModelShape, section: LowPrecisionSection
) -> dict[str, LowPrecisionTarget]:
    """Select the weights that multiply quantised operands; their kinds of layer by name.

    Raises:
        RecipeError: a pattern matches no such weight, or none is left.
    """
    weights = {
        spec.name: TARGET_OF_ROLE[spec.role]
        for spec in shape.list_parameters()
        if spec.role in TARGET_OF_ROLE
        and TARGET_OF_ROLE[spec.role] in section.targets
        and not spec.is_bias
        and spec.adapter_part is None
    }
    for pattern in section.exclude:
        excluded = fnmatch.filter(weights, pattern)
        if not excluded:
            raise RecipeError(
                f"matches no weight that multiplies {describe_bits(section)} operands",
                field=f"precision.{section.kind}.exclude",
                got=pattern,
                allowed=f"a pattern such as {next(iter(weights), 'model.layers.0.*')}",
            )
        for name in excluded:
            del weights[name]
    if not weights:
        raise RecipeError(
            f"no weight is left that multiplies {describe_bits(section)} operands",
            field=f"precision.{section.kind}",
            got=f"targets {list(section.targets)}, exclude {list(section.exclude)}",
            remedy="Name more targets, exclude less, or use precision.kind: bf16",
        )
    return weights


def check_low_precision(
    placement: Placement, section: LowPrecisionSection, sequence_length: int
) -> None:
    """Check that a recipe's scales are those of one process under a layout.

    Raises:
        LayoutError, RecipeError: names what a scale would depend on, and the alternative.
    """
    if isinstance(placement.shape, HFShape):
        raise RecipeError(
            f"the products of {placement.shape.family} run in transformers' own "
            f"{placement.shape.class_name}",
            field="precision.kind",
            got=section.kind,
            allowed="bf16, fp16, fp32",
        )
    weights = select_scaled_weights(placement.shape, section)
    targets = set(weights.values())
    if section.recipe == "tensorwise" and "experts" in targets:
        raise RecipeError(
            "the rows of an expert depend on the micro-batch and on layout.ep, and one scale "
            "would cover them all",
            field="precision.fp8.recipe",
            got=section.recipe,
            allowed=f"{_INVARIANT}, mxfp8, blockwise, rowwise",
            remedy=f"Use {_INVARIANT}, or leave experts out of precision.fp8.targets",
        )
    if placement.layout.expert_dispatch == "padded" and "experts" in targets:
        raise LayoutError(
            f"padding has undefined values, which products of {describe_bits(section)} operands "
            "would quantise",
            field="layout.expert_dispatch",
            got="padded",
            allowed="whole, halves, once_per_rank",
            remedy=f"Choose another, or leave experts out of precision.{section.kind}.targets",
        )
    _check_token_scales(placement, section)
    _check_partial_gradients(placement, section, targets)
    if section.recipe in TOKEN_BLOCK_OF_RECIPE:
        _check_token_blocks(placement, section, sequence_length)
    if section.recipe in BLOCK_OF_RECIPE:
        for name in weights:
            _check_weight_blocks(placement, section, name)


def describe_bits(section: LowPrecisionSection) -> str:
    """Return `8-bit` or `4-bit`."""
    return "4-bit" if section.kind == "nvfp4" else "8-bit"


def _name_recipe_field(section: LowPrecisionSection) -> str:
    return "precision.kind" if section.kind == "nvfp4" else "precision.fp8.recipe"


def _name_alternative(section: LowPrecisionSection) -> str:
    """Name the recipe that every layout supports, as it is chosen from this section."""
    if section.kind == "nvfp4":
        return f"precision.kind: fp8 with recipe: {_INVARIANT}"
    return f"recipe: {_INVARIANT}"


def _check_token_scales(placement: Placement, section: LowPrecisionSection) -> None:
    """Check that ranks with different tokens never share a scale."""
    layout = placement.layout
    num_ranks = layout.data_ranks * layout.cp
    if has_micro_batch_scales(section) and num_ranks > 1:
        operands = "activations" if section.recipe == "tensorwise" else "weight gradients"
        raise LayoutError(
            f"{section.recipe} scales of {operands} span all tokens of a micro-batch, and "
            f"{num_ranks} ranks have different tokens (data ranks x cp)",
            field="precision.fp8.recipe",
            got=section.recipe,
            allowed=f"{_INVARIANT}, mxfp8, blockwise; {section.recipe} with tp and pp only",
            remedy=f"Use recipe: {_INVARIANT}",
        )


def _check_partial_gradients(
    placement: Placement, section: LowPrecisionSection, targets: set[LowPrecisionTarget]
) -> None:
    """Check that no rank quantises its part of a sum of gradients."""
    shape = placement.shape
    tp = placement.layout.tp
    if tp == 1 or "attention" not in targets:
        return
    remedy = f'Set precision.{section.kind}.targets to ["mlp", "experts"]'
    if shape.latent is not None:
        raise LayoutError(
            "tensor-parallel ranks each have a part of the gradient of the latent projections, "
            "and would quantise the parts",
            field="layout.tp",
            got=tp,
            allowed=f"1 with {describe_bits(section)} attention projections",
            remedy=remedy,
        )
    if tp > shape.num_kv_heads:
        raise LayoutError(
            f"{tp} tensor-parallel ranks share {shape.num_kv_heads} key-value heads; each rank "
            "has only part of their gradient and would quantise that part",
            field="layout.tp",
            got=tp,
            allowed=f"at most {shape.num_kv_heads} with {describe_bits(section)} attention "
            "projections",
            remedy=remedy,
        )


def _check_token_blocks(
    placement: Placement, section: LowPrecisionSection, sequence_length: int
) -> None:
    """Check that no block of tokens spans rows of the batch or context ranks."""
    multiple = compute_token_multiple(placement, section)
    if sequence_length % multiple:
        block = TOKEN_BLOCK_OF_RECIPE[section.recipe]
        raise RecipeError(
            f"weight gradients of {section.recipe} have blocks of {block} tokens, which must lie "
            "within one row" + (" and one rank's part of it" if placement.layout.cp > 1 else ""),
            field="training.sequence_length",
            got=sequence_length,
            allowed=f"multiples of {multiple}",
            remedy=f"Use {max(1, round(sequence_length / multiple)) * multiple}, "
            f"or recipe: {_INVARIANT}",
        )


def has_micro_batch_scales(section: LowPrecisionSection | None) -> bool:
    """Return True if a scale spans all tokens of a micro-batch, padding included."""
    return section is not None and section.recipe in ("tensorwise", "rowwise")


def compute_token_multiple(placement: Placement, section: LowPrecisionSection | None) -> int:
    """Return the number of which row lengths must be a multiple for whole blocks of tokens."""
    if section is None or section.recipe not in TOKEN_BLOCK_OF_RECIPE:
        return 1
    context = placement.context
    layout = placement.layout
    chunks = 1
    if context is not None:
        chunks = (
            count_chunks(context.method, layout.cp)
            if layout.cp_split == "zigzag"
            else MAX_CHUNKS_PER_RANK * layout.cp
        )
    return TOKEN_BLOCK_OF_RECIPE[section.recipe] * chunks


def has_whole_block_shards(
    recipe: LowPrecisionRecipe, shape: tuple[int, ...], num_shards: int
) -> bool:
    """Return True if sharding the first dim leaves equal numbers of whole blocks, or of experts.

    `shape` is that of a weight on one tensor-parallel rank.
    """
    rows = BLOCK_OF_RECIPE.get(recipe, 1) if len(shape) == 2 else 1
    return shape[0] % (rows * num_shards) == 0


def _check_weight_blocks(placement: Placement, section: LowPrecisionSection, name: str) -> None:
    """Check that a weight, and every rank's part of it, has whole blocks."""
    block = BLOCK_OF_RECIPE[section.recipe]
    layout = placement.layout
    parameter = placement.parameters[name]
    matrix = next(
        spec.packed_matrix for spec in placement.shape.list_parameters() if spec.name == name
    )
    sizes = (parameter.shape if matrix is None else matrix.shape)[-2:]
    if any(size % block for size in sizes):
        raise RecipeError(
            f"{name} is {sizes[0]} x {sizes[1]}, not whole blocks of {block} x {block} of "
            f"{section.recipe}",
            field=_name_recipe_field(section),
            got=section.recipe,
            allowed=f"widths that are multiples of {block}, or {_name_alternative(section)}",
            remedy=f"Use {_name_alternative(section)}, or exclude it by "
            f"precision.{section.kind}.exclude",
        )
    if layout.tp == 1:
        return
    if matrix is not None:
        raise LayoutError(
            f"tensor parallelism shards packed 4-bit weights, but {section.recipe} has blocks "
            "of weights",
            field="layout.tp",
            got=layout.tp,
            allowed="1",
            remedy=f"Use {_name_alternative(section)}",
        )
    first = RankGrid(layout).coordinates(0) | {"pp": parameter.pp_ranks[0]}
    parts = [
        number
        for rank in range(layout.tp)
        for box in compute_local_boxes(parameter, layout, first | {"tp": rank}, with_zero=False)
        for bounds in (box.local_bounds[-2:], box.global_bounds[-2:])
        for start, length in bounds
        for number in (start, length)
    ]
    if any(number % block for number in parts):
        valid = [
            tp
            for tp in range(1, layout.tp)
            if layout.tp % tp == 0 and all(size // tp % block == 0 for size in sizes)
        ]
        raise LayoutError(
            f"{layout.tp} tensor-parallel ranks shard {name} ({sizes[0]} x {sizes[1]}) inside "
            f"blocks of {block} of {section.recipe}",
            field="layout.tp",
            got=layout.tp,
            allowed=f"parts that are multiples of {block}",
            remedy=f"Use tp={max(valid, default=1)}, or {_name_alternative(section)}",
        )
