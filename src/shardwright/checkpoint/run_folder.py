"""The run folder: its files, and the conditions under which a run may use it.

<run>/recipe.yaml   resolved recipe             <run>/events.jsonl   one event per line
      plan.json     layout, stages, batch, precision  log.txt        the same as text
      config.json   model, Hugging Face format        checkpoints/   step-00000100, latest, best
      tokenizer/    tokenizer                         samples/       texts of evaluations
      hangs/        reports of hangs: missing ranks, stacks of all ranks
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.checkpoint.commit import has_saved
from shardwright.checkpoint.storage_path import StoragePath, parse_storage_path
from shardwright.config import Recipe, dump_recipe, load_recipe
from shardwright.errors import CheckpointError, InputError, ShardwrightError
from shardwright.store_requests import describe_store_error
from shardwright.telemetry.event_log import (
    CheckpointEvent,
    check_unlocked,
    read_events,
    select_surviving,
)


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run."""

    path: Path
    checkpoints_location: str | None = None
    """Folder or URL of the checkpoints if they are outside the run folder."""

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> RunFolder:
        """Return the folder that a recipe names: `run.dir`, or runs/<name>."""
        path = Path(recipe.run.dir) if recipe.run.dir else Path("runs") / recipe.name
        return cls(path, recipe.checkpoint.dir)

    @classmethod
    def open_existing(cls, path: Path) -> RunFolder:
        """Return the folder of a run that was started before.

        Raises:
            InputError: The folder holds no recipe.yaml.
        """
        folder = cls(path)
        if not folder.recipe_path.is_file():
            raise InputError(
                "not a run folder",
                field="RUN",
                got=str(path),
                allowed="a folder with recipe.yaml, as written by `train`",
            )
        return cls(path, folder.load_recipe().checkpoint.dir)

    @property
    def recipe_path(self) -> Path:
        """Resolved recipe."""
        return self.path / "recipe.yaml"

    @property
    def plan_path(self) -> Path:
        """Plan as JSON."""
        return self.path / "plan.json"

    @property
    def prediction_path(self) -> Path:
        """The planner's prediction, if the recipe names a cluster."""
        return self.path / "prediction.json"

    @property
    def config_path(self) -> Path:
        """The model's config.json."""
        return self.path / "config.json"

    @property
    def generation_config_path(self) -> Path:
        """The generation_config.json of the model that the run started from, if it has one."""
        return self.path / "generation_config.json"

    @property
    def tokenizer_path(self) -> Path:
        """Folder of the tokenizer."""
        return self.path / "tokenizer"

    @property
    def log_path(self) -> Path:
        """Log as plain text."""
        return self.path / "log.txt"

    @property
    def samples_path(self) -> Path:
        """Texts that the model generated at evaluations, one file per evaluation."""
        return self.path / "samples"

    @property
    def hang_reports_path(self) -> Path:
        """Reports of hangs: missing ranks and the stacks of all ranks."""
        return self.path / "hangs"

    @property
    def checkpoints(self) -> StoragePath:
        """Folder or URL of all checkpoints."""
        return (
            self.path / "checkpoints"
            if self.checkpoints_location is None
            else parse_storage_path(self.checkpoints_location)
        )

    @property
    def has_checkpoints(self) -> bool:
        """True if a save has completed, even if damaged since.

        A run that died during its first save has no checkpoint and may start again.

        Raises:
            CheckpointError: The folder of checkpoints cannot be read.
        """
        try:
            return has_saved(self.checkpoints)
        except CheckpointError:
            raise
        except Exception as error:  # every file system has its own exceptions
            if isinstance(self.checkpoints, Path):
                raise
            raise CheckpointError(
                f"checkpoints cannot be read here: {describe_store_error(error)}",
                field="checkpoint.dir",
                got=str(self.checkpoints),
                remedy="Check the bucket's name, the credentials and their permission to read",
            ) from error

    @property
    def is_started(self) -> bool:
        """True if a run exists here, with or without a checkpoint."""
        return self.recipe_path.exists() or self.has_checkpoints

    def load_recipe(self) -> Recipe:
        """Load the recipe that the run was started with."""
        return load_recipe(self.recipe_path)

    def check_available(self, *, resume: bool) -> None:
        """Check that the folder may be used; write nothing.

        Raises:
            InputError: A run exists and `resume` is False, or another process is training it.
            CheckpointError: `resume` is True and there is nothing to resume.
        """
        self.check_started(resume=resume)
        check_unlocked(self.path)

    def check_started(self, *, resume: bool) -> None:
        """Check that the folder has a run if `resume`, and none otherwise; write nothing.

        A run that ended before its first checkpoint may be resumed: it starts again. Whether it did
        is checked later, by all ranks together (`find_last_save`).

        Raises:
            InputError: A run exists and `resume` is False.
            CheckpointError: `resume` is True and there is nothing to resume, or the run's
                checkpoints are in another folder.
        """
        exists = self.is_started
        if exists and not resume:
            raise InputError(
                "this folder already has a run",
                field="run.dir",
                got=str(self.path),
                remedy="Continue it (--resume), name another folder (--run-dir), or remove it",
            )
        if resume and not exists:
            raise CheckpointError(
                "no run and no checkpoint to resume from",
                field="run.dir",
                got=str(self.path),
                remedy="Start without --resume",
            )
        if resume:
            self._check_same_checkpoints()

    def _check_same_checkpoints(self) -> None:
        """Refuse to start a run again because a relative `checkpoint.dir` names another folder.

        Raises:
            CheckpointError: This folder of checkpoints is empty, and that of the run is not.
        """
        try:
            former = RunFolder.open_existing(self.path)
        except ShardwrightError:  # no recipe, or one that another version wrote
            return
        # Remote locations are absolute, and their credentials are masked in the run's recipe.
        if "://" in (former.checkpoints_location or ""):
            return
        place = former.checkpoints
        assert isinstance(place, Path), "no URL"
        if self.has_checkpoints or not has_saved(place):
            return
        raise CheckpointError(
            f"it has no checkpoint, and the run has saved its checkpoints in {place.absolute()}",
            field="checkpoint.dir",
            got=_describe_place(self.checkpoints),
            allowed="that folder; a relative path starts at the working directory",
            remedy="Start in the former working directory, set checkpoint.dir to that folder, or "
            "copy its checkpoints",
        )

    def find_last_save(self) -> CheckpointEvent | None:
        """Return the newest save that the events record; None if none has completed.

        Saves of steps that were trained again since, from an earlier step, do not count: a run that
        began again at step 0 on purpose may resume there.
        """
        if not self.path.is_dir():
            return None
        events = select_surviving(read_events(self.path, is_lenient=True))
        saves = [event for event in events if isinstance(event, CheckpointEvent)]
        return saves[-1] if saves else None

    def build_loss_error(self, step: int, path: str) -> CheckpointError:
        """Build the error of a run that saved `path` at `step` and has no checkpoint any more."""
        return CheckpointError(
            f"it has no checkpoint, and the run has saved {path} at step {step:,}",
            field="checkpoint.dir",
            got=_describe_place(self.checkpoints),
            allowed="the place of that checkpoint",
            remedy="Mount or restore it, then resume. To start again at step 0, remove the run "
            f"folder {self.path}, or name another one (--run-dir), and start without --resume",
        )

    def create(self) -> None:
        """Create the folder, unless it exists; write nothing into it.

        Raises:
            InputError: It cannot be created or written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if not os.access(self.path, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise self._build_write_error(error) from error

    def write_metadata(
        self,
        recipe: Recipe,
        plan: dict[str, Any],
        config: dict[str, Any],
        prediction: dict[str, Any] | None = None,
        generation_config: dict[str, Any] | None = None,
        save_tokenizer: Callable[[Path], None] = lambda _folder: None,
    ) -> None:
        """Write recipe, plan, prediction and the model's configurations, each file atomically.

        Credentials in URLs are masked in the recipe, and a relative `checkpoint.dir` is written as
        an absolute path, so that the run can be read from any working directory.

        Args:
            save_tokenizer: writes the tokenizer's files to the given folder.

        Raises:
            InputError: The folder cannot be written.
        """
        self.create()
        try:
            save_tokenizer(self.tokenizer_path)
            for path, text in (
                *(
                    (path, json.dumps(value, indent=2) + "\n")
                    for path, value in (
                        (self.plan_path, plan),
                        (self.config_path, config),
                        (self.prediction_path, prediction),
                        (self.generation_config_path, generation_config),
                    )
                    if value is not None
                ),
                (
                    self.recipe_path,
                    dump_recipe(_make_checkpoints_absolute(recipe), should_mask=True),
                ),  # last: it marks a run folder
            ):
                partial = path.with_name(path.name + ".partial")
                partial.write_text(text, encoding="utf-8")
                partial.replace(path)
        except OSError as error:
            raise self._build_write_error(error) from error

    def _build_write_error(self, error: OSError) -> InputError:
        return InputError(
            f"cannot be written: {error.strerror}",
            field="run.dir",
            got=str(self.path),
            remedy="Free space, or name another folder (--run-dir)"
            if error.errno in (errno.ENOSPC, errno.EDQUOT)
            else "Name another folder (--run-dir)",
        )


def _make_checkpoints_absolute(recipe: Recipe) -> Recipe:
    """Return the recipe with the absolute path of its folder of checkpoints, if it names one."""
    location = recipe.checkpoint.dir
    if location is None or "://" in location:
        return recipe
    section = recipe.checkpoint.model_copy(update={"dir": str(Path(location).absolute())})
    return recipe.model_copy(update={"checkpoint": section})


def _describe_place(place: StoragePath) -> str:
    """Name a folder, with its absolute path if it is relative."""
    if not isinstance(place, Path) or place.is_absolute():
        return str(place)
    return f"{place}, here {place.absolute()}"
