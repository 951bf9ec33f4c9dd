"""Recomputation of a plan, installed in the blocks of a decoder."""

from __future__ import annotations

from shardwright.architecture import ModelShape
from shardwright.config.recipe import RecomputeKind
from shardwright.layout import Layout
from shardwright.layout.saved_results import LayerResults, SavedResults
from shardwright.model.communication_results import PARTIAL_PRODUCTS, create_keeping_contexts
from shardwright.model.decoder import Decoder
from shardwright.model.result_names import STATISTICS, UNREAD_END, get_result_name
from shardwright.numerics.packed_results import PackFunction
from shardwright.numerics.recompute import (
    RecomputeRunner,
    SavedCommunication,
    build_recompute_runner,
    build_saved_results_runner,
)
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
        decoder.set_recompute(build_block_runner(plan.shape, plan.layout, plan.recompute, pack))
        return
    assert choice is not None
    runners = {
        results: build_layer_runner(plan.shape, plan.layout, results, pack)
        for results in dict.fromkeys(choice.layers)
    }
    for block in decoder.blocks:
        block.set_recompute(runners[choice.layers[block.layer_index]])


def build_block_runner(
    shape: ModelShape, layout: Layout, kind: RecomputeKind, pack: PackFunction | None = None
) -> RecomputeRunner | None:
    """Build the runner of all blocks of a model, as `build_recompute_runner` does.

    `selective` keeps the results of the blocks' tensor-parallel collectives too.
    """
    results = _STREAM_RESULTS | _GATHERED_PRODUCTS if kind == "selective" else frozenset()
    return build_recompute_runner(kind, pack, _build_communication(shape, layout, results))


def build_layer_runner(
    shape: ModelShape, layout: Layout, results: LayerResults, pack: PackFunction | None = None
) -> RecomputeRunner | None:
    """Build the runner of a layer that keeps some results; None if it keeps everything."""
    if results is None:
        return None
    communication = _build_communication(shape, layout, results)
    return build_saved_results_runner(results, get_result_name, pack, communication)


_STREAM_RESULTS: SavedResults = frozenset(["gathered", "attention_out", "down"])
"""Results of the collectives between the residual stream and tensor-parallel products."""

_GATHERED_PRODUCTS: SavedResults = frozenset(["projections", "gate_up"])
"""Results of products that are pipelined with a gather. The policy of a recomputation keeps those
of other products itself."""


def _build_communication(
    shape: ModelShape, layout: Layout, results: SavedResults
) -> SavedCommunication | None:
    """Choose the results of communication that a block keeps in addition to its results of
    products.

    None if no other rank computes parts of the same block.
    """
    if layout.tp == layout.cp == layout.ep == 1:
        return None
    communicated = _STREAM_RESULTS
    if layout.async_tensor_parallel != "none" and layout.sequence_parallel:
        communicated |= _GATHERED_PRODUCTS
    names: set[str | None] = {STATISTICS, *(results & communicated)}
    if not shape.is_block_end_read:
        names.discard("down")
        names.add(UNREAD_END)
    return SavedCommunication(
        frozenset(names), get_result_name, create_keeping_contexts, PARTIAL_PRODUCTS
    )
