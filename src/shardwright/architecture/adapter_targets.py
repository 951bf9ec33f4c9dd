"""Choice of the matrices that get adapters, by name pattern. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from shardwright.architecture.adapter_shape import ADAPTABLE_ROLES, AdapterShape, get_module_name
from shardwright.architecture.flop_count import EXPERT_ROLES
from shardwright.architecture.hf_shape import HFShape
from shardwright.architecture.model_shape import ModelShape
from shardwright.architecture.peft_folder import read_peft_folder
from shardwright.config.adapter_section import DEFAULT_RANK, AdapterSection
from shardwright.errors import RecipeError, suggest_name


def add_adapters(shape: ModelShape, section: AdapterSection | None) -> ModelShape:
    """Add the adapters of a recipe to the model's shape; None adds none."""
    if section is None:
        return shape
    if isinstance(shape, HFShape):
        _check_hf(shape, section)
    adapted = replace(
        shape, adapters=replace(choose_adapters(shape, section), quantize=section.quantize)
    )
    if section.quantize is not None:
        _check_quantised(adapted)
    return adapted


def _check_hf(shape: HFShape, section: AdapterSection) -> None:
    """Refuse adapter settings that a transformers class does not support."""
    has_projection = any(spec.role == "projection" for spec in shape.specs)
    refusals = {
        "kind": (section.kind == "dora", section.kind, "lora or rslora"),
        "dropout": (
            section.dropout > 0.0,
            section.dropout,
            "0: random masks would depend on the layout",
        ),
        "quantize": (
            section.quantize is not None,
            section.quantize,
            "none: the class multiplies with unquantised matrices",
        ),
        "path": (
            section.path is not None,
            section.path,
            "none: start with new adapters, or from merged weights",
        ),
        "targets": (not has_projection, section.targets, "none: no projection of it is known"),
    }
    for field, (is_refused, got, allowed) in refusals.items():
        if is_refused:
            raise RecipeError(
                f"{shape.family} runs through transformers' {shape.class_name}",
                field=f"adapters.{field}",
                got=got,
                allowed=allowed,
            )


def _check_quantised(shape: ModelShape) -> None:
    """Refuse matrices stored `[in, out]`: a block lies in a row and must have one output."""
    in_out = next(
        (
            spec.name
            for spec in shape.list_parameters()
            if spec.packed_matrix is not None and shape.is_in_out(spec)
        ),
        None,
    )
    if in_out is not None:
        raise RecipeError(
            f"{in_out} is stored [in, out]; 4-bit quantisation does not support this layout",
            field="adapters.quantize",
            got=shape.family,
            allowed="families with projections stored [out, in]",
            remedy="Remove adapters.quantize: adapters without it work for this family",
        )


def choose_adapters(shape: ModelShape, section: AdapterSection) -> AdapterShape:
    """Choose the adapters that a recipe describes, or read those of its `path`.

    Raises:
        RecipeError: a pattern that matches no matrix that can have an adapter; a kind of
            adapter that experts do not support.
        WeightsError: the folder at `path` has no adapters of this model.
    """
    if section.path is not None:
        adapters = read_peft_folder(section.path, shape, dropout=section.dropout)
        check_adapters(shape, adapters)
        return adapters
    rank = section.rank if section.rank is not None else DEFAULT_RANK
    modules = choose_modules(shape, section.targets, section.exclude)
    adapters = AdapterShape(
        kind=section.kind or "lora",
        rank=rank,
        alpha=section.alpha if section.alpha is not None else 2.0 * rank,
        modules=modules,
        dropout=section.dropout,
    )
    check_adapters(shape, adapters)
    return adapters


def check_adapters(shape: ModelShape, adapters: AdapterShape) -> None:
    """Refuse DoRA and adapter dropout for stacked experts, which are multiplied together."""
    experts = sorted(
        get_module_name(spec)
        for spec in shape.list_parameters()
        if spec.role in EXPERT_ROLES and spec.adapter_part is None
    )
    adapted = [name for name in experts if name in adapters.modules]
    if not adapted or (adapters.kind != "dora" and adapters.dropout == 0.0):
        return
    is_dora = adapters.kind == "dora"
    raise RecipeError(
        f"{'DoRA' if is_dora else 'dropout inside adapters'} is not supported "
        "for stacked experts, nor is it in peft",
        field="adapters.kind" if is_dora else "adapters.dropout",
        got=f"{adapters.kind if is_dora else adapters.dropout} for {adapted[0]}",
        allowed="lora or rslora" if is_dora else "0",
        remedy="Exclude the experts: `adapters.exclude: [experts.*]`",
    )


def choose_modules(
    shape: ModelShape, targets: Sequence[str] | None, exclude: Sequence[str] = ()
) -> frozenset[str]:
    """Choose modules by name patterns; None chooses all that can have an adapter.

    A pattern is compared with whole names and with their last parts.

    Raises:
        RecipeError: a pattern matches nothing; the message suggests the closest name.
    """
    specs = [spec for spec in shape.base_shape.list_parameters() if not spec.is_bias]
    adaptable = [get_module_name(spec) for spec in specs if spec.role in ADAPTABLE_ROLES]
    others = [get_module_name(spec) for spec in specs if spec.role not in ADAPTABLE_ROLES]
    chosen = set(adaptable)
    if targets is not None:
        chosen = {
            name
            for pattern in targets
            for name in _find_matching(pattern, adaptable, others, "adapters.targets")
        }
    for pattern in exclude:
        chosen -= _find_matching(pattern, adaptable, others, "adapters.exclude")
    if not chosen:
        raise RecipeError(
            "the patterns match no matrix that can be adapted",
            field="adapters.targets",
            got=", ".join(targets or ()),
            allowed=_list_last_parts(adaptable),
        )
    return frozenset(chosen)


def _find_matching(
    pattern: str, adaptable: Sequence[str], others: Sequence[str], field: str
) -> set[str]:
    matching = {name for name in adaptable if _is_match(pattern, name)}
    if matching:
        return matching
    unadaptable = next((name for name in others if _is_match(pattern, name)), None)
    if unadaptable is not None:
        raise RecipeError(
            f"{unadaptable} is not a projection of a block and cannot have an adapter",
            field=field,
            got=pattern,
            allowed=_list_last_parts(adaptable),
        )
    known = [*dict.fromkeys(name.rpartition(".")[2] for name in adaptable), *adaptable]
    raise RecipeError(
        "matches no matrix of this model",
        field=field,
        got=pattern,
        allowed=_list_last_parts(adaptable),
        remedy=suggest_name(pattern, known),
    )


def _is_match(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _list_last_parts(names: Iterable[str]) -> str:
    return ", ".join(sorted({name.rpartition(".")[2] for name in names}))
