"""Planning on more or fewer devices: scaling of throughput, and the minimum number."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from shardwright.errors import LayoutError
from shardwright.hardware import Cluster
from shardwright.hardware.host_cpu import divide_host
from shardwright.planner.memory_settings import search_run_layouts
from shardwright.planner.prediction import Prediction
from shardwright.planner.predictor import Predictor
from shardwright.planner.search.best_first import search_layouts
from shardwright.planner.search.space import PlanningProblem

FLAT_GROWTH_SHARE = 0.5
"""Scaling is flat if more devices add less than this share of the ideal throughput gain."""

_MAX_GPUS = 65536


@dataclass(frozen=True)
class ScalePoint:
    """Chosen layout on `num_gpus` devices (None: nothing fits). `efficiency`: tokens/s per
    device relative to the first point."""

    num_gpus: int
    prediction: Prediction | None
    efficiency: float | None


def resize_cluster(cluster: Cluster, num_gpus: int) -> Cluster:
    """Return the cluster with `num_gpus` devices: part of a node, or whole nodes. CPU ranks of this
    machine share it, however many they are.

    Raises:
        LayoutError: the number is not a multiple of a node's devices.
    """
    if cluster.num_host_cores is not None:
        share = num_gpus / cluster.gpus_per_node
        return replace(
            cluster,
            accelerator=divide_host(cluster.accelerator, share),
            gpus_per_node=num_gpus,
            domain_size=num_gpus,
        )
    if num_gpus <= cluster.gpus_per_node:
        return replace(
            cluster,
            gpus_per_node=num_gpus,
            num_nodes=1,
            domain_size=min(cluster.domain_size, max(1, num_gpus)),
        )
    if num_gpus % cluster.gpus_per_node:
        lower_count = num_gpus // cluster.gpus_per_node * cluster.gpus_per_node
        raise LayoutError(
            f"each node has {cluster.gpus_per_node} GPUs",
            field="--gpus",
            got=num_gpus,
            allowed=f"{lower_count} or {lower_count + cluster.gpus_per_node}",
        )
    return replace(cluster, num_nodes=num_gpus // cluster.gpus_per_node)


def scale_devices(
    predictor: Predictor, problem: PlanningProblem, gpu_counts: Iterable[int]
) -> list[ScalePoint]:
    """Plan each number of devices."""
    points: list[ScalePoint] = []
    first: Prediction | None = None
    for num_gpus in gpu_counts:
        prediction = search_run_layouts(
            predictor.resize(resize_cluster(predictor.cluster, num_gpus)),
            replace(problem, num_gpus=num_gpus),
            num_layouts=1,
        ).chosen
        first = first or prediction
        share = None
        if prediction is not None and first is not None:
            share = prediction.tokens_per_second_per_gpu / first.tokens_per_second_per_gpu
        points.append(ScalePoint(num_gpus, prediction, share))
    return points


def find_flattening(points: list[ScalePoint]) -> int | None:
    """Return the number of devices beyond which scaling is flat. None if it never is."""
    fitting = [point for point in points if point.prediction is not None]
    for before, after in pairwise(fitting):
        assert before.prediction is not None
        assert after.prediction is not None
        gain = after.prediction.tokens_per_second / before.prediction.tokens_per_second - 1
        if gain < FLAT_GROWTH_SHARE * (after.num_gpus / before.num_gpus - 1):
            return before.num_gpus
    return None


def find_min_gpus(predictor: Predictor, problem: PlanningProblem) -> Prediction | None:
    """Return the prediction for the first doubling of the devices on which a layout fits, or
    None. More CPU ranks of this machine have no more memory."""
    cluster = predictor.cluster
    if cluster.num_host_cores is not None:
        return None
    num_gpus = problem.num_gpus
    while num_gpus < _MAX_GPUS:
        num_gpus *= 2
        if num_gpus > cluster.gpus_per_node and (
            num_gpus % cluster.gpus_per_node or (cluster.inter is None)
        ):
            continue
        chosen = search_layouts(
            predictor.resize(resize_cluster(cluster, num_gpus)),
            replace(problem, num_gpus=num_gpus),
            num_layouts=1,
        ).chosen
        if chosen is not None:
            return chosen
    return None
