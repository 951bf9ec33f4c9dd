"""Preference losses: a plain DPO loop of two ranks is equal, and planted mistakes are named."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.audit.check import AuditReport, check_recorded_step
from shardwright.audit.errors import AuditInputError
from shardwright.audit.preference import PreferenceSettings
from shardwright.audit.recorder import Recorder
from shardwright.cli.main import run as shardwright
from shardwright.errors import ExitCode
from tests.unit.audit.simulated_trainer import VOCABULARY, build_initial_model

NUM_RANKS = 2
NUM_PAIRS = (2, 1)
"""Pairs of each rank's micro-batches."""
LENGTH = 9
BETA = 0.3
SMOOTHING = 0.1
IGNORED = -100
PAIR_MISTAKES = ("pairs_swapped", "log_probs_averaged", "reference_omitted", "own_reference")


def build_batch(rank: int, index: int) -> dict[str, Tensor]:
    """Build the chosen, then the rejected responses; prompts and padding of unequal lengths."""
    generator = torch.Generator().manual_seed(10 * rank + index)
    num_rows = 2 * NUM_PAIRS[index]
    ids = torch.randint(0, VOCABULARY, (num_rows, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    labels = ids.clone()
    for row in range(num_rows):
        labels[row, : 2 + (row + rank) % 3] = IGNORED
        length = LENGTH - (row + index) % 3
        mask[row, length:] = 0
    ids[mask == 0] = 0
    labels[mask == 0] = IGNORED
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def sum_log_probs(model: nn.Module, batch: dict[str, Tensor], mistake: str) -> Tensor:
    """Sum the log-probabilities of each row's response, token by token."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    log_probs = logits.log_softmax(-1)
    sums = []
    for row, labels in enumerate(batch["labels"]):
        terms = [
            log_probs[row, position - 1, label]
            for position, label in enumerate(labels)
            if position > 0 and label != IGNORED
        ]
        total = torch.stack(terms).sum()
        sums.append(total / len(terms) if mistake == "log_probs_averaged" else total)
    return torch.stack(sums)


def sum_losses(
    model: nn.Module, reference: nn.Module, batch: dict[str, Tensor], mistake: str
) -> Tensor:
    """Sum the DPO losses of a micro-batch's pairs, written out pair by pair."""
    log_probs = sum_log_probs(model, batch, mistake)
    with torch.no_grad():
        judge = model if mistake == "own_reference" else reference
        base = sum_log_probs(judge, batch, mistake)
    if mistake == "reference_omitted":
        base = torch.zeros_like(base)
    num_pairs = len(log_probs) // 2
    total = torch.zeros(())
    for pair in range(num_pairs):
        ratios = [log_probs[row] - base[row] for row in (pair, pair + num_pairs)]
        if mistake == "pairs_swapped":
            ratios.reverse()
        margin = BETA * (ratios[0] - ratios[1])
        total = total - (1 - SMOOTHING) * margin.sigmoid().log()
        total = total - SMOOTHING * (-margin).sigmoid().log()
    return total


def record_steps(folder: Path, mistake: str = "", *, has_log_probs: bool = False) -> None:
    """Record the same step of every rank, with the gradient of all ranks' pairs."""
    start = build_initial_model("llama", 0)
    reference = build_initial_model("llama", 1)
    losses = {
        (rank, index): sum_losses(start, reference, build_batch(rank, index), mistake)
        for rank in range(NUM_RANKS)
        for index in range(len(NUM_PAIRS))
    }
    total_pairs = NUM_RANKS * sum(NUM_PAIRS)
    weights = dict.fromkeys(losses, 1.0 / total_pairs)
    if mistake == "mean_of_micro_batch_means":
        weights = {key: 1.0 / NUM_PAIRS[key[1]] / len(losses) for key in losses}
    loss = torch.stack([weights[key] * value for key, value in losses.items()]).sum()
    gradients = torch.autograd.grad(loss, list(start.parameters()))
    for rank in range(NUM_RANKS):
        model = copy.deepcopy(start)
        batches = [build_batch(rank, index) for index in range(len(NUM_PAIRS))]
        added: list[dict[str, Tensor]] = [{} for _ in batches]
        if has_log_probs:
            with torch.no_grad():
                added = [
                    {"reference_log_probs": sum_log_probs(reference, batch, "")}
                    for batch in batches
                ]
        recorder = Recorder(folder, rank=rank, world_size=NUM_RANKS)
        with recorder.record_step(model, added):
            for batch in batches:
                model(**batch)
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient.clone()
            recorder.after_backward(model)
            recorder.report(loss=loss)


def check(folder: Path, reference: Path | None = None) -> AuditReport:
    return check_recorded_step(
        folder, objective="dpo", preference=PreferenceSettings(BETA, SMOOTHING, reference)
    )


@pytest.fixture(scope="module")
def reference_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    build_initial_model("llama", 1).save_pretrained(folder)
    return folder


def test_a_plain_loop_equals_one_process(tmp_path: Path, reference_folder: Path) -> None:
    record_steps(tmp_path)
    report = check(tmp_path, reference_folder)
    assert report.passed, report.worst_parameters[0]
    assert not report.diagnoses
    assert (report.num_terms, report.term_unit) == (6, "pairs")
    assert "loss" in {finding.quantity for finding in report.findings}


def test_recorded_log_probabilities_are_the_reference(tmp_path: Path) -> None:
    record_steps(tmp_path, has_log_probs=True)
    report = check(tmp_path)
    assert report.passed, report.worst_parameters[0]


@pytest.mark.parametrize("mistake", [*PAIR_MISTAKES, "mean_of_micro_batch_means"])
def test_a_mistake_of_a_preference_loss_is_named(
    tmp_path: Path, reference_folder: Path, mistake: str
) -> None:
    record_steps(tmp_path, mistake)
    report = check(tmp_path, reference_folder)
    assert not report.passed
    assert report.diagnoses[0].keys == (mistake,)
    assert report.diagnoses[0].residual_after < 1e-4


def test_wrong_settings_are_refused(
    tmp_path: Path, reference_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record_steps(tmp_path)
    other = tmp_path / "other"
    build_initial_model("gpt2", 0).save_pretrained(other)
    chosen = ["--objective", "dpo"]
    wrong: list[tuple[list[str], str]] = [
        (chosen, "needs --beta"),
        ([*chosen, "--beta", "0"], "not a DPO loss"),
        ([*chosen, "--beta", "0.1", "--label-smoothing", "0.5"], "not a fraction"),
        (["--beta", "0.1"], "has no beta"),
        (["--reference", str(reference_folder)], "apply only to the DPO loss"),
        ([*chosen, "--beta", "0.1"], "reference model of the preference loss is unknown"),
        ([*chosen, "--beta", "0.1", "--reference", str(tmp_path)], "not a Hugging Face folder"),
        ([*chosen, "--beta", "0.1", "--reference", str(other)], "is another model"),
    ]
    for arguments, message in wrong:
        assert shardwright(["audit", "check", str(tmp_path), *arguments]) == ExitCode.WRONG_INPUT
        assert message in " ".join(capsys.readouterr().err.split()), arguments


def test_rows_that_are_no_pairs_are_refused(tmp_path: Path, reference_folder: Path) -> None:
    model = build_initial_model("llama", 0)
    ids = torch.arange(8).view(1, 8)
    with Recorder(tmp_path).record_step(model):
        model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad()
    with pytest.raises(AuditInputError, match="is not the chosen and then the rejected responses"):
        check(tmp_path, reference_folder)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_the_reference_of_adapters_is_the_model_without_them(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=3, lora_alpha=7, target_modules=["q_proj", "up_proj"])
    base = copy.deepcopy(build_initial_model("llama", 1))
    model: Any = peft.get_peft_model(copy.deepcopy(base), settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    batch = build_batch(0, 0)
    with Recorder(tmp_path).record_step(model, batch):
        (sum_losses(model, base, batch, "") / NUM_PAIRS[0]).backward()
    report = check(tmp_path)
    assert report.passed, report.worst_parameters[0]
    assert all("lora_" in result.name for result in report.parameters)
