"""`precision: auto`: chosen once, recorded, preserved on resume, and equal on all ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.architecture import read_config
from shardwright.checkpoint.run_folder import RunFolder
from shardwright.config import Recipe, load_recipe
from shardwright.errors import CheckpointError
from shardwright.inference.model_source import open_model_source
from shardwright.launch.rank_environment import RankEnvironment
from shardwright.numerics import bf16
from shardwright.plans import PrecisionChoice, resolve_plan
from shardwright.telemetry.event_log import RunStartedEvent, WarningEvent, read_events
from shardwright.telemetry.sinks import describe_event
from shardwright.training.checks.auto_choice import agree_on_precision, predict_precision
from shardwright.training.rank_sync import RankSync
from shardwright.training.run import train
from tests.multiprocess.models import LLAMA
from tests.unit.training.finished import ALPHABET, CONFIG

FAST = 3.0
EMULATED = 0.025


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return `machine(ratio)`, which sets the speed of bf16 products relative to fp32."""
    return lambda ratio: monkeypatch.setattr(bf16, "measure_bf16_ratio", lambda _device: ratio)


def build_recipe(folder: Path, precision: str | None = None, max_steps: int = 1) -> Recipe:
    """Build a recipe of a few steps, without `precision` by default."""
    (folder / "corpus.txt").write_text(ALPHABET * 20)
    return Recipe.model_validate(
        {
            "model": {"config": CONFIG},
            "tokenizer": {"kind": "character"},
            "data": {"sources": str(folder / "corpus.txt"), "cache_dir": str(folder / "cache")},
            **({} if precision is None else {"precision": precision}),
            "training": {
                "sequence_length": 8,
                "micro_batch_size": 2,
                "max_steps": max_steps,
                "learning_rate": 1e-3,
            },
            "run": {"dir": str(folder / "run"), "device": "cpu"},
        }
    )


def read_plan(folder: Path) -> dict[str, Any]:
    plan: dict[str, Any] = json.loads(RunFolder(folder / "run").plan_path.read_text())
    return plan


def list_warnings(folder: Path) -> list[str]:
    return [event.message for event in read_events(folder / "run").filter_by_type(WarningEvent)]


@pytest.mark.parametrize(("ratio", "kind"), [(FAST, "bf16"), (EMULATED, "fp32")])
def test_a_recipe_without_precision_uses_the_fastest_of_the_machine(
    tmp_path: Path, machine: Any, ratio: float, kind: str
) -> None:
    machine(ratio)
    train(build_recipe(tmp_path))
    assert read_plan(tmp_path)["precision"]["kind"] == kind
    assert "on this CPU" in read_plan(tmp_path)["precision_reason"]
    assert load_recipe(RunFolder(tmp_path / "run").recipe_path).precision.kind == kind
    (started,) = read_events(tmp_path / "run").filter_by_type(RunStartedEvent)
    assert f"{kind} (precision auto: bf16 " in describe_event(started)
    assert not list_warnings(tmp_path)
    assert (
        open_model_source(tmp_path / "run").dtype
        == {"fp32": torch.float32, "bf16": torch.bfloat16}[kind]
    )


@pytest.mark.parametrize(("first_ratio", "second_ratio"), [(FAST, EMULATED), (EMULATED, FAST)])
def test_a_run_resumed_on_another_machine_preserves_and_reports_its_precision(
    tmp_path: Path, machine: Any, first_ratio: float, second_ratio: float
) -> None:
    machine(first_ratio)
    train(build_recipe(tmp_path))
    kind = read_plan(tmp_path)["precision"]["kind"]
    machine(second_ratio)
    assert predict_precision(build_recipe(tmp_path)) == PrecisionChoice(
        kind, "the run was started in it"
    )
    train(build_recipe(tmp_path, max_steps=2), resume=True)
    plan = read_plan(tmp_path)
    assert plan["precision"]["kind"] == kind
    assert plan["precision_reason"].startswith("the run was started in it; a new run would use ")
    # Training in an emulated precision is reported once, with the ratio.
    slow = [message for message in list_warnings(tmp_path) if "40 times slower" in message]
    assert len(slow) == (1 if kind == "bf16" else 0)


def test_a_run_of_a_version_with_default_fp32_resumes_in_fp32(tmp_path: Path, machine: Any) -> None:
    train(build_recipe(tmp_path, "fp32"))  # such a version recorded fp32 for an absent `precision`
    machine(FAST)
    train(build_recipe(tmp_path, max_steps=2), resume=True)
    assert read_plan(tmp_path)["precision"]["kind"] == "fp32"
    # As if resumed from the checkpoints alone, in another run folder.
    RunFolder(tmp_path / "run").recipe_path.unlink()
    assert predict_precision(build_recipe(tmp_path)) == PrecisionChoice(
        "fp32", "the run was started in it"
    )


def test_a_precision_of_the_recipe_is_compared_with_that_of_the_run(
    tmp_path: Path, machine: Any
) -> None:
    machine(EMULATED)
    train(build_recipe(tmp_path))
    with pytest.raises(CheckpointError, match="precision: saved 'fp32', now 'bf16'"):
        train(build_recipe(tmp_path, "bf16", max_steps=2), resume=True)


def test_explicit_bf16_on_an_emulating_machine_gives_one_warning(
    tmp_path: Path, machine: Any
) -> None:
    machine(EMULATED)
    train(build_recipe(tmp_path, "bf16"))
    assert read_plan(tmp_path)["precision"]["kind"] == "bf16"
    assert "precision_reason" not in read_plan(tmp_path)
    (warning,) = list_warnings(tmp_path)
    assert "bf16 is emulated on this CPU, 40 times slower than fp32" in warning


class FakeRankSync(RankSync):
    """Rank synchronisation with given rows of the other ranks."""

    def __init__(self, *rows: list[float]) -> None:
        self.rank_environment = RankEnvironment(world_size=1 + len(rows))
        self._other_rows = rows

    def gather(self, values: Any, *, is_ragged: bool = False) -> list[list[float]]:
        """Return this rank's values, then those of the other ranks."""
        return [list(values), *self._other_rows]


@pytest.mark.parametrize(
    ("ratio", "others", "kind", "reason"),
    [
        (FAST, [[-1.0, 0.0], [-1.0, 0.0]], "bf16", "bf16 products are 3 times as fast"),
        (
            FAST,
            [[-1.0, 0.0], [-1.0, 1.0]],
            "fp32",
            "1 of 3 ranks multiply bf16 more slowly than fp32",
        ),
        (
            EMULATED,
            [[-1.0, 0.0], [-1.0, 0.0]],
            "fp32",
            "bf16 is emulated on this CPU, 40 times slower",
        ),
    ],
)
def test_ranks_with_different_choices_use_fp32(
    tmp_path: Path, machine: Any, ratio: float, others: list[list[float]], kind: str, reason: str
) -> None:
    machine(ratio)
    recipe = build_recipe(tmp_path)
    choice = agree_on_precision(
        recipe,
        RunFolder.from_recipe(recipe),
        FakeRankSync(*others),
        torch.device("cpu"),
        is_resumed=False,
    )
    assert choice is not None
    assert choice.kind == kind
    assert reason in choice.reason


def test_no_plan_has_precision_auto(tmp_path: Path) -> None:
    shape = read_config(LLAMA)
    choice = PrecisionChoice("bf16", "a test says so")
    with pytest.raises(AssertionError, match="`resolve_plan` resolves `auto`"):
        resolve_plan(build_recipe(tmp_path), shape, 1)
    plan = resolve_plan(build_recipe(tmp_path), shape, 1, choice)
    assert (plan.precision.kind, plan.precision_reason) == ("bf16", "a test says so")
    explicit = resolve_plan(build_recipe(tmp_path, "fp64"), shape, 1, choice)
    assert (explicit.precision.kind, explicit.precision_reason) == ("fp64", None)
