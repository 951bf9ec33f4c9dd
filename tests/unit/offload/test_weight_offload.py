"""Order in which frozen weights of blocks arrive and leave, and passes that use them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.config import Recipe
from shardwright.data.loader import read_step_micro_batches
from shardwright.data.sample_order import SampleOrder
from shardwright.offload import WeightOffload
from shardwright.offload.block_uses import Phase
from shardwright.training.checks.run_checks import validate_run
from shardwright.training.setup import build_state
from shardwright.training.step import accumulate_gradients
from shardwright.training.training_state import TrainingState
from tests.multiprocess.test_offload import DENSE, build_recipe

NUM_LAYERS = 4


def build_adapter_state(folder: Path, tier: str, **sections: Any) -> tuple[Recipe, TrainingState]:
    recipe = build_recipe(
        folder,
        {
            "model": {"config": DENSE | {"num_hidden_layers": NUM_LAYERS}},
            "adapters": {"rank": 4},
            "offload": {"parameters": tier, "buffer_bytes": 16384},
        }
        | sections,
    )
    return recipe, build_state(validate_run(recipe, 1), torch.device("cpu"))


def compute_gradients(recipe: Recipe, state: TrainingState, step: int = 0) -> dict[str, Tensor]:
    validated_run = validate_run(recipe, 1)
    order = SampleOrder(recipe.seed, len(validated_run.data.train))
    batches = read_step_micro_batches(
        validated_run.data.train, order, validated_run.plan.batch, step, 0
    )
    state.model.decoder.zero_grad()
    accumulate_gradients(state.model, batches, seed=0, step=step)
    return {
        name: parameter.grad.clone()
        for name, parameter in state.model.named_parameters()
        if parameter.grad is not None
    }


def record_events(offload: WeightOffload, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list that receives the reads that begin, and the uses once they have begun."""
    layer_of_place = {
        id(shared.place): layer
        for layer, weights in offload._blocks.items()
        for shared in weights.memories
    }
    events: list[str] = []
    read = offload.store.read
    use = WeightOffload._use

    def record_read(place: Any, target: Tensor) -> Any:
        events.append(f"read {layer_of_place[id(place)]}")
        return read(place, target)

    def record_use(self: WeightOffload, layer: int, phase: Phase) -> None:
        use(self, layer, phase)
        events.append(f"{phase} {layer}")

    monkeypatch.setattr(offload.store, "read", record_read)
    monkeypatch.setattr(WeightOffload, "_use", record_use)
    return events


def test_weights_arrive_one_block_ahead_in_both_directions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = {
        "max_steps": 2, "micro_batch_size": 2, "sequence_length": 16, "learning_rate": 1e-2,
    }  # fmt: skip
    recipe, state = build_adapter_state(tmp_path, "disk", training=training)
    offload = state.weight_offload
    assert offload is not None
    events = record_events(offload, monkeypatch)
    for step in range(2):
        events.clear()
        compute_gradients(recipe, state, step)
    offload.close()
    # Block 0 is present from the backward pass of the first step.
    assert events == [
        *("read 1", "forward 0", "read 2", "forward 1", "read 3", "forward 2", "forward 3"),
        *("read 2", "backward 3", "read 1", "backward 2", "read 0", "backward 1", "backward 0"),
    ]


def test_an_order_of_uses_is_learnt_from_the_last_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass after a pass begins with block 0, whose weights arrive during the last block."""
    _, state = build_adapter_state(tmp_path, "disk")
    offload = state.weight_offload
    assert offload is not None
    events = record_events(offload, monkeypatch)
    passes = []
    with state.model.evaluate_mode():
        for _ in range(2):
            events.clear()
            state.model.decoder(torch.arange(16)[None] % 10)
            passes.append(tuple(events))
    offload.close()
    middle = ("read 1", "inference 0", "read 2", "inference 1", "read 3", "inference 2")
    assert passes == [
        ("read 0", *middle, "inference 3"),
        ("read 0", *middle, "read 0", "inference 3"),
    ]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # by torch's tracing
@pytest.mark.parametrize(
    "recompute", ["none", pytest.param("selective", marks=pytest.mark.long), "full"]
)
def test_compiled_blocks_have_the_same_gradients(tmp_path: Path, recompute: str) -> None:
    gradients = {}
    for tier in ("none", "disk"):
        recipe, state = build_adapter_state(tmp_path, tier, recompute=recompute)
        state.model.decoder.compile_blocks(backend="aot_eager")
        gradients[tier] = compute_gradients(recipe, state)
        if state.weight_offload is not None:
            state.weight_offload.close()
    assert gradients["none"].keys() == gradients["disk"].keys()
    for name, gradient in gradients["none"].items():
        assert torch.equal(gradient, gradients["disk"][name]), name


def test_passes_without_gradients_between_steps_use_the_same_weights(tmp_path: Path) -> None:
    """As evaluations and the reference of preference tuning do, without adapters too."""
    outputs = {}
    for tier in ("none", "disk"):
        recipe, state = build_adapter_state(tmp_path, tier)
        ids = torch.arange(16)[None] % 10
        parts = list(compute_gradients(recipe, state).values())
        with state.model.evaluate_mode(), state.model.decoder.without_adapters():
            parts += [state.model.decoder(ids), state.model.decoder(ids.flip(1))]
        parts += compute_gradients(recipe, state, 1).values()
        outputs[tier] = parts
        if state.weight_offload is not None:
            state.weight_offload.close()
    assert all(map(torch.equal, outputs["none"], outputs["disk"]))


def test_weights_are_not_readable_by_name(tmp_path: Path) -> None:
    _, state = build_adapter_state(tmp_path, "disk")
    assert state.weight_offload is not None
    state.weight_offload.close()
    for name in state.model.offloaded_names:
        with pytest.raises(AssertionError, match="is offloaded"):
            state.model.gather_parameter(name)
    assert len(state.model.offloaded_names) == 7 * NUM_LAYERS
