"""Update on the host of weights on a CUDA device: gradients leave during the backward pass through
pinned memory, and the weights return, with the bits of the resident run and no further wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.config import Recipe
from shardwright.config.offload import OffloadSection
from shardwright.errors import RecipeError
from shardwright.layout import Layout, RankGrid
from shardwright.numerics import get_local_tensor
from shardwright.offload import OffloadedOptimizer, offload_optimizer
from shardwright.offload.host_update import HostUpdate
from shardwright.optim import build_optimizer, collect_optimizer_tensors, collect_optimizer_values
from shardwright.parallel.gradient_watch import GradientWatch
from shardwright.training.moment_offload import overlap_update
from shardwright.training.run import train as run_training
from shardwright.training.step import accumulate_gradients, update_parameters
from shardwright.verification.rank_pool import RankPool
from tests.hostcuda import device
from tests.hostcuda.ranks import LEARNING_RATE, Case, build_model, draw_micro_batches
from tests.unit.training.test_offload_run import build_run, read_checkpoints

NUM_STEPS = 4
OVERLAPPED = "overlapped"
"""Updated on the device during the next forward pass."""
RULES: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw"},
    "adamw_8bit": {"name": "adamw_8bit", "block_size": 32},
    "sgd": {"name": "sgd", "momentum": 0.9},
}


@dataclass
class Outcome:
    """Weights, moments and counts of a run, and what its steps did."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    waits: list[int] = field(default_factory=list)
    num_early: int = 0
    """Gradients of the last step that left during the backward pass."""
    num_buckets: int = 0


@contextmanager
def count_early_gradients(outcome: Outcome) -> Iterator[None]:
    end = GradientWatch.end

    def count(self: GradientWatch) -> None:
        outcome.num_early = len(self._versions)
        end(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientWatch, "end", count)
        yield


def train(case: Case, folder: Path, tier: str, *, max_grad_norm: float | None = 0.5) -> Outcome:
    """Train this rank's steps; the third one is skipped, because its gradient is infinite."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    with torch.cuda.device(rank):  # the ranks' processes run other tests too
        return _train_on(torch.device("cuda", rank), case, folder, tier, rank, max_grad_norm)


def _train_on(
    cuda: torch.device,
    case: Case,
    folder: Path,
    tier: str,
    rank: int,
    max_grad_norm: float | None,
) -> Outcome:
    recipe = case.make_recipe()
    model = build_model(case, recipe, case.layout, cuda)
    optimizer = build_optimizer(
        model.named_parameters(),
        recipe.optimizer,
        learning_rate=LEARNING_RATE,
        weight_decay=0.1,
        model=model,
    )
    if tier != "none":
        is_overlapped = tier == OVERLAPPED
        section = OffloadSection.model_validate(
            {
                "optimizer": "host" if is_overlapped else tier,
                "buffer_bytes": 16384,
                "update_on": "device" if is_overlapped else "host",
            }
        )
        optimizer = offload_optimizer(
            optimizer,
            section,
            model,
            device=cuda,
            default_folder=folder,
            overlap=overlap_update(model, is_deferred=False) if is_overlapped else None,
        )
    data_rank = RankGrid(case.layout).data_rank(rank)
    outcome = Outcome()
    for step in range(NUM_STEPS):
        batches = [batch.pin_memory() for batch in draw_micro_batches(case, data_rank)]
        with device.log_synchronisations() as log, count_early_gradients(outcome):
            loss = accumulate_gradients(
                model, batches, seed=0, step=step, loss_scale=1e38 if step == 2 else 1.0
            )
            before_update = sum(log.values())
            update = update_parameters(
                model,
                optimizer,
                learning_rate=LEARNING_RATE,
                max_grad_norm=max_grad_norm,
                router_table=loss.router_table,
                overlaps_forward=True,
            )
        assert update.is_skipped == (step == 2)
        outcome.waits.append(sum(log.values()) - before_update)
    named = dict(model.named_parameters())
    tensors = named | collect_optimizer_tensors(optimizer, named.items())
    outcome.tensors = {
        key: get_local_tensor(tensor.detach()).cpu().clone() for key, tensor in tensors.items()
    }
    outcome.values = collect_optimizer_values(optimizer)
    if isinstance(optimizer, OffloadedOptimizer):
        assert (optimizer.host_update is None) == (tier == OVERLAPPED)
        outcome.num_buckets = optimizer.num_buckets
        optimizer.close()
    assert not device.list_violations()
    return outcome


def find_differences(expected: Outcome, got: Outcome) -> list[str]:
    """List the tensors that differ, and names or counts if they do."""
    wrong = [] if expected.values == got.values else ["values"]
    if expected.tensors.keys() != got.tensors.keys():
        return [*wrong, "names"]
    return wrong + [
        key for key, tensor in expected.tensors.items() if not torch.equal(tensor, got.tensors[key])
    ]


@pytest.mark.parametrize("rule", RULES)
def test_the_bits_are_those_of_the_resident_run_and_the_host_waits_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    # On the test device a query makes the host know the event. Reading the norm has to do that.
    monkeypatch.setattr(torch.cuda.Event, "query", lambda event: True)
    case = Case(Layout(), sections={"optimizer": RULES[rule]})
    expected = train(case, tmp_path, "none")
    for tier in ("host", "disk"):
        got = train(case, tmp_path, tier)
        assert find_differences(expected, got) == []
        assert got.num_buckets > 20
        assert got.waits == [1] * NUM_STEPS  # for the norm
        assert got.num_early == len(got.values["steps"]) - 1  # the last one when all have ended


def test_gradients_without_clipping_have_the_bits_of_the_resident_run(tmp_path: Path) -> None:
    case = Case(Layout())
    expected = train(case, tmp_path, "none", max_grad_norm=None)
    assert find_differences(expected, train(case, tmp_path, "host", max_grad_norm=None)) == []


LAYOUTS: dict[str, tuple[Case, bool]] = {
    "zero0": (Case(Layout(dp_replicate=2)), False),
    "zero1": (Case(Layout(dp_shard=2, zero_stage=1)), True),
    "zero2": (Case(Layout(dp_shard=2, zero_stage=2)), True),
    "zero3": (Case(Layout(dp_shard=2, zero_stage=3)), True),
    "tp2": (Case(Layout(tp=2, async_tensor_parallel="chunked")), True),
    "cp2": (Case(Layout(cp=2)), False),
    "pp2 x zero1": (Case(Layout(pp=2, dp_shard=2, zero_stage=1)), False),
    "ep2": (Case(Layout(dp_shard=2, ep=2, zero_stage=1), model="qwen3_moe"), True),
    "adapters": (
        Case(Layout(dp_shard=2, zero_stage=3), sections={"adapters": {"rank": 4}}),
        True,
    ),
}
"""Case, and whether gradients are complete during the backward pass. DDP, the reduction over cp
ranks and pipelines complete them after it."""


def compare_on_rank(case: Case, folder: Path) -> tuple[list[str], int]:
    """Compare this rank's runs; return what differs, and the gradients that left early."""
    expected = train(case, folder, "none")
    got = train(case, folder, "host")
    overlapped = train(case, folder, OVERLAPPED)
    differences = find_differences(expected, got) + find_differences(expected, overlapped)
    return differences, got.num_early


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_has_the_bits_of_the_resident_run(
    device_ranks: RankPool, tmp_path: Path, name: str
) -> None:
    case, is_early = LAYOUTS[name]
    size = case.layout.world_size
    for differences, num_early in device_ranks.run(size, compare_on_rank, case, tmp_path):
        assert differences == []
        assert (num_early > 0) == is_early


def test_copies_are_pinned_and_moments_are_not_on_the_device(tmp_path: Path) -> None:
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
        OffloadSection(optimizer="host", update_on="host"),
        model,
        device=cuda,
        default_folder=tmp_path,
    )
    assert optimizer.host_update is not None
    assert optimizer.host_update.num_bytes == 2 * sum(tensor.nbytes for tensor in named.values())
    assert torch.cuda.memory_allocated() == before
    copies = optimizer.host_update._copies.values()
    assert all(copy.weights.is_pinned() and copy.gradient.is_pinned() for copy in copies)
    optimizer.close()


@pytest.mark.parametrize("method", ["take_gradient", "end_update"])
def test_copies_that_no_event_orders_are_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    original = getattr(HostUpdate, method)

    def run_without_waits(self: HostUpdate, *arguments: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda.Stream, "wait_stream", lambda *_: None)
            return original(self, *arguments)

    monkeypatch.setattr(HostUpdate, method, run_without_waits)
    with pytest.raises(RuntimeError, match="missing event"):
        train(Case(Layout()), tmp_path, "host")
    device.list_violations()  # those of the interrupted run


def test_an_update_without_a_norm_waits_for_the_gradients(tmp_path: Path) -> None:
    case = Case(Layout())
    cuda = torch.device("cuda", 0)
    model = build_model(case, case.make_recipe(), case.layout, cuda)
    named = dict(model.named_parameters())
    optimizer = offload_optimizer(
        build_optimizer(
            named.items(),
            case.make_recipe().optimizer,
            learning_rate=0.1,
            weight_decay=0.0,
            model=model,
        ),
        OffloadSection(optimizer="host", update_on="host"),
        model,
        device=cuda,
        default_folder=tmp_path,
    )
    batches = [batch.pin_memory() for batch in draw_micro_batches(case, 0)]
    accumulate_gradients(model, batches, seed=0, step=0)
    optimizer.step()  # reads nan from memory to which a copy is under way
    assert all(bool(parameter.isfinite().all()) for parameter in named.values())
    optimizer.close()
    assert not device.list_violations()


def test_a_run_writes_the_checkpoints_of_the_resident_run_and_resumes_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def build(run: str, tier: str, max_steps: int) -> Recipe:
        recipe = build_run(tmp_path, run, tier, max_steps=max_steps)
        on_host = {"update_on": "host"} if tier != "none" else {}
        return recipe.model_copy(
            update={
                "run": recipe.run.model_copy(update={"device": "cuda"}),
                "offload": recipe.offload.model_copy(update=on_host),
            }
        )

    run_training(build("resident", "none", 4))
    with caplog.at_level("INFO", logger="shardwright"):
        run_training(build("run", "disk", 2))
    assert any("the host updates them, with" in line for line in caplog.messages)
    assert "offload.update_on: host: the recipe says so" in caplog.messages
    run_training(build("run", "host", 4), resume=True)
    expected = read_checkpoints(tmp_path / "resident")
    assert len(expected) == 4
    assert read_checkpoints(tmp_path / "run") == expected
    assert not device.list_violations()


@pytest.mark.parametrize("rule", ["adafactor", "muon"])
def test_optimizers_that_need_whole_matrices_are_refused(tmp_path: Path, rule: str) -> None:
    recipe = build_run(tmp_path, "run", "host")
    recipe = Recipe.model_validate(
        recipe.model_dump(mode="json", exclude_unset=True)
        | {
            "optimizer": {"name": rule},
            "offload": {"optimizer": "host", "update_on": "host"},
            "run": {"dir": str(tmp_path / "run"), "device": "cuda"},
        }
    )
    with pytest.raises(RecipeError, match=f"offload.update_on: the update of {rule} needs whole"):
        run_training(recipe)
