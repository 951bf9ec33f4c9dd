"""Precision of a run with `precision: auto`: recorded by the run, or agreed on by all ranks."""

from __future__ import annotations

from contextlib import suppress
from typing import Literal

import torch

from shardwright.checkpoint.disk import read_small
from shardwright.checkpoint.manifest import MAX_VALUES_BYTES, VALUES_NAME, parse_json
from shardwright.checkpoint.verify import candidates
from shardwright.config import Recipe
from shardwright.errors import ShardwrightError
from shardwright.numerics.bf16 import choose_precision
from shardwright.plan import PrecisionChoice
from shardwright.train.automatic import choose_planned_precision
from shardwright.train.folder import RunFolder
from shardwright.train.meeting import Meeting

Kind = Literal["fp32", "bf16"]

_KINDS: tuple[Kind, ...] = ("fp32", "bf16")
_NOT_RECORDED = -1
_RECORDED = "the run was started in it"


def agree_on_precision(
    recipe: Recipe, folder: RunFolder, meeting: Meeting, device: torch.device, *, resume: bool
) -> PrecisionChoice | None:
    """Choose the precision of a run with `precision: auto`; None if the recipe names one.

    A resumed run keeps its precision. Otherwise all ranks use bf16 if each of them would choose
    it, else fp32. Collective, called before any rank writes to the run folder.
    """
    if recipe.precision.kind != "auto":
        return None
    local = choose_precision(device)
    recorded = read_recorded_precision(folder) if resume and meeting.ranks.speaks else None
    index = _NOT_RECORDED if recorded is None else _KINDS.index(recorded)
    rows = meeting.gather([index, float(local.kind == "fp32")])
    if (recorded_index := int(rows[0][0])) != _NOT_RECORDED:
        return _keep(_KINDS[recorded_index], local)
    num_fp32 = sum(int(wants_fp32) for _, wants_fp32 in rows)
    if num_fp32 and local.kind == "bf16":
        reason = f"{num_fp32} of {len(rows)} ranks multiply bf16 more slowly than fp32"
        return PrecisionChoice("fp32", reason)
    return local


def _keep(kind: Kind, mine: PrecisionChoice) -> PrecisionChoice:
    reason = _RECORDED
    if kind != mine.kind:
        reason += f"; a new run would use {mine.kind} here, because {mine.reason}"
    return PrecisionChoice(kind, reason)


def foresee_precision(recipe: Recipe) -> PrecisionChoice | None:
    """Predict the choice of `precision: auto` for training or resuming on this machine.

    None if the recipe names its precision.

    Raises:
        InputError: The catalogue does not know the recipe's cluster.
    """
    if recipe.precision.kind != "auto":
        return None
    recorded = read_recorded_precision(RunFolder.of(recipe))
    if recorded is not None:
        return PrecisionChoice(recorded, _RECORDED)
    return choose_planned_precision(recipe)


def read_recorded_precision(folder: RunFolder) -> Kind | None:
    """Read the precision of the newest checkpoint, or else of the run folder's recipe.

    None if there is neither, or if `auto` never chooses that precision. Damaged files are
    ignored here; resuming reports them later.
    """
    recorded: str | None = _read_from_checkpoint(folder)
    if recorded is None and folder.recipe.is_file():
        with suppress(ShardwrightError):
            recorded = folder.load_recipe().precision.kind
    return next((kind for kind in _KINDS if kind == recorded), None)


def _read_from_checkpoint(folder: RunFolder) -> str | None:
    with suppress(ShardwrightError, OSError):
        for path in candidates(folder.checkpoints)[0]:
            with suppress(ShardwrightError, OSError, KeyError, TypeError):
                file = path / VALUES_NAME
                values = parse_json(read_small(file, MAX_VALUES_BYTES), file)
                return str(values["run"]["precision"])
    return None
