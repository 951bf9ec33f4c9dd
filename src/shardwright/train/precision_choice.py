"""`precision: auto` at the start of a run: what an earlier start recorded, or what all ranks agree on."""

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
    """What `precision: auto` means for this run, the same on every rank; None if the recipe names its precision.

    A run that resumes keeps the precision that it was begun in. Otherwise all ranks take bf16 if each would, or else fp32.
    Every rank calls this, before any writes to the run folder.
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
        return PrecisionChoice("fp32", f"{num_fp32} of {len(rows)} ranks multiply bf16 more slowly than fp32")
    return mine


def _keep(kind: Kind, mine: PrecisionChoice) -> PrecisionChoice:
    reason = _RECORDED
    if kind != mine.kind:
        reason += f"; a new run would take {mine.kind} here, because {mine.reason}"
    return PrecisionChoice(kind, reason)


def foresee_precision(recipe: Recipe) -> PrecisionChoice | None:
    """What `precision: auto` would mean if the recipe were trained, or resumed, from here; None if it names its precision.

    Raises:
        InputError: the catalogue does not know the recipe's cluster.
    """
    recorded = read_recorded_precision(RunFolder.of(recipe)) if recipe.precision.kind == "auto" else None
    if recorded is not None:
        return PrecisionChoice(recorded, _RECORDED)
    return choose_planned_precision(recipe)


def read_recorded_precision(folder: RunFolder) -> Kind | None:
    """The precision of the newest checkpoint, or else of the run folder's recipe; None if `auto` would never choose it.

    What is damaged is passed over: whether the run can resume is found out later.
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
                values = parse_json(read_small(path / VALUES_NAME, MAX_VALUES_BYTES), path / VALUES_NAME)
                return str(values["run"]["precision"])
    return None
