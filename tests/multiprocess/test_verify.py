"""Layouts give the gradients of one process: some cells here, all of them in the long suite."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import yaml
from torch import Tensor

from shardwright.architecture import read_recipe_shape
from shardwright.cli.main import run
from shardwright.config.layout import LayoutSection
from shardwright.config.recipe import RecomputeKind
from shardwright.layout import Layout
from shardwright.model import Decoder
from shardwright.model.mlp import FeedForward
from shardwright.verification.cases import (
    VERIFICATION_DTYPES,
    VerificationCase,
    choose_cases,
    choose_layouts,
)
from shardwright.verification.cell import MutationContext
from shardwright.verification.verification import VerificationReport, verify
from tests.multiprocess.assertions import assert_detected
from tests.multiprocess.models import GPT2, LLAMA, MIXTRAL, QWEN3, TENSOR_LLAMA, build_recipe
from tests.multiprocess.pool import RankPool


def list_failures(report: VerificationReport) -> list[Any]:
    return [
        (
            str(cell.layout),
            str(cell.case),
            cell.failure or [f for f in cell.findings if not f.passed],
        )
        for cell in report.cells
        if not cell.passed
    ]


def verify_layouts(
    ranks: RankPool,
    config: dict[str, Any],
    layouts: list[Layout],
    cases: list[VerificationCase],
    **options: Any,
) -> VerificationReport:
    dtypes = options.pop("dtypes", ["float64"])
    mutation = options.pop("mutation", None)
    recipe = build_recipe(config, **options)
    return verify(
        recipe,
        read_recipe_shape(recipe),
        layouts,
        cases,
        dtypes,
        sequence_length=12,
        pool=ranks,
        mutation=mutation,
    )


LONG = pytest.mark.long
"""Cells that `test_grid` also covers."""

# One cell of each stage and each number of ranks; every value of every option occurs.
CELLS = [
    (Layout(dp_replicate=3), VerificationCase(3, "selective", tied=True, dropout=True)),
    (Layout(dp_shard=3, zero_stage=1), VerificationCase(2, "full", tied=False, dropout=True)),
    (
        Layout(dp_shard=3, zero_stage=2),
        VerificationCase(1, "selective", tied=True, documents=False),
    ),
    pytest.param(
        Layout(dp_shard=4, zero_stage=3),
        VerificationCase(3, "full", tied=True, dropout=True),
        marks=LONG,
    ),
    pytest.param(
        Layout(dp_replicate=2, dp_shard=2, zero_stage=1),
        VerificationCase(3, "none", tied=True),
        marks=LONG,
    ),
    (
        Layout(dp_replicate=2, dp_shard=2, zero_stage=3),
        VerificationCase(2, "selective", tied=False, dropout=True),
    ),
    (
        Layout(dp_shard=2, zero_stage=3, wrap_blocks=2, prefetch_depth=2, max_gathers_in_flight=3),
        VerificationCase(2, "none", tied=False),
    ),
]


@pytest.mark.parametrize(("layout", "case"), CELLS, ids=str)
def test_some_cells(ranks: RankPool, layout: Layout, case: VerificationCase) -> None:
    report = verify_layouts(ranks, LLAMA, [layout], [case], dtypes=VERIFICATION_DTYPES)
    assert report.passed, list_failures(report)
    assert len(report.cells) == 2


def test_a_step_that_is_repeated_drops_gradients_that_have_left(ranks: RankPool) -> None:
    layout = Layout(dp_shard=2, ep=2, zero_stage=2, expert_dispatch="padded", expert_row_limit=1.0)
    offload = {"optimizer": "disk", "parameters": "disk", "buffer_bytes": 8192}
    report = verify_layouts(
        ranks, MIXTRAL, [layout], [VerificationCase(1, tied=False)], offload=offload
    )
    assert report.passed, list_failures(report)


def test_rows_assigned_by_work_have_the_same_gradients(ranks: RankPool) -> None:
    recipe = build_recipe(LLAMA)
    recipe = recipe.model_copy(
        update={"data": recipe.data.model_copy(update={"assignment": "work"})}
    )
    report = verify(
        recipe,
        read_recipe_shape(recipe),
        [Layout(dp_replicate=2), Layout(dp_shard=2, zero_stage=2), Layout(pp=2)],
        [VerificationCase(3, tied=True, dropout=True, documents=False)],
        ["float64"],
        sequence_length=12,
        pool=ranks,
    )
    assert report.passed, list_failures(report)
    assert len(report.cells) == 3


@pytest.mark.parametrize("config", [GPT2, QWEN3], ids=["gpt2", "qwen3"])
def test_other_model_families(ranks: RankPool, config: dict[str, Any]) -> None:
    report = verify_layouts(
        ranks,
        config,
        [Layout(dp_replicate=2), Layout(dp_shard=2, zero_stage=3)],
        [VerificationCase(2, tied=True, dropout=True)],
    )
    assert report.passed, list_failures(report)


@pytest.mark.parametrize(
    "layout", [Layout(dp_replicate=2), Layout(dp_shard=2, zero_stage=3)], ids=str
)
def test_frozen_parameters_stay_and_have_no_gradient(ranks: RankPool, layout: Layout) -> None:
    model = {"freeze": ["*.bias", "transformer.wte.weight"]}
    report = verify_layouts(ranks, GPT2, [layout], [VerificationCase(2, tied=False)], model=model)
    assert report.passed, list_failures(report)


def test_a_frozen_head_on_a_context_rank_without_supervised_tokens(ranks: RankPool) -> None:
    """The last data rank has one supervised token, which another context rank has."""
    report = verify_layouts(
        ranks,
        LLAMA,
        [Layout(cp=2, dp_shard=2, zero_stage=3)],
        [VerificationCase(3, tied=True, documents=True)],
        model={"freeze": ["*embed_tokens*"]},
    )
    assert report.passed, list_failures(report)


class _WithoutGradient(torch.autograd.Function):
    """Identity whose backward pass loses the gradient."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.zeros_like(gradients[0])


@contextmanager
def run_graphs_without_kernels() -> Iterator[None]:
    """Run the operations of compiled blocks one by one: generating C++ takes a minute."""
    compile_blocks = Decoder.compile_blocks

    def compile_graphs(self: Decoder, **options: Any) -> None:
        compile_blocks(self, **options, backend="aot_eager")

    with patch.object(Decoder, "compile_blocks", compile_graphs):
        yield


@contextmanager
def lose_a_gradient_in_compiled_code() -> Iterator[None]:
    """Lose the gradients of feed-forward layers' inputs in compiled code alone."""
    forward = FeedForward.forward

    def lose_gradient(self: FeedForward, x: Tensor, *others: Any) -> Tensor:
        return forward(
            self, _WithoutGradient.apply(x) if torch.compiler.is_compiling() else x, *others
        )

    with patch.object(FeedForward, "forward", lose_gradient), run_graphs_without_kernels():
        yield


@pytest.mark.parametrize(
    ("mutation", "is_compiled", "has_error"),
    [
        (run_graphs_without_kernels, True, False),
        (lose_a_gradient_in_compiled_code, True, True),
        (lose_a_gradient_in_compiled_code, False, False),
    ],
    ids=["compiled", "compiled wrongly", "uncompiled"],
)
def test_gradients_that_compiled_code_loses_are_reported(
    ranks: RankPool, mutation: MutationContext, is_compiled: bool, has_error: bool
) -> None:
    report = verify_layouts(
        ranks,
        TENSOR_LLAMA | {"num_hidden_layers": 1},
        [Layout(tp=2)],
        [VerificationCase(1, tied=False)],
        dtypes=["float32"],  # torch 2.11 compiles no other
        mutation=mutation,
        model={"compile": is_compiled},
    )
    (cell,) = report.cells
    assert cell.is_compiled is is_compiled
    if has_error:
        assert_detected(report, "gradient")
        assert "post_attention_layernorm" in str([f for f in cell.findings if not f.passed])
    else:
        assert report.passed, list_failures(report)


@pytest.mark.parametrize(
    ("layout", "recompute"),
    [
        (Layout(dp_shard=2, zero_stage=3), "none"),
        (Layout(dp_shard=2, zero_stage=1), "full"),
        (Layout(dp_replicate=2, bucket_size_bytes=4096), "none"),
    ],
    ids=str,
)
def test_compiled_blocks_with_rows_of_any_length(
    ranks: RankPool, layout: Layout, recompute: RecomputeKind
) -> None:
    """FSDP2 and DDP change how torch.compile traces and divides the blocks that they wrap."""
    report = verify_layouts(
        ranks,
        LLAMA | {"num_hidden_layers": 2},
        [layout],
        [VerificationCase(1, recompute, tied=False, documents=False)],
        dtypes=["float32"],  # torch 2.11 compiles no other
        mutation=run_graphs_without_kernels,
        model={"compile": True},
    )
    assert report.passed, list_failures(report)


@pytest.mark.parametrize("layout", [Layout(), Layout(dp_shard=1, zero_stage=3)], ids=str)
def test_the_engine_on_one_rank(ranks: RankPool, layout: Layout) -> None:
    report = verify_layouts(ranks, LLAMA, [layout], choose_cases(False, is_full=False))
    assert report.passed, list_failures(report)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", choose_layouts([], 4, LayoutSection()), ids=str)
def test_all_cells(ranks: RankPool, layout: Layout) -> None:
    report = verify_layouts(
        ranks, LLAMA, [layout], choose_cases(False, is_full=True), dtypes=VERIFICATION_DTYPES
    )
    assert report.passed, list_failures(report)
    assert len(report.cells) == 72


def _write_recipe(folder: Path) -> str:
    document = build_recipe(LLAMA).model_dump(mode="json")
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return str(path)


def test_the_verb_prints_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "verify",
        _write_recipe(tmp_path),
        "--layout",
        "zero_stage=2",
        "--nproc",
        "2",
        "--dtype",
        "float64",
        "--num-layers",
        "1",
    ]
    assert run([*words, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["schema_version"] == 1
    assert summary["passed"]
    assert summary["model"]["num_layers"] == 1
    assert summary["compiled_blocks"]["dtypes"] == []
    assert [cell["layout"] for cell in summary["cells"]] == ["dp_shard=2,zero_stage=2"] * 3
    assert {finding["quantity"] for finding in summary["cells"][0]["findings"]} >= {
        "gradient",
        "norm",
        "weights after AdamW",
    }


def test_the_verb_fails_with_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ranks compute the errors; the parent decides whether they pass, and this test changes that.
    monkeypatch.setattr(
        "shardwright.verification.comparison.ComparisonResult.passed", property(lambda _self: False)
    )
    words = [
        "verify",
        _write_recipe(tmp_path),
        "--layout",
        "zero_stage=0",
        "--nproc",
        "2",
        "--dtype",
        "float64",
    ]
    assert run([*words, "--num-layers", "1"]) == 1
    captured = capsys.readouterr()
    assert "3 of 3 fail" in captured.out
    assert "blocks compiled: no (auto: the device is a CPU; " in captured.out
    assert "differ from one process" in captured.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layout", "tp=3"], "4 heads are not divisible by 3"),
        (["--layout", "dp_shard=5"], "no number of ranks from 2 to 4 fits"),
        (["--dtype", "float16"], "unsupported dtype"),
        (["--num-layers", "9"], "cannot add layers to the model"),
    ],
)
def test_wrong_input_is_reported_before_any_rank_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert run(["verify", _write_recipe(tmp_path), *words]) == 2
    assert message in capsys.readouterr().err
