"""Graphs with PyTorch's rounding have all casts, with every version of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch._inductor import config
from torch._inductor.fx_passes import joint_graph
from torch._inductor.pattern_matcher import (
    CallFunction,
    KeywordArg,
    Match,
    PatternMatcherPass,
    register_graph_pattern,
)

from shardwright.numerics.compiled_casts import repair_casts

CAST = torch.ops.prims.convert_element_type.default


def build_patterns(name: str) -> PatternMatcherPass:
    """Register the pattern of torch 2.11, which has no condition, by this name."""
    patterns = PatternMatcherPass()

    def merge(match: Match, arg: fx.Node, first: torch.dtype, second: torch.dtype) -> None:
        node = match.output_node()
        node.replace_all_uses_with(match.graph.call_function(CAST, (arg, second)))
        match.erase_nodes()

    merge.__name__ = name
    inner = CallFunction(CAST, KeywordArg("arg"), KeywordArg("first"))
    pattern = CallFunction(CAST, inner, KeywordArg("second"))
    register_graph_pattern(pattern, pass_dict=patterns)(merge)  # type: ignore[arg-type]
    return patterns


def count_casts(*, is_exact: bool) -> int:
    """Count the casts of fp32 to bf16 and back that the joint graph's patterns leave."""
    graph = fx.Graph()
    node = graph.placeholder("x")
    for dtype in (torch.bfloat16, torch.float32):
        node = graph.call_function(CAST, (node, dtype))
    graph.output(node)
    module = fx.GraphModule({}, graph)
    patterns: Any = joint_graph.patterns
    with config.patch(emulate_precision_casts=is_exact):
        patterns.apply(module)
    return len(module.graph.find_nodes(op="call_function", target=CAST))


def test_graphs_of_pytorchs_rounding_have_all_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint_graph, "patterns", build_patterns("pointless_convert"))
    assert count_casts(is_exact=True) == 1
    repair_casts()
    assert count_casts(is_exact=True) == 2
    assert count_casts(is_exact=False) == 1, "other graphs are as before"


def test_this_torch_has_all_casts_after_the_repair() -> None:
    repair_casts()
    assert count_casts(is_exact=True) == 2


def test_a_cast_that_another_pattern_removes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint_graph, "patterns", build_patterns("merge_casts"))
    with pytest.raises(RuntimeError, match=r"leaves out casts to 16 bits.*pointless_convert"):
        repair_casts()
