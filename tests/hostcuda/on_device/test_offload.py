"""Offloaded optimizer states on a CUDA device: copies through pinned memory on their own streams,
ordered by events, without a wait of the host.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.config.offload import OffloadSection
from shardwright.layout import Layout
from shardwright.offload import OffloadedOptimizer, offload_optimizer
from shardwright.offload.device_buffers import DeviceBuffers
from shardwright.optim import build_optimizer, collect_optimizer_tensors, collect_optimizer_values
from shardwright.training.step import accumulate_gradients, update_parameters
from tests.hostcuda import device
from tests.hostcuda.ranks import LEARNING_RATE, Case, build_model, draw_micro_batches

NUM_STEPS = 5
RULES = ("adamw", "muon", "sgd")


def train(
    folder: Path, rule: str, tier: str
) -> tuple[dict[str, Tensor], dict[str, Any], int, list[int]]:
    """Return weights and moments, values, buckets, and the host's waits in each update."""
    section: dict[str, Any] = {"name": rule} | ({"momentum": 0.9} if rule == "sgd" else {})
    case = Case(Layout(), sections={"optimizer": section})
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
        offload = OffloadSection.model_validate({"optimizer": tier, "buffer_bytes": 16384})
        optimizer = offload_optimizer(optimizer, offload, model, device=cuda, default_folder=folder)
    waits = []
    for step in range(NUM_STEPS):
        batches = [batch.pin_memory() for batch in draw_micro_batches(case, 0)]
        accumulate_gradients(model, batches, seed=0, step=step)
        with device.log_synchronisations() as log:
            update_parameters(model, optimizer, learning_rate=LEARNING_RATE, max_grad_norm=0.5)
        waits.append(sum(log.values()))
    named = dict(model.named_parameters())
    tensors = named | collect_optimizer_tensors(optimizer, named.items())
    result = {key: tensor.detach().cpu().clone() for key, tensor in tensors.items()}
    values = collect_optimizer_values(optimizer)
    num_buckets = 0
    if isinstance(optimizer, OffloadedOptimizer):
        num_buckets = optimizer.num_buckets
        optimizer.close()
    assert not device.list_violations()
    return result, values, num_buckets, waits


@pytest.mark.parametrize("rule", RULES)
def test_offloaded_states_have_the_bits_of_resident_ones_and_the_host_does_not_wait(
    tmp_path: Path, rule: str
) -> None:
    expected, expected_values, _, resident_waits = train(tmp_path, rule, "none")
    for tier in ("host", "disk"):
        got, values, num_buckets, waits = train(tmp_path, rule, tier)
        assert values == expected_values
        assert [key for key in expected if not torch.equal(expected[key], got[key])] == []
        assert num_buckets > 20
        if tier == "host":
            assert waits == resident_waits


def test_the_states_are_in_pinned_memory_and_not_on_the_device(tmp_path: Path) -> None:
    case = Case(Layout())
    recipe = case.make_recipe()
    cuda = torch.device("cuda", 0)
    model = build_model(case, recipe, case.layout, cuda)
    named = dict(model.named_parameters())
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


@pytest.mark.parametrize("method", ["copy_in", "copy_out"])
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
