"""Bytes that a layout sends by the planner's formulas; tests/multiprocess/test_traffic.py counts
them on real ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwright.config.layout import ClusterSection, LayoutSection
from shardwright.config.recipe_loading import validate_recipe
from shardwright.launch.auto_layout import resolve_expert_dispatch_here
from shardwright.layout import CpMethod, Layout
from shardwright.layout.degrees import MAX_TENSOR_CHUNKS, ExpertDispatch, ZeroStage, resolve_layout
from shardwright.planner import Efficiency, predict
from shardwright.planner.auto_layout import choose_expert_dispatch, resolve_expert_dispatch
from shardwright.planner.candidate import Candidate
from shardwright.planner.model_costs import ModelFacts
from shardwright.planner.predictor import Predictor
from shardwright.planner.published.conventions import FrameworkConventions
from shardwright.planner.published.frameworks import FRAMEWORK_DEFAULTS
from shardwright.planner.time.communication import NetworkModel, StridedGroup, build_groups
from shardwright.planner.time.compute import LayerSeconds
from shardwright.planner.time.memory_traffic import count_matmul_calls, list_matmuls
from shardwright.planner.time.traffic import (
    _compute_context_seconds,
    _compute_expert_seconds,
    _get_expert_overlap,
    compute_layer_traffic,
)
from shardwright.plans import resolve_plan
from tests.unit.planner import models

TOKENS = 128
ROWS = 2


class ByteCountingNetwork:
    """Network on which each byte that a rank sends takes a second."""

    def time_all_gather(self, group: StridedGroup, num_bytes: float) -> float:
        return num_bytes * (group.num_ranks - 1) / group.num_ranks

    time_reduce_scatter = time_all_to_all = time_all_gather

    def time_send(self, group: StridedGroup, num_bytes: float) -> float:
        return num_bytes


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize(("precision", "fp32_factor"), [("bf16", 2.0), ("fp32", 1.0)])
def test_context_parallelism_sends_the_bytes_measured_on_real_ranks(
    degree: int, precision: Any, fp32_factor: float
) -> None:
    facts = ModelFacts(models.read_shape("llama"))
    size = 4 / fp32_factor

    def count_sent_bytes(method: CpMethod) -> tuple[float, float]:
        layout = Layout(cp=degree, cp_method=method)
        candidate = Candidate(layout, TOKENS, ROWS, precision=precision)
        network: Any = ByteCountingNetwork()
        forward, backward, _ = _compute_context_seconds(
            facts, candidate, network, build_groups(layout)["cp"]
        )
        return forward, backward

    pair_bytes = (
        2 * ROWS * (TOKENS / degree) * 4 * 32 * size
    )  # four heads of 32 for keys and values
    # Keys and values stop one rank before their own in both passes; their fp32 gradients return to
    # their rank.
    assert count_sent_bytes("ring") == pytest.approx(
        ((degree - 1) * pair_bytes, (degree - 1) * pair_bytes + degree * fp32_factor * pair_bytes)
    )
    gathered = (degree - 1) * pair_bytes
    assert count_sent_bytes("all_gather") == pytest.approx((gathered, gathered * (1 + fp32_factor)))
    heads_bytes = 2 * ROWS * (TOKENS / degree) * (8 + 4) * 32 * size * (degree - 1) / degree
    assert count_sent_bytes("ulysses") == pytest.approx((heads_bytes, heads_bytes))


def test_ulysses_sends_latent_values_with_their_padding() -> None:
    """Queries, keys, values and outputs are as wide as keys."""
    facts = ModelFacts(models.read_shape("deepseek_v3"))
    layout = Layout(cp=2, cp_method="ulysses")
    network: Any = ByteCountingNetwork()
    seconds = _compute_context_seconds(
        facts, Candidate(layout, TOKENS, ROWS), network, build_groups(layout)["cp"]
    )
    sent_bytes = ROWS * TOKENS / 2 * 8 * 4 * 48 * 2 / 2
    assert seconds[:2] == pytest.approx((sent_bytes, sent_bytes))


RECIPES = FrameworkConventions("recipes", has_node_dispatch=True)


class RecordingNetwork(ByteCountingNetwork):
    """Records the bytes of each dispatch, in total and between domains."""

    def __init__(self, per_node: int) -> None:
        self.cluster = models.make_cluster(16, per_node=per_node)
        self.messages: list[tuple[StridedGroup, float, float]] = []

    def time_dispatch(self, group: StridedGroup, num_bytes: float, crossing_bytes: float) -> float:
        self.messages.append((group, num_bytes, crossing_bytes))
        return 0.0


def predict_dispatch(
    layout: Layout, conventions: FrameworkConventions, per_node: int = 16
) -> tuple[tuple[StridedGroup, float, float], float]:
    """Return the dispatch of a rank's rows in one direction, and the seconds of everything else."""
    facts = ModelFacts(models.read_shape("qwen3_moe"))
    network: Any = RecordingNetwork(per_node)
    kind = next(kind for kind in facts.kinds if kind.shape.sparse)
    candidate = Candidate(layout, TOKENS, ROWS, engine=conventions)
    others, _ = _compute_expert_seconds(facts, kind, candidate, network, build_groups(layout))
    return network.messages[0], others


def test_a_row_is_sent_once_to_each_rank_and_domain_with_its_experts() -> None:
    (group, num_bytes, crossing), _ = predict_dispatch(
        Layout(dp_shard=4, ep=4, zero_stage=1), RECIPES, per_node=2
    )
    token = ROWS * TOKENS * 256 * 2  # bf16
    assert group == StridedGroup(4, 1)
    assert num_bytes == pytest.approx(token * 4 * (1 - 0.75**2)), "two draws from four ranks"
    assert crossing == pytest.approx(token * 2 * (1 - 0.5**2) * 0.5), (
        "two draws from two domains, one of them the rank's own"
    )


def test_tensor_parallel_ranks_each_send_a_part_of_the_sequence_to_whole_experts() -> None:
    layout = Layout(dp_shard=4, tp=2, ep=4, zero_stage=1, sequence_parallel=True)
    (group, num_bytes, _), others = predict_dispatch(
        layout, FrameworkConventions("recipes", has_node_dispatch=True, has_unsharded_experts=True)
    )
    (sharded_group, sharded_bytes, _), sharded_others = predict_dispatch(layout, RECIPES)
    token = ROWS * TOKENS * 256 * 2
    assert (group, sharded_group) == (StridedGroup(8, 1), StridedGroup(4, 2))
    assert num_bytes == pytest.approx(token / 2 * 8 * (1 - (7 / 8) ** 2))
    assert sharded_bytes == pytest.approx(token / 2 * 4 * (1 - (3 / 4) ** 2))
    assert others == 0.0
    assert sharded_others == pytest.approx(2 * token * 2 / 2), (
        "ranks of a sharded expert gather each other's rows and sum their results"
    )


def test_late_sums_reduce_all_gradients_and_overlap_with_nothing() -> None:
    shape = models.read_shape("llama")
    network_efficiency = Efficiency(data_overlap=1.0)

    def predict_data(engine: FrameworkConventions, stage: ZeroStage) -> tuple[float, float]:
        candidate = Candidate(Layout(dp_shard=8, zero_stage=stage), TOKENS, ROWS, engine=engine)
        time = predict(shape, candidate, models.make_cluster(8), network_efficiency).time
        return time.data, time.hidden_data

    sharded = FrameworkConventions("sharded", weight_bytes=2.0, reduce_bytes=4.0)
    late = replace(sharded, has_unsharded_sums=True)
    exposed, hidden = predict_data(late, 1)
    assert hidden == 0.0
    # An all-reduce of fp32 gradients and a gather of bf16 weights at 10 GB/s, and their start-up.
    ring_bytes = shape.num_parameters * (2 * 4 + 2) * 7 / 8
    assert exposed == pytest.approx(ring_bytes / (1e10 * network_efficiency.intra_share), rel=0.1)
    assert predict_data(late, 2) == predict_data(sharded, 2)
    assert FRAMEWORK_DEFAULTS["nanotron"].conventions.has_late_sums(1)
    assert not FRAMEWORK_DEFAULTS["nanotron"].conventions.has_late_sums(0)


def test_owners_broadcast_their_tensors_one_after_the_other() -> None:
    shape = models.read_shape("llama")
    cluster = models.make_cluster(8)
    network = NetworkModel(cluster, Efficiency())
    group = StridedGroup(8, 1)
    one = network.time_all_gather(group, 1e6)
    assert network.time_owner_calls(group, 1e6, 1) == one
    hops = 7 * cluster.intra.latency_seconds + Efficiency().collective_seconds
    assert network.time_owner_calls(group, 1e6, 3) == pytest.approx(one + 2 * hops)
    assert network.time_owner_calls(StridedGroup(1, 1), 1e6, 8) == 0.0

    owners = FrameworkConventions(
        "owners", weight_bytes=2.0, reduce_bytes=2.0, has_owner_broadcasts=True
    )
    times = {
        (engine.name, stage): predict(
            shape,
            Candidate(Layout(dp_shard=8, zero_stage=stage), TOKENS, ROWS, engine=engine),
            cluster,
            Efficiency(data_overlap=1.0, contention=0.0),
        ).time
        for engine in (owners, replace(owners, name="shards", has_owner_broadcasts=False))
        for stage in (1, 2)
    }
    # More tensors than ranks. Weights are waited for; reductions overlap but for the last.
    broadcasts = network.time_owner_calls(group, shape.num_parameters * 2, 8)
    total = times["owners", 1].data + times["owners", 1].hidden_data
    assert total == pytest.approx(2 * broadcasts)
    assert broadcasts * 9 / 8 <= times["owners", 1].data < total
    assert times["owners", 2] == times["shards", 2]
    assert times["owners", 1].data > times["shards", 1].data


def test_halves_hide_half_of_the_exchange_behind_experts_with_half_of_the_rows() -> None:
    facts = ModelFacts(models.read_shape("qwen3_moe"))
    kind = next(kind for kind in facts.kinds if kind.shape.sparse)
    network = NetworkModel(models.make_cluster(8), Efficiency())
    traffic = {}
    products = {}
    dispatch: ExpertDispatch
    for dispatch in ("whole", "halves"):
        layout = Layout(dp_shard=4, ep=4, zero_stage=1, expert_dispatch=dispatch)
        candidate = Candidate(layout, TOKENS, ROWS)
        product, rows = list_matmuls(facts, kind, candidate)[-1]
        products[dispatch] = (rows, count_matmul_calls(facts, kind, product, candidate))
        for name, experts in (("slow", 1.0), ("fast", 1e-9)):
            seconds = LayerSeconds(1.0, 2.0, 0.0, 1.0, 0.0, 0.0, experts, 2 * experts)
            traffic[dispatch, name] = compute_layer_traffic(
                facts, kind, candidate, network, build_groups(layout), seconds
            )
    assert products["whole"] == (2 * products["halves"][0], products["halves"][1] / 2)
    for direction, factor in ((0, 1), (1, 2)):
        total = traffic["whole", "slow"][direction].expert
        assert traffic["whole", "slow"][direction].hidden_expert == 0.0
        assert traffic["halves", "slow"][direction].hidden_expert == pytest.approx(total / 2)
        assert traffic["halves", "slow"][direction].expert == pytest.approx(total / 2)
        assert traffic["halves", "fast"][direction].hidden_expert == pytest.approx(factor * 5e-10)


def test_deep_ep_receives_a_row_per_rank_of_a_token_and_its_choices_before() -> None:
    shape = models.read_shape("qwen3_moe")
    assert shape.experts is not None
    experts = replace(shape.experts, num_experts=8, experts_per_token=2)
    facts = ModelFacts(replace(shape, experts=experts))
    kind = next(kind for kind in facts.kinds if kind.shape.sparse)
    network = NetworkModel(models.make_cluster(4, per_node=1), Efficiency())
    layout = Layout(dp_shard=4, ep=4, zero_stage=1, expert_dispatch="deep_ep")
    candidate = Candidate(layout, TOKENS, ROWS)
    groups = build_groups(layout)
    # Two of eight experts miss a rank with two of them with probability 6/8 x 5/7.
    num_rows = candidate.micro_batch_tokens * 4 * (1 - 6 / 8 * 5 / 7)
    sizes = [num_rows * shape.hidden_size * 2, num_rows * (16 * 2 + 2 * (8 + 4))]
    rows, plan = (network.time_all_to_all(groups["ep"], size) for size in sizes)
    seconds = LayerSeconds(1.0, 2.0, 0.0, 1.0, 0.0, 0.0, 1.0, 2.0)
    forward, _ = compute_layer_traffic(facts, kind, candidate, network, groups, seconds)
    assert forward.expert == pytest.approx(2 * rows + plan)


@pytest.mark.parametrize(
    ("per_node", "num_experts", "num_choices", "expected"),
    [(4, 8, 2, "whole"), (1, 8, 2, "halves"), (1, 32, 8, "once_per_rank")],
)
def test_auto_takes_the_order_with_the_shortest_predicted_step(
    per_node: int, num_experts: int, num_choices: int, expected: str
) -> None:
    shape = models.read_shape("qwen3_moe")
    assert shape.experts is not None
    experts = replace(shape.experts, num_experts=num_experts, experts_per_token=num_choices)
    facts = ModelFacts(replace(shape, experts=experts))
    cluster = models.make_cluster(4, per_node=per_node, memory_bytes=2**36)
    predictor = Predictor(facts, cluster, Efficiency())
    seconds = {}
    dispatch: ExpertDispatch
    for dispatch in ("auto", "whole", "halves", "once_per_rank"):
        layout = Layout(dp_shard=4, ep=4, zero_stage=1, expert_dispatch=dispatch)
        candidate = Candidate(layout, TOKENS, 2 * ROWS)
        seconds[dispatch] = predictor.predict(candidate).time.step
        chosen, reason = choose_expert_dispatch(predictor, candidate)
        assert chosen.layout.expert_dispatch == expected
        assert reason.startswith("predicted step: whole ")
        assert reason.endswith("where the host delays the GPU")
        assert "deep_ep" not in reason
    assert min(seconds.values()) == seconds[expected]


def test_auto_is_resolved_for_the_cluster_of_the_recipe_and_is_whole_without_one() -> None:
    recipe = validate_recipe(
        {
            "model": {"config": models.CONFIGS["qwen3_moe"]},
            "data": {"sources": ["nowhere"]},
            "training": {
                "sequence_length": 4096,
                "micro_batch_size": 4,
                "learning_rate": 1e-3,
                "max_steps": 1,
            },
            "precision": "bf16",
            "layout": {"dp_shard": 4, "ep": 4, "expert_dispatch": "auto"},
            "run": {"device": "cpu"},
        }
    )
    plan = resolve_plan(recipe, models.read_shape("qwen3_moe"), 4)
    here = resolve_expert_dispatch_here(recipe, plan)
    assert here.layout.expert_dispatch == "whole"
    assert here.as_dict()["expert_dispatch_reason"].startswith("the recipe names no cluster")
    cluster = models.make_cluster(4, per_node=1, memory_bytes=2**36)
    resolved = resolve_expert_dispatch(recipe, plan, cluster)
    assert resolved.layout.expert_dispatch == "halves"
    assert resolved.expert_dispatch_reason is not None
    named = recipe.model_copy(update={"cluster": ClusterSection(node="4xH100-80GB")})
    reason = resolve_expert_dispatch_here(named, plan).expert_dispatch_reason
    assert reason is not None
    assert reason.startswith("predicted step: whole ")
    without_experts = LayoutSection(expert_dispatch="auto")
    assert resolve_layout(without_experts, 4).expert_dispatch == "whole"


def test_overlap_differs_within_and_between_domains() -> None:
    efficiency = Efficiency(expert_overlap=0.5, near_expert_overlap=0.25)
    layout = Layout(dp_shard=8, ep=8, zero_stage=1)
    within, across = (NetworkModel(models.make_cluster(8, per_node=n), efficiency) for n in (8, 4))
    assert _get_expert_overlap(Candidate(layout, TOKENS), within) == 0.25
    assert _get_expert_overlap(Candidate(layout, TOKENS), across) == 0.5


@pytest.mark.parametrize("compile_blocks", [False, True])
def test_tensor_parallel_chunks_overlap_with_products_in_compiled_blocks_too(
    compile_blocks: bool,
) -> None:
    shape = models.read_shape("llama")
    hidden_shares = {}
    for layout in (Layout(tp=2), Layout(tp=2, async_tensor_parallel="chunked")):
        candidate = Candidate(layout, 512, 8, compile=compile_blocks)
        parts = predict(shape, candidate, models.make_cluster(2), Efficiency()).time
        hidden_shares[layout.async_tensor_parallel] = parts.hidden_tensor / (
            parts.tensor + parts.hidden_tensor
        )
    assert hidden_shares["none"] == 0.0
    # Embedding and loss have nothing to overlap with.
    assert 0.4 < hidden_shares["chunked"] < 1 - 1 / MAX_TENSOR_CHUNKS
