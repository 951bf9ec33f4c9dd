"""Everything that can be wrong and be known before a rank starts: layout, model, tokenizer, data, weights."""

from __future__ import annotations

import fnmatch
import hashlib
import logging
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any

from shardwright import placement
from shardwright.architecture import ByClass, ExpertShape, ForeignShape, LatentShape, ModelShape
from shardwright.config import Recipe
from shardwright.data.fit import prepare_for_model
from shardwright.data.prepare import Prepared, Progress
from shardwright.errors import RecipeError
from shardwright.model.load import WeightsFolder
from shardwright.model.routing import ExpertRules, resolve_rules
from shardwright.model.theirs import read_shape
from shardwright.optim import check_blocks, require_torchao
from shardwright.plan import Plan, PrecisionChoice, count_steps, resolve, row_multiple
from shardwright.train.automatic import choose_precision_here
from shardwright.train.preference import check_preference
from shardwright.train.samples import check_samples

logger = logging.getLogger(__name__)

FIXED_TRAINING = (
    "learning_rate", "min_learning_rate", "schedule", "warmup_steps", "decay_steps", "batch_scaling", "base_batch_size",
    "weight_decay", "max_grad_norm", "label_smoothing", "neftune_noise_alpha",
)  # fmt: skip
"""Of the recipe's training section, what a resumed run has in common with the run that saved; its length may change."""


@dataclass(frozen=True)
class Checked:
    """A recipe found able to run: what every rank builds from. Its precision is the plan's, never `auto`."""

    recipe: Recipe
    plan: Plan
    shape: ModelShape
    data: Prepared
    total_steps: int
    frozen: frozenset[str]

    @property
    def data_hash(self) -> str:
        """What is learned and in which order: equal exactly when two runs see the same samples at the same positions."""
        parts = (self.data.content_hash, self.recipe.seed, self.plan.batch.sequence_length, self.plan.batch.global_batch_size)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    @property
    def drift_fields(self) -> dict[str, Any]:
        """What must not change between a run and its resumption."""
        recipe, batch = self.recipe, self.plan.batch
        return {
            **_adapters_and_base(recipe, self.shape),
            "model": _fields_of(self.shape),
            "tokenizer": self.data.tokenizer.content_hash,
            "data": self.data.content_hash,
            "seed": recipe.seed,
            "sequence_length": batch.sequence_length,
            "global_batch_size": batch.global_batch_size,
            "optimizer": recipe.optimizer.model_dump(mode="json"),
            "precision": recipe.precision.kind,
            **({} if recipe.preference is None else {"preference": recipe.preference.model_dump(mode="json")}),
            "freeze": sorted(self.frozen),
            "training": recipe.training.model_dump(mode="json", include=set(FIXED_TRAINING)),
        }


def check(
    recipe: Recipe, world_size: int, *, auto_precision: PrecisionChoice | None = None, progress: Progress | None = None
) -> Checked:
    """Check a recipe against the ranks, its model, its tokenizer and its data; tokenise what is not yet in the cache.

    Args:
        auto_precision: what `precision: auto` means for the run; default what this machine's device is best at.

    Raises:
        InputError: the first thing that is wrong, by field.
    """
    if recipe.precision.kind == "auto" and auto_precision is None:
        auto_precision = choose_precision_here(recipe)
    plan = resolve(recipe, world_size, auto_precision)
    recipe = recipe.model_copy(update={"precision": plan.precision})
    check_preference(recipe)
    shape, data = prepare_for_model(recipe, partial(read_shape, section=recipe.model), progress=progress)
    placement.check(shape, plan.layout, plan.batch.sequence_length)
    if recipe.model.pretrained:
        assert recipe.model.path is not None
        WeightsFolder(recipe.model.path).check(shape.base)
    _check_foreign(recipe, shape)
    check_samples(recipe, shape, data.tokenizer, validates=data.validation is not None)
    rules = resolve_rules(recipe.moe, shape)  # refuses what the model does not have
    plan = replace(plan, batch=replace(plan.batch, row_multiple=_row_multiple(recipe, plan, data.report.packing, rules)))
    if recipe.model.keep_zeros and shape.adapters is not None:
        raise RecipeError(
            "adapters leave the model's zeros alone, and fill them where they are merged",
            field="model.keep_zeros",
            got=True,
            remedy="Leave it out, or fine-tune without adapters",
        )
    frozen = match_frozen(recipe.model.freeze, [spec.name for spec in shape.parameters()])
    _check_optimizer(recipe, plan, shape, frozen)
    return Checked(
        recipe=recipe,
        plan=plan,
        shape=shape,
        data=data,
        total_steps=count_steps(recipe.training, len(data.train), plan.batch.global_batch_size),
        frozen=frozen,
    )


def _row_multiple(recipe: Recipe, plan: Plan, packing: str, rules: ExpertRules | None) -> int | None:
    """What the length of rows that are not full is a multiple of; None where all are filled, which is said once."""
    if packing == "windows" or recipe.data.padding == "max_length":
        return None
    if recipe.model.compile:
        logger.info("rows are all filled to training.sequence_length: compiled blocks (model.compile) are made for one length")
        return None
    if rules not in (None, ExpertRules()):
        logger.info("rows are all filled to training.sequence_length: what balances or bounds experts counts a row's tokens")
        return None
    return row_multiple(plan.layout, recipe.data.pad_to_multiple_of)


def _check_optimizer(recipe: Recipe, plan: Plan, shape: ModelShape, frozen: frozenset[str]) -> None:
    """Refuse a rule that lacks its package, its matrices, or whole blocks of them."""
    trained = {
        spec.name: spec
        for spec in shape.parameters()
        if spec.name not in frozen and (shape.adapters is None or spec.part is not None)
    }
    if recipe.optimizer.name == "adamw_8bit":
        require_torchao()
        stages = placement.stages_of(shape, plan.layout, plan.batch.sequence_length)
        layouts = {name: lies for name, lies in placement.place(shape, plan.layout, stages).items() if name in trained}
        check_blocks(layouts, plan.layout, recipe.optimizer.block_size)
    if recipe.optimizer.name == "muon" and not any(s.layer is not None and len(s.shape) > 1 for s in trained.values()):
        raise RecipeError(
            "no matrix of a block is trained, and Muon moves nothing else",
            field="optimizer.name",
            got="muon",
            remedy="Use adamw, which would move all of this",
        )


def _check_foreign(recipe: Recipe, shape: ModelShape) -> None:
    """Refuse what needs to know how a foreign model works inside."""
    if not isinstance(shape, ForeignShape):
        return
    by_class = [spec.name for spec in shape.parameters() if isinstance(spec.init, ByClass)]
    refusals = {
        "model.compile": (recipe.model.compile, "its blocks are not compiled", "Leave it out"),
        "training.label_smoothing": (recipe.training.label_smoothing > 0.0, "its loss is not smoothed", "Leave it out"),
        "training.neftune_noise_alpha": (recipe.training.neftune_noise_alpha > 0.0, "its embeddings get no noise", "Leave it out"),
        "model.init": (
            bool(by_class) and not recipe.model.pretrained,
            f"only its own class knows how {', '.join(by_class[:3])} begins",
            "Save it once with transformers (from_config, save_pretrained), and begin from that folder",
        ),
    }
    for field, (refused, reason, remedy) in refusals.items():
        if refused:
            raise RecipeError(f"{shape.family} runs through transformers' {shape.class_name}: {reason}", field=field, remedy=remedy)


def _adapters_and_base(recipe: Recipe, shape: ModelShape) -> dict[str, Any]:
    """What adapters are trained and beside which weights; nothing for a model without them."""
    if shape.adapters is None:
        return {}
    adapters = asdict(shape.adapters) | {"modules": sorted(shape.adapters.modules)}
    base = "random"  # a function of the seed, which is told by itself
    if recipe.model.pretrained:
        assert recipe.model.path is not None
        base = WeightsFolder(recipe.model.path).fingerprint()
    return {"adapters": adapters, "base": base}


def _fields_of(shape: ModelShape) -> dict[str, Any]:
    """The shape as JSON: equal for two config.json files that mean the same, however they spell it."""
    if isinstance(shape, ForeignShape):
        return shape.told()
    told = {field.name: getattr(shape, field.name) for field in fields(shape) if field.name not in ("config", "names", "adapters")}
    nested = {name: [asdict(item) for item in value] for name, value in told.items() if isinstance(value, tuple)}
    return told | nested | {name: asdict(value) for name, value in told.items() if isinstance(value, ExpertShape | LatentShape)}


def match_frozen(patterns: tuple[str, ...], names: list[str]) -> frozenset[str]:
    """Names that the patterns match.

    >>> sorted(match_frozen(("*.bias",), ["a.weight", "a.bias"]))
    ['a.bias']
    """
    frozen: set[str] = set()
    for pattern in patterns:
        matched = fnmatch.filter(names, pattern)
        if not matched:
            raise RecipeError(
                "matches no parameter",
                field="model.freeze",
                got=pattern,
                allowed=f"a pattern such as {names[0]} or *.{names[-1].split('.')[-1]}",
            )
        frozen.update(matched)
    if len(frozen) == len(names):
        raise RecipeError("every parameter would be frozen", field="model.freeze", got=", ".join(patterns))
    return frozenset(frozen)
