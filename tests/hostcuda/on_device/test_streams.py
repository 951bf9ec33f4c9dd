"""Copies on other streams than training's: events order them, and the host waits before it reads.

Background saves copy on a stream of their own, micro-batches come from pinned memory.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shardwright.checkpoint import background_save
from shardwright.checkpoint.background_save import BackgroundSaver, HostBuffer
from shardwright.checkpoint.tensor_loading import load_checkpoint
from shardwright.data.loader import MicroBatch
from shardwright.errors import SaveFailed
from shardwright.layout import Layout
from shardwright.optim import build_optimizer
from shardwright.optim.adamw_8bit import AdamW8bit
from shardwright.optim.bf16_updates import BF16AdamW
from shardwright.optim.local_updates import AdamW
from shardwright.optim.sharded_optimizer import UpdateByPiece
from shardwright.optim.state import collect_optimizer_tensors
from shardwright.training import step as training_step
from shardwright.training.metrics.host_reads import PendingRead
from shardwright.training.step import StepUpdate, accumulate_gradients, update_parameters
from tests.hostcuda import device
from tests.hostcuda.ranks import LEARNING_RATE, Case, build_model, draw_micro_batches

CASE = Case(Layout())
BF16_CASE = Case(
    Layout(), sections={"precision": {"kind": "bf16", "master_weights": "bf16"}}
)  # weights and moments, too
QUANTISED_CASE = Case(Layout(), sections={"optimizer": {"name": "adamw_8bit", "block_size": 32}})


class Training:
    """A model on the device with its optimizer, and the batches of a step in pinned memory."""

    def __init__(self, case: Case = CASE) -> None:
        recipe = case.make_recipe()
        self.model = build_model(case, recipe, case.layout, torch.device("cuda", 0))
        self.optimizer = build_optimizer(
            self.model.named_parameters(),
            recipe.optimizer,
            learning_rate=LEARNING_RATE,
            weight_decay=0.1,
            model=self.model,
        )
        self.step = 0

    def accumulate(self) -> None:
        batches = [batch.pin_memory() for batch in draw_micro_batches(CASE, 0)]
        accumulate_gradients(self.model, batches, seed=0, step=self.step)
        self.step += 1

    def update(self) -> None:
        update_parameters(
            self.model, self.optimizer, learning_rate=LEARNING_RATE, max_grad_norm=0.5
        )

    def collect_state(self) -> dict[str, torch.Tensor]:
        weights = {name: tensor.detach() for name, tensor in self.model.named_parameters()}
        return weights | collect_optimizer_tensors(self.optimizer, self.model.named_parameters())


def save_during_a_step(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Save in the background during a step; return the state at that time and the saved one."""
    training = Training()
    training.accumulate()
    training.update()
    state = training.collect_state()
    expected = {name: tensor.clone() for name, tensor in state.items()}
    # The host has not waited for the update's kernels, which only an event orders before the copy.
    saver = BackgroundSaver()
    saver.save(folder, 1, state, {})
    training.accumulate()
    saver.wait_for_copy()
    training.update()
    saved = saver.close()
    assert saved is not None
    loaded = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    load_checkpoint(saved.path, loaded)
    return expected, loaded


def test_a_background_save_has_the_state_at_its_start(tmp_path: Path) -> None:
    expected, loaded = save_during_a_step(tmp_path)
    assert len(expected) > 30
    for name, tensor in expected.items():
        assert torch.equal(loaded[name].cpu(), tensor.cpu()), name


def test_a_save_without_its_event_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_save, "_record_ready_event", lambda _tensors: None)
    with pytest.raises(SaveFailed, match="missing event: aten::copy_ on stream"):
        save_during_a_step(tmp_path)


def test_a_host_buffer_that_is_read_too_early_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(100, device="cuda")
    ready = torch.cuda.current_stream().record_event()
    (copied,) = HostBuffer().copy_tensors([x], ready)
    assert copied.pieces[0].view(torch.float32).tolist() == [1.0] * 100
    monkeypatch.setattr(torch.cuda.Stream, "synchronize", lambda _stream: None)
    (copied,) = HostBuffer().copy_tensors([x], ready)
    assert copied.pieces[0].view(torch.float32).isnan().all()
    torch.cuda.synchronize()


def test_an_update_before_the_copy_has_finished_is_detected() -> None:
    training = Training()
    training.accumulate()
    training.update()
    started = threading.Event()
    go = threading.Event()
    ready = torch.cuda.current_stream().record_event()
    weight = next(iter(training.collect_state().values()))

    def copy() -> None:
        side = torch.cuda.Stream()
        side.wait_event(ready)
        with torch.cuda.stream(side):
            torch.empty(weight.shape, pin_memory=True).copy_(weight, non_blocking=True)
        started.set()
        go.wait(60)
        side.synchronize()

    thread = threading.Thread(target=copy)
    thread.start()
    started.wait(60)
    training.accumulate()  # reads the weights, which is allowed
    with pytest.raises(RuntimeError, match=r"missing event: .* writes memory that aten::copy_"):
        weight.add_(1.0)
    go.set()
    thread.join()
    weight.add_(1.0)


def test_micro_batches_are_copied_from_pinned_memory_without_waiting() -> None:
    (batch, *_) = draw_micro_batches(CASE, 0)

    def move(batch: MicroBatch) -> Callable[[], object]:
        return lambda: batch.to("cuda")

    for source, number in ((batch, 4), (batch.pin_memory(), 0)):
        with device.log_synchronisations() as log:
            move(source)()
        assert log.total() == number, log


def run_updates(
    *, is_skipped: bool, case: Case = CASE
) -> tuple[Training, StepUpdate, list[torch.Tensor]]:
    """Run two updates with clipping; a number of the second one's gradients may be a NaN.

    Returns the training, the second update, and weights, moments and step counts.
    """
    training = Training(case)
    training.accumulate()
    training.update()
    training.accumulate()
    _, parameter = next(iter(training.model.named_parameters()))
    assert parameter.grad is not None
    if is_skipped:
        parameter.grad.view(-1)[0] = float("nan")
    is_alive = weakref.ref(parameter.grad)
    update = update_parameters(
        training.model,
        training.optimizer,
        learning_rate=LEARNING_RATE,
        max_grad_norm=0.5,
        read_along=[torch.full((2,), 7.0, device=training.model.device)],
    )
    assert is_alive() is None, "the preparation holds the gradient"
    counts = [state["step"] for state in training.optimizer.state.values()]
    return training, update, [*training.collect_state().values(), *counts]


@pytest.mark.parametrize(
    ("rule", "case"),
    [(AdamW, CASE), (BF16AdamW, BF16_CASE), (AdamW8bit, QUANTISED_CASE)],
)
@pytest.mark.parametrize("is_skipped", [False, True])
def test_an_update_that_is_launched_before_the_wait_has_the_bits_of_one_after_it(
    is_skipped: bool, rule: type[UpdateByPiece], case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    wait = PendingRead.wait
    launch = rule.update_pieces
    monkeypatch.setattr(PendingRead, "wait", lambda each: (calls.append("wait"), wait(each))[1])
    monkeypatch.setattr(
        rule, "update_pieces", lambda *arguments: (calls.append("launch"), launch(*arguments))[1]
    )
    _, update, found = run_updates(is_skipped=is_skipped, case=case)
    assert calls == ["launch", "wait"] * 2
    assert update.is_skipped == is_skipped
    assert update.read_values == ([7.0, 7.0],)

    calls.clear()
    monkeypatch.setattr(rule, "can_skip_on_device", lambda _optimizer: False)
    training, separate, expected = run_updates(is_skipped=is_skipped, case=case)
    assert calls == ["launch"] * (1 if is_skipped else 2)
    assert update.gradient_norm == separate.gradient_norm or is_skipped
    assert {float(state["step"]) for state in training.optimizer.state.values()} == {
        1.0 if is_skipped else 2.0
    }
    assert len(found) == len(expected)
    for mine, wanted in zip(found, expected, strict=True):
        assert torch.equal(mine.cpu(), wanted.cpu())


@pytest.mark.parametrize("is_skipped", [False, True])
def test_the_update_is_prepared_before_the_host_waits(
    is_skipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the host must know whether the step is skipped."""
    calls: list[str] = []
    list_pieces = AdamW.list_pieces
    read_together = training_step.read_together
    monkeypatch.setattr(
        AdamW, "list_pieces", lambda each: (calls.append("list pieces"), list_pieces(each))[1]
    )
    monkeypatch.setattr(AdamW, "can_skip_on_device", lambda _optimizer: False)
    monkeypatch.setattr(
        training_step,
        "read_together",
        lambda tensors: (calls.append("wait"), read_together(tensors))[1],
    )
    _, update, _ = run_updates(is_skipped=is_skipped)
    assert update.is_skipped == is_skipped
    assert calls == ["list pieces", "list pieces", "wait"]
