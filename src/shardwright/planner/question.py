"""From a recipe to what is asked of the planner: what the recipe fixes, and what is open."""

from __future__ import annotations

from dataclasses import replace

from shardwright.architecture import ModelShape, read_config
from shardwright.architecture.targets import with_adapters
from shardwright.config.schema import Recipe
from shardwright.config.training import OptimizerSection
from shardwright.errors import ArchitectureError, LayoutError, RecipeError
from shardwright.hardware import Accelerator
from shardwright.layout import Layout, resolve_layout
from shardwright.plan import PrecisionChoice, resolve_batch
from shardwright.planner.candidate import Adapter, Candidate, OptimizerKind, Precision, Reference
from shardwright.planner.space import Question

_MOST_LAYERS = 2048
"""Dealing layers to pipeline stages takes time with the square of their number: about a minute for so many."""
_MOST_SEQUENCES = 2**30
"""Of a global batch; divisors of larger numbers take long to find."""


def shape_of(recipe: Recipe) -> ModelShape:
    """The model that a recipe names, from its config alone: no weights, no tokenizer, no data.

    Raises:
        ArchitectureError: a config that we refuse, or one without what the count needs.
    """
    config = recipe.model.config if recipe.model.config is not None else recipe.model.path
    assert config is not None  # the schema demands one of them
    if isinstance(config, dict) and "vocab_size" not in config and recipe.tokenizer.vocab_size is not None:
        config = {**config, "vocab_size": recipe.tokenizer.vocab_size}
    if isinstance(config, dict) and "vocab_size" not in config:
        raise ArchitectureError(
            "the size of the vocabulary is needed to count parameters and logits",
            field="model.config.vocab_size",
            remedy="Write it there; planning reads no tokenizer",
        )
    shape = read_config(config)
    if shape.num_layers > _MOST_LAYERS:
        raise ArchitectureError(
            "too many layers to plan", field="model.config", got=f"{shape.num_layers:,} layers", allowed=f"at most {_MOST_LAYERS:,}"
        )
    total = recipe.training.global_batch_size
    if total is not None and total > _MOST_SEQUENCES:
        raise RecipeError(
            "too many sequences to plan", field="training.global_batch_size", got=total, allowed=f"at most {_MOST_SEQUENCES:,}"
        )
    shape.check_sequence_length(recipe.training.sequence_length)
    return shape


def template_of(
    recipe: Recipe, *, precision: Precision | None = None, adapter: Adapter | None = None, optimizer: OptimizerKind | None = None
) -> Candidate:
    """A candidate with everything of the recipe that is not searched; its layout is that of one device.

    `precision` replaces the recipe's; `auto` must be settled before.
    """
    section, training = recipe.layout, recipe.training
    kind = precision or recipe.precision.kind
    assert kind != "auto", "settle_precision comes first"
    adapter = adapter or adapter_of(recipe)
    return Candidate(
        layout=Layout(
            wrap_blocks=section.wrap_blocks,
            prefetch_depth=section.prefetch_depth,
            max_gathers_in_flight=section.max_gathers_in_flight,
            bucket_size_bytes=section.bucket_size_bytes,
        ),
        sequence_length=training.sequence_length,
        precision=kind,
        optimizer=optimizer or _optimizer(recipe.optimizer),
        adapter=adapter,
        reduce_in_bf16=recipe.precision.reduce_dtype == "bf16",
        compile=recipe.model.compile,
        flash_attention=recipe.model.attention != "explicit",
        document_tokens=training.sequence_length if recipe.data.packing == "documents" else None,
        loss_chunk_tokens=recipe.model.loss_chunk_tokens,
        reference=_reference(recipe, adapter),
    )


def choose_precision_on(accelerator: Accelerator) -> PrecisionChoice:
    """What `precision: auto` means on a device of the catalogue.

    >>> from shardwright.hardware.load import find_accelerator
    >>> str(choose_precision_on(find_accelerator("T4")))
    'fp32 (auto: T4-16GB has no bf16 units)'
    """
    if accelerator.has_bf16_units:
        return PrecisionChoice("bf16", f"{accelerator.name} multiplies bf16 natively")
    return PrecisionChoice("fp32", f"{accelerator.name} has no bf16 units")


def _reference(recipe: Recipe, adapter: Adapter | None) -> Reference:
    """What a recipe's preferences are held to; where it does not say, adapters are switched off, and a copy is held without any."""
    if recipe.preference is None:
        return "none"
    return recipe.preference.reference or ("frozen" if adapter is None else "adapter_off")


def adapter_of(recipe: Recipe) -> Adapter | None:
    """The recipe's own adapters: their rank, and the roles of the matrices that have one in any layer; None without any."""
    if recipe.adapters is None:
        return None
    chosen = with_adapters(shape_of(recipe), recipe.adapters)
    assert chosen.adapters is not None
    roles = {spec.beside.role for spec in chosen.parameters() if spec.beside is not None}
    return Adapter(chosen.adapters.rank, tuple(sorted(roles)), quantised=chosen.adapters.quantize is not None)


def _optimizer(section: OptimizerSection) -> OptimizerKind:
    if section.name == "sgd":
        return "sgd_momentum" if section.momentum else "sgd"
    return section.name


def question_of(recipe: Recipe, template: Candidate, num_gpus: int) -> Question:
    """What is open for a recipe on `num_gpus` devices: every degree, recomputation, and how the batch is cut.

    The recipe's global batch stays what it is; without one, its micro batch and accumulation are kept on every rank.

    Raises:
        RecipeError: neither a global nor a micro batch is given.
    """
    training = recipe.training
    if training.global_batch_size is not None:
        return Question(template, num_gpus, training.global_batch_size)
    if training.micro_batch_size is None:
        raise RecipeError(
            "say how many sequences a step holds",
            field="training.global_batch_size",
            remedy="Give global_batch_size, or micro_batch_size for every rank",
        )
    accumulation = training.gradient_accumulation_steps or 1
    return Question(template, num_gpus, None, (training.micro_batch_size,), (accumulation,))


def candidate_of(recipe: Recipe, template: Candidate, num_gpus: int) -> Candidate | None:
    """The recipe as it stands, on `num_gpus` devices; None where its layout is `auto` or does not fit their number."""
    return _candidate_of(recipe, template, num_gpus)[0]


def why_no_candidate(recipe: Recipe, template: Candidate, num_gpus: int) -> str | None:
    """Why the recipe as it stands cannot run on so many devices; None where it can, or where it leaves its layout open."""
    return None if recipe.layout.auto else _candidate_of(recipe, template, num_gpus)[1]


def _candidate_of(recipe: Recipe, template: Candidate, num_gpus: int) -> tuple[Candidate | None, str | None]:
    try:
        layout = resolve_layout(recipe.layout, num_gpus)
        batch = resolve_batch(recipe.training, layout.data_ranks)
    except (LayoutError, RecipeError) as error:
        return None, error.problem
    candidate = replace(
        template,
        layout=layout,
        micro_batch_size=batch.micro_batch_size,
        gradient_accumulation_steps=batch.gradient_accumulation_steps,
        recompute=recipe.recompute,
    )
    return candidate, None
