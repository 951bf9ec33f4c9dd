"""Fused norms, gates and rotations on the test device, traced as on a GPU.

Inductor's kernels need a driver: the operations of a graph run one by one.
"""

from __future__ import annotations

import pytest
import torch

from shardwright.model.pointwise import operators
from shardwright.model.pointwise.functions import COMPILED_FUNCTIONS
from shardwright.numerics.recompute import build_recompute_runner
from tests.unit.model.test_pointwise import build, measure_error, run_step

GPU = torch.device("cuda", 0)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss-clamps-bite"])
def test_gradients_equal_those_of_separate_operations(
    monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """The backward pass runs, and recomputes, in a thread of its own."""
    monkeypatch.setattr(operators, "compiled_formulas", {})
    monkeypatch.setattr(operators, "choose_compile_options", lambda: {"backend": "aot_eager"})
    decoder = build(family, torch.float64).to(GPU)
    decoder.set_recompute(build_recompute_runner("selective"))
    expected = run_step(decoder)
    decoder.fuse_functions(COMPILED_FUNCTIONS)
    found = run_step(decoder)
    assert operators.compiled_formulas
    assert all(key[1] == "cuda" for key in operators.compiled_formulas)
    assert measure_error(found, expected) < 1e-13
    torch._dynamo.reset()
