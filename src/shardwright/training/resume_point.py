"""State from which a run continues: its newest checkpoint, or copies in the ranks' memory."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.checkpoint.commit import list_step_folders
from shardwright.checkpoint.drift import (
    FieldDifference,
    find_differences,
    is_below,
    split_allowed,
)
from shardwright.checkpoint.rank_group import RankGroup
from shardwright.checkpoint.run_folder import RunFolder
from shardwright.checkpoint.run_values import RunValues, parse_values
from shardwright.checkpoint.tensor_loading import (
    VerifiedCheckpoint,
    find_newest_checkpoint,
    open_checkpoint,
    read_run_values,
)
from shardwright.config.preference import PreferenceSection
from shardwright.config.recipe_section import RecipeSection
from shardwright.config.training import OptimizerSection, PrecisionSection, TrainingSection
from shardwright.errors import CheckpointError
from shardwright.parallel.mesh import get_host_group
from shardwright.peer_copies.memory import CopyId, get_process_memory
from shardwright.peer_copies.recovery import find_copies, read_copied_values
from shardwright.training.checks.run_checks import FIXED_TRAINING_FIELDS, ValidatedRun

logger = logging.getLogger(__name__)

_MAX_SHOWN_DIFFERENCES = 20

FIXED_FIELDS = {
    "model": "its tensors have other shapes or meanings",
    "global_batch_size": "the data cursor counts batches: samples would be repeated or left out",
    "optimizer.name": "its states belong to another update rule",
    "freeze": "its optimizer states belong to other parameters",
    "adapters": "its tensors have other shapes or meanings",
    "base": "adapters fit only the base weights that they were trained with",
}
"""Fields that `--allow-drift` cannot allow to change in a resumed run, and the reasons."""

_SECTIONS: dict[str, type[RecipeSection]] = {
    "optimizer": OptimizerSection,
    "precision": PrecisionSection,
    "preference": PreferenceSection,
    "training": TrainingSection,
}


@dataclass(frozen=True)
class ResumePoint:
    """Complete checkpoint of the same run, its values, and the drift allowed by field name."""

    checkpoint: VerifiedCheckpoint
    values: RunValues
    allowed: tuple[FieldDifference, ...] = ()


@dataclass(frozen=True)
class CopiesInMemory:
    """State after one step in the memory of the ranks' processes."""

    copy_id: CopyId
    values: RunValues


@dataclass(frozen=True)
class CopiesSearch:
    """Result of a search for copies in memory after the loss of a rank."""

    found: CopiesInMemory | None
    fault: str
    """Reason why none was found; empty otherwise."""
    finished_step: int
    """Newest step that any process has finished."""


def find_copies_in_memory(folder: RunFolder) -> CopiesSearch:
    """Find the newest step that the copies of all ranks have completely.

    Collective. Reads nothing from the checkpoints: the launcher starts every generation of a run
    with the same recipe.
    """
    ranks = RankGroup(get_host_group())
    memory = get_process_memory()
    search = find_copies(ranks, memory)
    if search.found is None:
        return CopiesSearch(None, search.fault, search.finished_step)
    content = read_copied_values(ranks, memory, search.found)
    values = parse_values(content, folder.checkpoints, step=search.found.step)
    return CopiesSearch(CopiesInMemory(search.found, values), "", search.finished_step)


def _build_drift_remedy(refused: Sequence[FieldDifference]) -> str:
    """Return what to do about differences, of which some can perhaps be allowed."""
    remedy = "Undo the change, start a new run (--run-dir), or resume anyway (--allow-drift FIELD)"
    if any(is_below(difference.field, name) for difference in refused for name in FIXED_FIELDS):
        remedy = "Undo the change, or start a new run (--run-dir)"
    batch = next((one for one in refused if one.field == "global_batch_size"), None)
    if batch is not None:
        remedy += (
            f". The number of data ranks is a factor of it: to keep {batch.saved}, change "
            "training.micro_batch_size or training.gradient_accumulation_steps to match"
        )
    return remedy


def find_resume_point(
    validated_run: ValidatedRun, folder: RunFolder, allow_drift: Sequence[str] = ()
) -> ResumePoint | None:
    """Find the checkpoint to resume from; None if the run ended before its first one.

    Collective, called before any rank writes.

    Args:
        allow_drift: Fields that may have changed, named as in the error; `optimizer` includes
            all fields below it.

    Raises:
        CheckpointError: The checkpoints are damaged or lost, or the recipe has changed too much.
    """
    found = find_newest_checkpoint(folder.checkpoints, group=get_host_group(), should_cache=True)
    if found is None:
        if folder.has_checkpoints:
            raise CheckpointError(
                "no complete checkpoint to resume from",
                field="run.dir",
                got=str(folder.checkpoints),
            )
        _check_nothing_lost(folder)
        return None
    values = read_run_values(found, group=get_host_group())
    differences = find_differences(
        add_missing_defaults(values.run.to_saved_json(), validated_run.drift_fields),
        validated_run.drift_fields,
    )
    allowed, refused = split_allowed(differences, allow_drift, FIXED_FIELDS)
    if refused:
        more = (
            f"; {len(refused) - _MAX_SHOWN_DIFFERENCES} more"
            if len(refused) > _MAX_SHOWN_DIFFERENCES
            else ""
        )
        raise CheckpointError(
            "the recipe differs from the run's: "
            f"{'; '.join(refused[:_MAX_SHOWN_DIFFERENCES])}{more}",
            field="--resume",
            remedy=_build_drift_remedy([one for one in differences if one not in allowed]),
        )
    return ResumePoint(found, values, tuple(allowed))


def _check_nothing_lost(folder: RunFolder) -> None:
    """Refuse to start a run again whose checkpoints have vanished since they were saved.

    Collective: other nodes may not see the events, and would wait for the first rank otherwise.

    Raises:
        CheckpointError: The run's events record a save.
    """
    ranks = RankGroup(get_host_group())
    save = folder.find_last_save() if ranks.is_first else None
    found = ranks.broadcast_first(None if save is None else [save.step or 0, save.path])
    if found is not None:
        step, path = found
        raise folder.build_loss_error(step, path)


def find_rollback_point(folder: RunFolder, max_step: int) -> ResumePoint | None:
    """Find the newest complete checkpoint of at most `max_step`. Collective; same on all ranks."""
    group = get_host_group()
    ranks = RankGroup(group)
    folders = list_step_folders(folder.checkpoints) if ranks.is_first else []
    for name in ranks.broadcast_first(
        [found.path.name for found in reversed(folders) if found.step <= max_step]
    ):
        try:
            path = folder.checkpoints / name
            checkpoint = open_checkpoint(path, group=group, should_cache=True)
        except CheckpointError as error:  # same on every rank
            logger.warning("%s", error)
        else:
            return ResumePoint(checkpoint, read_run_values(checkpoint, group=group))
    return None


def list_changes(
    start: ResumePoint | CopiesInMemory, validated_run: ValidatedRun
) -> list[FieldDifference]:
    """List the changes of the recipe that a resumed run may make; they are only reported."""
    current = collect_changeable_settings(validated_run)
    return find_differences(add_missing_defaults(start.values.recipe, current), current)


def add_missing_defaults(saved: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """Add the defaults of keys that are newer than the saved sections of a recipe.

    A run of a former version has no value of such a key and behaves as by its default. Keys that
    `current` lacks are not added.
    """
    complete = dict(saved)
    for name, section in _SECTIONS.items():
        values = saved.get(name)
        now = current.get(name)
        if isinstance(values, Mapping) and isinstance(now, Mapping):
            defaults = {
                key: field.get_default(call_default_factory=True)
                for key, field in section.model_fields.items()
                if key in now and not field.is_required()
            }
            complete[name] = defaults | dict(values)
    return complete


def collect_changeable_settings(validated_run: ValidatedRun) -> dict[str, Any]:
    """Collect the settings that a resumed run may change, as JSON."""
    recipe = validated_run.recipe
    return {
        "training": recipe.training.model_dump(mode="json", exclude=set(FIXED_TRAINING_FIELDS)),
        "precision": recipe.precision.model_dump(mode="json"),
        "recompute": recipe.model_dump(mode="json")["recompute"],
    }
