"""Training steps: equality with the CPU, fused optimizer, recompute, compile, one rank of ZeRO,
checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist

from shardwright.architecture import ModelShape
from shardwright.checkpoint.tensor_loading import load_checkpoint, open_checkpoint, read_tensor
from shardwright.checkpoint.tensor_saving import save_checkpoint
from shardwright.config import Recipe
from shardwright.config.training import OptimizerSection, PrecisionSection
from shardwright.data.loader import MicroBatch
from shardwright.layout import Layout
from shardwright.layout.saved_results import LayerResults, RecomputeChoice
from shardwright.model.decoder import Decoder
from shardwright.model.weight_init import initialise_parameter
from shardwright.numerics.chunked_loss import ChunkedLoss
from shardwright.numerics.precision import resolve_dtypes
from shardwright.optim import build_optimizer
from shardwright.optim.state import (
    collect_optimizer_tensors,
    collect_optimizer_values,
    load_optimizer_values,
)
from shardwright.parallel import ParallelModel, apply_layout
from shardwright.parallel.fsdp import apply_fsdp
from shardwright.parallel.mesh import Mesh
from shardwright.plans import BatchPlan, build_plan
from shardwright.training.run import train
from shardwright.training.step import accumulate_gradients, update_parameters
from tests.gpu.conftest import is_gpu, measure_peak_bytes


def build_decoder(shape: ModelShape, precision: PrecisionSection) -> Decoder:
    with torch.device("meta"):
        return Decoder(
            shape,
            loss_function=ChunkedLoss(128),
            compute_dtype=resolve_dtypes(precision).compute,
        )


def build_model(
    shape: ModelShape,
    device: torch.device,
    *,
    kind: Any = "fp32",
    recompute: Any = "none",
    compile_blocks: bool = False,
    working_weights: bool | Literal["auto"] = "auto",
) -> ParallelModel:
    precision = PrecisionSection(kind=kind, working_weights=working_weights)
    plan = build_plan(
        shape, Layout(), BatchPlan(count_row_tokens(shape), 4, 1, 1), precision, recompute
    )
    if recompute == "mixed":
        plan = replace(plan, recompute_choice=build_choice(shape.num_layers))
    specs = {spec.name: spec for spec in shape.list_parameters()}
    return apply_layout(
        build_decoder(shape, precision),
        plan,
        None,
        device,
        read_slice=lambda name, narrow: initialise_parameter(
            specs[name], 0, dtype=torch.float32, narrow=narrow
        ),
        compile_blocks=compile_blocks,
    )


def build_choice(num_layers: int) -> RecomputeChoice:
    """Build a choice of two levels; its figures are not used."""
    levels: tuple[LayerResults, LayerResults] = (
        frozenset(["attention"]),
        frozenset(["attention", "projections", "attention_out", "gate_up"]),
    )
    layers = tuple(levels[2 * layer >= num_layers] for layer in range(num_layers))
    return RecomputeChoice(layers, "test", "none", 0.0, 0.0, 0.0, 0.0)


def build_adamw(model: ParallelModel) -> torch.optim.Optimizer:
    return build_optimizer(
        model.named_parameters(), OptimizerSection(), learning_rate=1e-3, weight_decay=0.1
    )


def count_row_tokens(shape: ModelShape) -> int:
    """Return the number of tokens per row."""
    return shape.max_position_embeddings // 4


def draw_batch(shape: ModelShape) -> MicroBatch:
    generator = torch.Generator().manual_seed(3)
    ids_BT = torch.randint(0, shape.vocab_size, (4, count_row_tokens(shape)), generator=generator)
    labels_BT = torch.nn.functional.pad(ids_BT[:, 1:], (0, 1), value=-100)
    positions_BT = torch.arange(count_row_tokens(shape)).expand(4, -1)
    return MicroBatch(
        ids_BT, labels_BT, positions_BT, None, torch.arange(4), int((labels_BT != -100).sum())
    )


def run_steps(
    model: ParallelModel,
    shape: ModelShape,
    optimizer: torch.optim.Optimizer,
    num_steps: int,
    *,
    learning_rate: float = 1e-3,
) -> list[float]:
    batch = draw_batch(shape)
    losses = []
    for step in range(num_steps):
        losses.append(accumulate_gradients(model, [batch], seed=0, step=step).mean())
        outcome = update_parameters(
            model, optimizer, learning_rate=learning_rate, max_grad_norm=1.0
        )
        assert not outcome.is_skipped
    return losses


def test_steps_equal_those_of_the_cpu(device: torch.device, shape: ModelShape) -> None:
    here = build_model(shape, device)
    there = build_model(shape, torch.device("cpu"))
    ours, reference = (run_steps(model, shape, build_adamw(model), 3) for model in (here, there))
    assert ours == pytest.approx(reference, rel=1e-5)


def test_adamw_is_fused_and_bf16_trains(device: torch.device, shape: ModelShape) -> None:
    model = build_model(shape, device, kind="bf16")
    optimizer = build_adamw(model)
    assert all(group["fused"] for group in optimizer.param_groups)
    num_steps, learning_rate = (30, 1e-3) if is_gpu(device) else (14, 1e-2)
    losses = run_steps(model, shape, optimizer, num_steps, learning_rate=learning_rate)
    assert losses[-1] < 0.5 * losses[0]
    moments = [tensor for state in optimizer.state.values() for tensor in state.values()]
    assert {parameter.dtype for _, parameter in model.named_parameters()} == {torch.float32}
    assert {tensor.dtype for tensor in moments} == {torch.float32}


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_working_weights_keep_every_bit(
    device: torch.device, shape: ModelShape, recompute: Any
) -> None:
    weights = []
    for working_weights in (False, True):
        model = build_model(
            shape, device, kind="bf16", recompute=recompute, working_weights=working_weights
        )
        assert (model.decoder.working_weights is not None) == working_weights
        run_steps(model, shape, build_adamw(model), 3)
        weights.append([parameter.detach() for _, parameter in model.named_parameters()])
    assert all(map(torch.equal, *weights))


def measure_two_steps(
    shape: ModelShape, device: torch.device, recompute: str
) -> tuple[list[float], int]:
    """Return the losses, and the most bytes that the second step allocates."""
    model = build_model(shape, device, recompute=recompute)
    optimizer = build_adamw(model)
    losses = run_steps(model, shape, optimizer, 1)  # makes the optimizer's states
    peak_bytes = measure_peak_bytes(
        device, lambda: losses.extend(run_steps(model, shape, optimizer, 1))
    )
    return losses, peak_bytes


@pytest.mark.parametrize("recompute", ["selective", "full", "mixed"])
def test_recompute_changes_memory_and_not_the_loss(
    device: torch.device, shape: ModelShape, recompute: str
) -> None:
    (losses, peak_bytes), (expected, expected_bytes) = (
        measure_two_steps(shape, device, kind) for kind in (recompute, "none")
    )
    assert losses == pytest.approx(expected, rel=1e-6)
    assert peak_bytes < expected_bytes


# A warning of torch itself, when it traces.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_compiled_blocks_compute_the_same(
    device: torch.device, shape: ModelShape, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_gpu(device):  # Inductor's C++ takes 20 s; long multi-process tests use it
        monkeypatch.setattr(
            Decoder, "compile_blocks", partialmethod(Decoder.compile_blocks, backend="aot_eager")
        )
    plain, compiled = (
        build_model(shape, device, recompute=recompute, compile_blocks=compile_blocks)
        for compile_blocks in (False, True)
    )
    reference, ours = (
        run_steps(model, shape, build_adamw(model), 2) for model in (plain, compiled)
    )
    assert ours == pytest.approx(reference, rel=1e-5)


@pytest.fixture
def one_rank(device: torch.device) -> Iterator[torch.device]:
    """A process group of this process alone: NCCL on CUDA."""
    dist.init_process_group(
        "nccl" if is_gpu(device) else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    yield device
    dist.destroy_process_group()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_one_rank_of_zero_has_the_gradients_of_zero_stage_0(
    one_rank: torch.device, shape: ModelShape, stage: Any
) -> None:
    plain = build_model(shape, one_rank)
    batch = draw_batch(shape).to(one_rank)
    loss = plain.module(batch.input_ids_BT, labels_BT=batch.labels_BT)
    loss.backward()

    precision = PrecisionSection(kind="fp32")
    sharded = build_decoder(shape, precision)
    layout = Layout(zero_stage=stage)
    apply_fsdp(sharded, layout, Mesh(layout, one_rank.type), resolve_dtypes(precision))
    sharded.to_empty(device=one_rank)
    weights = dict(plain.named_parameters())
    with torch.no_grad():
        for name, parameter in sharded.named_parameters():
            parameter.to_local().copy_(weights[name])  # type: ignore[attr-defined]
    parameters = dict(sharded.named_parameters())
    sharded_loss = sharded(batch.input_ids_BT, labels_BT=batch.labels_BT)
    sharded_loss.backward()
    assert sharded_loss.item() == pytest.approx(loss.item(), rel=1e-6)
    for name, parameter in parameters.items():
        gradient = parameter.grad
        expected = weights[name].grad
        assert gradient is not None
        assert expected is not None
        difference = gradient.full_tensor() - expected  # type: ignore[attr-defined]
        assert float(difference.norm() / expected.norm()) < 1e-5, name


def test_a_checkpoint_restores_every_bit(
    device: torch.device, shape: ModelShape, tmp_path: Path
) -> None:
    model = build_model(shape, device, kind="bf16")
    optimizer = build_adamw(model)
    run_steps(model, shape, optimizer, 2)
    saved = save_checkpoint(
        tmp_path, 2, collect_state(model, optimizer), collect_optimizer_values(optimizer)
    )
    uninterrupted = run_steps(model, shape, optimizer, 2)

    fresh = build_model(shape, device, kind="bf16")
    fresh_optimizer = build_adamw(fresh)
    load_optimizer_values(
        fresh_optimizer, load_checkpoint(saved.path, collect_state(fresh, fresh_optimizer))
    )
    resumed = run_steps(fresh, shape, fresh_optimizer, 2)
    if device.type == "cuda":  # atomics sum embedding gradients in any order
        assert resumed == pytest.approx(uninterrupted, rel=1e-5)
    else:
        assert resumed == uninterrupted


def collect_state(
    model: ParallelModel, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return weights | collect_optimizer_tensors(optimizer, model.named_parameters())


def build_content(folder: Path, device: torch.device, **training: Any) -> dict[str, Any]:
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    return {
        "model": {
            "config": {
                "model_type": "llama",
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 1,
                "max_position_embeddings": 64,
            }
        },
        "tokenizer": {"kind": "character"},
        "data": {
            "sources": [str(text)],
            "validation_fraction": 0.1,
            "validation_split": "tail",
            "cache_dir": str(folder / "cache"),
        },
        "training": {
            "sequence_length": 64,
            "micro_batch_size": 4,
            "max_steps": 12,
            "learning_rate": 1e-2,
            "schedule": "constant",
            **training,
        },
        "precision": "bf16" if is_gpu(device) else "fp32",
        "checkpoint": {"every_steps": 6},
        "run": {"dir": str(folder / "run"), "device": device.type},
    }


def test_a_recipe_trains_and_resumes(device: torch.device, tmp_path: Path) -> None:
    first = train(Recipe.model_validate(build_content(tmp_path, device)))
    assert first is not None
    assert first["status"] == "completed"
    longer = build_content(tmp_path, device, max_steps=20)
    second = train(Recipe.model_validate(longer), resume=True)
    assert second is not None
    assert second["steps"] == 20
    assert second["validation_loss"] < first["validation_loss"]


def test_a_deterministic_run_resumes_with_the_same_bits(
    device: torch.device, tmp_path: Path
) -> None:
    """`conftest.py` has set the workspace of cuBLAS before CUDA started."""
    weights = []
    for name, stops in (("whole", [8]), ("parts", [4, 8])):
        folder = tmp_path / name
        folder.mkdir()
        for steps in stops:
            options = {"max_steps": steps, "sequence_length": 32, "deterministic": True}
            content = build_content(folder, device, **options)
            train(Recipe.model_validate(content), resume=steps > stops[0])
        checkpoint = open_checkpoint(folder / "run/checkpoints/step-00000008")
        names = checkpoint.manifest.tensors
        weights.append({name: read_tensor(checkpoint, name) for name in names})
    whole, parts = weights
    assert whole.keys() == parts.keys()
    assert all(torch.equal(tensor, parts[name]) for name, tensor in whole.items())
