"""Attention under tensor and context parallelism: loss and gradients of explicit products in one
process, for every kind of attention, with whole rows and packed documents.

FlexAttention and varlen run on CPUs as in `tests/unit/model/test_fused_attention.py`. Ranks of a
ring compute tiles with other kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
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
from shardwright.parallel import ParallelModel
from tests.multiprocess.pool import RankPool
from tests.multiprocess.test_layouts import build
from tests.plain_varlen import PlainVarlen
from tests.reference.cases import CASES

NUM_TOKENS = 16
LAYOUTS = {
    "tp": Layout(tp=2),
    "ulysses": Layout(cp=2, cp_method="ulysses"),
    "ring": Layout(cp=2, cp_method="ring"),
    "all-gather": Layout(cp=2, cp_method="all_gather"),
    "tp-ulysses": Layout(tp=2, cp=2, cp_method="ulysses"),
}
LONG_LAYOUTS = {"all-gather", "tp-ulysses"}
TILED = {"ring", "all-gather"}
WHOLE_ROWS = {"mistral-window", "gpt_oss", "deepseek_v3"}
"""Cases whose whole rows are short tests too."""
KERNELS = {
    "llama": ("sdpa", "varlen"),
    "llama-one-kv-head-tied": ("sdpa", "varlen"),
    "mistral-window": ("varlen", "varlen"),
    "qwen3": ("sdpa", "varlen"),  # norms of each head
    "olmo2": ("sdpa", "varlen"),  # norms over all heads
    "gpt_neox": ("sdpa", "varlen"),
    "gemma2": ("flex", "flex"),
    "gpt_oss": ("flex", "flex"),
    "deepseek_v3": ("sdpa", "varlen"),
}
"""The kernel of each kind of attention with whole rows, and with packed documents.

Windows, which end before the row does, caps, sinks, groups of heads, norms and latents."""


def run_step(model: ParallelModel, *, is_packed: bool) -> list[Tensor]:
    """Return the loss and the gradients of a step on two rows."""
    random = torch.Generator().manual_seed(4)
    ids_BT = torch.randint(0, model.decoder.shape.vocab_size, (2, NUM_TOKENS), generator=random)
    documents_BT = None
    if is_packed:
        # Documents end inside a rank's part of a row, and at its end.
        ends = torch.tensor([[1, 3, 11], [4, 8, 9]])
        documents_BT = torch.searchsorted(ends, torch.arange(NUM_TOKENS).expand(2, -1), right=True)
    labels_BT = ids_BT.roll(-1, 1)
    loss = model.module(ids_BT, labels_BT=labels_BT, document_ids_BT=documents_BT)
    loss.backward()
    model.finish_gradients()
    gradients = [model.gather_gradient(name) for name, _ in model.named_parameters()]
    whole_loss = model.sum_over_data(loss.detach())
    return [whole_loss, *(each.clone() for each in gradients if each is not None)]


def compute_step(layout: Layout, case: str, attention: Any, is_packed: bool) -> Any:
    """Compute a step with both kernels available; return its results and the kernels called."""
    model = build(layout, PrecisionSection(kind="fp64"), CASES[case])
    model.decoder.attention = attention
    kernels: set[str] = set()
    varlen = PlainVarlen()

    def attend(*arguments: Any, **options: Any) -> Any:
        kernels.add("flex")
        return flex.flex_attention(*arguments, **options)

    with (
        patch.object(forward_context, "find_kernel_support", lambda *_: KernelSupport()),
        patch.object(flex, "_validate_device", lambda *_: None),
        patch.object(fused_attention, "flex_replacement", attend),
        patch.object(fused_attention, "varlen_function", VarlenFunction(varlen, {})),
    ):
        results = run_step(model, is_packed=is_packed)
    return results, kernels | ({"varlen"} if varlen.calls else set())


def list_products() -> Iterator[Any]:
    for layout in LAYOUTS:
        for case in KERNELS:
            for is_packed in (False, True):
                is_short = layout not in LONG_LAYOUTS and (is_packed or case in WHOLE_ROWS)
                name = f"{layout}-{case}-{'packed' if is_packed else 'whole'}"
                marks = () if is_short else pytest.mark.long
                yield pytest.param(layout, case, is_packed, id=name, marks=marks)


@pytest.mark.parametrize(("layout", "case", "is_packed"), [*list_products()])
def test_a_step_is_that_of_explicit_products_in_one_process(
    ranks: RankPool, layout: str, case: str, is_packed: bool
) -> None:
    ((expected, _),) = ranks.run(1, compute_step, Layout(), case, "explicit", is_packed)
    degrees = LAYOUTS[layout]
    steps = ranks.run(degrees.world_size, compute_step, degrees, case, "auto", is_packed)
    kernel = "tiles" if layout in TILED else KERNELS[case][is_packed]
    for results, kernels in steps:
        assert kernels == {kernel} & {"flex", "varlen"}
        for got, want in zip(results, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
