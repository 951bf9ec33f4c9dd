"""Which matrices of a model get an adapter, by name pattern; refuses what no adapter can stand beside. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from shardwright.architecture.adapters import ADAPTED_ROLES, AdapterShape, module_of
from shardwright.architecture.count import EXPERT_ROLES
from shardwright.architecture.foreign import ForeignShape
from shardwright.architecture.peft import read_peft_folder
from shardwright.architecture.shape import ModelShape
from shardwright.config.adapters import DEFAULT_RANK, AdapterSection
from shardwright.errors import RecipeError, nearest


def with_adapters(shape: ModelShape, section: AdapterSection | None) -> ModelShape:
    """The model with the adapters that a recipe asks for; as it is where it asks for none."""
    if section is None:
        return shape
    if isinstance(shape, ForeignShape):
        _check_foreign(shape, section)
    adapted = replace(shape, adapters=replace(choose_adapters(shape, section), quantize=section.quantize))
    if section.quantize is not None:
        _check_quantised(adapted)
    return adapted


def _check_foreign(shape: ForeignShape, section: AdapterSection) -> None:
    """Refuse of adapters what a class that is not ours cannot have."""
    refusals = {
        "kind": (section.kind == "dora", section.kind, "lora or rslora"),
        "dropout": (section.dropout > 0.0, section.dropout, "0: masks of its own stream would depend on the layout"),
        "quantize": (section.quantize is not None, section.quantize, "none: its class multiplies with the matrices themselves"),
        "path": (section.path is not None, section.path, "none: begin anew, or from merged weights"),
        "targets": (not any(spec.role == "projection" for spec in shape.specs), section.targets, "none of its matrices is known"),
    }
    for field, (refused, got, allowed) in refusals.items():
        if refused:
            raise RecipeError(
                f"{shape.family} runs through transformers' {shape.class_name}", field=f"adapters.{field}", got=got, allowed=allowed
            )


def _check_quantised(shape: ModelShape) -> None:
    """Refuse matrices whose rows are their inputs: blocks go along rows, and ours are those of the products' inputs."""
    turned = next((spec.name for spec in shape.parameters() if spec.packed is not None and shape.lies_in_out(spec)), None)
    if turned is not None:
        raise RecipeError(
            f"{turned} lies [in, out], and is not held in 4 bits here",
            field="adapters.quantize",
            got=shape.family,
            allowed="families whose projections lie [out, in]",
            remedy="Leave it out: plain adapters work on this family",
        )


def choose_adapters(shape: ModelShape, section: AdapterSection) -> AdapterShape:
    """The adapters that a recipe asks for, or that its `path` holds, beside matrices of this model.

    Raises:
        RecipeError: a pattern that matches nothing, or nothing that can have an adapter; a kind that experts cannot have.
        WeightsError: a folder that does not hold adapters of this model.
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
    """Refuse what stacked experts cannot have: each expert's rows are not multiplied one matrix at a time."""
    experts = sorted(module_of(spec) for spec in shape.parameters() if spec.role in EXPERT_ROLES and spec.part is None)
    beside = [name for name in experts if name in adapters.modules]
    if not beside or (adapters.kind != "dora" and adapters.dropout == 0.0):
        return
    is_dora = adapters.kind == "dora"
    raise RecipeError(
        f"{'DoRA has' if is_dora else 'dropout inside adapters has'} no form for stacked experts, here as in peft",
        field="adapters.kind" if is_dora else "adapters.dropout",
        got=f"{adapters.kind if is_dora else adapters.dropout} beside {beside[0]}",
        allowed="lora or rslora" if is_dora else "0",
        remedy="Leave the experts out: `adapters.exclude: [experts.*]`",
    )


def choose_modules(shape: ModelShape, targets: Sequence[str] | None, exclude: Sequence[str] = ()) -> frozenset[str]:
    """Modules of the matrices that patterns choose; None chooses all that can have an adapter.

    A pattern is held against whole names and against their last parts.

    Raises:
        RecipeError: names the pattern, and what is called most like it.
    """
    specs = [spec for spec in shape.base.parameters() if not spec.is_bias]
    adaptable = [module_of(spec) for spec in specs if spec.role in ADAPTED_ROLES]
    others = [module_of(spec) for spec in specs if spec.role not in ADAPTED_ROLES]
    chosen = set(adaptable)
    if targets is not None:
        chosen = {name for pattern in targets for name in _matching(pattern, adaptable, others, "adapters.targets")}
    for pattern in exclude:
        chosen -= _matching(pattern, adaptable, others, "adapters.exclude")
    if not chosen:
        raise RecipeError(
            "no matrix is left to have an adapter", field="adapters.targets", got=", ".join(targets or ()), allowed=_ends(adaptable)
        )
    return frozenset(chosen)


def _matching(pattern: str, adaptable: Sequence[str], others: Sequence[str], field: str) -> set[str]:
    found = {name for name in adaptable if _matches(pattern, name)}
    if found:
        return found
    wrong = next((name for name in others if _matches(pattern, name)), None)
    if wrong is not None:
        raise RecipeError(
            f"{wrong} is no projection of a block, and takes no adapter", field=field, got=pattern, allowed=_ends(adaptable)
        )
    guess = nearest(pattern, [*dict.fromkeys(name.rpartition(".")[2] for name in adaptable), *adaptable])
    raise RecipeError(
        "matches no matrix of this model",
        field=field,
        got=pattern,
        allowed=_ends(adaptable),
        remedy=f"Did you mean `{guess}`?" if guess else None,
    )


def _matches(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _ends(names: Iterable[str]) -> str:
    return ", ".join(sorted({name.rpartition(".")[2] for name in names}))
