"""Predicted seconds of collectives, products and the parts of a step."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from shardwright.architecture import read_config
from shardwright.errors import InputError
from shardwright.hardware import Cluster, CollectiveRate, MatmulRate, MeasuredProfile
from shardwright.layout import Layout
from shardwright.planner import Candidate, Efficiency, Predictor, predict
from shardwright.planner.candidate import LowRankAdapter, OffloadKind
from shardwright.planner.engine_model import OptimizerKind
from shardwright.planner.model_costs import ModelFacts
from shardwright.planner.published.conventions import FrameworkConventions
from shardwright.planner.rates.device_rates import DeviceRates
from shardwright.planner.time.communication import NetworkModel, StridedGroup
from shardwright.planner.time.compute import compute_end_seconds, compute_layer_seconds
from shardwright.planner.time.memory_traffic import (
    count_collective_copy_bytes,
    count_weight_traffic_bytes,
)
from shardwright.planner.time.pipeline import get_pipeline
from shardwright.planner.time.pipeline_simulation import StageSeconds, simulate_stages
from shardwright.planner.time.update_time import count_update_bytes
from shardwright.schedule import ActionTimes, build_schedule
from shardwright.schedule import simulate as simulate_schedule
from tests.unit.planner import models

IDEAL = Efficiency(
    matmul_share=1.0, m_half=0.0, n_half=0.0, k_half=0.0, memory_share=1.0, intra_share=1.0,
    inter_share=1.0,
    collective_seconds=0.0, kernel_seconds=0.0, host_seconds=0.0, contention=0.0, step_seconds=0.0,
    straggler_share=0.0,
)  # fmt: skip
MIB = 2**20


def test_collectives_within_a_node_take_the_time_of_a_ring() -> None:
    network = NetworkModel(models.make_cluster(8), IDEAL)  # 10 GB/s
    group = StridedGroup(8, 1)
    ring_seconds = 64 * MIB * 7 / 8 / 1e10
    assert network.time_all_gather(group, 64 * MIB) == pytest.approx(ring_seconds, rel=2e-3)
    assert network.time_reduce_scatter(group, 64 * MIB) == pytest.approx(ring_seconds, rel=2e-3)
    assert network.time_all_reduce(group, 64 * MIB) == pytest.approx(2 * ring_seconds, rel=2e-3)
    assert network.time_all_to_all(group, 64 * MIB) == pytest.approx(ring_seconds, rel=2e-3)
    assert network.time_send(group, 64 * MIB) == pytest.approx(64 * MIB / 1e10, rel=2e-3)
    assert network.time_all_reduce(StridedGroup(1, 1), 64 * MIB) == 0.0


def test_a_ring_over_nodes_uses_one_link_per_member_in_a_node() -> None:
    network = NetworkModel(models.make_cluster(8, per_node=4), IDEAL)  # 1 GB/s between nodes
    all_ranks = network.time_all_gather(StridedGroup(8, 1), 64 * MIB)
    one_per_node = network.time_all_gather(StridedGroup(2, 4), 64 * MIB)
    assert all_ranks == pytest.approx(64 * MIB / 2 / (4 * 1e9), rel=2e-3)
    assert one_per_node == pytest.approx(64 * MIB / 2 / 1e9, rel=2e-3)


def test_latency_of_gathers_grows_with_members_and_of_reductions_with_their_logarithm() -> None:
    cluster = models.make_cluster(64, per_node=8)
    assert cluster.inter is not None
    slow = replace(
        cluster,
        intra=replace(cluster.intra, latency_seconds=1e-3),
        inter=replace(cluster.inter, latency_seconds=1e-2),
    )
    network = NetworkModel(slow, IDEAL)
    assert network.time_all_gather(StridedGroup(64, 1), 1.0) == pytest.approx(
        56 * 1e-3 + 7 * 1e-2, rel=1e-3
    )
    assert network.time_all_reduce(StridedGroup(64, 1), 1.0) == pytest.approx(
        2 * (3 * 1e-3 + 3 * 1e-2), rel=1e-3
    )
    switched = replace(slow, intra=replace(slow.intra, has_multicast_reduction=True))
    assert NetworkModel(switched, IDEAL).time_reduce_scatter(
        StridedGroup(64, 1), 1.0
    ) == pytest.approx(8 * 3 * 1e-3 + 7 * 1e-2, rel=1e-3)


def test_separately_gathered_tensors_pay_the_latency_each() -> None:
    layout = Layout(dp_shard=8, zero_stage=3)
    slow = replace(IDEAL, data_hop_seconds=1e-3)
    blocks, tensors = (
        predict(
            models.read_shape("llama"),
            Candidate(
                layout, 128, engine=FrameworkConventions(should_gather_per_tensor=per_tensor)
            ),
            models.make_cluster(8),
            slow,
        ).time
        for per_tensor in (False, True)
    )
    # Nine tensors per layer instead of one group, each with seven hops in two gathers and a
    # reduction, not overlapped.
    assert tensors.data - blocks.data == pytest.approx(4 * 8 * 3 * 7e-3, rel=0.05)


def test_measured_rates_have_precedence() -> None:
    profile = MeasuredProfile(
        "x",
        None,
        "2026",
        2**30,
        5e10,
        (MatmulRate("bf16", 256, 256, 256, 3e11),),
        (CollectiveRate("all_reduce", 4, 4, MIB, 0.5),),
    )
    cluster = replace(models.make_cluster(4), profile=profile)
    assert NetworkModel(cluster, IDEAL).time_all_reduce(StridedGroup(4, 1), MIB) == 0.5
    assert DeviceRates(cluster, IDEAL, "bf16").time_matmul(512, 512, 512) == pytest.approx(
        2 * 512**3 / 3e11
    )
    assert DeviceRates(cluster, IDEAL, "bf16").time_copy(5e10) == 1.0


def make_linked_cluster(
    processor_seconds: float | None,
    step_seconds: float | None = None,
    handoff_seconds: float = 0.0,
) -> Cluster:
    """Return four CPU-like ranks on which a sum of 1 MiB takes 0.5 s."""
    rate = CollectiveRate("all_reduce", 4, 4, MIB, 0.5, processor_seconds, step_seconds)
    profile = MeasuredProfile(
        "x", None, "2026", 2**30, 5e10, (), (rate,), handoff_seconds=handoff_seconds
    )
    return replace(models.make_cluster(4), profile=profile)


def test_a_step_slows_the_processors_part_of_a_collective_not_the_links() -> None:
    group = StridedGroup(4, 1)
    slow = replace(IDEAL, step_share=0.5)
    for processor_seconds, seconds, idle_share in ((None, 1.0, 0.0), (0.1, 0.6, 0.4 / 0.6)):
        network = NetworkModel(make_linked_cluster(processor_seconds), slow)
        assert network.time_all_reduce(group, MIB) == pytest.approx(seconds)
        assert network.get_idle_share("all_reduce", group, MIB) == pytest.approx(idle_share)


def test_a_collective_measured_between_computations_counts_as_it_is() -> None:
    group = StridedGroup(4, 1)
    slow = replace(IDEAL, step_share=0.5)
    for processor_seconds, idle_seconds in ((None, 0.0), (0.1, 0.4)):
        network = NetworkModel(
            make_linked_cluster(processor_seconds, 0.8, handoff_seconds=0.25), slow
        )
        assert network.time_all_reduce(group, MIB) == pytest.approx(0.8)
        assert network.get_idle_share("all_reduce", group, MIB) == pytest.approx(idle_seconds / 0.8)
        # Kinds without such a measurement cost their own time and the handoff.
        assert network.time_send(group, 1) > 0.25


@pytest.mark.parametrize(
    ("layout", "micro_batch_size", "num_forward", "num_backward"),
    [
        (Layout(tp=2), 2, 4, 4),
        (Layout(tp=2), 1, 0, 0),
        (Layout(tp=2, sequence_parallel=False), 2, 0, 2),
        (Layout(tp=2, async_tensor_parallel="chunked"), 2, 0, 0),
        (Layout(), 2, 0, 0),
    ],
)
def test_copies_of_collectives_are_read_and_written(
    layout: Layout, micro_batch_size: int, num_forward: int, num_backward: int
) -> None:
    """Each copy reads and writes all rows in bf16."""
    facts = ModelFacts(models.read_shape("llama"))
    candidate = Candidate(layout, 64, micro_batch_size)
    other = replace(candidate, engine=FrameworkConventions())
    size = 2 * 64 * micro_batch_size * facts.shape.hidden_size * 2
    copied = count_collective_copy_bytes(facts, candidate)
    assert copied == (num_forward * size, num_backward * size)
    assert count_collective_copy_bytes(facts, other) == (0, 0)
    rates = DeviceRates(models.make_cluster(1), IDEAL, "bf16")
    own, others = (
        compute_layer_seconds(facts, facts.kinds[0], each, rates) for each in (candidate, other)
    )
    assert own.forward - others.forward == pytest.approx(rates.time_copy(copied[0]))
    assert own.backward - others.backward == pytest.approx(rates.time_copy(copied[1]))


def test_gradients_are_reduced_beside_the_backward_pass_while_the_processor_is_idle() -> None:
    layout = Layout(dp_replicate=4, bucket_size_bytes=2**10)
    busy, idle = (
        predict(
            models.read_shape("llama"),
            Candidate(layout, 128, micro_batch_size=4096),
            make_linked_cluster(processor_seconds),
            replace(IDEAL, data_overlap=0.0),
        ).time
        for processor_seconds in (0.5, 0.1)
    )
    assert busy.hidden_data == 0.0
    assert idle.hidden_data == pytest.approx(0.8 * (idle.data + idle.hidden_data), rel=1e-3)


def test_products_are_limited_by_flops_or_by_bytes() -> None:
    rates = DeviceRates(models.make_cluster(1), IDEAL, "bf16")
    assert rates.time_matmul(4096, 4096, 4096) == pytest.approx(2 * 4096**3 / 1e12)
    assert rates.time_matmul(1, 4096, 4096) == pytest.approx(2 * (4096 + 4096**2 + 4096) / 1e11)


def test_a_precision_without_units_is_refused() -> None:
    with pytest.raises(InputError, match="no hardware support for fp8"):
        predict(
            models.read_shape("llama"),
            Candidate(Layout(), 128, precision="fp8"),
            models.make_cluster(1),
            IDEAL,
        )


def test_parts_add_up_to_the_step_without_hidden_traffic() -> None:
    layout = Layout(tp=2, pp=2, dp_shard=2, zero_stage=3)
    time = predict(
        models.read_shape("llama"),
        Candidate(layout, 128, 1, 4),
        models.make_cluster(8, per_node=4),
        Efficiency(),
    ).time
    parts = (
        time.compute,
        time.tensor,
        time.pipeline,
        time.data,
        time.bubble,
        time.optimizer,
        time.overhead,
    )
    assert all(part > 0 for part in parts)
    assert time.step == pytest.approx(sum(parts))
    assert time.context == time.expert == 0.0


@pytest.mark.parametrize(
    ("candidate", "host_seconds"),
    [
        (Candidate(Layout(dp_shard=4, zero_stage=3), 512, 1, 4, activation_offload="disk"), 0.0),
        (Candidate(Layout(tp=4), 128, 4, recompute="full"), 1e-4),
    ],
    ids=["waits for offloaded tensors", "waits for the host"],
)
def test_no_step_is_longer_on_faster_devices_or_links(
    candidate: Candidate, host_seconds: float
) -> None:
    """Whatever becomes shorter, nothing that it hid becomes longer by more."""
    efficiency = Efficiency(host_seconds=host_seconds)
    shape = models.read_shape("llama")
    slow = models.make_cluster(4, per_node=4 // candidate.layout.data_ranks)
    assert slow.inter is not None
    slow = replace(slow, inter=replace(slow.inter, bytes_per_second=1e8))

    def predict_step(device_factor: float, link_factor: float) -> float:
        device = slow.accelerator
        peaks = device.peak_flops_per_second
        rates = {name: device_factor * rate for name, rate in peaks.items()}
        memory = device_factor * device.memory_bytes_per_second
        accelerator = replace(device, peak_flops_per_second=rates, memory_bytes_per_second=memory)
        links = [
            replace(
                link,
                bytes_per_second=link_factor * link.bytes_per_second,
                latency_seconds=link.latency_seconds / link_factor,
            )
            for link in (slow.intra, slow.inter)
            if link is not None
        ]
        cluster = replace(slow, accelerator=accelerator, intra=links[0], inter=links[1])
        return predict(shape, candidate, cluster, efficiency).time.step

    steps = [predict_step(factor, 1.0) for factor in (1.0, 2.0, 4.0, 16.0)]
    assert steps == sorted(steps, reverse=True)
    steps = [predict_step(1.0, factor) for factor in (1.0, 2.0, 4.0, 16.0)]
    assert steps == sorted(steps, reverse=True)


def test_zero_bubble_and_interleaved_schedules_have_a_smaller_bubble_than_1f1b() -> None:
    shape = models.read_shape("llama")
    cluster = models.make_cluster(2)

    def predict_bubble(schedule: str, virtual: int | None = None) -> float:
        layout = Layout(pp=2, schedule=schedule, virtual_stages=virtual)
        return predict(shape, Candidate(layout, 128, 1, 4), cluster, IDEAL).time.bubble

    assert predict_bubble("interleaved_1f1b", 2) < predict_bubble("1f1b")
    assert predict_bubble("zb_h1") < predict_bubble("1f1b")


def test_extrapolated_schedules_equal_a_full_simulation() -> None:
    facts = ModelFacts(models.read_shape("llama"))
    for schedule, virtual in (
        ("gpipe", None),
        ("1f1b", None),
        ("zb_h1", None),
        ("interleaved_1f1b", 2),
        ("zbv", None),
    ):
        pipeline = get_pipeline(
            facts, Layout(pp=2, schedule=schedule, virtual_stages=virtual), 40, 128
        )
        seconds = [
            StageSeconds(1.0 + 0.1 * i, 2.0 + 0.05 * i, 0.9) for i in range(len(pipeline.stages))
        ]
        times = ActionTimes(
            tuple(s.forward for s in seconds),
            tuple(s.backward - s.weight_gradient for s in seconds),
            tuple(s.weight_gradient for s in seconds),
            (0.05,) * (len(seconds) - 1),
        )
        full = simulate_schedule(build_schedule(schedule, 2, 40, virtual), times).step_seconds
        assert simulate_stages(pipeline, seconds, 0.05) == pytest.approx(full, rel=0.004)


def test_accumulating_at_stage_2_reduces_more_often_than_at_stage_1() -> None:
    shape = models.read_shape("llama")
    cluster = models.make_cluster(4, per_node=2)

    def predict_traffic(stage: int) -> float:
        layout = Layout(dp_shard=4, zero_stage=stage)  # type: ignore[arg-type]
        time = predict(shape, Candidate(layout, 128, 1, 8), cluster, IDEAL).time
        return time.data + time.hidden_data

    assert predict_traffic(1) < predict_traffic(2) < predict_traffic(3)


def test_a_pipeline_waits_twice_for_each_message_of_a_micro_batch() -> None:
    shape = models.read_shape("llama")
    cluster = models.make_cluster(8, per_node=4)

    def predict_delay(layout: Layout) -> float:
        times = [
            predict(shape, Candidate(layout, 128, 1, 4, engine=engine), cluster, IDEAL).time.step
            for engine in (FrameworkConventions(poll_seconds=10.0), FrameworkConventions())
        ]
        return times[0] - times[1]

    assert predict_delay(Layout(dp_replicate=8)) == 0.0
    assert predict_delay(Layout(pp=2, dp_replicate=4)) == pytest.approx((4 + 1) * 2 * 2 * 10.0)
    assert predict_delay(Layout(pp=4, dp_replicate=2)) == pytest.approx((4 + 3) * 4 * 2 * 10.0)


def test_launches_on_a_device_that_is_its_own_host_add_to_compute_time() -> None:
    shape = models.read_shape("llama")
    candidate = Candidate(Layout(), 128)
    quick = replace(IDEAL, host_seconds=1e-7)
    overlapped, added = (
        predict(
            shape, candidate, models.make_cluster(1), replace(quick, runs_on_host=runs_on_host)
        ).time
        for runs_on_host in (False, True)
    )
    assert added.compute - overlapped.compute == pytest.approx(shape.num_layers * 62 * 1e-7)


@pytest.mark.parametrize(("precision", "launches"), [("bf16", (2, 4)), ("fp8", (4, 6))])
def test_the_host_launches_the_products_of_each_expert(
    precision: str, launches: tuple[int, int]
) -> None:
    facts = ModelFacts(models.read_shape("qwen3_moe"))
    kind = next(kind for kind in facts.kinds if kind.shape.sparse)
    cluster = models.make_cluster(2)
    accelerator = replace(
        cluster.accelerator, peak_flops_per_second={"bf16": 1e12, "fp8": 2e12, "fp32": 5e11}
    )
    cluster = replace(cluster, accelerator=accelerator)
    candidate = Candidate(Layout(dp_shard=2, ep=2, zero_stage=1), 128, precision=precision)
    one_kernel, looped = (
        compute_layer_seconds(
            facts,
            kind,
            candidate,
            DeviceRates(
                cluster,
                replace(IDEAL, expert_launch_seconds=seconds),
                precision,
            ),
        )
        for seconds in (0.0, 1.0)
    )
    num_local_experts = 4
    forward, backward = (num_local_experts * number for number in launches)
    assert looped.host_forward - one_kernel.host_forward == pytest.approx(forward)
    assert looped.host_backward - one_kernel.host_backward == pytest.approx(backward)
    # The forward pass waits for its launches, because the host cannot run ahead.
    assert looped.forward == pytest.approx(
        one_kernel.forward - one_kernel.experts_forward + forward
    )


def test_handoff_time_is_added_per_collective() -> None:
    shape = models.read_shape("llama")
    cluster = models.make_cluster(4)
    profile = MeasuredProfile("any", None, "2026", 2**34, 1e12, handoff_seconds=2.0)

    def predict_data_seconds(cluster: Cluster, **changes: float) -> float:
        efficiency = replace(IDEAL, data_overlap=0.0, **changes)
        candidate = Candidate(Layout(dp_shard=4, zero_stage=3), 128)
        return predict(shape, candidate, cluster, efficiency).time.data

    without = predict_data_seconds(cluster)
    # Blocks, embedding and head are gathered for the forward pass and reduced; blocks are gathered
    # again.
    expected = pytest.approx(3 * shape.num_layers + 2, abs=1.0)
    assert predict_data_seconds(cluster, handoff_seconds=1.0) - without == expected
    # A measured handoff counts for every collective, and as a share for the host's work around it.
    measured = replace(cluster, profile=profile)
    added = predict_data_seconds(measured, handoff_seconds=9.0, handoff_share=0.5) - without
    assert added / (2.0 * (1 + 0.5)) == expected


def test_widths_that_do_not_fill_tiles_or_suit_tensor_cores_are_slower() -> None:
    rates = DeviceRates(
        models.make_cluster(1),
        replace(IDEAL, uneven_share=0.5, half_aligned_share=0.3, odd_share=0.1),
        "bf16",
    )
    assert [
        rates.compute_tile_share(*widths)
        for widths in ((128, 64), (128, 7200), (128, 1800), (108, 128), (1728,))
    ] == [1.0, 0.5, 0.3, 0.1, 1.0]


def test_a_window_fills_tiles_like_a_row_of_twice_its_keys() -> None:
    facts = ModelFacts(models.read_shape("gemma2"))
    kind = next(kind for kind in facts.kinds if kind.shape.window == 64)
    keys = facts.compute_mean_visible_keys(kind, 512)
    candidate = Candidate(Layout(), 512, 8, has_masked_kernels=True)
    ideal, tiled = (
        compute_layer_seconds(
            facts,
            kind,
            candidate,
            DeviceRates(models.make_cluster(1), replace(IDEAL, attention_half_tokens=half), "bf16"),
        ).attention_forward
        for half in (0.0, 128.0)
    )
    assert tiled / ideal == pytest.approx(1 + 128 / (2 * keys))


def test_attention_of_latent_values_takes_the_time_of_their_padding() -> None:
    """The kernels get values as wide as keys (48); other trainers' get the values' own width."""

    rates = DeviceRates(models.make_cluster(1), IDEAL, "bf16")

    def time_attention(value_dim: int, **options: Any) -> float:
        facts = ModelFacts(read_config(models.CONFIGS["deepseek_v3"] | {"v_head_dim": value_dim}))
        candidate = Candidate(Layout(), 512, 8, **options)
        return compute_layer_seconds(facts, facts.kinds[0], candidate, rates).attention_forward

    assert time_attention(32) == time_attention(48)
    others = {"engine": FrameworkConventions()}
    ratio = time_attention(32, **others) / time_attention(48, **others)
    assert ratio == pytest.approx((48 + 32) / (48 + 48))


def test_fp8_operands_are_cast_from_bf16_and_the_head_stays_bf16() -> None:
    cluster = models.make_cluster(1)
    accelerator = replace(
        cluster.accelerator, peak_flops_per_second={"bf16": 1e12, "fp8": 2e12, "fp32": 1e12}
    )
    facts = ModelFacts(models.read_shape("llama"))
    fast = replace(IDEAL, attention_forward_share=1.0, attention_backward_share=1.0)
    seconds = {}
    for precision in ("bf16", "fp8"):
        rates = DeviceRates(replace(cluster, accelerator=accelerator), fast, precision)
        candidate = Candidate(Layout(), 512, 1, precision=precision)  # type: ignore[arg-type]
        seconds[precision] = (
            compute_layer_seconds(facts, facts.kinds[0], candidate, rates),
            compute_end_seconds(facts, candidate, rates),
        )
    (wide_layer, wide_ends) = seconds["bf16"]
    (narrow_layer, narrow_ends) = seconds["fp8"]
    assert wide_ends == narrow_ends
    products = 2 * 512 * (256 * 256 * 2 + 256 * 128 * 2 + 3 * 256 * 704)
    # Inputs of queries (shared with keys and values), output projection, gate (shared with up) and
    # down projection.
    cast_seconds = 4 * 512 * (256 + 256 + 256 + 704) / rates.bytes_per_second
    assert wide_layer.forward - narrow_layer.forward == pytest.approx(
        products / 1e12 - products / 2e12 - cast_seconds, rel=1e-6
    )


@pytest.mark.parametrize("tp", [1, 2])
def test_whole_and_sharded_experts_take_equal_time_in_products(tp: int) -> None:
    facts = ModelFacts(models.read_shape("qwen3_moe"))
    kind = next(kind for kind in facts.kinds if kind.shape.sparse)
    layout = Layout(dp_shard=4, tp=tp, ep=4, zero_stage=1, sequence_parallel=tp > 1)
    whole, sharded = (
        compute_layer_seconds(
            facts,
            kind,
            Candidate(layout, 512, 1, engine=conventions),
            DeviceRates(models.make_cluster(8), IDEAL, "bf16"),
        )
        for conventions in (
            FrameworkConventions(has_unsharded_experts=True),
            FrameworkConventions(),
        )
    )
    assert whole.weight_gradient == pytest.approx(sharded.weight_gradient)
    assert (whole.forward < sharded.forward) == (tp > 1), (
        "each rank sorts only the rows of its part of the sequence"
    )


def test_routing_without_a_fused_kernel_takes_time_per_row() -> None:
    facts = ModelFacts(models.read_shape("qwen3_moe"))
    candidate = Candidate(Layout(), 512, 2)
    for kind in facts.kinds:
        slow, quick = (
            compute_layer_seconds(
                facts,
                kind,
                candidate,
                DeviceRates(
                    models.make_cluster(1), replace(IDEAL, routing_seconds=seconds), "bf16"
                ),
            )
            for seconds in (1e-3, 0.0)
        )
        expected = 1e-3 * 2 * 512 * 2 if kind.shape.sparse else 0.0
        assert slow.total - quick.total == pytest.approx(expected), "two experts per token"


def test_four_bit_weights_are_dequantised_in_every_pass() -> None:
    facts = ModelFacts(models.read_shape("llama"))
    rates = DeviceRates(models.make_cluster(1), IDEAL, "bf16")
    quantised_layer, plain = (
        compute_layer_seconds(
            facts,
            facts.kinds[0],
            Candidate(
                Layout(), 128, recompute="full", adapter=LowRankAdapter(8, quantised=is_quantised)
            ),
            rates,
        )
        for is_quantised in (True, False)
    )
    dequantise_seconds = (
        (256 * 256 * 2 + 256 * 128 * 2 + 3 * 256 * 704) * 6 / rates.bytes_per_second
    )
    assert quantised_layer.forward - plain.forward == pytest.approx(dequantise_seconds)
    assert quantised_layer.total - plain.total == pytest.approx(3 * dequantise_seconds), (
        "forward, recomputation and backward"
    )


def test_adapters_take_the_time_of_their_memory_traffic() -> None:
    facts = ModelFacts(models.read_shape("llama"))
    rates = DeviceRates(models.make_cluster(1), IDEAL, "bf16")
    candidate = Candidate(Layout(), 64, adapter=LowRankAdapter(8, roles=()))
    gate = next(
        product for product in facts.kinds[0].matmuls if product.role in ("gate", "gate_up")
    )
    without_adapter = compute_layer_seconds(facts, facts.kinds[0], candidate, rates)
    adapted = compute_layer_seconds(
        facts,
        facts.kinds[0],
        replace(candidate, adapter=LowRankAdapter(8, roles=(gate.role,))),
        rates,
    )
    forward = 64 * (gate.num_inputs + 4 * gate.num_outputs)
    backward = 64 * (5 * gate.num_inputs + 2 * gate.num_outputs)
    assert adapted.forward - without_adapter.forward == pytest.approx(
        rates.time_copy(2.0 * forward)
    )
    assert adapted.backward - without_adapter.backward == pytest.approx(
        rates.time_copy(2.0 * backward)
    )


@pytest.mark.parametrize(
    ("layout", "num_micro_batches", "gradient_bytes"),
    [
        (Layout(), 1, 2 + 4),  # read in bf16, written in fp32
        (Layout(), 4, 2 + 4 + 3 / 4 * 12),  # three sums read two and write one
        (Layout(dp_replicate=2), 1, 2 + 4 + 8),  # copied to a bucket
        (Layout(dp_replicate=2), 4, 2 + 4 + 3 / 4 * 12 + 8 / 4),
        (Layout(pp=2, dp_replicate=2), 4, 2 + 4 + 3 / 4 * 12),  # stages reduce without buckets
    ],
)
def test_replicated_gradients_are_cast_added_and_copied_to_buckets(
    layout: Layout, num_micro_batches: int, gradient_bytes: float
) -> None:
    facts = ModelFacts(models.read_shape("llama"))
    kind = facts.kinds[0]
    candidate = Candidate(layout, 128, 1, num_micro_batches)
    elements = facts.count_elements(layout).layers[kind.slot]
    count = partial(count_weight_traffic_bytes, facts, kind)
    forward, backward = count(candidate, has_wide_products=False)
    assert forward == elements.local_matrices * (4 + 2)
    assert backward == pytest.approx(elements.local_matrices * gradient_bytes)
    # fp32 sums are written, 2 bytes more, and not converted, 6 bytes less.
    wide = count(candidate, has_wide_products=True)[1]
    assert backward - wide == pytest.approx(elements.local_matrices * (6 - 2))
    full = replace(candidate, precision="fp32")
    assert count(full, has_wide_products=True)[1] == pytest.approx(
        elements.local * (gradient_bytes - 6)
    )


def test_only_a_cpu_writes_the_product_before_it_adds_it_to_the_heads_gradient() -> None:
    facts = ModelFacts(models.read_shape("llama"))
    gpu = models.make_cluster(1)
    cpu = replace(gpu, accelerator=replace(gpu.accelerator, kind="cpu"))
    num_elements = facts.shape.vocab_size * facts.shape.hidden_size
    for precision, separate_bytes in (("bf16", 4), ("fp32", 0)):
        candidate = Candidate(Layout(), 128, precision=precision, loss_chunk_tokens=32)
        on_gpu, on_cpu = (
            compute_end_seconds(facts, candidate, DeviceRates(cluster, IDEAL, precision))[1]
            for cluster in (gpu, cpu)
        )
        assert on_cpu - on_gpu == pytest.approx(4 * num_elements * separate_bytes / 1e11)


@pytest.mark.parametrize(
    ("optimizer", "offload", "clip_bytes", "read_bytes"),
    [
        ("adamw", "none", 8, 4),
        ("adamw_8bit", "none", 8, 4),
        ("adafactor", "none", 0, 0),
        ("adamw", "optimizer", 0, 0),
    ],
)
def test_a_compiled_update_clips_and_writes_working_weights_in_its_own_pass(
    optimizer: OptimizerKind, offload: OffloadKind, clip_bytes: int, read_bytes: int
) -> None:
    facts = ModelFacts(models.read_shape("llama"))
    plain = Candidate(Layout(), 128, optimizer=optimizer, offload=offload, working_weights=True)
    compiled = replace(plain, compile_functions="auto")
    cluster = models.make_cluster(1)
    whole, reduced = (
        count_update_bytes(1.0, each, cluster.accelerator) for each in (plain, compiled)
    )
    assert whole - reduced == clip_bytes
    assert whole == count_update_bytes(1.0, compiled, replace(cluster.accelerator, kind="cpu"))
    predictor = Predictor(facts, cluster, IDEAL)
    before, after = (predictor.predict(each).time.optimizer for each in (plain, compiled))
    if offload == "none":
        uncast = predictor.predict(replace(plain, working_weights=False)).time.optimizer
        saved_clip = uncast * clip_bytes / whole
        # A cast reads 4 bytes and writes 2.
        saved_cast = (before - uncast) * read_bytes / 6
        assert before - after == pytest.approx(saved_clip + saved_cast)
    else:
        assert before == after
