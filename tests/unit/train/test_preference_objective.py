"""Direct preference optimisation held against the formula written out, and what it refuses."""

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
from shardwright.data.conversation import UnusableRecord
from shardwright.data.loader import MicroBatch, read_step_micro_batches
from shardwright.data.record_formats import detect_schema
from shardwright.data.sample_order import SampleOrder
from shardwright.errors import DataError, ExitCode, RecipeError
from shardwright.model.decoder import Decoder
from shardwright.numerics import chunked_cross_entropy, compute_token_losses
from shardwright.train.preference_objective import PreferenceObjective
from shardwright.train.run_checks import ValidatedRun, validate_run
from shardwright.train.setup import TrainingState, build_state
from shardwright.train.step import accumulate_gradients, update_parameters
from tests.unit.train.preference_data import ROWS, preference_recipe, write_pairs


def build(folder: Path, **changes: Any) -> tuple[ValidatedRun, TrainingState]:
    checked = validate_run(validate_recipe(preference_recipe(folder, **changes)), 1)
    return checked, build_state(checked, torch.device("cpu"))


def batches(checked: ValidatedRun, step: int) -> list[MicroBatch]:
    order = SampleOrder(checked.recipe.seed, len(checked.data.train))
    return read_step_micro_batches(checked.data.train, order, checked.plan.batch, step, 0)


def plain_log_probs(decoder: Decoder, batch: MicroBatch) -> Tensor:
    """Log-probabilities of both responses, each computed from its document alone."""
    found = []
    assert batch.document_ids_BT is not None
    for ids_T, labels_T, documents_T in zip(
        batch.input_ids_BT, batch.labels_BT, batch.document_ids_BT, strict=True
    ):
        for side in (0, 1):
            here = documents_T == side
            log_probs_SV = F.log_softmax(decoder(ids_T[here][None])[0].double(), dim=-1)
            wanted = labels_T[here]
            learnt = wanted != -100
            found.append(log_probs_SV[learnt].gather(1, wanted[learnt][:, None]).sum())
    return torch.stack(found).view(-1, 2)


def test_loss_and_gradients_are_those_of_the_formula(tmp_path: Path) -> None:
    checked, state = build(tmp_path)
    model = state.model
    assert isinstance(state.objective, PreferenceObjective)
    with torch.no_grad():  # away from the reference, where every term shows
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
    for batch in batches(checked, 0):
        with torch.no_grad():
            held = plain_log_probs(reference, batch)
        ratio = plain_log_probs(model.decoder, batch) - held
        margin = section.beta * (ratio[:, 0] - ratio[:, 1])
        e = section.label_smoothing
        losses.append(-(1 - e) * F.logsigmoid(margin) - e * F.logsigmoid(-margin))
        margins.append(margin.detach())
    loss = torch.cat(losses).mean()
    loss.backward()
    expected = {name: parameter.grad for name, parameter in model.decoder.named_parameters()}
    model.decoder.zero_grad()
    found = accumulate_gradients(
        model, batches(checked, 0), seed=0, step=0, objective=state.objective
    )
    assert found.mean() == pytest.approx(float(loss.detach()), rel=1e-6)
    for name, parameter in model.decoder.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=2e-4, atol=1e-7, msg=name)
    told = state.objective.pop_metrics()
    assert told.reward_margin == pytest.approx(float(torch.cat(margins).mean()), rel=1e-5)
    assert told.reward_accuracy == pytest.approx(float((torch.cat(margins) > 0).double().mean()))
    assert told.reward_chosen - told.reward_rejected == pytest.approx(told.reward_margin)


def test_training_prefers_the_chosen_and_leaves_the_reference_alone(tmp_path: Path) -> None:
    checked, state = build(tmp_path, preference={"label_smoothing": 0.0})
    objective = state.objective
    assert isinstance(objective, PreferenceObjective)
    assert objective.reference is not None
    before = {name: parameter.clone() for name, parameter in objective.reference.named_parameters()}
    told = []
    for step in range(6):
        loss = accumulate_gradients(
            state.model, batches(checked, step % 3), seed=0, step=step, objective=objective
        )
        if step == 0:  # the model is its own reference still
            assert loss.mean() == pytest.approx(0.6931472, abs=1e-6)
        update_parameters(state.model, state.optimizer, learning_rate=1e-2, max_grad_norm=None)
        told.append(objective.pop_metrics())
    assert told[0].reward_margin == pytest.approx(0.0, abs=1e-6)
    assert told[-1].reward_margin > 0.5
    assert told[-1].reward_accuracy == 1.0
    assert all(
        torch.equal(parameter, before[name])
        for name, parameter in objective.reference.named_parameters()
    )


def test_adapters_switched_off_are_the_reference(tmp_path: Path) -> None:
    checked, state = build(tmp_path, adapters={"rank": 4})
    objective = state.objective
    assert isinstance(objective, PreferenceObjective)
    assert objective.reference is None
    first = accumulate_gradients(
        state.model, batches(checked, 0), seed=0, step=0, objective=objective
    )
    assert objective.pop_metrics().reward_margin == pytest.approx(0.0, abs=1e-6)
    update_parameters(state.model, state.optimizer, learning_rate=0.05, max_grad_norm=None)
    held = objective.compute_reference_log_probs(batches(checked, 0))
    second = accumulate_gradients(
        state.model, batches(checked, 0), seed=0, step=1, objective=objective
    )
    assert second.mean() < first.mean()
    assert objective.pop_metrics().reward_margin > 0.0
    for again, before in zip(
        objective.compute_reference_log_probs(batches(checked, 0)), held, strict=True
    ):
        torch.testing.assert_close(again, before, rtol=0, atol=0)


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
    found = chunked_cross_entropy(*tensors[1], None, labels_N, chunk_tokens=4, weights_N=weights_N)
    found.backward()
    torch.testing.assert_close(found, losses_N @ weights_N)
    for ours, plain in zip(tensors[1], tensors[0], strict=True):
        torch.testing.assert_close(ours.grad, plain.grad)
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
def test_what_cannot_be_learned_is_refused(
    tmp_path: Path, changes: dict[str, Any], kind: type[Exception], message: str
) -> None:
    document = preference_recipe(tmp_path, **changes)
    with pytest.raises(kind, match=message):
        validate_run(validate_recipe(document), 2 if "layout" in changes else 1)


def test_pairs_want_to_be_asked_for_and_to_be_there(tmp_path: Path) -> None:
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


def test_both_forms_of_turns_are_read() -> None:
    asked = {"role": "user", "content": "2+2?"}
    good = {"role": "assistant", "content": "4"}
    bad = {"role": "assistant", "content": "5"}
    given = {"prompt": [asked], "chosen": [good], "rejected": [bad]}
    whole = {"chosen": [asked, good], "rejected": [asked, bad]}
    found = []
    for row in (given, whole):
        records = detect_schema([row], "auto", {}, "text", "data.sources.0")
        assert records.kind == "preference"
        found.append(records.read_row(row))
    assert found[0] == found[1]
    chosen = json.loads(found[0][1])["chosen"]["messages"]
    assert chosen == [asked | {"loss_weight": 0}, good]
    with pytest.raises(UnusableRecord, match="the same"):
        detect_schema([whole], "auto", {}, "text", "").read_row(
            {"chosen": [asked, good], "rejected": [asked, good]}
        )


def test_pairs_that_do_not_fit_are_left_out_and_counted(tmp_path: Path) -> None:
    checked, _ = build(tmp_path, data={"overlong": "drop"}, training={"sequence_length": 12})
    report = checked.data.report.train
    assert report.num_dropped > 0
    assert len(checked.data.train) == len(ROWS) - report.num_dropped
