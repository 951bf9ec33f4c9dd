"""Stages of an examination on one rank: its environment, then measurements with the others."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from shardwright.doctor import correctness, gpu_health, host, software, storage
from shardwright.doctor.examination import BUDGET_SHARES, ExaminationContext
from shardwright.doctor.probe_budget import Omission, TimeBudget
from shardwright.doctor.rates import (
    calibration_measurement,
    collective_bandwidth,
    device_rates,
    elementwise,
    link_bandwidth,
    scaled_rates,
    scratch_disk,
)
from shardwright.doctor.rates.computation import build_computation
from shardwright.doctor.rendezvous import MAX_CLOCKS_SECONDS
from shardwright.doctor.stage_watchdog import BROKEN_KEY
from shardwright.errors import InputError, RankFailed
from shardwright.hardware.collective_rate import CollectiveKind
from shardwright.launch.devices import claim_device
from shardwright.launch.rank_environment import count_local_ranks
from shardwright.launch.rank_outcome import extract_first_line
from shardwright.parallel.clock_sync import estimate_clock_offset
from shardwright.parallel.mesh import build_mesh, init_process_group
from shardwright.units import MIB_BYTES, format_bytes

_MESSAGE_BYTES = {
    "cpu": (4096, 256 * 1024, 4 * MIB_BYTES),
    "cuda": (64 * 1024, MIB_BYTES, 16 * MIB_BYTES, 256 * MIB_BYTES),
}
_GROUP_TIMEOUT_SHARES = {"cpu": 0.7, "cuda": 2.0}
"""Time-out of a collective as a multiple of the time-out of a stage.

With gloo it raises an error, which the rank reports. With NCCL it ends the process, so it is longer
than the stage's, and the watchdog acts first.
"""
_COLLECTIVES_SECONDS = 30.0
_RESULTS_SECONDS = 20.0
_LINKS_SECONDS = 20.0
"""Time limits of the default messages, the check of results and the links of pairs."""
_MAX_MESSAGE_SECONDS = 2.0
_ROUNDS_SECONDS = 0.25
"""Seconds of the repeated calls of a short problem, its preparation included."""
_STAGES_OF_SEVERAL_RANKS = (
    "groups", "clocks", "correctness", "collectives", "handoff", "links",
)  # fmt: skip
_LINK_BYTES = {"cpu": MIB_BYTES, "cuda": 64 * MIB_BYTES}


def examine_environment(context: ExaminationContext) -> None:
    """Examine software, host and the idle device, before the rendezvous, which may fail."""
    with context.watchdog.watch_stage("software"):
        context.report.software = software.read_software(context.device)
    with context.watchdog.watch_stage("host"):
        context.report.host = host.read_host(context.report.host_name)
        if context.device.type == "cuda":
            context.report.idle_gpu, context.report.gpu_driver_error = gpu_health.read_gpu(
                context.device, os.getpid()
            )


def run_stages(context: ExaminationContext) -> None:
    """Run the stages after the rendezvous; a failed stage is recorded and ends them."""
    stages: dict[str, Callable[[ExaminationContext], None]] = {
        "groups": _join_groups,
        "products": _time_matmuls,
        "attention": _time_attention,
        "elementwise": _time_elementwise,
        "copies": _time_copies,
        "folders": _check_folders,
        "scratch": _time_scratch,
        "clocks": _compare_clocks,
        "correctness": _check_collectives,
        "collectives": _time_collectives,
        "handoff": _time_handoff,
        "links": _time_links,
    }
    for name, stage in stages.items():
        if context.rendezvous is None and name in _STAGES_OF_SEVERAL_RANKS:
            continue
        try:
            with context.watchdog.watch_stage(name):
                _synchronise_start(context, name)
                stage(context)
        except RankFailed:  # the failed rank reports the error
            destroy_groups(context)
            break
        except (InputError, RuntimeError, OSError) as error:
            context.report.failure = (name, extract_first_line(str(error)))
            if context.rendezvous is not None:
                context.rendezvous.store.set(BROKEN_KEY, str(context.ranks.rank))
            destroy_groups(context)  # ends the collectives of peers now, not at their time-out
            break


def _synchronise_start(context: ExaminationContext, stage: str) -> None:
    """Synchronise the ranks, so that they measure at the same time, as in training."""
    if context.rendezvous is None:
        return
    if context.rendezvous.store.add(f"ready/{stage}", 1) == context.ranks.world_size:
        context.rendezvous.store.set(f"started/{stage}", "1")
    context.watchdog.wait_for_key(f"started/{stage}")


def destroy_groups(context: ExaminationContext) -> None:
    """Destroy the process group if the examination created it."""
    if context.is_group_owner and dist.is_initialized():
        dist.destroy_process_group()


def _join_groups(context: ExaminationContext) -> None:
    assert context.rendezvous is not None
    if context.is_group_owner:
        claim_device(context.rendezvous.store, context.ranks, context.device)
        init_process_group(
            context.device.type,
            timeout=timedelta(
                seconds=context.request.timeout_seconds * _GROUP_TIMEOUT_SHARES[context.device.type]
            ),
            store=dist.PrefixStore("groups", context.rendezvous.store),
            rank=context.ranks.rank,
            world_size=context.ranks.world_size,
        )
    build_mesh(context.request.layout, context.device.type)


def _time_matmuls(context: ExaminationContext) -> None:
    device = context.device
    request = context.request
    precisions = [*device_rates.list_precisions(device), *(shape[0] for shape in request.matmuls)]
    seconds_per_flop = {}
    for precision in dict.fromkeys(precisions):
        for rate in device_rates.time_squares(precision, device, context.compute_maximum):
            context.report.matmuls.append(rate)
            context.watchdog.record_progress()
        seconds_per_flop[precision] = context.compute_maximum(
            1 / context.report.matmuls[-1].flops_per_second
        )
    for scaled_rate in scaled_rates.time_scaled_products(device, context.report.matmuls):
        context.report.scaled_products.append(scaled_rate)
        context.watchdog.record_progress()
    if device.type == "cuda":
        with gpu_health.run_under_load(device):
            context.report.loaded_gpu, _ = gpu_health.read_gpu(device, os.getpid())
    if request.matmuls:
        limit = context.start_time_limit("products")
        measured = tuple(context.report.matmuls)
        rates = calibration_measurement.time_products(
            request.matmuls, measured, seconds_per_flop, device, limit
        )
        _record(context, rates, context.report.matmuls)


def _record(
    context: ExaminationContext,
    results: calibration_measurement.RatesOrOmissions[calibration_measurement.Rate],
    rates: list[calibration_measurement.Rate],
) -> None:
    for rate in results:
        if isinstance(rate, Omission):
            context.report.omissions.append(rate)
        else:
            rates.append(rate)
            context.watchdog.record_progress()


def _time_attention(context: ExaminationContext) -> None:
    rates = calibration_measurement.time_attention(
        context.request.attention, context.device, context.start_time_limit("attention")
    )
    _record(context, rates, context.report.attention)


def _time_elementwise(context: ExaminationContext) -> None:
    limit = context.start_time_limit("elementwise")
    rates = calibration_measurement.time_elementwise(
        context.request.elementwise, context.device, limit
    )
    _record(context, rates, context.report.elementwise)


def _time_handoff(context: ExaminationContext) -> None:
    if context.request.elementwise:
        context.report.handoff_seconds = elementwise.time_handoff(context.device)


def _time_copies(context: ExaminationContext) -> None:
    context.report.copies = device_rates.time_copies(context.device)


def _check_folders(context: ExaminationContext) -> None:
    for folder in context.request.folders:
        if context.ranks.local_rank == 0:  # ranks of a node share its disk
            context.report.write_results.append(storage.time_write(folder))
        if context.rendezvous is not None:
            context.report.folder_visibility.append(
                storage.check_visibility(
                    folder, context.rendezvous.store, context.ranks.rank, context.ranks.world_size
                )
            )
        context.watchdog.record_progress()


def _time_scratch(context: ExaminationContext) -> None:
    folder = context.request.scratch_folder
    if folder is not None:  # all ranks at once, as in a step
        context.report.scratch_rate = scratch_disk.measure_scratch(
            folder, num_local_ranks=count_local_ranks() or context.ranks.world_size
        )


def _compare_clocks(context: ExaminationContext) -> None:
    assert context.rendezvous is not None
    context.report.clock_offset = estimate_clock_offset(
        context.rendezvous.store,
        context.ranks.rank,
        context.ranks.world_size,
        max_seconds=MAX_CLOCKS_SECONDS,
    )


def _find_group(
    context: ExaminationContext, groups: collective_bandwidth.AxisGroups
) -> tuple[dist.ProcessGroup, tuple[int, ...]]:
    """Find this rank's group of an axis and its members."""
    ranks = next(members for members in groups.groups if context.ranks.rank in members)
    if groups.axes[0] == "all":
        assert dist.group.WORLD is not None
        return dist.group.WORLD, ranks
    mesh = build_mesh(context.request.layout, context.device.type)
    assert mesh is not None
    group = mesh.group(groups.axes[0])
    assert group is not None
    return group, ranks


def _check_collectives(context: ExaminationContext) -> None:
    budget = TimeBudget(_RESULTS_SECONDS, context.compute_maximum)
    last_seconds = 0.0
    for groups in collective_bandwidth.list_axis_groups(context.request.layout):
        group, ranks = _find_group(context, groups)
        for dtype in correctness.CHECKED_DTYPES:
            if not budget.can_afford(last_seconds):
                name = str(dtype).removeprefix("torch.")
                context.record_omission("results", f"{name} over {groups.name}", last_seconds)
                continue
            start = time.monotonic()
            result = correctness.check_collectives(groups.name, group, ranks, context.device, dtype)
            context.report.collective_checks.append(result)
            last_seconds = time.monotonic() - start
            context.watchdog.record_progress()


def _time_collectives(context: ExaminationContext) -> None:
    seconds = _COLLECTIVES_SECONDS
    if context.request.messages:
        seconds += context.request.budget_seconds * BUDGET_SHARES["messages"]
    budget = TimeBudget(seconds, context.compute_maximum)
    is_on_cpu = context.device.type == "cpu"
    compute = (
        build_computation(context.device) if context.request.elementwise and is_on_cpu else None
    )
    for groups in collective_bandwidth.list_axis_groups(context.request.layout):
        group, ranks = _find_group(context, groups)
        for kind in collective_bandwidth.COLLECTIVE_KINDS:
            extra = [
                size
                for name, members, size in context.request.messages
                if (name, members) == (kind, groups.size)
            ]
            sizes = {
                collective_bandwidth.round_message_bytes(size, groups.size)
                for size in (*_MESSAGE_BYTES[context.device.type], *extra)
            }
            _time_sizes(context, budget, groups.name, kind, sorted(sizes), group, ranks, compute)


def _time_sizes(
    context: ExaminationContext,
    budget: TimeBudget,
    axis: str,
    kind: CollectiveKind,
    sizes: Sequence[int],
    group: dist.ProcessGroup,
    ranks: tuple[int, ...],
    compute: Callable[[], None] | None,
) -> None:
    """Measure one collective with growing messages; each time predicts the next."""
    byte_seconds = 0.0
    for size in sizes:
        call_seconds = context.compute_maximum(size * byte_seconds)
        is_short = call_seconds <= _MAX_MESSAGE_SECONDS
        seconds = _ROUNDS_SECONDS + 2 * call_seconds
        seconds += 0.0 if compute is None else collective_bandwidth.STEP_SECONDS
        if not budget.can_afford(seconds) or not is_short:
            context.record_omission(
                "messages", f"{kind} of {format_bytes(size)} over {axis}", call_seconds
            )
            continue
        group_time = collective_bandwidth.time_collective(
            kind, axis, group, ranks, size, context.device, compute
        )
        context.report.collective_times.append(group_time)
        byte_seconds = group_time.seconds / size
        context.watchdog.record_progress()


def _time_links(context: ExaminationContext) -> None:
    num_bytes = _LINK_BYTES[context.device.type]
    num_directions = 2 * len(link_bandwidth.pair_ranks(context.ranks.world_size))
    budget = TimeBudget(_LINKS_SECONDS, context.compute_maximum)
    num_done = 0
    for link_time in link_bandwidth.time_links(context.device, num_bytes, budget):
        if link_time is not None:
            context.report.link_times.append(link_time)
        num_done += 1
        context.watchdog.record_progress()
    if num_done < num_directions:
        omitted = f"{num_directions - num_done} of {num_directions} rounds"
        context.record_omission("pairs", omitted, _LINKS_SECONDS / max(1, num_done))
