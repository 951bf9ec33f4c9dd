"""Planning of offloaded states, activations and weights: bytes per tier, transfers, `auto`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.config import Recipe
from shardwright.config.layout import ClusterSection
from shardwright.config.offload import OffloadSection
from shardwright.config.recipe_loading import validate_recipe
from shardwright.errors import LayoutError
from shardwright.hardware import MeasuredProfile, TierRates, save_profile
from shardwright.hardware.catalog_loading import parse_cluster
from shardwright.layout import Layout
from shardwright.offload.state_buckets import OffloadedParameter, partition_state
from shardwright.optim.sharded_optimizer import StateSpec
from shardwright.planner import offload_costs
from shardwright.planner.auto_layout import build_cluster, choose_layout
from shardwright.planner.candidate import Candidate
from shardwright.planner.engine_model import OptimizerKind
from shardwright.planner.model_costs import get_model_facts
from shardwright.planner.prediction import Prediction
from shardwright.planner.predictor import Predictor
from shardwright.planner.problem import build_problem, build_template, read_planning_shape
from shardwright.planner.rates.efficiency import Efficiency
from shardwright.planner.rejections import find_rejections
from shardwright.planner.time.communication import StridedGroup
from shardwright.planner.update_place import (
    choose_update_place,
    find_backward_obstacle,
    find_overlap_obstacle,
)

NUM_PARAMETERS = 5_928_861_696
STATE_BYTES = 8 * NUM_PARAMETERS
CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 28, "num_attention_heads": 32, "max_position_embeddings": 4096,
}  # fmt: skip


def build_recipe(**sections: Any) -> Recipe:
    return validate_recipe(
        {
            "model": {"config": CONFIG},
            "data": {"sources": ["nowhere"]},
            "precision": "bf16",
            "training": {
                "sequence_length": 512,
                "learning_rate": 1e-4,
                "max_steps": 5,
                "global_batch_size": 8,
            },
        }
        | sections
    )


def test_states_move_from_the_device_to_another_tier_and_take_the_time_of_their_transfer() -> None:
    recipe = build_recipe()
    shape = read_planning_shape(recipe)
    predictor = Predictor(get_model_facts(shape), parse_cluster("1xH100-80GB"), Efficiency())
    resident, host, disk = (
        predictor.predict(build_template(build_recipe(offload={"optimizer": tier})))
        for tier in ("none", "host", "disk")
    )
    assert resident.memory.offloaded == 0.0
    assert resident.memory.optimizer == pytest.approx(STATE_BYTES, rel=1e-3)
    for prediction, bucket_bytes in ((host, 64 * 2**20), (disk, 4 * 2**20)):
        assert prediction.memory.offloaded == resident.memory.optimizer
        assert prediction.memory.optimizer == 3 * bucket_bytes
        assert resident.memory.total - prediction.memory.total >= 0.9 * STATE_BYTES
        assert prediction.candidate.is_runnable
    assert resident.time.optimizer < host.time.optimizer < disk.time.optimizer
    hidden_seconds = STATE_BYTES / 25e9 - host.time.optimizer
    assert 0.3 < hidden_seconds / host.time.compute < 0.45  # that of the forward pass
    # The moments of a layer are more than three buffers, so none stay in them.
    disk_hidden_seconds = disk.memory.offloaded / 1e9 - disk.time.optimizer
    assert disk_hidden_seconds == pytest.approx(hidden_seconds, rel=1e-3)
    assert host.time.compute == resident.time.compute
    ahead = predictor.predict(replace(host.candidate, ahead_bytes=2**29))
    assert ahead.memory.optimizer == host.memory.optimizer + 2**29
    assert host.time.optimizer - ahead.time.optimizer == pytest.approx(2**29 / 25e9)
    everything = predictor.predict(replace(host.candidate, ahead_bytes=2**50))
    # The last buffer is not full.
    empty_bytes = everything.memory.optimizer - host.memory.offloaded
    assert 0.0 < empty_bytes < 64 * 2**20
    assert everything.memory.optimizer % (64 * 2**20) == 0
    # They are read during the backward pass, and no faster than the link.
    assert 0.0 < host.time.optimizer - everything.time.optimizer < host.time.compute
    unused = predictor.predict(replace(disk.candidate, ahead_bytes=2**29))
    assert (unused.memory, unused.time) == (disk.memory, disk.time)


def test_a_forward_pass_hides_an_update_after_that_of_its_first_layer() -> None:
    sections: dict[str, Any] = {"offload": {"optimizer": "host"}}
    candidate = replace(build_template(build_recipe(**sections)), micro_batch_size=512)
    facts = get_model_facts(read_planning_shape(build_recipe()))
    predicted = Predictor(facts, parse_cluster("1xH100-80GB"), Efficiency()).predict(candidate).time
    assert predicted.compute / 3 > STATE_BYTES / 25e9
    first_elements = (NUM_PARAMETERS - 2 * 32000 * 4096) / 28 + 32000 * 4096
    assert predicted.optimizer == pytest.approx(first_elements * 8 / 25e9, rel=0.01)
    cases: list[tuple[dict[str, Any], str | None]] = [
        ({}, None),
        ({"adapters": {"rank": 8}, "offload": {"optimizer": "host", "parameters": "host"}}, None),
        ({"optimizer": {"name": "adafactor"}}, "adafactor needs whole matrices of all ranks"),
        ({"offload": {"optimizer": "disk"}}, None),
        (
            {"offload": {"optimizer": "host", "parameters": "host"}},
            "weights return to their tier after it",
        ),
        (
            {"offload": {"optimizer": "host", "parameters": "host", "update_on": "host"}},
            None,
        ),
    ]
    for changed, obstacle in cases:
        recipe = build_recipe(**sections | changed)
        has_host_update = recipe.offload.update_on == "host"
        assert (
            find_overlap_obstacle(
                recipe, read_planning_shape(recipe), has_host_update=has_host_update
            )
            == obstacle
        )
        assert build_template(recipe).overlaps_update == (obstacle is None)
    assert not replace(candidate, keeps_zeros=True).overlaps_update  # zeros are kept


def test_without_clipping_the_backward_pass_hides_the_update() -> None:
    facts = get_model_facts(read_planning_shape(build_recipe()))
    predictor = Predictor(facts, parse_cluster("1xcpu"), Efficiency())
    training = build_recipe().training.model_dump(exclude_unset=True)
    training |= {"sequence_length": 64, "max_grad_norm": None}
    offload = {"optimizer": "disk", "buffer_bytes": 2**30}
    cases: list[tuple[dict[str, Any], str | None]] = [
        ({"training": training | {"max_skipped_steps": 0}}, None),
        ({"training": training}, "training.max_skipped_steps lets steps be skipped"),
        ({"training": training | {"max_grad_norm": 1.0}}, "training.max_grad_norm clips gradients"),
    ]
    times = []
    for changed, obstacle in cases:
        recipe = build_recipe(offload=offload, **changed)
        assert find_backward_obstacle(recipe) == obstacle
        candidate = build_template(recipe)
        assert candidate.needs_gradient_norm == (obstacle is not None)
        times.append(predictor.predict(candidate).time)
    recipe = build_recipe(offload=offload, **cases[0][0])
    assert build_template(recipe, precision="fp16").needs_gradient_norm, "fp16 may skip steps"
    assert times[1].optimizer == times[2].optimizer
    hidden_seconds = times[1].optimizer - times[0].optimizer
    # The backward pass less the forward pass.
    assert 0.1 < hidden_seconds / times[0].compute < 0.4
    replicas = replace(
        build_template(build_recipe(offload=offload)),
        layout=Layout(dp_replicate=2),
        needs_gradient_norm=False,
    )
    assert not offload_costs.is_updated_in_backward(replicas)  # DDP reduces in buckets of its own
    # On a CPU only moments on disk are transferred while a pass runs.
    on_host = build_template(build_recipe(offload={"optimizer": "host"}, training=training))
    update_seconds = predictor.predict(on_host).time.optimizer
    assert update_seconds == pytest.approx(STATE_BYTES / 25e9, rel=0.01)


def test_without_clipping_the_backward_pass_hides_an_update_on_the_host() -> None:
    facts = get_model_facts(read_planning_shape(build_recipe()))
    predictor = Predictor(facts, parse_cluster("1xH100-80GB"), Efficiency())
    candidate = build_template(build_recipe(offload={"optimizer": "host", "update_on": "host"}))
    assert candidate.is_updated_on_host
    assert candidate.needs_gradient_norm
    free = replace(candidate, needs_gradient_norm=False)
    assert offload_costs.is_updated_in_backward(free)
    short, long = (
        [predictor.predict(replace(each, micro_batch_size=rows)).time for each in (candidate, free)]
        for rows in (16, 2048)
    )
    # Copies to the host end after a short backward pass, during the update.
    copy_seconds = 2 * 4 * NUM_PARAMETERS / 25e9
    assert short[0].optimizer - short[1].optimizer == pytest.approx(copy_seconds, rel=0.1)
    # A long one hides all but the update of the first layer, and the norm; with clipping the next
    # forward pass does, and the copies to the host are hidden behind the backward pass.
    assert short[0].optimizer > 5 * long[0].optimizer
    assert long[0].optimizer == long[1].optimizer > 0.0
    waiting = replace(free, layout=Layout(dp_replicate=2))
    assert not offload_costs.is_updated_in_backward(waiting)


@pytest.mark.parametrize(
    ("layout", "is_early"),
    [
        (Layout(dp_replicate=2), True),
        (Layout(cp=2), True),
        (Layout(dp_shard=2, zero_stage=1), True),
        (Layout(pp=2), True),
        (Layout(pp=2, dp_shard=2, zero_stage=1), True),
        (Layout(pp=2, dp_replicate=2), False),
        (Layout(pp=2, schedule="zb_h1"), False),
    ],
)
def test_the_backward_pass_hides_gradients_that_leave_one_by_one(
    layout: Layout, is_early: bool
) -> None:
    template = build_template(build_recipe(offload={"optimizer": "host", "update_on": "host"}))
    without, hidden = (
        offload_costs.compute_host_update_seconds(
            replace(template, layout=layout),
            num_elements=25e9 / 8,  # gradients and weights leave in one second
            num_offloaded=0.0,
            moved_bytes=0.0,
            pass_seconds=(10.0, backward_seconds),
            profile=None,
            first_share=0.0,
            num_layers=10,
        )
        for backward_seconds in (0.0, 2.0)
    )
    assert without - hidden == pytest.approx(1.0 if is_early else 0.0)


RATES = TierRates(
    host_link_bytes_per_second=20e9,
    host_memory_bytes_per_second=200e9,
    disk_both_bytes_per_second=4e9,
)


def save_rates(folder: Path, rates: TierRates) -> dict[str, str]:
    """Write a profile; return the section `cluster` with it."""
    path = folder / "profile.json"
    save_profile(MeasuredProfile("H100", "H100-80GB-SXM", "today", 2**36, 3e12, tiers=rates), path)
    return {"node": "1xH100-80GB", "profile": str(path)}


def predict_update(recipe: Recipe) -> Prediction:
    cluster = build_cluster(recipe.cluster or ClusterSection(node="1xH100-80GB"), 1)
    facts = get_model_facts(read_planning_shape(recipe))
    return Predictor(facts, cluster, Efficiency()).predict(build_template(recipe))


def test_an_update_on_the_host_takes_the_time_of_host_memory_and_no_staging(
    tmp_path: Path,
) -> None:
    cluster = save_rates(tmp_path, RATES)
    by_place = {
        (tier, place): predict_update(
            build_recipe(cluster=cluster, offload={"optimizer": tier, "update_on": place})
        )
        for tier in ("host", "disk")
        for place in ("device", "host")
    }
    for tier in ("host", "disk"):
        assert by_place[tier, "host"].memory.optimizer == 0.0
        assert by_place[tier, "host"].memory.offloaded == by_place[tier, "device"].memory.offloaded
    host = by_place["host", "host"].time
    update_seconds = 36 * NUM_PARAMETERS / 200e9 + 4 * NUM_PARAMETERS / 3e12
    leaving_seconds = 8 * NUM_PARAMETERS / 20e9
    forward_seconds = host.compute / 3
    exposed_seconds = max(0.0, update_seconds - forward_seconds)
    exposed_seconds += max(0.0, leaving_seconds - 2 * forward_seconds)
    assert host.optimizer == pytest.approx(exposed_seconds, rel=0.1)
    assert by_place["host", "device"].time.optimizer == pytest.approx(STATE_BYTES / 20e9, rel=0.01)
    # Both places wait for the disk.
    for place in ("device", "host"):
        hidden_seconds = by_place["disk", place].time.compute / 3
        moving_bytes = STATE_BYTES - 2 * 64 * 2**20
        assert by_place["disk", place].time.optimizer >= moving_bytes / 4e9 - hidden_seconds


@pytest.mark.parametrize("layer_bytes", [0, 100 * 2**20])
@pytest.mark.parametrize("num_buffers", [0.5, 1.5, 2.5, 3.5, 10])
def test_as_many_moments_are_planned_to_move_as_do_not_stay_in_staging_memory(
    num_buffers: float, layer_bytes: int
) -> None:
    section = OffloadSection(optimizer="disk")
    buffer_bytes = section.buffer_bytes
    num_elements = int(num_buffers * buffer_bytes) // 8
    spec = StateSpec((num_elements,), torch.float32)
    moments = OffloadedParameter("weight", num_elements, 1, {"exp_avg": spec, "exp_avg_sq": spec})
    partition = partition_state([moments], section.bucket_bytes)
    moving_bytes = partition.num_bytes - sum(
        partition.select_resident_buckets(buffer_bytes, layer_bytes).values()
    )
    candidate = build_template(build_recipe(offload={"optimizer": "disk"}))
    planned_bytes = offload_costs.count_moving_moments(candidate, partition.num_bytes, layer_bytes)
    assert planned_bytes == pytest.approx(moving_bytes, abs=section.bucket_bytes)


def test_update_on_auto_is_the_host_only_if_measured_rates_say_so(tmp_path: Path) -> None:
    offload = {"optimizer": "host"}
    assert choose_update_place(build_recipe()).place == "device"
    choice = choose_update_place(build_recipe(offload=offload))
    assert (choice.place, "no measured rates" in choice.reason) == ("device", True)
    measured = {"cluster": save_rates(tmp_path, RATES), "offload": offload}
    choice = choose_update_place(build_recipe(**measured))
    assert choice.place == "host"
    assert "0.4 s on the device and 0.2 s on the host" in choice.reason
    muon = choose_update_place(build_recipe(**measured, optimizer={"name": "muon"}))
    assert (muon.place, "muon" in muon.reason) == ("device", True)
    slow = replace(RATES, host_memory_bytes_per_second=20e9)
    save_rates(tmp_path, slow)
    assert choose_update_place(build_recipe(**measured)).place == "device"
    save_rates(tmp_path, TierRates())
    assert "measure them again" in choose_update_place(build_recipe(**measured)).reason
    # Offloaded weights and gradients are 8 bytes more that an update on the device brings.
    slower = replace(RATES, host_memory_bytes_per_second=72e9)
    measured["cluster"] = save_rates(tmp_path, slower)
    assert choose_update_place(build_recipe(**measured)).place == "device"
    weights = measured | {"offload": offload | {"parameters": "host"}}
    choice = choose_update_place(build_recipe(**weights))
    assert choice.place == "host"
    assert "0.8 s on the device and 0.5 s on the host" in choice.reason
    # From a disk both places read the same bytes.
    on_disk = measured | {"offload": offload | {"parameters": "disk"}}
    choice = choose_update_place(build_recipe(**on_disk))
    assert choice.place == "device"
    assert "2 s on the device and 2 s on the host" in choice.reason
    save_rates(tmp_path, replace(slower, disk_both_bytes_per_second=40e9))
    assert choose_update_place(build_recipe(**on_disk)).place == "host"
    explicit = build_recipe(offload={"optimizer": "host", "update_on": "host"})
    assert choose_update_place(explicit).place == "host"
    assert build_template(explicit).is_updated_on_host
    for tier in ("host", "disk"):
        section = {"optimizer": tier, "update_on": "host"}
        on_cpu = build_recipe(offload=section, run={"device": "cpu"})
        assert not build_template(on_cpu).is_updated_on_host


def test_offloading_to_the_host_frees_no_memory_of_a_cpu() -> None:
    recipe = build_recipe(offload={"optimizer": "host"}, run={"device": "cpu"})
    assert build_template(recipe).offload == "none"


def test_layout_auto_offloads_only_if_nothing_else_fits_and_the_recipe_does_not_decide() -> None:
    small = parse_cluster("1xH100-80GB")
    chosen = choose_layout(build_recipe(layout="auto"), small, 1)
    assert chosen.recipe.offload.optimizer == "host"
    assert "offload optimizer" in chosen.prediction.candidate.describe()
    with pytest.raises(LayoutError, match="no layout that the recipe allows fits"):
        choose_layout(build_recipe(layout="auto", offload={"optimizer": "none"}), small, 1)
    recipe = build_recipe(layout="auto", offload={"optimizer": "disk"})
    assert choose_layout(recipe, small, 1).recipe.offload == recipe.offload
    chosen = choose_layout(build_recipe(layout="auto"), parse_cluster("8xH100-80GB"), 8)
    assert not chosen.recipe.offload.is_enabled


LONG_ROWS: dict[str, Any] = {
    "model": {"config": CONFIG | {"max_position_embeddings": 16384}},
    "training": {
        "sequence_length": 16384,
        "learning_rate": 1e-4,
        "max_steps": 5,
        "global_batch_size": 1,
    },
    "optimizer": {"name": "sgd"},
    "recompute": "none",
}
"""Activations need the most memory, and there are no states to offload."""


def test_activations_move_but_for_two_layers_and_delay_the_passes_if_the_tier_is_slower() -> None:
    predictor = Predictor(
        get_model_facts(read_planning_shape(build_recipe(**LONG_ROWS))),
        parse_cluster("1xH100-80GB"),
        Efficiency(),
    )
    resident, host, disk = (
        predictor.predict(build_template(build_recipe(**LONG_ROWS, offload={"activations": tier})))
        for tier in ("none", "host", "disk")
    )
    num_layers = CONFIG["num_hidden_layers"]
    assert resident.time.offload == resident.memory.offloaded == 0.0
    assert host.memory.offloaded == disk.memory.offloaded
    # All layers but the last leave, and two are on the device. The peak moves from the loss to the
    # backward pass, where a layer's gradients are there too.
    layer_bytes = host.memory.offloaded / (num_layers - 1)
    freed_bytes = resident.memory.activations - host.memory.activations
    assert 0.8 < freed_bytes / ((num_layers - 2) * layer_bytes) <= 1.0
    assert host.time.compute == disk.time.compute == resident.time.compute
    assert disk.time.step == pytest.approx(resident.time.step + disk.time.offload)
    # Both directions of a transfer, less the passes during which they run.
    transfers = 2 * disk.memory.offloaded / 1e9
    assert transfers - resident.time.compute <= disk.time.offload < transfers
    assert host.time.offload < 0.1 * disk.time.offload


def test_waits_for_activations_lengthen_the_bubble_of_a_pipeline() -> None:
    recipe = build_recipe()
    predictor = Predictor(
        get_model_facts(read_planning_shape(recipe)), parse_cluster("2xH100-80GB"), Efficiency()
    )
    pipeline = replace(build_template(recipe), layout=Layout(pp=2), gradient_accumulation_steps=4)
    resident = predictor.predict(pipeline).time
    disk = predictor.predict(replace(pipeline, activation_offload="disk")).time
    # One of five slots is the bubble, forward and backward.
    assert disk.bubble - resident.bubble == pytest.approx(disk.offload / 4, rel=0.1)


def test_layout_auto_offloads_activations_if_that_suffices() -> None:
    small = parse_cluster("1xH100-80GB")
    chosen = choose_layout(build_recipe(layout="auto", **LONG_ROWS), small, 1)
    assert chosen.recipe.offload.activations == "host"
    assert chosen.recipe.offload.optimizer == "none"
    assert "activations on host" in chosen.prediction.candidate.describe()


def test_layout_auto_offloads_two_kinds_of_state_if_one_does_not_suffice() -> None:
    rows = LONG_ROWS | {"optimizer": {"name": "adamw"}}
    chosen = choose_layout(build_recipe(layout="auto", **rows), parse_cluster("1xH100-80GB"), 1)
    tiers = chosen.recipe.offload.list_tiers()
    assert sorted(tiers) == ["host", "host", "none"]
    assert chosen.prediction.fits


def test_a_layout_that_does_not_fit_is_offered_offloaded_activations() -> None:
    recipe = build_recipe(**LONG_ROWS)
    predictor = Predictor(
        get_model_facts(read_planning_shape(recipe)), parse_cluster("1xH100-80GB"), Efficiency()
    )
    template = build_template(recipe)
    problem = replace(build_problem(recipe, template, 1), recompute_kinds=("none",))
    (rejection,) = find_rejections(predictor, problem)
    assert rejection.change == "offload.activations: host"


BLOCK_MATRICES = 28 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
"""Elements of the blocks' matrices of `CONFIG`."""


def predict_on(num_devices: int, candidate: Candidate, recipe: Recipe | None = None) -> Prediction:
    facts = get_model_facts(read_planning_shape(recipe or build_recipe()))
    cluster = parse_cluster(f"{num_devices}xH100-80GB")
    return Predictor(facts, cluster, Efficiency()).predict(candidate)


def test_frozen_weights_leave_the_device_and_delay_the_passes_if_the_tier_is_slower() -> None:
    lora: dict[str, Any] = {"adapters": {"rank": 8}}
    resident, host, disk = (
        predict_on(1, build_template(build_recipe(**lora, offload={"parameters": tier})))
        for tier in ("none", "host", "disk")
    )
    stored = 2 * BLOCK_MATRICES
    assert (host.memory.host, host.memory.disk) == (stored, 0.0)
    assert (disk.memory.host, disk.memory.disk) == (0.0, stored)
    # One block is on the device at the loss, two in the backward pass.
    freed_bytes = resident.memory.live - host.memory.live
    assert 26 / 28 <= freed_bytes / stored <= 27 / 28
    assert host.memory.live == disk.memory.live
    assert disk.time.compute == resident.time.compute
    assert disk.time.step == pytest.approx(resident.time.step + disk.time.offload)
    transfers = 2 * stored * 27 / 28 / 1e9
    assert transfers - resident.time.compute <= disk.time.offload < transfers
    assert host.time.offload < 0.1 * disk.time.offload
    assert all(prediction.candidate.is_runnable for prediction in (host, disk))


def test_ranks_of_zero_keep_a_part_of_frozen_weights_and_gather_each_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(offload_costs._BYTES_PER_SECOND, "host", 1e15)  # only gathers take time
    recipe = build_recipe(adapters={"rank": 8}, offload={"parameters": "host"})
    template = build_template(recipe)
    sharded = replace(template, layout=Layout(dp_shard=4, zero_stage=3))
    whole = predict_on(4, replace(template, layout=Layout(dp_replicate=4)))
    part = predict_on(4, sharded)
    assert part.memory.host == whole.memory.host / 4
    resident = predict_on(4, replace(sharded, parameter_offload="none"))
    assert resident.memory.offloaded == resident.time.offload == 0.0
    # Each rank has a quarter of 28 blocks less, and two whole blocks without prefetched ones more.
    assert part.memory.weights == pytest.approx(
        resident.memory.weights - 2 * BLOCK_MATRICES / 4, rel=1e-6
    )
    network = Predictor(
        get_model_facts(read_planning_shape(recipe)), parse_cluster("4xH100-80GB"), Efficiency()
    ).network
    block_seconds = network.time_all_gather(StridedGroup(4, 1), 2 * BLOCK_MATRICES / 28)
    assert part.time.offload == pytest.approx(2 * 27 * block_seconds)
    assert whole.time.offload == 0.0


def test_trained_weights_move_with_their_gradients_and_return_for_the_update() -> None:
    states = build_recipe(offload={"optimizer": "disk"})
    weights = build_recipe(offload={"optimizer": "disk", "parameters": "disk"})
    resident = predict_on(1, build_template(states))
    disk = predict_on(1, build_template(weights))
    assert disk.candidate.is_runnable
    assert disk.memory.disk == resident.memory.disk + 8 * BLOCK_MATRICES
    assert resident.memory.weights - disk.memory.weights == 4 * BLOCK_MATRICES
    # Moments arrive and leave; weights and gradients arrive, weights leave.
    update_seconds = (STATE_BYTES - 2 * 64 * 2**20 + 8 * BLOCK_MATRICES) / 1e9
    assert disk.time.optimizer == pytest.approx(update_seconds, rel=1e-3)
    one = disk.time.offload
    accumulated = replace(
        build_template(weights), micro_batch_size=1, gradient_accumulation_steps=4
    )
    # Gradients leave after each micro-batch, and return for all but the first.
    four = predict_on(1, accumulated).time.offload
    read_bytes = (4 * 8 + 3 * 4) * BLOCK_MATRICES * 27 / 28
    assert one <= 8 * BLOCK_MATRICES / 1e9 * 27 / 28
    assert four <= read_bytes / 1e9
    assert four >= read_bytes / 1e9 - predict_on(1, accumulated).time.compute


def test_working_weights_stay_while_master_weights_and_gradients_are_in_host_memory() -> None:
    """The device has 2 instead of 10 bytes of a trained matrix in the passes: the casts of resident
    weights are saved for the backward pass."""
    offload = {"optimizer": "host", "update_on": "host"}
    states = build_template(build_recipe(offload=offload))
    weights = build_template(build_recipe(offload=offload | {"parameters": "host"}))
    steps = {"micro_batch_size": 1, "gradient_accumulation_steps": 8}
    assert not replace(weights, **steps).has_working_weights  # `auto` needs a device's free memory
    resident, moved, copied = (
        predict_on(1, replace(candidate, working_weights=setting, **steps))
        for candidate, setting in ((states, False), (weights, False), (weights, True))
    )
    assert copied.candidate.is_runnable
    host_bytes = 16 * BLOCK_MATRICES + 8 * (NUM_PARAMETERS - BLOCK_MATRICES)
    assert copied.memory.host == pytest.approx(host_bytes, rel=1e-4)
    gradients = 4 * 2 / 28 * BLOCK_MATRICES
    assert resident.memory.live - copied.memory.live == pytest.approx(
        8 * BLOCK_MATRICES - gradients, rel=0.01
    )
    # Weights pass the link once per step, not twice per micro-batch: gradients alone do.
    assert moved.time.offload > 1.5 * copied.time.offload
    assert copied.time.step < moved.time.step
    # Gradients of all micro-batches but one return while the ones before leave.
    assert copied.time.offload <= 8 * 4 * BLOCK_MATRICES / 25e9


REFUSED: tuple[dict[str, Any], ...] = (
    {"optimizer": "sgd"},
    {"offload": "none"},
    {"is_updated_on_host": True, "optimizer": "muon"},
    {"reference": "frozen"},
)


@pytest.mark.parametrize("change", REFUSED, ids=str)
def test_layouts_that_cannot_offload_trained_weights_are_not_planned(
    change: dict[str, Any],
) -> None:
    recipe = build_recipe(offload={"optimizer": "disk", "parameters": "disk"})
    template = build_template(recipe)
    is_allowed = build_problem(recipe, template, 2).is_allowed
    assert is_allowed is not None
    assert is_allowed(template)
    assert is_allowed(replace(template, layout=Layout(pp=2, schedule="zb_h1")))
    assert is_allowed(replace(template, precision="fp8"))
    assert is_allowed(replace(template, working_weights=True))
    for tier in ("host", "disk"):
        on_host = replace(template, parameter_offload=tier, is_updated_on_host=True)
        assert is_allowed(on_host)
        assert is_allowed(replace(on_host, keeps_zeros=True))
    assert is_allowed(replace(template, layout=Layout(dp_shard=2, zero_stage=1)))
    assert not is_allowed(replace(template, **change))


def test_layout_auto_offloads_weights_if_nothing_else_suffices() -> None:
    small = parse_cluster("1xH100-80GB")
    large = CONFIG | {"num_hidden_layers": 120}  # 24.6 billion parameters
    frozen = build_recipe(
        model={"config": CONFIG | {"num_hidden_layers": 230}},
        adapters={"rank": 8},
        layout="auto",
        recompute="full",
    )
    chosen = choose_layout(frozen, small, 1)
    offload = chosen.recipe.offload
    assert (offload.parameters, offload.optimizer) == ("host", "none")
    assert "parameters on host" in chosen.prediction.candidate.describe()
    trained = build_recipe(model={"config": large}, layout="auto", recompute="full")
    chosen = choose_layout(trained, small, 1)
    offload = chosen.recipe.offload
    assert (offload.parameters, offload.optimizer) == ("host", "host")
    assert chosen.prediction.fits
    assert chosen.prediction.candidate.is_runnable


def test_a_layout_that_does_not_fit_is_offered_offloaded_weights_in_the_fastest_way(
    tmp_path: Path,
) -> None:
    recipe = build_recipe(model={"config": CONFIG | {"num_hidden_layers": 120}})
    facts = get_model_facts(read_planning_shape(recipe))
    cluster = parse_cluster("1xH100-80GB")
    measured = build_cluster(ClusterSection.model_validate(save_rates(tmp_path, RATES)), 1)
    weights = "offload.optimizer: host, offload.parameters: host"
    # The CPU is faster with measured rates, and slower with those that are assumed.
    for each, change, is_on_host in (
        (cluster, f"{weights} and precision.working_weights: true", False),
        (measured, f"{weights}, offload.update_on: host and precision.working_weights: true", True),
    ):
        predictor = Predictor(facts, each, Efficiency())
        (rejection,) = find_rejections(predictor, build_problem(recipe, build_template(recipe), 1))
        assert rejection.change is not None
        assert change in rejection.change
        prediction = rejection.changed_prediction
        assert prediction is not None
        changed = prediction.candidate
        assert changed.is_runnable
        assert (changed.is_updated_on_host, changed.has_working_weights) == (is_on_host, True)
        for part in ({"is_updated_on_host": not is_on_host}, {"working_weights": False}):
            assert predictor.predict(replace(changed, **part)).time.step > prediction.time.step


@pytest.mark.parametrize(("devices", "optimizer"), [("1xcpu", "adamw"), ("1xH100-80GB", "muon")])
def test_an_update_on_the_host_is_not_offered_where_it_is_refused(
    devices: str, optimizer: OptimizerKind
) -> None:
    recipe = build_recipe(model={"config": CONFIG | {"num_hidden_layers": 120}})
    facts = get_model_facts(read_planning_shape(recipe))
    predictor = Predictor(facts, parse_cluster(devices), Efficiency())
    template = replace(build_template(recipe), optimizer=optimizer)
    changes = [
        each.change for each in find_rejections(predictor, build_problem(recipe, template, 1))
    ]
    assert not any("update_on" in (change or "") for change in changes)


def test_layout_auto_updates_where_a_run_of_its_recipe_does(tmp_path: Path) -> None:
    small = parse_cluster("1xH100-80GB")
    large = {"config": CONFIG | {"num_hidden_layers": 120}}
    for rates, place in ((RATES, "host"), (TierRates(), "device")):
        recipe = build_recipe(
            model=large, layout="auto", recompute="full", cluster=save_rates(tmp_path, rates)
        )
        chosen = choose_layout(recipe, small, 1)
        assert chosen.recipe.offload.parameters == "host"
        assert choose_update_place(chosen.recipe).place == place
        assert chosen.prediction.candidate.is_updated_on_host == (place == "host")


def test_layout_auto_chooses_a_layout_with_working_shards() -> None:
    recipe = build_recipe(
        model={"config": CONFIG | {"num_hidden_layers": 120}},
        layout="auto",
        recompute="full",
        offload={"optimizer": "host", "parameters": "host", "update_on": "host"},
        precision={"kind": "bf16", "working_weights": True},
    )
    chosen = choose_layout(recipe, parse_cluster("2xH100-80GB"), 2)
    candidate = chosen.prediction.candidate
    assert candidate.has_offloaded_shards
    assert candidate.has_working_weights
    assert candidate.is_runnable
    assert chosen.prediction.fits
    assert chosen.recipe.precision.working_weights is True
    # Without them shards come from the host in each pass, and the device has two blocks of them.
    copied, moved = (
        predict_on(2, replace(candidate, working_weights=setting), recipe)
        for setting in (True, False)
    )
    assert moved.time.step > copied.time.step
    assert copied.memory.live > moved.memory.live


def test_an_update_on_the_host_of_weights_on_disk_reads_and_writes_them() -> None:
    offload = {"optimizer": "disk", "parameters": "disk"}
    device, host = (
        build_template(build_recipe(offload=offload | {"update_on": place}))
        for place in ("device", "host")
    )
    on_device, moved, copied = (
        predict_on(1, candidate)
        for candidate in (device, host, replace(host, working_weights=True))
    )
    # A disk of 1 GB/s: moments, weights and gradients are read, and fewer bytes written.
    read_bytes = STATE_BYTES + 8 * BLOCK_MATRICES
    assert on_device.time.optimizer == pytest.approx(read_bytes / 1e9, rel=0.01)
    # The next forward pass hides a part, if it does not read weights from the same disk.
    hidden = copied.time.compute / 3
    assert moved.time.optimizer == pytest.approx(read_bytes / 1e9, rel=0.01)
    assert copied.time.optimizer == pytest.approx(read_bytes / 1e9 - hidden, rel=0.01)
    # The bound of the staging memory: a buffer, or three buckets' weights and gradients.
    assert (on_device.memory.host, moved.memory.host) == (0.0, 64 * 2**20)
    assert moved.memory.disk == on_device.memory.disk
    in_host = predict_on(
        1, replace(host, offload="optimizer", optimizer="adamw_8bit", offload_buffer_bytes=2**26)
    )
    moments = in_host.memory.host - 3 * 2**26 * 8 / (2 + 8 / 256)
    assert moments == pytest.approx((2 + 8 / 256) * NUM_PARAMETERS, rel=0.01)


def test_shards_of_trained_weights_leave_the_device_and_blocks_are_gathered_in_each_pass() -> None:
    states = build_recipe(offload={"optimizer": "disk"})
    weights = build_recipe(offload={"optimizer": "disk", "parameters": "disk"})
    by_stage = {}
    for stage in (1, 2, 3):
        layout = Layout(dp_shard=4, zero_stage=stage)
        resident, disk = (
            predict_on(4, replace(build_template(recipe), layout=layout))
            for recipe in (states, weights)
        )
        assert disk.candidate.is_runnable
        assert disk.memory.disk == pytest.approx(
            resident.memory.disk + 8 * BLOCK_MATRICES / 4, rel=1e-6
        )
        assert resident.memory.weights - disk.memory.weights == pytest.approx(BLOCK_MATRICES)
        update_seconds = (STATE_BYTES + 8 * BLOCK_MATRICES) / 4 / 1e9
        assert disk.time.optimizer == pytest.approx(update_seconds, rel=0.01)
        by_stage[stage] = (resident, disk)
    # At stages 1 and 2 the whole weights remain only without offloading.
    resident, disk = by_stage[2]
    two_blocks = 2 * BLOCK_MATRICES / 28 * 2
    assert disk.memory.gathered <= resident.memory.gathered - 2 * BLOCK_MATRICES + 2 * two_blocks
    traffic = {
        stage: [item.time.data + item.time.hidden_data for item in pair]
        for stage, pair in by_stage.items()
    }
    assert traffic[2][1] > 1.2 * traffic[2][0]
    assert traffic[3][1] == pytest.approx(traffic[3][0])
    assert traffic[2][1] == pytest.approx(traffic[3][1], rel=0.02)
