"""`precision: auto` at the start of a run: what was recorded before, or what all ranks agree on."""

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
_RECORDED = "the run was begun in it"


def agree_on_precision(
    recipe: Recipe, folder: RunFolder, meeting: Meeting, device: torch.device, *, resume: bool
) -> PrecisionChoice | None:
    """Agree on what `precision: auto` means for this run; None if the recipe names its precision.

    A run that resumes keeps the precision that it was begun in. Otherwise all ranks take bf16 if each
    would, or else fp32. Every rank calls this, before any writes to the run folder.
    """
    if recipe.precision.kind != "auto":
        return None
    mine = choose_precision(device)
    recorded = read_recorded_precision(folder) if resume and meeting.ranks.speaks else None
    index = _NOT_RECORDED if recorded is None else _KINDS.index(recorded)
    rows = meeting.gather([index, float(mine.kind == "fp32")])
    if (begun_in := int(rows[0][0])) != _NOT_RECORDED:
        return _keep(_KINDS[begun_in], mine)
    num_fp32 = sum(int(wants_fp32) for _, wants_fp32 in rows)
    if num_fp32 and mine.kind == "bf16":
        told = f"{num_fp32} of {len(rows)} ranks multiply bf16 more slowly than fp32"
        return PrecisionChoice("fp32", told)
    return mine


def _keep(kind: Kind, mine: PrecisionChoice) -> PrecisionChoice:
    reason = _RECORDED
    if kind != mine.kind:
        reason += f"; a new run would take {mine.kind} here, because {mine.reason}"
    return PrecisionChoice(kind, reason)


def foresee_precision(recipe: Recipe) -> PrecisionChoice | None:
    """Find what `precision: auto` would mean if the recipe were trained, or resumed, from here.

    None if the recipe names its precision.

    Raises:
        InputError: the catalogue does not know the recipe's cluster.
    """
    if recipe.precision.kind != "auto":
        return None
    recorded = read_recorded_precision(RunFolder.of(recipe))
    if recorded is not None:
        return PrecisionChoice(recorded, _RECORDED)
    return choose_planned_precision(recipe)


def read_recorded_precision(folder: RunFolder) -> Kind | None:
    """Read the precision of the newest checkpoint, or else of the run folder's recipe.

    None if there is neither, or if `auto` would never choose it. What is damaged is passed over: whether
    the run can resume is found out later.
    """
    found: str | None = _read_from_checkpoint(folder)
    if found is None and folder.recipe.is_file():
        with suppress(ShardwrightError):
            found = folder.load_recipe().precision.kind
    return next((kind for kind in _KINDS if kind == found), None)


def _read_from_checkpoint(folder: RunFolder) -> str | None:
    with suppress(ShardwrightError, OSError):
        for path in candidates(folder.checkpoints)[0]:
            with suppress(ShardwrightError, OSError, KeyError, TypeError):
                file = path / VALUES_NAME
                values = parse_json(read_small(file, MAX_VALUES_BYTES), file)
                return str(values["run"]["precision"])
    return None
