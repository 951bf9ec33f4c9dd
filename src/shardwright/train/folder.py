"""The run folder: what it holds, and when a run may use it.

<run>/recipe.yaml    the recipe as resolved           <run>/events.jsonl   one event per line
      plan.json      how it is cut over the ranks           log.txt        the same for people
      config.json    the model, as Hugging Face has it      checkpoints/   step-00000100, ..., latest, best
      tokenizer/     the tokenizer                          samples/       texts of evaluations
      hangs/         who was missing from what, with everybody's stacks, where it hung
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.checkpoint.commit import has_saved
from shardwright.checkpoint.place import Place, place_of
from shardwright.config import Recipe, dump_recipe, load_recipe
from shardwright.errors import CheckpointError, InputError
from shardwright.telemetry.events import check_free


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run."""

    path: Path
    checkpoints_at: str | None = None
    """Folder or URL of the checkpoints, where they are not in the run folder."""

    @classmethod
    def of(cls, recipe: Recipe) -> RunFolder:
        """The folder that a recipe names: `run.dir`, or runs/<name>."""
        path = Path(recipe.run.dir) if recipe.run.dir else Path("runs") / recipe.name
        return cls(path, recipe.checkpoint.dir)

    @classmethod
    def existing(cls, path: Path) -> RunFolder:
        """The folder of a run that was started before.

        Raises:
            InputError: nothing of ours is there.
        """
        folder = cls(path)
        if not folder.recipe.is_file():
            raise InputError(
                "not a run folder", field="RUN", got=str(path), allowed="a folder that holds recipe.yaml, as `train` makes it"
            )
        return cls(path, folder.load_recipe().checkpoint.dir)

    @property
    def recipe(self) -> Path:
        """The recipe as resolved."""
        return self.path / "recipe.yaml"

    @property
    def plan(self) -> Path:
        """The plan as JSON."""
        return self.path / "plan.json"

    @property
    def prediction(self) -> Path:
        """What the planner predicted of the plan, where the recipe names a cluster."""
        return self.path / "prediction.json"

    @property
    def config(self) -> Path:
        """The model's config.json."""
        return self.path / "config.json"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer's folder."""
        return self.path / "tokenizer"

    @property
    def log(self) -> Path:
        """Plain lines for people."""
        return self.path / "log.txt"

    @property
    def samples(self) -> Path:
        """What the model wrote at evaluations, a file for each."""
        return self.path / "samples"

    @property
    def hangs(self) -> Path:
        """What was written when the run hung: who was missing from what, and everybody's stacks."""
        return self.path / "hangs"

    @property
    def checkpoints(self) -> Place:
        """All checkpoints."""
        return self.path / "checkpoints" if self.checkpoints_at is None else place_of(self.checkpoints_at)

    @property
    def has_checkpoints(self) -> bool:
        """Whether a save has ended, damaged since or not; a run that died in its first one has none, and may begin again."""
        return has_saved(self.checkpoints)

    @property
    def begun(self) -> bool:
        """Whether a run is there, with or without a checkpoint."""
        return self.recipe.exists() or self.has_checkpoints

    def load_recipe(self) -> Recipe:
        """The recipe that the run was started with."""
        return load_recipe(self.recipe)

    def claim(self, *, resume: bool) -> None:
        """See that the folder may be used; nothing is written.

        Raises:
            InputError: a run is there already and `resume` was not asked for, or another process is training it.
            CheckpointError: `resume` was asked for and nothing is there to go on from. A run that ended before its first
                checkpoint may be resumed: it begins again.
        """
        begun = self.begun
        if begun and not resume:
            raise InputError(
                "a run is there already",
                field="run.dir",
                got=str(self.path),
                remedy="Go on with it (--resume), name another folder (--run-dir), or remove it",
            )
        if resume and not begun:
            raise CheckpointError(
                "there is no run and no checkpoint to resume from",
                field="run.dir",
                got=str(self.path),
                remedy="Start without --resume",
            )
        check_free(self.path)

    def write(self, recipe: Recipe, plan: dict[str, Any], config: dict[str, Any], prediction: dict[str, Any] | None = None) -> None:
        """Write recipe, plan, prediction and model configuration, each whole or not at all.

        Raises:
            InputError: the folder cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for path, text in (
                (self.plan, json.dumps(plan, indent=2) + "\n"),
                (self.config, json.dumps(config, indent=2) + "\n"),
                *([] if prediction is None else [(self.prediction, json.dumps(prediction, indent=2) + "\n")]),
                (self.recipe, dump_recipe(recipe)),  # last: it is what marks a run folder
            ):
                partial = path.with_name(path.name + ".partial")
                partial.write_text(text, encoding="utf-8")
                partial.replace(path)
        except OSError as error:
            raise InputError(f"cannot be written: {error.strerror}", field="run.dir", got=str(self.path)) from error
