"""Measured step times correct later plans of the same hardware, and only those."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwright import api
from shardwright.cli.main import run
from shardwright.config import Recipe
from shardwright.config.recipe_loading import load_recipe, validate_recipe
from shardwright.doctor.checklist_context import ChecklistContext
from shardwright.errors import ExitCode, InputError
from shardwright.hardware import step_versions
from shardwright.hardware.catalog_loading import parse_cluster
from shardwright.hardware.host_cpu import guess_host
from shardwright.hardware.step_versions import describe_step_versions
from shardwright.launch.auto_layout import describe_choice, plan_ranks
from shardwright.planner.auto_layout import choose_layout
from shardwright.planner.candidate import Candidate
from shardwright.planner.planning_result import PlanningResult, plan_recipe
from shardwright.planner.step_profile import (
    StepProfile,
    TunedStep,
    build_tuned_step,
    find_profile_path,
    load_step_profile,
    save_step_profile,
)
from shardwright.plans import resolve_degrees
from shardwright.tuning.candidates import CandidateList, TuningRequest, list_candidates
from tests.unit.planner import models

RECIPE: dict[str, Any] = {
    "name": "small",
    "model": {"config": models.CONFIGS["llama"], "compile": False},
    "data": {"sources": "nowhere"},
    "training": {
        "sequence_length": 256,
        "global_batch_size": 64,
        "max_steps": 100,
        "learning_rate": 1e-3,
    },
    "precision": "bf16",
    "layout": {"zero_stage": 3},
}
AUTO: dict[str, Any] = RECIPE | {"layout": "auto", "cluster": "2xEPYC-9654"}
CLUSTER = parse_cluster("2xEPYC-9654")
VALID_STEP: dict[str, Any] = {
    "workload": "a",
    "layout": {},
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "recompute": "none",
    "compile": False,
    "offload": "none",
    "predicted_seconds": 1.0,
    "measured_seconds": 1.0,
    "spread": 0.0,
    "rates": "",
    "measured_at": "",
}


@pytest.fixture(scope="module")
def candidates() -> CandidateList:
    return list_candidates(TuningRequest(validate_recipe(RECIPE), CLUSTER, 2, False, False))


def measure(candidates: CandidateList, ratios: dict[int, float]) -> StepProfile:
    """Return a profile in which candidates took `ratios` times their predicted time."""
    steps: list[TunedStep] = []
    for index, ratio in ratios.items():
        prediction = candidates.candidates[index].prediction
        step = build_tuned_step(
            prediction,
            candidates.workload,
            measured_seconds=ratio * prediction.time.step,
            spread=0.02,
            rates=CLUSTER.rates_source,
            measured_at="2026-01-01T00:00:00Z",
            versions=describe_step_versions(CLUSTER),
        )
        steps.append(step)
    return StepProfile(CLUSTER.name, tuple(steps))


def replace_age(text: str) -> str:
    """Replace the age of measurements, which changes from hour to hour."""
    return re.sub(r"Z, \d+d \d\dh ago", "Z, AGE ago", text)


def plan(profile: StepProfile | None, **changes: Any) -> PlanningResult:
    return plan_recipe(validate_recipe(RECIPE | changes), CLUSTER, step_profile=profile)


def test_the_layout_that_was_measured_fastest_is_chosen(candidates: CandidateList) -> None:
    slowest = len(candidates.candidates) - 1
    ratios = dict.fromkeys(range(slowest), 3.0) | {slowest: 0.3}
    result = plan(measure(candidates, ratios))
    assert result.num_measured_steps == slowest + 1
    fastest = candidates.candidates[slowest].prediction
    assert result.chosen is not None
    assert result.chosen.candidate == fastest.candidate
    assert result.chosen is result.predictions[0]
    assert result.chosen.is_measured
    assert result.chosen.time.step == pytest.approx(0.3 * fastest.time.step)
    low, high = result.chosen.step_interval
    assert high / low == pytest.approx(1.02**2)
    assert plan(None).chosen != result.chosen


def test_of_equally_fast_layouts_the_measured_one_is_chosen(candidates: CandidateList) -> None:
    """Without measurements the simplest one is; measuring another as predicted changes that."""
    predicted = plan(None)
    chosen = predicted.chosen
    other = next(each for each in predicted.alternatives if each is not chosen)
    step = build_tuned_step(
        other,
        candidates.workload,
        measured_seconds=other.time.step,
        spread=0.02,
        rates=CLUSTER.rates_source,
        measured_at="2026-01-01T00:00:00Z",
        versions=describe_step_versions(CLUSTER),
    )
    result = plan(StepProfile(CLUSTER.name, (step,)))
    assert result.chosen is not None
    assert result.chosen.candidate == other.candidate
    assert len(result.alternatives) == len(predicted.alternatives)


def test_other_settings_are_corrected_by_those_of_their_layout(candidates: CandidateList) -> None:
    """The recipe's own layout was measured twice as slow; another one as predicted."""
    profile = measure(candidates, {0: 2.0, 1: 1.0})
    before = plan(None, recompute="full").recipe_prediction
    after = plan(profile, recompute="full").recipe_prediction
    assert before is not None
    assert after is not None
    assert not after.is_measured
    assert after.time.step == pytest.approx(2 * before.time.step)
    assert after.time.compute == pytest.approx(2 * before.time.compute)
    assert after.memory == before.memory


def test_a_layout_that_was_not_measured_has_the_median_of_the_others(
    candidates: CandidateList,
) -> None:
    profile = measure(candidates, {1: 4.0})
    before = plan(None).recipe_prediction
    after = plan(profile).recipe_prediction
    assert before is not None
    assert after is not None
    assert after.time.step == pytest.approx(4 * before.time.step)


def test_another_recipe_is_corrected_by_the_ratio_alone(candidates: CandidateList) -> None:
    profile = measure(candidates, {0: 2.0, 1: 2.0})
    training = RECIPE["training"] | {"sequence_length": 128}
    before = plan(None, training=training)
    after = plan(profile, training=training)
    assert after.num_measured_steps == 0
    assert [p.candidate for p in after.predictions] == [p.candidate for p in before.predictions]
    for corrected, predicted in zip(after.predictions, before.predictions, strict=True):
        assert corrected.time.step == pytest.approx(2 * predicted.time.step)
        assert not corrected.is_measured
    other_rates = tuple(replace(step, rates="measured elsewhere") for step in profile.steps)
    unchanged = plan(replace(profile, steps=other_rates), training=training)
    assert unchanged.num_measured_steps is None
    assert unchanged.predictions == before.predictions


def test_a_newer_measurement_replaces_an_older_one(
    candidates: CandidateList, tmp_path: Path
) -> None:
    profile = measure(candidates, {0: 2.0, 1: 2.0}).add(measure(candidates, {0: 5.0}).steps)
    path = tmp_path / "folder" / "steps.json"
    save_step_profile(profile, path)
    loaded = load_step_profile(path)
    assert loaded is not None
    assert loaded.path == path
    assert len(loaded.steps) == 2
    after = plan(loaded).recipe_prediction
    assert after is not None
    assert after.time.step == pytest.approx(loaded.steps[0].measured_seconds)
    assert load_step_profile(tmp_path / "none.json") is None


@pytest.mark.parametrize(
    "change",
    [
        {"schema_version": 2},
        {"steps": 3},
        {"steps": [{"workload": "a"}]},
        {"steps": [None]},
        {"steps": [VALID_STEP | {"versions": ["torch"]}]},
    ],
)
def test_a_damaged_file_is_refused(
    candidates: CandidateList, tmp_path: Path, change: dict[str, Any]
) -> None:
    path = tmp_path / "steps.json"
    save_step_profile(measure(candidates, {0: 2.0}), path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError, match="not a file of measured steps"):
        load_step_profile(path)
    path.write_text('{"schema_version":')
    with pytest.raises(InputError, match="--no-measured-steps` does not read it"):
        load_step_profile(path)


def test_plan_reports_the_correction_in_one_line(
    candidates: CandidateList,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path))
    path = find_profile_path(CLUSTER)
    assert path.is_relative_to(tmp_path)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(RECIPE))
    words = ["plan", str(recipe), "--cluster", "2xEPYC-9654"]
    assert run([*words, "--json"]) == ExitCode.DONE
    before = json.loads(capsys.readouterr().out)
    assert before["num_measured_steps"] is None
    save_step_profile(measure(candidates, {1: 0.5}), path)
    assert run([*words, "--json"]) == ExitCode.DONE
    output = capsys.readouterr()
    after = json.loads(output.out)
    assert after["num_measured_steps"] == 1
    assert after["chosen"]["measured"]
    line = (
        "corrected by 1 step time of this recipe that `tune` measured on this hardware at "
        f"2026-01-01T00:00:00Z, AGE ago ({path})"
    )
    text = replace_age(output.err)
    assert text.count(f"{line}; --no-measured-steps plans without them\n") == 1
    assert run(words) == ExitCode.DONE
    text = " ".join(capsys.readouterr().out.split())
    assert text.count("corrected by 1 step time of this recipe") == 1
    assert "#: step time measured by `tune`" in text
    assert run([*words, "--json", "--no-measured-steps"]) == ExitCode.DONE
    output = capsys.readouterr()
    assert json.loads(output.out)["layouts"] == before["layouts"]
    assert "corrected" not in output.err
    assert run([*words[:-1], "4xEPYC-9654", "--json"]) == ExitCode.DONE  # other hardware
    assert json.loads(capsys.readouterr().out)["num_measured_steps"] is None


@pytest.mark.parametrize("change", [{"torch": "1.0.0"}, {"shardwright": "0.0.1"}, None])
def test_steps_measured_with_other_versions_are_ignored_in_one_line(
    candidates: CandidateList,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, str] | None,
) -> None:
    """So are steps of files that have no versions."""
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path))
    versions = describe_step_versions(CLUSTER)
    former = {} if change is None else versions | change
    profile = measure(candidates, dict.fromkeys(range(len(candidates.candidates)), 3.0))
    steps = tuple(replace(step, versions=former) for step in profile.steps)
    path = find_profile_path(CLUSTER)
    save_step_profile(replace(profile, steps=steps), path)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(AUTO))
    ignored = api.plan(recipe)
    unmeasured = api.plan(recipe, should_use_measured_steps=False)
    assert ignored.num_measured_steps is None
    assert ignored.predictions == unmeasured.predictions
    assert ignored.correction_summary is not None
    named = "unknown versions"
    if change is not None:
        named = " and ".join(f"{name} {version}" for name, version in former.items())
    assert replace_age(ignored.correction_summary) == (
        f"ignored: {len(steps)} step times that `tune` measured with {named}, not this software "
        f"and CPU (at 2026-01-01T00:00:00Z, AGE ago; {path}); `tune` measures again"
    )
    assert describe_choice(plan_ranks(load_recipe(recipe), 2)).endswith(ignored.correction_summary)
    assert run(["plan", str(recipe), "--json"]) == ExitCode.DONE
    output = replace_age(capsys.readouterr().err)
    assert output.count(f"{replace_age(ignored.correction_summary)}\n") == 1

    mixed = (*steps[1:], replace(steps[0], versions=versions))
    save_step_profile(replace(profile, steps=mixed), path)
    summary = api.plan(recipe).correction_summary
    assert summary is not None
    assert "corrected by 1 step time of this recipe" in summary
    assert f"ignored: {len(steps) - 1} step times" in summary


def test_a_step_on_a_cpu_without_a_name_belongs_to_the_cpu_that_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_versions, "read_processor_name", lambda: "EPYC 1")
    named = describe_step_versions(CLUSTER)
    assert "CPU" not in named
    here = guess_host(CLUSTER, "cpu")
    assert describe_step_versions(here) == named | {"CPU": "EPYC 1"}
    monkeypatch.setattr(step_versions, "read_processor_name", lambda: None)
    assert describe_step_versions(here) == named


def test_a_workload_is_everything_but_the_settings() -> None:
    def describe(**changes: Any) -> str:
        recipe = validate_recipe(RECIPE | changes)
        return list_candidates(TuningRequest(recipe, CLUSTER, 2, False, False)).workload

    own = describe()
    assert describe(layout={"zero_stage": 1}, recompute="full") == own
    assert describe(precision="fp32") != own
    assert describe(optimizer={"name": "sgd"}) != own
    assert describe(training=RECIPE["training"] | {"global_batch_size": 32}) != own


@pytest.fixture(scope="module")
def slow_index(candidates: CandidateList) -> int:
    """Return the index of a candidate that is predicted slower than those of other layouts."""
    settings = [each.prediction.candidate for each in candidates.candidates]
    return next(
        index
        for index, each in enumerate(settings)
        if each.layout.tp == 2 and each.gradient_accumulation_steps == 2
    )


def reverse_order(candidates: CandidateList, slow_index: int) -> StepProfile:
    """Return measured steps of which those of one slow candidate are the shortest."""
    ratios = dict.fromkeys(range(len(candidates.candidates)), 3.0)
    return measure(candidates, ratios | {slow_index: 0.3})


def test_train_chooses_the_layout_that_plan_chooses_by_measured_steps(
    candidates: CandidateList,
    slow_index: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path))
    path = find_profile_path(CLUSTER)
    profile = reverse_order(candidates, slow_index)
    later = replace(profile.steps[slow_index], measured_at="2026-01-02T00:00:00Z")
    save_step_profile(profile.add([later]), path)
    recipe = validate_recipe(AUTO)
    predicted = api.plan(recipe, should_use_measured_steps=False).chosen
    corrected = api.plan(recipe).chosen
    assert predicted is not None
    assert corrected is not None
    fastest = candidates.candidates[slow_index].prediction
    assert corrected.candidate == fastest.candidate
    assert corrected.candidate.layout != predicted.candidate.layout
    assert choose_layout(recipe, CLUSTER, 2).prediction.candidate == predicted.candidate

    planned = plan_ranks(recipe, 2)
    assert planned.prediction == corrected
    assert planned.uncorrected_seconds == pytest.approx(fastest.time.step)
    assert planned.recipe.cluster == recipe.cluster
    layout, batch = resolve_degrees(planned.recipe, 2)
    assert layout == fastest.candidate.layout
    assert batch.micro_batch_size == fastest.candidate.micro_batch_size
    assert planned.recipe.recompute == fastest.candidate.recompute
    checklist = ChecklistContext(recipe, 2, "recipe.yaml")
    assert checklist.resolved_recipe == planned.recipe
    assert checklist.prediction is not None
    assert checklist.prediction.time == corrected.time

    line = (
        f"corrected by {len(profile.steps)} step times of this recipe that `tune` measured on "
        f"this hardware from 2026-01-01T00:00:00Z to 2026-01-02T00:00:00Z, AGE ago ({path})"
    )
    description = replace_age(describe_choice(planned))
    assert "; measured " in description
    assert description.endswith(f" per device; {line}")
    (tmp_path / "recipe.yaml").write_text(json.dumps(AUTO))
    assert run(["plan", str(tmp_path / "recipe.yaml"), "--json"]) == ExitCode.DONE
    assert line in replace_age(capsys.readouterr().err)

    path.write_text("{")
    with pytest.raises(InputError, match="not a file of measured steps"):
        plan_ranks(recipe, 2)


@pytest.mark.parametrize(
    ("setting", "written", "measured"),
    [
        ("micro_batch_size", 1, 32),
        ("gradient_accumulation_steps", 1, 2),
        ("recompute", "selective", "none"),
        ("compile", False, True),
        ("prefetch_depth", 3, 2),
        ("offload", "none", "optimizer"),
    ],
)
def test_layout_auto_keeps_values_of_the_recipe_whatever_was_measured(
    candidates: CandidateList, slow_index: int, setting: str, written: Any, measured: Any
) -> None:
    """Without the value in the recipe, the measured settings become the run's."""
    prediction = candidates.candidates[slow_index].prediction
    candidate = prediction.candidate
    sections: dict[str, Any] = {"recompute": {"recompute": written}}
    sections["offload"] = {"offload": {"optimizer": written}}
    sections["prefetch_depth"] = {"layout": {"auto": True, setting: written}}
    sections["compile"] = {"model": AUTO["model"] | {setting: written}}
    section = sections.get(setting, {"training": AUTO["training"] | {setting: written}})
    if setting == "prefetch_depth":
        candidate = replace(candidate, layout=replace(candidate.layout, prefetch_depth=measured))
    else:
        candidate = replace(candidate, **{setting: measured})
    step = build_tuned_step(
        replace(prediction, candidate=candidate),
        candidates.workload,
        measured_seconds=0.01 * prediction.time.step,
        spread=0.02,
        rates=CLUSTER.rates_source,
        measured_at="2026-01-01T00:00:00Z",
        versions=describe_step_versions(CLUSTER),
    )
    profile = reverse_order(candidates, slow_index).add([step])

    def choose(**changes: Any) -> tuple[Recipe, Candidate]:
        document = AUTO | {"model": {"config": models.CONFIGS["llama"]}} | changes
        planned = choose_layout(validate_recipe(document), CLUSTER, 2, profile)
        assert planned.correction_summary is not None
        return planned.recipe, planned.prediction.candidate

    if setting == "offload":
        elastic = {"warm_restarts": True, "max_restarts": 1, "peer_copies": 1}
        assert choose(elastic=elastic)[1].offload == written
    _, chosen = choose(**section)
    values = {**vars(chosen), "prefetch_depth": chosen.layout.prefetch_depth}
    assert values[setting] == written
    recipe, chosen = choose()
    assert chosen == candidate
    assert recipe.layout.prefetch_depth == candidate.layout.prefetch_depth
    assert recipe.model.compile == (True if candidate.compile else "auto")
    assert recipe.offload.optimizer == ("none" if candidate.offload == "none" else "host")
