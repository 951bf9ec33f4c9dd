"""`expert_dispatch: deep_ep`: the package that it needs, and what it refuses before a run.

The stand-in for the package shows the exchange itself, in tests/multiprocess.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from shardwright import api
from shardwright.errors import LayoutError, RecipeError
from shardwright.parallel.experts import deep_ep
from shardwright.training.checks import deep_ep_checks
from shardwright.training.checks.run_checks import validate_run
from tests import deep_ep_double
from tests.unit.training import test_run_checks

SPARSE = test_run_checks.CONFIG | test_run_checks.EXPERTS
BF16 = {"kind": "bf16"}
CHOSEN = {"dp_shard": 2, "ep": 2, "expert_dispatch": "deep_ep"}


@pytest.mark.parametrize(
    ("method", "replacement", "problem"),
    [
        ("dispatch", lambda self, x, handle: None, "dispatch has no parameter num_tokens_per_rank"),
        ("combine", lambda self, rows: None, "combine has no parameter x, handle"),
        ("get_dispatch_layout", None, "get_dispatch_layout does not exist"),
    ],
)
def test_another_api_is_refused(
    monkeypatch: pytest.MonkeyPatch, method: str, replacement: Any, problem: str
) -> None:
    with deep_ep_double.install():
        assert deep_ep.load_buffer_class() is deep_ep_double.Buffer
        monkeypatch.setattr(deep_ep_double.Buffer, method, replacement)
        with pytest.raises(LayoutError, match=rf"layout\.expert_dispatch: deep_ep.*{problem}"):
            deep_ep.load_buffer_class()


def test_indices_of_another_type_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    package = deep_ep_double.build_package()
    package.topk_idx_t = torch.int32  # type: ignore[attr-defined]
    monkeypatch.setattr(deep_ep, "import_module", lambda _name: package)
    with pytest.raises(LayoutError, match=r"built for indices of experts in torch\.int32"):
        deep_ep.load_buffer_class()
    monkeypatch.setattr(deep_ep, "import_module", lambda _name: ModuleType("deep_ep"))
    with pytest.raises(LayoutError, match=r"get_dispatch_config does not exist|__init__"):
        deep_ep.load_buffer_class()


@pytest.mark.parametrize(
    ("version", "obstacle"),
    [
        ("1.2.1+9af0e0d", None),
        ("2.1.0", None),
        ("3.0.0", r"deep_ep 3\.0\.0 is installed.*versions 1 and 2"),
        (None, "the package deep_ep is not installed"),
    ],
)
def test_versions_are_checked_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str | None, obstacle: str | None
) -> None:
    def find_version(_name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError
        return version

    monkeypatch.setattr(deep_ep.metadata, "version", find_version)
    monkeypatch.setattr(deep_ep_checks, "should_use_cuda", lambda *_, **__: True)
    recipe = test_run_checks.build_recipe(
        tmp_path, model={"config": SPARSE}, precision=BF16, layout=CHOSEN
    )
    if obstacle is None:
        assert validate_run(recipe, 2).plan.layout.expert_dispatch == "deep_ep"
        return
    with pytest.raises(RecipeError, match=rf"layout\.expert_dispatch: {obstacle}.*once_per_rank"):
        validate_run(recipe, 2)


@pytest.mark.parametrize(
    ("sections", "obstacle"),
    [
        ({}, "the device is a CPU"),
        ({"precision": {"kind": "fp32"}}, "precision.kind is fp32"),
        ({"training": {"deterministic": True}}, "training.deterministic"),
        ({"model": {"config": SPARSE | {"hidden_size": 24}}}, "multiple of 16 elements.*24"),
    ],
)
def test_runs_that_the_kernels_do_not_serve_are_refused(
    tmp_path: Path, sections: dict[str, Any], obstacle: str
) -> None:
    defaults = {"model": {"config": SPARSE}, "precision": BF16, "layout": CHOSEN}
    recipe = test_run_checks.build_recipe(tmp_path, **{**defaults, **sections})
    with pytest.raises(RecipeError, match=rf"layout\.expert_dispatch: .*{obstacle}"):
        validate_run(recipe, 2)


def test_neither_verify_nor_rehearse_runs_the_kernels(tmp_path: Path) -> None:
    recipe = test_run_checks.build_recipe(
        tmp_path, model={"config": SPARSE}, precision=BF16, layout=CHOSEN
    )
    with pytest.raises(LayoutError, match=r"verification runs on CPUs.*once_per_rank"):
        api.verify(recipe, ["dp_shard=2,ep=2,expert_dispatch=deep_ep"])
    with pytest.raises(LayoutError, match=r"do not run on fake devices.*once_per_rank"):
        api.rehearse(recipe, 2)
