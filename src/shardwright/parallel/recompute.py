"""Recomputation of a plan, installed in the blocks of a decoder."""

from __future__ import annotations

from shardwright.model.decoder import Decoder
from shardwright.model.result_names import get_result_name
from shardwright.numerics.packed_results import PackFunction
from shardwright.numerics.recompute import build_recompute_runner, build_saved_results_runner
from shardwright.plans import Plan


def install_recompute(decoder: Decoder, plan: Plan, pack: PackFunction | None = None) -> None:
    """Let every block recompute as the plan says.

    Layers with one choice share one runner, and so one compiled graph.

    Args:
        pack: function through which kept results are stored, as for `build_recompute_runner`.
    """
    choice = plan.recompute_choice
    assert plan.recompute != "auto", "`resolve_recompute` resolves `auto`"
    if plan.recompute != "mixed":
        decoder.set_recompute(build_recompute_runner(plan.recompute, pack))
        return
    assert choice is not None
    runners = {
        results: None
        if results is None
        else build_saved_results_runner(results, get_result_name, pack)
        for results in dict.fromkeys(choice.layers)
    }
    for block in decoder.blocks:
        block.set_recompute(runners[choice.layers[block.layer_index]])
