"""Recomputation of a plan, installed in the blocks of a decoder."""

from __future__ import annotations

from shardwright.model.decoder import Decoder
from shardwright.model.result_names import get_result_name
from shardwright.numerics.packed_results import PackFunction
from shardwright.numerics.recompute import build_kept_results_runner, build_recompute_runner
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
        else build_kept_results_runner(results, get_result_name, pack)
        for results in dict.fromkeys(choice.layers)
    }
    decoder.set_layer_recompute(lambda layer: runners[choice.layers[layer]])
