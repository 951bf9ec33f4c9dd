"""The reference: adapters, frozen parameters, both implementations, readings of rows."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwright.audit import check
from shardwright.audit.batch_reading import BatchReading, build_segments, pad_segments
from shardwright.audit.check import check_recorded_step
from shardwright.audit.recorded_batch import RecordedBatch
from shardwright.audit.recorder import Recorder
from shardwright.audit.reference import ReferenceModel
from shardwright.errors import RunFailed
from shardwright.model.hf.hf_decoder import Float64Mode
from tests.unit.audit.simulated_trainer import Run, build_initial_model, simulate


def train_a_step(folder: Path, model: nn.Module, scale: float = 1.0) -> None:
    """Record a step of two micro-batches with the right normaliser, times `scale`."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    batches = [torch.randint(0, 31, (2, 9)) for _ in range(2)]
    with Recorder(folder).record_step(model, optimizer=optimizer):
        for ids in batches:
            labels = ids.clone()
            (model(input_ids=ids, labels=labels).loss * scale / 2).backward()
        optimizer.step()


def test_frozen_parameters_are_not_compared(tmp_path: Path) -> None:
    model = copy.deepcopy(build_initial_model("llama", 0))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1" in name)
    train_a_step(tmp_path, model)
    report = check_recorded_step(tmp_path)
    assert report.passed
    assert all("layers.1" in result.name for result in report.parameters)


@pytest.mark.parametrize("has_padding_row", [True, False])
def test_the_embedding_s_padding_row_is_that_of_the_recorded_model(
    tmp_path: Path, has_padding_row: bool
) -> None:
    model = copy.deepcopy(build_initial_model("llama", 0))
    ids = torch.arange(9).view(1, 9)
    if has_padding_row:
        model.get_submodule("model.embed_tokens").padding_idx = 4  # type: ignore[assignment]
    else:
        model.config.pad_token_id = 4  # type: ignore[union-attr]
    try:
        with Recorder(tmp_path).record_step(model):
            model(input_ids=ids, labels=ids).loss.backward()
        gradient = model.get_parameter("model.embed_tokens.weight").grad
        assert gradient is not None
        assert bool(gradient[4].any()) != has_padding_row
        report = check_recorded_step(tmp_path)
        assert report.passed, report.worst_parameters[0]
    finally:
        model.config.pad_token_id = None  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_peft_adapters_are_compared(tmp_path: Path, scale: float) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=3, lora_alpha=7, target_modules=["q_proj", "up_proj"])
    model = peft.get_peft_model(copy.deepcopy(build_initial_model("llama", 0)), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    train_a_step(tmp_path, model, scale)
    report = check_recorded_step(tmp_path)
    assert all("lora_" in result.name for result in report.parameters)
    assert len(report.parameters) == 8
    assert report.passed == (scale == 1.0), report.worst_parameters[0]
    if scale != 1.0:
        assert report.diagnoses[0].keys == ("accumulation_not_divided",)


def test_two_references_that_disagree_stop_the_audit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(tmp_path, Run())
    compute = ReferenceModel.compute_decoder_gradient
    calls = []

    def compute_wrongly(
        self: ReferenceModel, batch: RecordedBatch, reading: BatchReading
    ) -> torch.Tensor:
        gradient = compute(self, batch, reading)
        assert gradient is not None, "our decoder implements this family"
        calls.append(batch)
        return 1.01 * gradient

    monkeypatch.setattr(ReferenceModel, "compute_decoder_gradient", compute_wrongly)
    with pytest.raises(RunFailed, match="two references disagree"):
        check_recorded_step(tmp_path)
    assert calls


def test_float64_finds_a_difference_that_float32_allows(tmp_path: Path) -> None:
    with Float64Mode():
        simulate(tmp_path, Run(dtype=torch.float64))
    report = check.check_recorded_step(tmp_path, dtype="float64")
    assert report.passed
    assert report.worst_parameters[0].allowed < 1e-7
    assert report.worst_parameters[0].error < 1e-9


def build_batch(**changes: torch.Tensor) -> RecordedBatch:
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    fields = {
        "input_ids": ids,
        "labels": ids.clone(),
        "position_ids": None,
        "attention_mask": None,
        "document_ids": None,
        "has_explicit_documents": False,
        "rng_state": torch.zeros(0),
    }
    return RecordedBatch(**fields | changes)


def test_documents_are_separate_segments() -> None:
    batch = build_batch(
        position_ids=torch.tensor([[0, 1, 2, 3, 0, 1]]),
        document_ids=torch.tensor([[0, 0, 0, 0, 1, 1]]),
    )
    first, second = build_segments(batch, BatchReading())
    assert first.targets.tolist() == [6, 7, 8, -100]
    assert second.ids.tolist() == [9, 10]
    assert second.positions.tolist() == [0, 1]
    (whole,) = build_segments(batch, BatchReading(separates_documents=False))
    assert whole.positions.tolist() == [0, 1, 2, 3, 0, 1]
    assert whole.targets.tolist() == [6, 7, 8, -100, 10, -100]
    (running,) = build_segments(
        batch, BatchReading(separates_documents=False, resets_positions=False)
    )
    assert running.positions.tolist() == [0, 1, 2, 3, 4, 5]
    ids, _, targets, _ = pad_segments([first, second])
    assert ids.shape == (2, 4)
    assert targets[1].tolist() == [10, -100, -100, -100]


def test_padding_is_removed_from_either_side() -> None:
    for mask in ([[1, 1, 1, 1, 0, 0]], [[0, 0, 1, 1, 1, 1]]):
        batch = build_batch(attention_mask=torch.tensor(mask))
        (segment,) = build_segments(batch, BatchReading())
        assert len(segment.ids) == 4
        (padded,) = build_segments(batch, BatchReading(supervises_padding=True))
        assert len(padded.ids) == 6


def test_shifted_labels_are_used_as_they_are() -> None:
    (segment,) = build_segments(build_batch(), BatchReading(label_offset=0))
    assert segment.targets.tolist() == [5, 6, 7, 8, 9, 10]
