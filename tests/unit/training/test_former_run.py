"""A run folder that a former version wrote, before modules and classes were renamed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import shardwright as sw
from shardwright.checkpoint.drift import find_differences
from shardwright.config.training import OptimizerSection
from shardwright.training.resume_point import add_missing_defaults

FORMER_RUN = Path(__file__).parents[2] / "data/former_run"
LOSSES = (3.3357787132263184, 3.2764949798583984, 3.2832798957824707, 3.2121787071228027)
"""Training losses of steps 1 and 2, and of 3 and 4 after a resume, all by the former version."""


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the run into a folder with its data, which the recipe names by relative paths."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    shutil.copytree(FORMER_RUN, "run")
    return Path("run")


def test_its_events_are_read(run_folder: Path) -> None:
    run = sw.load_run(run_folder)
    assert not run.log.problems
    assert run.status == "completed"
    assert run.table("step")["loss"] == LOSSES[:2]
    assert len(run.table("evaluation")) == 1


def test_it_resumes_and_takes_the_same_steps(run_folder: Path) -> None:
    recipe = sw.load_recipe(run_folder / "recipe.yaml", overrides=["training.max_steps=4"])
    run = sw.train(recipe, resume=True)
    assert run is not None
    assert run.table("step")["step"] == (1, 2, 3, 4)
    # Other CPUs round products differently.
    assert run.table("step")["loss"] == pytest.approx(LOSSES, rel=1e-5)


def test_its_checkpoint_generates_and_exports(run_folder: Path, tmp_path: Path) -> None:
    text = sw.generate(run_folder, "the", max_new_tokens=4, temperature=0.0).text
    sw.export(run_folder, tmp_path / "model", should_check=False)
    assert sw.generate(tmp_path / "model", "the", max_new_tokens=4, temperature=0.0).text == text


def test_keys_that_it_lacks_have_their_defaults() -> None:
    saved = {"optimizer": {"name": "adamw"}, "precision": "fp32", "training": {"max_steps": 2}}
    current = {
        "optimizer": OptimizerSection(beta2=0.99).model_dump(mode="json"),
        "precision": "fp32",
        "training": {"max_steps": 2, "deterministic": False, "learning_rate": 0.1},
    }
    differences = find_differences(add_missing_defaults(saved, current), current)
    assert [str(difference) for difference in differences] == [
        "optimizer.beta2: saved 0.95, now 0.99",
        "training.learning_rate: saved absent, now 0.1",
    ]
