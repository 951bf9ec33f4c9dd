"""`training.deterministic`: equal bits after a resume, variables of the libraries, named errors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.checkpoint.run_folder import RunFolder
from shardwright.checkpoint.tensor_loading import open_checkpoint, read_tensor
from shardwright.config import Recipe
from shardwright.errors import InputError
from shardwright.model import Decoder
from shardwright.numerics import determinism
from shardwright.numerics.determinism import (
    CUBLAS_VARIABLE,
    NVLS_VARIABLE,
    use_deterministic_algorithms,
)
from shardwright.telemetry.event_log import RunStartedEvent, WarningEvent, read_events
from shardwright.training.run import train
from tests.unit.training.test_loop import build_recipe


@pytest.fixture(autouse=True)
def library_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start as a new process, without the variables, and restore them afterwards."""
    monkeypatch.setattr(determinism, "_values_of_process", {})
    for name in (CUBLAS_VARIABLE, NVLS_VARIABLE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def read_state(recipe: Recipe) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(RunFolder.from_recipe(recipe).checkpoints / "step-00000004")
    return {name: read_tensor(checkpoint, name) for name in checkpoint.manifest.tensors}


def test_a_resumed_run_has_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Decoder.forward

    def check_and_forward(self: Decoder, *arguments: Any, **options: Any) -> Any:
        assert torch.are_deterministic_algorithms_enabled()
        return forward(self, *arguments, **options)

    monkeypatch.setattr(Decoder, "forward", check_and_forward)
    options: dict[str, Any] = {"schedule": "constant", "deterministic": True}
    whole = build_recipe(tmp_path, "whole", max_steps=4, **options)
    train(whole)
    train(build_recipe(tmp_path, max_steps=2, **options))
    resumed = build_recipe(tmp_path, max_steps=4, **options)
    train(resumed, resume=True)
    expected = read_state(whole)
    got = read_state(resumed)
    assert got.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in got.items())
    assert not torch.are_deterministic_algorithms_enabled()
    (started, *_) = read_events(tmp_path / "whole").filter_by_type(RunStartedEvent)
    assert started.recipe["training"]["deterministic"] is True


def test_an_operation_without_an_implementation_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Decoder.forward

    def put_and_forward(self: Decoder, *arguments: Any, **options: Any) -> Any:
        torch.zeros(2).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
        return forward(self, *arguments, **options)

    monkeypatch.setattr(Decoder, "forward", put_and_forward)
    with pytest.raises(InputError, match="the operation put_ has no deterministic") as error:
        train(build_recipe(tmp_path, deterministic=True))
    assert error.value.field == "training.deterministic"
    assert not torch.are_deterministic_algorithms_enabled()
    train(build_recipe(tmp_path, "other"))  # works without the setting


def test_a_resumed_run_that_differs_warns(tmp_path: Path) -> None:
    train(build_recipe(tmp_path, deterministic=True))
    train(build_recipe(tmp_path, max_steps=3), resume=True)
    (warning,) = read_events(tmp_path / "run").filter_by_type(WarningEvent)
    assert "training.deterministic: saved True, now False" in warning.message


def test_the_variables_of_the_libraries_are_set_before_cuda_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with use_deterministic_algorithms(is_cuda=True):
        assert os.environ[CUBLAS_VARIABLE] == ":4096:8"
        assert os.environ[NVLS_VARIABLE] == "0"
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    # A second run of the process, whose CUDA has started with them; between the generations of a
    # process that stays the environment is restored.
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for removed in ((), (CUBLAS_VARIABLE, NVLS_VARIABLE)):
        for name in removed:
            monkeypatch.delenv(name)
        with use_deterministic_algorithms(is_cuda=True):
            assert os.environ[CUBLAS_VARIABLE] == ":4096:8"
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize(
    ("variables", "is_initialized", "field"),
    [
        ({}, True, CUBLAS_VARIABLE),
        ({CUBLAS_VARIABLE: ":4096:2"}, False, CUBLAS_VARIABLE),
        ({NVLS_VARIABLE: "1"}, False, NVLS_VARIABLE),
    ],
    ids=["started", "workspace", "switch"],
)
def test_variables_with_which_results_vary_are_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], is_initialized: bool, field: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_initialized)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError) as error, use_deterministic_algorithms(is_cuda=True):
        pass
    assert error.value.field == field
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_cpu_needs_no_variables() -> None:
    with use_deterministic_algorithms(is_cuda=False):
        assert CUBLAS_VARIABLE not in os.environ
