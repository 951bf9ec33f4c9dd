"""A run that another start has overtaken leaves the run folder alone."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from shardwright.checkpoint.run_folder import RunFolder
from shardwright.errors import InputError
from shardwright.telemetry.event_log import EventWriter
from shardwright.training import rank_run
from shardwright.training.run import train
from tests.unit.training.test_token_ids import MODEL, build_recipe


@pytest.mark.parametrize("is_running", [True, False])
def test_a_start_that_was_overtaken_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_running: bool
) -> None:
    recipe = build_recipe(tmp_path, {"config": MODEL})
    folder = RunFolder.from_recipe(recipe)
    other = recipe.model_copy(update={"seed": 77})
    validate = rank_run.validate_run
    with ExitStack() as stack:

        def validate_while_another_starts(*arguments: Any, **options: Any) -> Any:
            folder.write_metadata(other, {}, {})
            writer = EventWriter(folder.path)
            if is_running:
                stack.callback(writer.close)
            else:
                writer.close()
            return validate(*arguments, **options)

        monkeypatch.setattr(rank_run, "validate_run", validate_while_another_starts)
        message = "another process is writing" if is_running else "already has a run"
        with pytest.raises(InputError, match=message):
            train(recipe)
    assert folder.load_recipe().seed == 77
    assert not folder.tokenizer_path.exists()
