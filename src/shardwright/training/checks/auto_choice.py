"""Meaning of `auto` in a recipe for a run: recorded by it, or agreed on by all ranks.

For `precision`, `model.compile` and `model.fused_pointwise`. The layout of `layout: auto` is chosen
before the ranks are connected; here they check that they have the same one.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from typing import Any, Literal

import torch

from shardwright.checkpoint.disk import read_small_file
from shardwright.checkpoint.integrity import list_candidates
from shardwright.checkpoint.manifest import MAX_VALUES_BYTES, VALUES_NAME, parse_json
from shardwright.checkpoint.run_folder import RunFolder
from shardwright.config import Recipe
from shardwright.errors import InputError, ShardwrightError
from shardwright.launch.auto_layout import choose_planned_precision
from shardwright.numerics.bf16 import choose_precision
from shardwright.numerics.compilation import choose_compilation
from shardwright.placement.compilation import CompileChoice
from shardwright.plans import PrecisionChoice
from shardwright.training.rank_sync import RankSync

AutoPrecision = Literal["fp32", "bf16"]

_KINDS: tuple[AutoPrecision, ...] = ("fp32", "bf16")
_PLANNED_FIELDS: dict[str, Any] = {
    "layout": True,
    "recompute": True,
    "offload": {"optimizer", "parameters", "activations"},
    "training": {"micro_batch_size", "gradient_accumulation_steps"},
    "model": {"compile"},
}
"""Fields of a recipe that `layout: auto` may change."""
_NOT_RECORDED = -1
_RECORDED_REASON = "the run was started in it"


def check_equal_layouts(recipe: Recipe, rank_sync: RankSync) -> None:
    """Check that all ranks have the same layout, batch, recomputation, offloading and compilation.

    Ranks of torchrun or srun plan `layout: auto` by themselves. Their choices differ if their
    files of measured step times do. Collective.

    Raises:
        InputError: On every rank, if the settings of any rank differ from those of rank 0.
    """
    settings = recipe.model_dump(mode="json", include=_PLANNED_FIELDS)
    content = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    # 13 digits are 52 bits, which a float has exactly.
    hashes = [row[0] for row in rank_sync.gather([float(int(content[:13], 16))])]
    differing = [rank for rank, each in enumerate(hashes) if each != hashes[0]]
    if differing:
        section = recipe.layout.model_dump(exclude_defaults=True)
        raise InputError(
            f"ranks 0 and {differing[0]} have different layouts, batches, recomputation, "
            "offloading or compilation",
            field="layout",
            got=f"{section} on rank {rank_sync.rank_environment.rank}",
            allowed="the same on every rank",
            remedy="Give every rank the same recipe; with `layout: auto`, the same files of step "
            "times that `tune` measured ($SHARDWRIGHT_CACHE/steps), or write the degrees",
        )


def agree_on_precision(
    recipe: Recipe,
    folder: RunFolder,
    rank_sync: RankSync,
    device: torch.device,
    *,
    is_resumed: bool,
) -> PrecisionChoice | None:
    """Choose the precision of a run with `precision: auto`; None if the recipe names one.

    A resumed run keeps its precision. Otherwise all ranks use bf16 if each of them would choose
    it, else fp32. Collective, called before any rank writes to the run folder.
    """
    if recipe.precision.kind != "auto":
        return None
    local = choose_precision(device)
    recorded = (
        read_recorded_precision(folder)
        if is_resumed and rank_sync.rank_environment.is_main_rank
        else None
    )
    index = _NOT_RECORDED if recorded is None else _KINDS.index(recorded)
    rows = rank_sync.gather([index, float(local.kind == "fp32")])
    if (recorded_index := int(rows[0][0])) != _NOT_RECORDED:
        return _build_recorded_choice(_KINDS[recorded_index], local)
    num_fp32 = sum(int(wants_fp32) for _, wants_fp32 in rows)
    if num_fp32 and local.kind == "bf16":
        reason = f"{num_fp32} of {len(rows)} ranks multiply bf16 more slowly than fp32"
        return PrecisionChoice("fp32", reason)
    return local


def _build_recorded_choice(kind: AutoPrecision, local_choice: PrecisionChoice) -> PrecisionChoice:
    reason = _RECORDED_REASON
    if kind != local_choice.kind:
        reason += f"; a new run would use {local_choice.kind} here, because {local_choice.reason}"
    return PrecisionChoice(kind, reason)


def agree_on_compilation(
    recipe: Recipe, rank_sync: RankSync, device: torch.device
) -> CompileChoice | None:
    """Choose what `auto` compiles, blocks or single functions; None if the recipe chooses both.

    All ranks compile if each of them would, because compiled code rounds differently and ranks
    that share a row or have copies of it must compute the same. Collective.
    """
    if "auto" not in (recipe.model.compile, recipe.model.fused_pointwise):
        return None
    local = choose_compilation(device)
    rows = rank_sync.gather([float(local.is_compiled)])
    num_uncompiled = sum(not is_compiled for (is_compiled,) in rows)
    if num_uncompiled and local.is_compiled:
        return CompileChoice(False, f"{num_uncompiled} of {len(rows)} ranks cannot compile")
    return local


def predict_precision(recipe: Recipe) -> PrecisionChoice | None:
    """Predict the choice of `precision: auto` for training or resuming on this machine.

    None if the recipe names its precision.

    Raises:
        InputError: The catalogue does not know the recipe's cluster.
    """
    if recipe.precision.kind != "auto":
        return None
    recorded = read_recorded_precision(RunFolder.from_recipe(recipe))
    if recorded is not None:
        return PrecisionChoice(recorded, _RECORDED_REASON)
    return choose_planned_precision(recipe)


def read_recorded_precision(folder: RunFolder) -> AutoPrecision | None:
    """Read the precision of the newest checkpoint, or else of the run folder's recipe.

    None if there is neither, or if `auto` never chooses that precision. Damaged files are
    ignored here; resuming reports them later.
    """
    recorded: str | None = _read_from_checkpoint(folder)
    if recorded is None and folder.recipe_path.is_file():
        with suppress(ShardwrightError):
            recorded = folder.load_recipe().precision.kind
    return next((kind for kind in _KINDS if kind == recorded), None)


def _read_from_checkpoint(folder: RunFolder) -> str | None:
    with suppress(ShardwrightError, OSError):
        for path in list_candidates(folder.checkpoints)[0]:
            with suppress(ShardwrightError, OSError, KeyError, TypeError):
                file = path / VALUES_NAME
                values = parse_json(read_small_file(file, MAX_VALUES_BYTES), file)
                return str(values["run"]["precision"])
    return None
