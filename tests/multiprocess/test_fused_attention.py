"""FlexAttention and varlen under tensor parallelism and Ulysses: gradients of eager attention.

The kernels run on CPUs as in `tests/unit/model/test_fused_attention.py`.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from shardwright.architecture.attention_kernel import KernelSupport
from shardwright.config.training import PrecisionSection
from shardwright.layout import Layout
from shardwright.model import forward_context
from shardwright.model.attention import fused_attention
from shardwright.model.attention.fused_attention import VarlenFunction
from tests.multiprocess.pool import RankPool
from tests.multiprocess.test_compiled_graphs import run_step
from tests.multiprocess.test_layouts import build
from tests.plain_varlen import PlainVarlen
from tests.reference.cases import CASES

TP = Layout(tp=2)
ULYSSES = Layout(cp=2, cp_method="ulysses")


def compare_with_explicit(layout: Layout, model_name: str) -> tuple[int, int]:
    """Compare the gradients of a step; return the calls of flex and of varlen."""
    model = build(layout, PrecisionSection(kind="fp64"), CASES[model_name])
    model.decoder.attention = "explicit"
    expected = run_step(model, 0)
    model.decoder.attention = "auto"
    calls: list[tuple[Any, ...]] = []
    varlen = PlainVarlen()

    def attend(q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, **options: Any) -> Any:
        calls.append((q_BHTE.shape[1], k_BKTE.shape[1]))
        return flex.flex_attention(q_BHTE, k_BKTE, v_BKTE, **options)

    with (
        patch.object(forward_context, "find_kernel_support", lambda *_: KernelSupport()),
        patch.object(flex, "_validate_device", lambda *_: None),
        patch.object(fused_attention, "flex_replacement", attend),
        patch.object(fused_attention, "varlen_function", VarlenFunction(varlen, {})),
    ):
        for got, want in zip(run_step(model, 0), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
    return len(calls), len(varlen.calls)


@pytest.mark.parametrize("layout", [TP, ULYSSES], ids=["tp", "ulysses"])
@pytest.mark.parametrize(
    ("model", "kernel"), [("gpt_oss", "flex"), ("gemma2", "flex"), ("mistral-window", "varlen")]
)
def test_gradients_are_those_of_explicit_products(
    ranks: RankPool, layout: Layout, model: str, kernel: str
) -> None:
    for num_flex, num_varlen in ranks.run(2, compare_with_explicit, layout, model):
        assert (num_flex > 0, num_varlen > 0) == (kernel == "flex", kernel == "varlen")
