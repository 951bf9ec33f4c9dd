"""Direct preference optimisation: equality with the formula, and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

from shardwright.cli.main import run as shardwright
from shardwright.config.recipe_loading import validate_recipe
from shardwright.data.loader import MicroBatch, read_step_micro_batches
from shardwright.data.records.conversation import UnusableRecord
from shardwright.data.records.record_formats import detect_schema
from shardwright.data.sample_order import SampleOrder
from shardwright.errors import DataError, ExitCode, RecipeError
from shardwright.model.decoder import Decoder
from shardwright.numerics import chunked_cross_entropy, compute_token_losses
from shardwright.training.checks.run_checks import ValidatedRun, validate_run
from shardwright.training.preference_objective import PreferenceObjective
from shardwright.training.setup import build_state
from shardwright.training.step import accumulate_gradients, update_parameters
from shardwright.training.training_state import TrainingState
from tests.unit.training.preference_data import ROWS, preference_recipe, write_pairs


def build_run(folder: Path, **changes: Any) -> tuple[ValidatedRun, TrainingState]:
    checked = validate_run(validate_recipe(preference_recipe(folder, **changes)), 1)
    return checked, build_state(checked, torch.device("cpu"))


def read_batches(checked: ValidatedRun, step: int) -> list[MicroBatch]:
    order = SampleOrder(checked.recipe.seed, len(checked.data.train))
    return read_step_micro_batches(checked.data.train, order, checked.plan.batch, step, 0)


def compute_log_probs(decoder: Decoder, batch: MicroBatch) -> Tensor:
    """Compute log-probabilities of both responses, each from its document alone."""
    log_probs = []
    assert batch.document_ids_BT is not None
    for ids_T, labels_T, documents_T in zip(
        batch.input_ids_BT, batch.labels_BT, batch.document_ids_BT, strict=True
    ):
        for side in (0, 1):
            in_document = documents_T == side
            log_probs_SV = F.log_softmax(decoder(ids_T[in_document][None])[0].double(), dim=-1)
            targets_S = labels_T[in_document]
            is_supervised = targets_S != -100
            log_probs.append(
                log_probs_SV[is_supervised].gather(1, targets_S[is_supervised][:, None]).sum()
            )
    return torch.stack(log_probs).view(-1, 2)


def test_loss_and_gradients_equal_those_of_the_formula(tmp_path: Path) -> None:
    checked, state = build_run(tmp_path)
    model = state.model
    assert isinstance(state.objective, PreferenceObjective)
    with torch.no_grad():  # move away from the reference, so that every term matters
        for number, parameter in enumerate(model.decoder.parameters()):
            parameter += 0.05 * torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(number)
            )
    assert state.objective.reference is not None
    reference = state.objective.reference.decoder
    section = checked.recipe.preference
    assert section is not None
    losses = []
    margins = []
    for batch in read_batches(checked, 0):
        with torch.no_grad():
            reference_log_probs = compute_log_probs(reference, batch)
        ratio = compute_log_probs(model.decoder, batch) - reference_log_probs
        margin = section.beta * (ratio[:, 0] - ratio[:, 1])
        e = section.label_smoothing
        losses.append(-(1 - e) * F.logsigmoid(margin) - e * F.logsigmoid(-margin))
        margins.append(margin.detach())
    loss = torch.cat(losses).mean()
    loss.backward()
    expected = {name: parameter.grad for name, parameter in model.decoder.named_parameters()}
    model.decoder.zero_grad()
    actual_loss = accumulate_gradients(
        model, read_batches(checked, 0), seed=0, step=0, objective=state.objective
    )
    assert actual_loss.mean() == pytest.approx(float(loss.detach()), rel=1e-6)
    for name, parameter in model.decoder.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=2e-4, atol=1e-7, msg=name)
    metrics = state.objective.pop_metrics()
    assert metrics.reward_margin == pytest.approx(float(torch.cat(margins).mean()), rel=1e-5)
    assert metrics.reward_accuracy == pytest.approx(float((torch.cat(margins) > 0).double().mean()))
    assert metrics.reward_chosen - metrics.reward_rejected == pytest.approx(metrics.reward_margin)


def test_training_prefers_the_chosen_and_does_not_change_the_reference(tmp_path: Path) -> None:
    checked, state = build_run(tmp_path, preference={"label_smoothing": 0.0})
    objective = state.objective
    assert isinstance(objective, PreferenceObjective)
    assert objective.reference is not None
    before = {name: parameter.clone() for name, parameter in objective.reference.named_parameters()}
    metrics = []
    for step in range(6):
        loss = accumulate_gradients(
            state.model, read_batches(checked, step % 3), seed=0, step=step, objective=objective
        )
        if step == 0:  # the model still equals its reference
            assert loss.mean() == pytest.approx(0.6931472, abs=1e-6)
        update_parameters(state.model, state.optimizer, learning_rate=1e-2, max_grad_norm=None)
        metrics.append(objective.pop_metrics())
    assert metrics[0].reward_margin == pytest.approx(0.0, abs=1e-6)
    assert metrics[-1].reward_margin > 0.5
    assert metrics[-1].reward_accuracy == 1.0
    assert all(
        torch.equal(parameter, before[name])
        for name, parameter in objective.reference.named_parameters()
    )


def test_the_model_without_adapters_is_the_reference(tmp_path: Path) -> None:
    checked, state = build_run(tmp_path, adapters={"rank": 4})
    objective = state.objective
    assert isinstance(objective, PreferenceObjective)
    assert objective.reference is None
    first = accumulate_gradients(
        state.model, read_batches(checked, 0), seed=0, step=0, objective=objective
    )
    assert objective.pop_metrics().reward_margin == pytest.approx(0.0, abs=1e-6)
    update_parameters(state.model, state.optimizer, learning_rate=0.05, max_grad_norm=None)
    reference_log_probs = objective.compute_reference_log_probs(read_batches(checked, 0))
    second = accumulate_gradients(
        state.model, read_batches(checked, 0), seed=0, step=1, objective=objective
    )
    assert second.mean() < first.mean()
    assert objective.pop_metrics().reward_margin > 0.0
    for recomputed, before in zip(
        objective.compute_reference_log_probs(read_batches(checked, 0)),
        reference_log_probs,
        strict=True,
    ):
        torch.testing.assert_close(recomputed, before, rtol=0, atol=0)


def test_weights_multiply_token_losses_and_their_gradients() -> None:
    random = torch.Generator().manual_seed(0)
    hidden_ND = torch.randn(13, 6, generator=random)
    weight_VD = torch.randn(11, 6, generator=random)
    labels_N = torch.randint(0, 11, (13,), generator=random)
    weights_N = torch.randn(13, generator=random)
    labels_N[[2, 5]] = -100
    tensors = [
        (hidden_ND.clone().requires_grad_(), weight_VD.clone().requires_grad_()) for _ in range(2)
    ]
    losses_N = F.cross_entropy(
        tensors[0][0] @ tensors[0][1].T, labels_N, reduction="none", ignore_index=-100
    )
    (losses_N @ weights_N).backward()
    loss = chunked_cross_entropy(*tensors[1], None, labels_N, chunk_tokens=4, weights_N=weights_N)
    loss.backward()
    torch.testing.assert_close(loss, losses_N @ weights_N)
    for actual, reference in zip(tensors[1], tensors[0], strict=True):
        torch.testing.assert_close(actual.grad, reference.grad)
    torch.testing.assert_close(
        compute_token_losses(hidden_ND, weight_VD, None, labels_N, chunk_tokens=4),
        losses_N.detach(),
    )


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        (
            {"preference": {"reference": "adapter_off"}},
            RecipeError,
            "preference.reference: there are no adapters to switch off",
        ),
        (
            {"data": {"supervise": "all"}},
            DataError,
            "data.supervise: both responses share the prompt",
        ),
        ({"data": {"packing": "documents"}}, DataError, "data.packing: pairs are not packed"),
        (
            {"training": {"sequence_length": 8}},
            DataError,
            r"data.overlong: pairs of responses are longer than a row.*data.overlong: drop",
        ),
    ],
    ids=str,
)
def test_unsupported_settings_are_refused(
    tmp_path: Path, changes: dict[str, Any], kind: type[Exception], message: str
) -> None:
    document = preference_recipe(tmp_path, **changes)
    with pytest.raises(kind, match=message):
        validate_run(validate_recipe(document), 2 if "layout" in changes else 1)


def test_pairs_require_the_section_and_the_section_requires_pairs(tmp_path: Path) -> None:
    document = preference_recipe(tmp_path)
    del document["preference"]
    with pytest.raises(DataError, match="the recipe has no `preference`"):
        validate_run(validate_recipe(document), 1)
    rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in ROWS]
    write_pairs(tmp_path / "pairs.jsonl", rows)
    with pytest.raises(
        DataError,
        match="preference tuning needs preferences, but some sources contain other records",
    ):
        validate_run(validate_recipe(preference_recipe(tmp_path)), 1)


def test_pairs_are_shown_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(preference_recipe(tmp_path)))
    assert shardwright(["data", str(recipe), "--samples", "1"]) == ExitCode.DONE
    shown = " ".join(capsys.readouterr().out.split())
    assert "one row of at most 48 tokens per pair" in shown
    assert "preferences (chosen, rejected)" in shown


def test_pairs_with_and_without_a_prompt_column_are_read() -> None:
    question = {"role": "user", "content": "2+2?"}
    good = {"role": "assistant", "content": "4"}
    bad = {"role": "assistant", "content": "5"}
    with_prompt = {"prompt": [question], "chosen": [good], "rejected": [bad]}
    without_prompt = {"chosen": [question, good], "rejected": [question, bad]}
    results = []
    for row in (with_prompt, without_prompt):
        records = detect_schema([row], "auto", {}, "text", "data.sources.0")
        assert records.kind == "preference"
        results.append(records.read_row(row))
    assert results[0] == results[1]
    chosen = json.loads(results[0][1])["chosen"]["messages"]
    assert chosen == [question | {"loss_weight": 0}, good]
    with pytest.raises(UnusableRecord, match="the same"):
        detect_schema([without_prompt], "auto", {}, "text", "").read_row(
            {"chosen": [question, good], "rejected": [question, good]}
        )


def test_pairs_that_do_not_fit_are_dropped_and_counted(tmp_path: Path) -> None:
    checked, _ = build_run(tmp_path, data={"overlong": "drop"}, training={"sequence_length": 12})
    report = checked.data.report.train
    assert report.num_dropped > 0
    assert len(checked.data.train) == len(ROWS) - report.num_dropped
