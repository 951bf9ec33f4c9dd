"""Fused norms, gates, rotations and residual sums under every layout: gradients equal those of
separate operations, which other tests compare with one process.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.config.recipe import RecomputeKind
from shardwright.config.training import PrecisionSection
from shardwright.layout import Layout
from shardwright.model.pointwise import operators
from shardwright.model.pointwise.functions import COMPILED_FUNCTIONS
from shardwright.numerics import build_recompute_runner, get_local_tensor
from shardwright.parallel import ParallelModel
from shardwright.training.step import accumulate_gradients
from tests.multiprocess.models import GPT2, GPT_OSS, LLAMA
from tests.multiprocess.pool import RankPool
from tests.multiprocess.test_layouts import build, micro_batches
from tests.reference.cases import CASES

VOCABULARY = {"vocab_size": LLAMA["vocab_size"]}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, "intermediate_size": 28},
    "gpt2": {**GPT2, **VOCABULARY, "n_layer": 4},
    "gemma2": {**CASES["gemma2"], **VOCABULARY},
    "olmo2": {**CASES["olmo2"], **VOCABULARY},
    "gpt_oss": {**GPT_OSS, **VOCABULARY},
}


class Case(NamedTuple):
    """Model, layout and recomputation."""

    model: str
    layout: Layout
    recompute: RecomputeKind = "none"

    def __str__(self) -> str:
        return f"{self.model}-{self.layout}-{self.recompute}"


CASES_ON_TWO_RANKS = [
    Case("llama", Layout(tp=2), "selective"),
    Case("llama", Layout(dp_replicate=2)),
    Case("llama", Layout(dp_shard=2, zero_stage=3), "full"),
    Case("llama", Layout(pp=2, schedule="zb_h1")),
    Case("gpt_oss", Layout(dp_shard=2, ep=2, zero_stage=3)),
    Case("gpt2", Layout(tp=2)),
    Case("olmo2", Layout(tp=2), "full"),
    Case("gemma2", Layout(tp=2, sequence_parallel=False)),
    Case("llama", Layout(cp=2, cp_method="ring")),
    Case("gpt2", Layout(pp=2, schedule="zbv"), "full"),
    Case("gemma2", Layout(pp=2), "selective"),
]


def compute_gradients(model: ParallelModel) -> dict[str, Tensor]:
    """Return this rank's parts of the gradients of a step."""
    data_rank = 0 if model.layout.data_ranks == 1 else dist.get_rank()
    model.decoder.zero_grad()
    accumulate_gradients(model, micro_batches(data_rank), seed=0, step=0)
    return {
        name: get_local_tensor(parameter.grad).clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def compare_with_separate(case: Case) -> int:
    """Run a step with separate operations and one with fused ones; return the fused calls."""
    model = build(case.layout, PrecisionSection(kind="fp64"), MODELS[case.model])
    model.decoder.set_recompute(build_recompute_runner(case.recompute))
    expected = compute_gradients(model)
    model.decoder.fuse_functions(COMPILED_FUNCTIONS)
    with (
        patch.object(operators, "compiled_formulas", {}) as used,
        patch.object(operators, "_compile", lambda formula: formula),
    ):
        found = compute_gradients(model)
    assert found.keys() == expected.keys() != set()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-12)
    return len(used)


@pytest.mark.parametrize(
    "case",
    CASES_ON_TWO_RANKS,
    ids=str,
)
def test_gradients_equal_those_of_separate_operations(ranks: RankPool, case: Case) -> None:
    assert all(used > 0 for used in ranks.run(2, compare_with_separate, case))
