"""The same question on more or fewer devices: how throughput grows, where it flattens, and how many devices it takes at all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from shardwright.errors import LayoutError
from shardwright.hardware import Cluster
from shardwright.planner.efficiency import Efficiency
from shardwright.planner.facts import ModelFacts
from shardwright.planner.predict import Predictor
from shardwright.planner.prediction import Prediction
from shardwright.planner.search import search
from shardwright.planner.space import Question

FLAT_SHARE = 0.5
"""Growth is called flat where more devices bring less than this share of what they would bring at best."""

_MOST_GPUS = 65536


@dataclass(frozen=True)
class ScalePoint:
    """The chosen layout on so many devices (None: nothing fits). `efficiency`: tokens/s per device over the first point's."""

    num_gpus: int
    prediction: Prediction | None
    efficiency: float | None


def resized(cluster: Cluster, num_gpus: int) -> Cluster:
    """The cluster with so many devices: parts of a node, or whole nodes.

    Raises:
        LayoutError: a number that fills no whole number of nodes.
    """
    if num_gpus <= cluster.gpus_per_node:
        return replace(cluster, gpus_per_node=num_gpus, num_nodes=1, domain_size=min(cluster.domain_size, max(1, num_gpus)))
    if num_gpus % cluster.gpus_per_node:
        whole = num_gpus // cluster.gpus_per_node * cluster.gpus_per_node
        raise LayoutError(
            f"nodes have {cluster.gpus_per_node} GPUs each",
            field="--gpus",
            got=num_gpus,
            allowed=f"{whole} or {whole + cluster.gpus_per_node}",
        )
    return replace(cluster, num_nodes=num_gpus // cluster.gpus_per_node)


def scale(
    facts: ModelFacts, cluster: Cluster, efficiency: Efficiency, question: Question, counts: Iterable[int]
) -> list[ScalePoint]:
    """The chosen layout for each number of devices."""
    points: list[ScalePoint] = []
    first: Prediction | None = None
    for num_gpus in counts:
        predictor = Predictor(facts, resized(cluster, num_gpus), efficiency)
        prediction = search(predictor, replace(question, num_gpus=num_gpus), top=1).chosen
        first = first or prediction
        share = None
        if prediction is not None and first is not None:
            share = prediction.tokens_per_second_per_gpu / first.tokens_per_second_per_gpu
        points.append(ScalePoint(num_gpus, prediction, share))
    return points


def flattens_at(points: list[ScalePoint]) -> int | None:
    """The number of devices beyond which more bring less than half of what they should; None where growth holds."""
    known = [point for point in points if point.prediction is not None]
    for before, after in pairwise(known):
        assert before.prediction is not None
        assert after.prediction is not None
        gained = after.prediction.tokens_per_second / before.prediction.tokens_per_second - 1
        if gained < FLAT_SHARE * (after.num_gpus / before.num_gpus - 1):
            return before.num_gpus
    return None


def fewest_gpus(facts: ModelFacts, cluster: Cluster, efficiency: Efficiency, question: Question) -> Prediction | None:
    """The first doubling of the devices on which something fits."""
    num_gpus = question.num_gpus
    while num_gpus < _MOST_GPUS:
        num_gpus *= 2
        if num_gpus > cluster.gpus_per_node and (num_gpus % cluster.gpus_per_node or (cluster.inter is None)):
            continue
        predictor = Predictor(facts, resized(cluster, num_gpus), efficiency)
        found = search(predictor, replace(question, num_gpus=num_gpus), top=1).chosen
        if found is not None:
            return found
    return None
