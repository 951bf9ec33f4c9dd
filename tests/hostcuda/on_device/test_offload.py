"""Offloaded optimizer states on a CUDA device: copies through pinned memory on their own streams,
ordered by events, without a wait of the host.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.config import Recipe
from shardwright.config.offload import OffloadSection
from shardwright.layout import Layout
from shardwright.offload import OffloadedOptimizer, StreamedUpdate, offload_optimizer
from shardwright.offload.device_buffers import DeviceBuffers
from shardwright.offload.store import CopyClock, TransferCounts
from shardwright.optim import (
    build_optimizer,
    collect_optimizer_tensors,
    collect_optimizer_values,
    one_pass_adamw,
)
from shardwright.optim.local_updates import AdamWRule
from shardwright.optim.sharded_optimizer import ParameterPiece
from shardwright.telemetry.event_log import EvaluationEvent, StepEvent, read_events
from shardwright.training.moment_offload import overlap_update
from shardwright.training.run import train as run_training
from shardwright.training.step import accumulate_gradients, update_parameters
from tests.hostcuda import device
from tests.hostcuda.ranks import LEARNING_RATE, Case, build_model, draw_micro_batches
from tests.unit.training.test_offload_run import build_run, read_checkpoints

NUM_STEPS = 5
RULES: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw"},
    "adamw_8bit": {"name": "adamw_8bit", "block_size": 32},
    "muon": {"name": "muon"},
    "sgd": {"name": "sgd", "momentum": 0.9},
}
AHEAD_BYTES = 65536
OVERLAPPED = "overlapped"
"""Moments in host memory, and an update that overlaps with the next forward pass."""
DEFERRED = "deferred"
"""Moments on disk, and an update of which each block runs a part."""


@dataclass
class Outcome:
    """Weights, moments and counts of a run, and what its steps did."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    num_buckets: int = 0
    waits: list[int] = field(default_factory=list)
    """The host's waits in each update."""
    num_bytes: int = 0
    """Bytes of the moments."""
    launched_bytes: list[int] = field(default_factory=list)
    """Those whose update each `update_parameters` has launched when it returns."""
    ahead_bytes: list[int] = field(default_factory=list)
    """Those whose copy to the device has been launched before each update."""
    peak_bytes: int = 0
    """Largest memory of the last three steps, without step counts: the order of an update changes
    how parameters are divided, and each piece has a count."""


def train(folder: Path, rule: str, tier: str, *, kind: str = "fp32") -> Outcome:
    """Train a few steps; with a tier, `OVERLAPPED` or `DEFERRED`, the moments are offloaded.

    They change between two steps, as in a rollback to a checkpoint.
    """
    gc.collect()  # what other runs left counts at the peak
    case = Case(Layout(), kind=kind, sections={"optimizer": RULES[rule]})
    recipe = case.make_recipe()
    cuda = torch.device("cuda", 0)
    model = build_model(case, recipe, case.layout, cuda)
    optimizer = build_optimizer(
        model.named_parameters(),
        recipe.optimizer,
        learning_rate=LEARNING_RATE,
        weight_decay=0.1,
        model=model,
    )
    if tier != "none":
        tiers: dict[str, Any] = (
            {"optimizer": "disk"}
            if tier in ("disk", DEFERRED)
            else {"optimizer": "host", "read_ahead_bytes": AHEAD_BYTES}
        )
        offload = OffloadSection.model_validate(tiers | {"buffer_bytes": 16384})
        overlap = (
            overlap_update(model, is_deferred=tier == DEFERRED)
            if tier in (OVERLAPPED, DEFERRED)
            else None
        )
        optimizer = offload_optimizer(
            optimizer, offload, model, device=cuda, default_folder=folder, overlap=overlap
        )
    outcome = Outcome()
    named = dict(model.named_parameters())
    for step in range(NUM_STEPS):
        if step == NUM_STEPS - 3:
            torch.cuda.reset_peak_memory_stats()
        batches = [batch.pin_memory() for batch in draw_micro_batches(case, 0)]
        accumulate_gradients(model, batches, seed=0, step=step)
        if isinstance(optimizer, OffloadedOptimizer):
            # Not those of the optimizer, which ask the device what has ended.
            before = replace(optimizer._store.counts)
            outcome.ahead_bytes.append(before.read_bytes - before.written_bytes)
        with device.log_synchronisations() as log:
            update_parameters(
                model,
                optimizer,
                learning_rate=LEARNING_RATE,
                max_grad_norm=0.5,
                overlaps_forward=True,
            )
        outcome.waits.append(sum(log.values()))
        if isinstance(optimizer, OffloadedOptimizer):
            written_bytes = optimizer._store.counts.written_bytes
            outcome.launched_bytes.append(written_bytes - before.written_bytes)
        if step == 1:
            for moment in collect_optimizer_tensors(optimizer, named.items()).values():
                if moment.is_floating_point():
                    moment.mul_(0.5)
    outcome.peak_bytes = torch.cuda.max_memory_allocated()
    if isinstance(optimizer, OffloadedOptimizer):
        optimizer.wait_for_update()
        outcome.peak_bytes -= 4 * sum(len(bucket.pieces) for bucket in optimizer._partition.buckets)
    outcome.tensors = {key: tensor.detach().cpu() for key, tensor in named.items()}
    for key, tensor in collect_optimizer_tensors(optimizer, named.items()).items():
        outcome.tensors[key] = tensor.cpu().clone()
    outcome.values = collect_optimizer_values(optimizer)
    if isinstance(optimizer, OffloadedOptimizer):
        outcome.num_buckets = optimizer.num_buckets
        outcome.num_bytes = optimizer.num_bytes
        optimizer.close()
    assert not device.list_violations()
    return outcome


def find_differences(expected: Outcome, got: Outcome) -> list[str]:
    return [
        key for key, tensor in expected.tensors.items() if not torch.equal(tensor, got.tensors[key])
    ] + ["values"] * (expected.values != got.values)


@pytest.mark.parametrize("rule", RULES)
def test_offloaded_states_have_the_bits_of_resident_ones_and_the_host_does_not_wait(
    tmp_path: Path, rule: str
) -> None:
    expected = train(tmp_path, rule, "none")
    for tier in ("host", "disk") + (() if rule == "muon" else (OVERLAPPED, DEFERRED)):
        got = train(tmp_path, rule, tier)
        assert find_differences(expected, got) == []
        assert got.num_buckets > 20
        if tier in ("host", OVERLAPPED):
            assert got.waits == expected.waits
            # The first buckets are read during the passes before.
            assert got.ahead_bytes[0] == 0
            assert min(got.ahead_bytes[1:]) > (0 if rule == "muon" else AHEAD_BYTES)
            # A whole update at once would fill the queues of the device.
            assert {size < got.num_bytes for size in got.launched_bytes} == {tier == OVERLAPPED}


def test_an_overlapped_update_casts_working_weights_and_needs_no_further_memory(
    tmp_path: Path,
) -> None:
    for tier, overlapped in (("host", OVERLAPPED), ("disk", DEFERRED)):
        expected = train(tmp_path, "adamw", tier, kind="bf16")
        got = train(tmp_path, "adamw", overlapped, kind="bf16")
        assert find_differences(expected, got) == []
        assert got.peak_bytes <= expected.peak_bytes


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("_wait_for_unit", "missing event"),
        ("_end", "missing event"),
        ("gradients", "record_stream"),
    ],
)
def test_passes_and_readers_wait_for_an_overlapped_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, message: str
) -> None:
    """A pass, or a reader, that does not wait for the update, and gradients freed too early."""
    if method == "gradients":
        end_bucket = StreamedUpdate.end_bucket

        def forget(self: StreamedUpdate, unit: int, complete: Any, gradients: Any) -> None:
            end_bucket(self, unit, complete, ())

        monkeypatch.setattr(StreamedUpdate, "end_bucket", forget)
    else:
        monkeypatch.setattr(StreamedUpdate, method, lambda *_: None)
    with pytest.raises((RuntimeError, AssertionError), match=message):
        train(tmp_path, "adamw", OVERLAPPED)
    gc.collect()
    device.list_violations()  # those of the interrupted run, also of freeing what it left


@pytest.mark.parametrize("rule", ["adamw", "muon"])
def test_saves_and_evaluations_between_steps_wait_for_the_update(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rule: str
) -> None:
    found = []
    for tier in ("none", "host"):
        recipe = build_run(tmp_path, f"{rule}-{tier}", tier, max_steps=7)
        sections = {
            "optimizer": RULES[rule],
            "checkpoint": {"every_steps": 3, "keep_last": 9},
            "evaluation": {"every_steps": 2},
            "run": {"dir": str(tmp_path / f"{rule}-{tier}"), "device": "cuda"},
        }
        with caplog.at_level("INFO", logger="shardwright"):
            run_training(
                Recipe.model_validate(recipe.model_dump(mode="json", exclude_unset=True) | sections)
            )
        events = read_events(tmp_path / f"{rule}-{tier}")
        evaluations = [event.loss for event in events.filter_by_type(EvaluationEvent)]
        losses = [event.loss for event in events.filter_by_type(StepEvent)]
        found.append((read_checkpoints(tmp_path / f"{rule}-{tier}"), evaluations, losses))
    assert found[0] == found[1]
    assert (len(found[0][0]), len(found[0][1]), len(found[0][2])) == (5, 4, 7)
    line = (
        "begins during the update"
        if rule == "adamw"
        else "waits for the update, because muon needs whole matrices"
    )
    assert any(line in message for message in caplog.messages)
    assert not device.list_violations()


def test_the_states_are_in_pinned_memory_and_not_on_the_device(tmp_path: Path) -> None:
    case = Case(Layout())
    recipe = case.make_recipe()
    cuda = torch.device("cuda", 0)
    model = build_model(case, recipe, case.layout, cuda)
    named = dict(model.named_parameters())
    gc.collect()  # the model of an earlier test would be freed during the measurement
    before = torch.cuda.memory_allocated()
    optimizer = offload_optimizer(
        build_optimizer(
            named.items(), recipe.optimizer, learning_rate=0.1, weight_decay=0.0, model=model
        ),
        OffloadSection(optimizer="host", buffer_bytes=16384),
        model,
        device=cuda,
        default_folder=tmp_path,
    )
    weight_bytes = sum(parameter.nbytes for parameter in named.values())
    assert optimizer.num_bytes >= 2 * weight_bytes
    assert torch.cuda.memory_allocated() - before < 3 * 16384 + 4096
    moments = collect_optimizer_tensors(optimizer, named.items())
    assert all(moment.is_pinned() for moment in moments.values())
    optimizer.close()


@pytest.mark.parametrize("method", ["fill", "empty"])
def test_copies_that_no_event_orders_are_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    original = getattr(DeviceBuffers, method)

    def run_without_waits(self: DeviceBuffers, *arguments: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda.Stream, "wait_event", lambda *_: None)
            patch.setattr(torch.cuda.Stream, "wait_stream", lambda *_: None)
            return original(self, *arguments)

    monkeypatch.setattr(DeviceBuffers, method, run_without_waits)
    with pytest.raises(RuntimeError, match="missing event"):
        train(tmp_path, "adamw", "host")
    device.list_violations()  # those of the interrupted run


@pytest.mark.parametrize("shares_memory", [False, True])
def test_pieces_of_one_buffer_are_updated_by_one_launch_with_any_factor(
    monkeypatch: pytest.MonkeyPatch, shares_memory: bool
) -> None:
    """The compiler's function would have a call for each of them."""
    monkeypatch.setattr(one_pass_adamw, "_MIN_ELEMENTS", {"cuda": 64})
    calls: list[int] = []

    def compile_function(
        _name: str, _function: Any, otherwise: Callable[..., Any], _make_sample: Any
    ) -> Callable[..., Any]:
        def update(all_tensors: Sequence[Any], *arguments: Any) -> None:
            calls.append(len(all_tensors))
            otherwise(all_tensors, *arguments)

        return update

    cuda = torch.device("cuda", 0)
    moments = [torch.zeros(64, device=cuda) for _ in range(4)]
    if shares_memory:
        moments = list(torch.zeros(256, device=cuda).split(64))
    group = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    pieces = []
    for mean, square in (moments[:2], moments[2:]):
        step = torch.zeros((), device=cuda)
        state = {"exp_avg": mean, "exp_avg_sq": square, "step": step}
        tensors = (torch.ones(64, device=cuda), torch.ones(64, device=cuda))
        pieces.append(ParameterPiece("weight", *tensors, state, group))
    rule = AdamWRule(compile_function, fused=True, foreach=False)
    rule.update(pieces, 0.5)
    assert calls == ([] if shares_memory else [2])
    for piece in pieces:
        assert torch.allclose(piece.state["exp_avg"].cpu(), torch.tensor(0.05))


@pytest.mark.parametrize("trained", [True, False])
def test_a_run_reports_the_times_of_copies_and_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, trained: bool
) -> None:
    recipe = build_run(tmp_path, "run", "host", max_steps=3)
    sections: dict[str, Any] = {
        "offload": dict.fromkeys(("optimizer", "parameters", "activations"), "host"),
        "run": {"dir": str(tmp_path / "run"), "device": "cuda"},
    }
    if not trained:
        sections["adapters"] = {"rank": 4}
    with caplog.at_level("INFO", logger="shardwright"):
        run_training(
            Recipe.model_validate(recipe.model_dump(mode="json", exclude_unset=True) | sections)
        )
    lines = [line for line in caplog.messages if "of the transfer time was hidden" in line]
    subjects = ["states", "activations", "weights" if trained else "frozen weights"]
    assert all(f" of {subject} read" in line for subject, line in zip(subjects, lines, strict=True))
    last = read_events(tmp_path / "run").filter_by_type(StepEvent)[-1]
    for prefix in ("offload", "activation", "parameter"):
        assert 0.0 < getattr(last, f"{prefix}_waiting_seconds") < last.step_seconds


def test_times_are_counted_once_their_events_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.Event, "elapsed_time", lambda begin, end: 1.0)
    clock = CopyClock(TransferCounts(), torch.device("cuda", 0))
    for _ in range(2):
        clock.end("reading_seconds", clock.begin())
        with clock.time_wait():
            pass
    clock.end("writing_seconds", clock.begin())
    ended = iter([True, True, False])
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda.Event, "query", lambda event: next(ended))
        counts = clock.collect()
    assert counts == TransferCounts(reading_seconds=1e-3, waiting_seconds=1e-3)
    expected = TransferCounts(reading_seconds=2e-3, waiting_seconds=2e-3, writing_seconds=1e-3)
    assert clock.collect() == expected
    assert clock.collect() == expected
