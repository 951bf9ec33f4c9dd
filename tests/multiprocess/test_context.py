"""Context parallelism through the whole engine: methods, ZeRO stages and kinds of attention against one process."""

from __future__ import annotations

from typing import Any

import pytest

from shardwright.architecture import shape_of
from shardwright.layout import Layout
from shardwright.verify.cases import Case
from shardwright.verify.matrix import verify
from tests.multiprocess.models import GPT2, LLAMA, QWEN3, recipe_of
from tests.multiprocess.pool import RankPool

DOCUMENTS = Case(accumulation=2)
PLAIN = Case(accumulation=1, documents=False)
DROPPING = Case(accumulation=1, recompute="full", dropout=True)
SELECTIVE = Case(accumulation=2, recompute="selective", tied=True)

MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 7}
GEMMA2 = {
    **LLAMA,
    "model_type": "gemma2",
    "sliding_window": 9,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 6,
    "hidden_activation": "gelu_pytorch_tanh",
}
LONGROPE = {
    **LLAMA,
    "model_type": "phi3",
    "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.1, 1.2], "long_factor": [1.5, 2.0, 3.0]},
    "original_max_position_embeddings": 8,
    "partial_rotary_factor": 1.0,
    "pad_token_id": 0,
}


def hold(
    ranks: RankPool, config: dict[str, Any], layout: Layout, case: Case, *, tokens: int = 24, dtypes: Any = ("float64",), **changes: Any
) -> None:
    recipe = recipe_of(config, **changes)
    report = verify(recipe, shape_of(recipe), [layout], [case], dtypes, sequence_length=tokens, pool=ranks)
    for cell in report.cells:
        assert cell.failure is None, cell.failure
        assert cell.passed, [finding for finding in cell.findings if not finding.passed]


@pytest.mark.parametrize("method", ["ring", "all_gather", "ulysses"])
@pytest.mark.parametrize(
    ("config", "case"),
    [
        (LLAMA, DOCUMENTS),
        (LLAMA, DROPPING),
        (GPT2, DROPPING),
        (GPT2, SELECTIVE),
        (QWEN3, SELECTIVE),
        (MISTRAL, DOCUMENTS),
        (MISTRAL, PLAIN),
        (GEMMA2, SELECTIVE),
        (GEMMA2, PLAIN),
        (LONGROPE, DOCUMENTS),
    ],
    ids=str,
)
def test_kinds(ranks: RankPool, method: Any, config: Any, case: Case) -> None:
    hold(ranks, config, Layout(cp=2, cp_method=method, zero_stage=2), case, dtypes=("float64", "float32"))


@pytest.mark.parametrize("method", ["ring", "all_gather", "ulysses"])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(cp=2, zero_stage=0),
        Layout(cp=2, zero_stage=1),
        Layout(cp=2, zero_stage=2),
        Layout(cp=2, zero_stage=3),
        Layout(cp=2, dp_replicate=2),
        Layout(cp=2, dp_shard=2, zero_stage=1),
        Layout(cp=2, dp_shard=2, zero_stage=3),
        Layout(cp=2, dp_replicate=2, zero_stage=3),
        Layout(cp=4),
        Layout(cp=4, zero_stage=3),
        Layout(cp=3, zero_stage=2),
    ],
    ids=str,
)
def test_layouts(ranks: RankPool, method: Any, layout: Layout) -> None:
    from dataclasses import replace

    if method == "ulysses" and layout.cp == 3:
        return
    hold(ranks, LLAMA, replace(layout, cp_method=method), DOCUMENTS, dtypes=("float64", "float32"))


@pytest.mark.parametrize("method", ["ring", "all_gather", "ulysses"])
@pytest.mark.parametrize(("config", "layout"), [(GPT2, Layout(cp=4)), (GEMMA2, Layout(cp=4, zero_stage=3))])
def test_drop(ranks: RankPool, method: Any, config: Any, layout: Layout) -> None:
    from dataclasses import replace

    hold(ranks, config, replace(layout, cp_method=method), DROPPING)


@pytest.mark.parametrize("method", ["ring", "all_gather", "ulysses"])
def test_explicit(ranks: RankPool, method: Any) -> None:
    hold(ranks, LLAMA, Layout(cp=2, cp_method=method), DOCUMENTS, model={"attention": "explicit"})
