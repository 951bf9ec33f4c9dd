"""Liger's loss: the arguments that it gets, equal numbers where its kernels run, and refusals.

Without a GPU its kernels run in Triton's interpreter: install liger-kernel and triton, and set
TRITON_INTERPRET=1.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.config import Recipe
from shardwright.errors import RecipeError, RunFailed
from shardwright.launch.devices import should_use_cuda
from shardwright.numerics import liger_loss
from shardwright.numerics.liger_loss import find_liger_obstacle, liger_cross_entropy
from shardwright.numerics.loss import chunked_cross_entropy
from shardwright.training.checks import loss_kernel_checks
from shardwright.training.checks.run_checks import validate_run
from tests.unit.training import test_run_checks

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
CONFIG = test_run_checks.CONFIG | {"max_position_embeddings": test_run_checks.LENGTH}
HAS_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec(
    "liger_kernel"
)


class PlainLoss(torch.nn.Module):
    """Liger's loss by PyTorch's functions; computes a weight's gradient as Liger does."""

    def __init__(
        self,
        ignore_index: int,
        label_smoothing: float,
        reduction: str,
        softcap: float | None,
        accum_dtype: torch.dtype,
    ) -> None:
        super().__init__()
        assert accum_dtype == torch.float32
        self.softcap = softcap
        self.options: dict[str, Any] = {
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
            "reduction": reduction,
        }

    def forward(self, weight: Tensor, x: Tensor, labels: Tensor, bias: Tensor | None) -> Tensor:
        logits = F.linear(x, weight if x.requires_grad else weight.detach(), bias).float()
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return F.cross_entropy(logits, labels, **self.options)


@pytest.fixture
def plain_liger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the package by one whose loss is plain."""
    name = "liger_kernel.transformers.fused_linear_cross_entropy"
    module = ModuleType(name)
    module.LigerFusedLinearCrossEntropyLoss = PlainLoss  # type: ignore[attr-defined]
    for part in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, part, ModuleType(part))
    monkeypatch.setitem(sys.modules, name, module)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        liger_loss.importlib.util,
        "find_spec",
        lambda name: name if name in ("liger_kernel", "triton") else find(name),
    )


def compare(dtype: torch.dtype, *, is_exact_weight: bool, **options: Any) -> None:
    """Compare loss and gradients with those of the chunked loss."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(20, 16, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(37, 16, generator=generator) * 0.5).requires_grad_()
    labels = torch.randint(0, 37, (20,), generator=generator)
    labels[3] = -100
    expected = chunked_cross_entropy(hidden, weight, None, labels, chunk_tokens=8, **options)
    found = liger_cross_entropy(hidden, weight, None, labels, num_supervised=19, **options)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-6 if is_exact_weight else 1e-3, atol=0)
    gradients = torch.autograd.grad(found * 0.37, (hidden, weight))
    wanted = torch.autograd.grad(expected * 0.37, (hidden, weight))
    for got, want in zip(gradients, wanted, strict=True):
        assert got.dtype == want.dtype
        assert (got - want).norm() <= 8 * torch.finfo(dtype).eps * want.norm()


@pytest.mark.usefixtures("plain_liger")
@pytest.mark.parametrize(
    "options", [{}, {"soft_cap": 5.0}, {"label_smoothing": 0.1}], ids=lambda options: str(options)
)
def test_arguments_have_the_meaning_of_the_chunked_loss(options: dict[str, Any]) -> None:
    compare(torch.float32, is_exact_weight=True, **options)


@pytest.mark.usefixtures("plain_liger")
def test_a_head_behind_frozen_blocks_gets_its_gradient() -> None:
    weight = torch.randn(37, 16).requires_grad_()
    labels = torch.arange(20)
    liger_cross_entropy(torch.randn(20, 16), weight, None, labels).backward()
    assert weight.grad is not None
    with torch.no_grad():
        assert not liger_cross_entropy(torch.randn(20, 16), weight, None, labels).requires_grad


@pytest.mark.skipif(not HAS_INTERPRETER, reason="needs liger-kernel and TRITON_INTERPRET=1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_its_kernels_compute_equal_numbers(dtype: torch.dtype, smoothing: float) -> None:
    is_exact = dtype == torch.float32
    compare(dtype, is_exact_weight=is_exact, label_smoothing=smoothing)


@pytest.mark.usefixtures("plain_liger")
def test_loss_weights_are_an_error() -> None:
    hidden = torch.randn(4, 16)
    with pytest.raises(RunFailed, match=r"loss weights.*model\.loss_kernel: chunked"):
        liger_cross_entropy(
            hidden, torch.randn(37, 16), None, torch.arange(4), weights_N=torch.ones(4)
        )


def build_recipe(folder: Path, model: dict[str, Any] | None = None, **sections: Any) -> Recipe:
    section = {"config": CONFIG, "loss_kernel": "liger", **(model or {})}
    return test_run_checks.build_recipe(folder, **{"model": section, **sections})


def test_a_missing_package_or_device_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liger_loss.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(
        RecipeError, match=r"model\.loss_kernel.*liger-kernel is not installed.*allowed: chunked"
    ):
        validate_run(build_recipe(tmp_path), 1)


@pytest.mark.usefixtures("plain_liger")
def test_devices_and_versions_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "the device is a CPU" in str(find_liger_obstacle(CPU))
    assert find_liger_obstacle(CUDA) is None
    monkeypatch.setattr(liger_loss, "_import_loss", lambda: torch.nn.CrossEntropyLoss)
    monkeypatch.setattr(liger_loss.metadata, "version", lambda _name: "0.5.0")
    assert "liger-kernel 0.5.0 sums the head's gradient in 16 bits" in str(
        find_liger_obstacle(CUDA)
    )


@pytest.mark.parametrize(
    ("sections", "world_size", "reason"),
    [
        ({"layout": {"tp": 2}}, 2, "ranks share the vocabulary"),
        ({"precision": {"kind": "fp64"}}, 1, "the precision is fp64"),
        (
            {
                "model": {
                    "loss_kernel": "liger",
                    "config": CONFIG
                    | {
                        "model_type": "granite",
                        "logits_scaling": 8.0,
                        "embedding_multiplier": 1.0,
                        "residual_multiplier": 1.0,
                        "attention_multiplier": 1.0,
                    },
                }
            },
            1,
            "logits have a factor",
        ),
    ],
)
def test_runs_of_other_losses_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sections: dict[str, Any],
    world_size: int,
    reason: str,
) -> None:
    assert loss_kernel_checks.should_use_cuda is should_use_cuda
    monkeypatch.setattr(loss_kernel_checks, "find_liger_obstacle", lambda _device: None)
    validate_run(build_recipe(tmp_path), 1)
    with pytest.raises(RecipeError, match=rf"model\.loss_kernel.*{reason}"):
        validate_run(build_recipe(tmp_path, **sections), world_size)


def test_chunks_without_effect_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`loss_chunk_tokens` has no effect"):
        build_recipe(tmp_path, {"loss_chunk_tokens": 512})
