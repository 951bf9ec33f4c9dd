"""Each known mistake, planted in a plain loop, is named; clean loops are not accused."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch

from shardwright.audit.check import AuditReport, check_recorded_step
from shardwright.audit.mistakes.mistake_table import MISTAKES
from tests.unit.audit.simulated_trainer import Run, simulate

PLANTED = [
    Run(("mean_of_rank_means",)),
    Run(("mean_of_micro_batch_means",)),
    Run(("ranks_not_divided",)),
    Run(("accumulation_not_divided",)),
    Run(("nothing_divided",)),
    Run(("divided_by_accumulation_twice",)),
    Run(("divided_by_ranks_twice",)),
    Run(("multiplied_by_ranks",)),
    Run(("multiplied_by_accumulation",)),
    Run(("multiplied_by_sharing_ranks",), num_sharing=2, num_ranks=1),
    Run(("divided_by_sharing_ranks",), num_sharing=4, num_batches=2),
    Run(("mean_of_context_means",), num_sharing=2),
    Run(("key_gradients_lost",), num_sharing=2, num_batches=1),
    Run(("query_gradients_lost",), num_sharing=2, num_batches=1, is_mirrored=True, length=12),
    Run(("heads_mixed",), num_sharing=2, num_batches=1),
    Run(("heads_and_tokens_mixed",), num_sharing=2, num_batches=1),
    Run(("head_gradient_not_summed",), num_sharing=2, num_batches=1),
    Run(("vocabulary_gradients_lost",), num_sharing=2, num_batches=1),
    Run(("logits_summed_over_copies",), num_sharing=2, num_batches=1),
    Run(("layers_numbered_by_stage",), num_sharing=2, num_batches=1, model="sliding"),
    Run(("tokens_not_counted",)),
    Run(("all_scaled",)),
    Run(("gradients_exchanged",)),
    Run(("gradients_incomplete",)),
    Run(("gradients_are_parameters",)),
    Run(("parameters_in_gradients",)),
    Run(("labels_smoothed",)),
    Run(("labels_smoothed_by_parts",), num_sharing=2),
    Run(("stages_rescaled",)),
    Run(("not_finite_applied",), max_norm=0.5),
    Run(("log_ranks_added",), num_sharing=2),
    Run(("clipped_by_squared_norm",), max_norm=0.1),
    Run(("final_scaling_missing",)),
    Run(("sum_averaged_over_ranks",)),
    Run(("unsupervised_tokens_counted",)),
    Run(("labels_counted_before_shift",), rows="unprompted"),
    Run(("rank_lost",)),
    Run(("micro_batch_lost",)),
    Run(("last_micro_batch_only",)),
    Run(("first_micro_batch_only",)),
    Run(("not_reduced",)),
    Run(("last_micro_batch_not_reduced",)),
    Run(("some_not_reduced",)),
    Run(("some_scaled",)),
    Run(("some_lost",)),
    Run(("clipped_before_reduction",), max_norm=0.5),
    Run(("labels_shifted_twice",)),
    Run(("labels_not_shifted",)),
    Run(("padding_supervised",), rows="padded"),
    Run(("prompt_supervised",), rows="padded"),
    Run(("documents_attend",), rows="packed"),
    Run(("positions_not_reset",), rows="packed", model="gpt2"),
    Run(("targets_cross_documents",), rows="packed"),
    Run(("dropout_on",), model="dropping"),
    Run(("tied_counted_once",), model="tied"),
    Run(("tied_counted_twice",), model="tied"),
    Run(("not_zeroed",), num_steps=2),
    Run(("low_precision_accumulation",)),
    Run(("same_data",)),
    Run(("replicas_differ",)),
    Run(("own_loss_reported",)),
    Run(("replicas_counted_in_norm",)),
    Run(("replicas_counted_in_norm",), num_sharing=3),
    Run(("norm_is_zero",), max_norm=0.5),
    Run(("not_clipped",), max_norm=0.5),
    Run(("clip_unbounded",), max_norm=50.0),
    Run(("clipped_per_group",), max_norm=0.1),
    Run(("clipped_twice",), max_norm=0.5),
    Run(("parameter_not_updated",)),
    Run(("next_learning_rate",)),
    Run(("other_learning_rate",)),
    Run(("decay_differs",)),
    Run(("optimizer_state_lost",), num_steps=3),
    Run(("optimizer_state_stale",), num_steps=3),
]
PAIRS = [
    Run(("mean_of_rank_means", "rank_lost")),
    Run(("mean_of_micro_batch_means", "divided_by_accumulation_twice")),
    Run(("documents_attend", "mean_of_rank_means"), rows="packed"),
    Run(("documents_attend", "positions_not_reset"), rows="packed"),
    Run(("some_scaled", "divided_by_ranks_twice")),
    Run(("mean_of_rank_means", "not_reduced")),
]


def audit(folder: Path, run: Run) -> AuditReport:
    simulate(folder, run)
    return check_recorded_step(folder)


@pytest.mark.parametrize("run", PLANTED, ids=lambda run: run.mistakes[0])
def test_a_planted_mistake_is_named(tmp_path: Path, run: Run) -> None:
    report = audit(tmp_path, run)
    assert not report.passed
    named = [diagnosis.keys for diagnosis in report.diagnoses]
    assert run.mistakes in named, (named, report.residual)
    diagnosis = report.diagnoses[named.index(run.mistakes)]
    assert diagnosis.residual_after < 0.5 * diagnosis.residual_before


def test_a_loss_scale_that_the_step_divides_out_is_named(tmp_path: Path) -> None:
    report = audit(tmp_path, Run(("scaled_in_the_step",), max_norm=0.5))
    assert [diagnosis.keys for diagnosis in report.diagnoses] == [("all_scaled",)]
    assert report.diagnoses[0].subject == "clip: factors from 1.526e-05 to 1.526e-05"


def test_a_clip_by_a_wrong_norm_is_reported_as_the_norm_only(tmp_path: Path) -> None:
    report = audit(tmp_path, Run(("replicas_counted_in_norm",), max_norm=0.1))
    assert [f.quantity for f in report.findings if not f.passed] == ["gradient norm", "clip"]
    assert [d.keys for d in report.diagnoses] == [("replicas_counted_in_norm",)]


def test_nothing_else_is_named_where_gradients_are_not_finite(tmp_path: Path) -> None:
    report = audit(tmp_path, Run(("not_finite_applied",), max_norm=0.5))
    assert [diagnosis.keys for diagnosis in report.diagnoses] == [("not_finite_applied",)]


@pytest.mark.parametrize("run", PAIRS, ids=lambda run: "-".join(run.mistakes))
def test_a_pair_of_mistakes_is_named(tmp_path: Path, run: Run) -> None:
    report = audit(tmp_path, run)
    assert not report.passed
    named = [set(diagnosis.keys) for diagnosis in report.diagnoses]
    assert set(run.mistakes) in named, (named, report.residual)


def draw_clean_run(number: int) -> Run:
    draw = random.Random(number)
    rows = draw.choice(["plain", "padded", "packed"])
    return Run(
        model=draw.choice(["llama", "tied", "gpt2"]),
        num_ranks=draw.choice([1, 2, 3]),
        num_batches=draw.choice([1, 2, 3]),
        num_sharing=random.Random(-number).choice([1, 1, 2]),
        num_rows=draw.choice([1, 2]),
        length=draw.choice([8, 10, 13]),
        rows=rows,
        optimizer=draw.choice(["adamw", "sgd"]),
        max_norm=draw.choice([None, 0.1, 100.0]),
        num_steps=draw.choice([1, 2]),
        seed=draw.randrange(1, 4),
        recorder=draw.choice([{}, {}, {"projections": 64}]),
    )


@pytest.mark.parametrize(
    "numbers",
    [range(20), pytest.param(range(20, 325), marks=[pytest.mark.long, pytest.mark.timeout(1800)])],
    ids=["20", "305"],
)
def test_no_clean_run_is_accused(tmp_path: Path, numbers: range) -> None:
    accused = []
    for number in numbers:
        run = draw_clean_run(number)
        report = audit(tmp_path / str(number), run)
        if not report.passed or report.diagnoses:
            accused.append((number, run, report.diagnoses, report.worst_parameters[0]))
    assert not accused, accused


@pytest.mark.parametrize("mistake", ["mean_of_rank_means", "some_scaled", "documents_attend"])
def test_random_projections_show_the_same_mistakes(tmp_path: Path, mistake: str) -> None:
    rows = "packed" if mistake == "documents_attend" else "plain"
    report = audit(tmp_path, Run((mistake,), rows=rows, recorder={"projections": 128}))
    assert not report.passed
    assert [diagnosis.keys for diagnosis in report.diagnoses] == [(mistake,)]
    assert report.projections == 128


def test_rounding_of_bf16_is_no_mistake_and_a_mistake_is_seen_through_it(tmp_path: Path) -> None:
    clean = audit(tmp_path / "clean", Run(dtype=torch.bfloat16))
    assert clean.passed, clean.worst_parameters[0]
    wrong = audit(tmp_path / "wrong", Run(("divided_by_ranks_twice",), dtype=torch.bfloat16))
    assert not wrong.passed
    assert wrong.diagnoses[0].keys == ("divided_by_ranks_twice",)


def test_every_issue_has_an_address() -> None:
    links = [link for mistake in MISTAKES.values() for link in mistake.links]
    assert len(links) > 30
    path = r"https://github.com/[\w-]+/[\w.-]+/(issues/\d+|commit/[\da-f]{8,})"
    assert all(re.fullmatch(path, link) for link in links)
