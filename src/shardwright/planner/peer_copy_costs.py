"""Host memory and time of the copies that ranks keep of each other's state. No torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shardwright.architecture import ModelShape
from shardwright.architecture.config_reading import read_recipe_shape
from shardwright.architecture.frozen_names import match_frozen
from shardwright.config import Recipe
from shardwright.hardware import Cluster
from shardwright.layout import Layout, RankGrid, compute_local_boxes
from shardwright.placement import Placement, place_model
from shardwright.planner.candidate import Candidate
from shardwright.planner.engine_model import OPTIMIZER_COSTS
from shardwright.planner.offload_costs import get_host_memory_rate, get_transfer_rate
from shardwright.planner.prediction import Prediction
from shardwright.units import format_bytes, format_seconds

NUM_COPIED_STEPS = 2
"""Steps whose copies are in memory: one is complete while the next one arrives."""
_LOCAL_PASSES = 4.0
"""Times that a byte is read or written in host memory on its way between two processes of a node:
to the socket's buffer, and from it."""


@dataclass(frozen=True)
class PeerCopyCost:
    """Predicted cost of `elastic.peer_copies` on one node, the first one."""

    own_bytes: float
    """Most bytes of one rank's state."""
    sent_bytes: float
    """Most bytes that one rank sends: what its holder does not have itself."""
    node_bytes: float
    """Host memory of the node's ranks for the states of two steps, their own and their peers'."""
    copy_seconds: float
    """Time from the device to host memory; the update of the next step waits for it."""
    send_seconds: float
    """Time of the transfer to the holder, during the next step."""
    covers_node_loss: bool
    """True if the holders are on other nodes."""

    def describe(self, step_seconds: float) -> str:
        """Describe the cost in one line.

        Args:
            step_seconds: Time of a step, behind which the copy should hide.
        """
        text = (
            f"peer copies: {format_bytes(self.node_bytes)} of host memory per node; each rank "
            f"copies {format_bytes(self.own_bytes)} in {format_seconds(self.copy_seconds)} and "
            f"sends {format_bytes(self.sent_bytes)} in {format_seconds(self.send_seconds)}"
        )
        if self.copy_seconds + self.send_seconds > step_seconds:
            text += f", longer than a step of {format_seconds(step_seconds)}: training waits"
        return text + ("" if self.covers_node_loss else "; the loss of the node is not covered")


def count_copy_bytes(
    placement: Placement,
    layout: Layout,
    bytes_of_parameter: dict[str, float],
    rank: int,
    holder: int,
) -> tuple[float, float]:
    """Count the bytes of a rank's state, and of the part that its holder does not have.

    Args:
        placement: Model under the layout.
        layout: Degrees of all parallelisms.
        bytes_of_parameter: Bytes per element of weight and optimizer state, by name, for the
            parameters that a copy has.
        rank: Rank whose state is copied.
        holder: Rank that keeps the copy.
    """
    grid = RankGrid(layout)
    own = sent = 0.0
    for name, element_bytes in bytes_of_parameter.items():
        parameter = placement.parameters[name]
        boxes, known = (
            {
                box.global_bounds: math.prod(length for _, length in box.global_bounds)
                for box in compute_local_boxes(parameter, layout, grid.coordinates(each))
            }
            for each in (rank, holder)
        )
        own += element_bytes * sum(boxes.values())
        sent += element_bytes * sum(size for bounds, size in boxes.items() if bounds not in known)
    return own, sent


def list_trained_names(shape: ModelShape, freeze: Sequence[str]) -> list[str]:
    """List the parameters that no pattern of `model.freeze` freezes; with adapters only those."""
    frozen = match_frozen(freeze, shape)
    return [
        spec.name
        for spec in shape.list_parameters()
        if (shape.adapters is None or spec.adapter_part is not None) and spec.name not in frozen
    ]


def list_copied_parameters(
    shape: ModelShape, candidate: Candidate, trained_names: Collection[str]
) -> dict[str, float]:
    """Return the bytes per element of weight and states, for each parameter in a checkpoint."""
    costs = OPTIMIZER_COSTS[candidate.optimizer]
    return {
        spec.name: candidate.master_bytes
        + (
            costs.state_bytes + (0.0 if spec.is_block_matrix else costs.other_bytes)
            if spec.name in trained_names
            else 0.0
        )
        for spec in shape.list_parameters()
        if shape.adapters is None or spec.name in trained_names
    }


def count_node_bytes(
    placement: Placement,
    layout: Layout,
    bytes_of_parameter: dict[str, float],
    ranks: range,
    shift: int,
) -> tuple[float, float, float]:
    """Count the bytes of the copies on a node: most own, most sent, and host memory of all.

    Args:
        placement: As in `count_copy_bytes`.
        layout: As in `count_copy_bytes`.
        bytes_of_parameter: As in `count_copy_bytes`.
        ranks: Ranks of the node.
        shift: Number of ranks from a rank to its holder, as `choose_holders` chooses it.
    """
    world_size = layout.world_size
    owns = []
    sents = []
    total = 0.0
    for rank in ranks:
        own, sent = count_copy_bytes(
            placement, layout, bytes_of_parameter, rank, (rank + shift) % world_size
        )
        owner = (rank - shift) % world_size
        _, received = count_copy_bytes(placement, layout, bytes_of_parameter, owner, rank)
        owns.append(own)
        sents.append(sent)
        total += NUM_COPIED_STEPS * (own + received)
    return max(owns), max(sents), total


def predict_recipe_copies(
    recipe: Recipe, chosen: Prediction | None, cluster: Cluster
) -> PeerCopyCost | None:
    """Predict the cost of the recipe's peer copies under the chosen layout; None without them.

    One rank has no peer, so there are no copies either.
    """
    if not recipe.elastic.peer_copies or chosen is None:
        return None
    shape = read_recipe_shape(recipe)
    trained = list_trained_names(shape, recipe.model.freeze)
    return predict_peer_copies(shape, chosen.candidate, trained, cluster)


def predict_peer_copies(
    shape: ModelShape, candidate: Candidate, trained_names: Collection[str], cluster: Cluster
) -> PeerCopyCost | None:
    """Predict the cost of peer copies under a candidate; None for one rank, which has no peer."""
    layout = candidate.layout
    if layout.world_size == 1:
        return None
    placement = place_model(shape, layout, candidate.sequence_length)
    node_size = min(cluster.gpus_per_node, layout.world_size)
    has_other_nodes = layout.world_size > node_size
    own, sent, node_bytes = count_node_bytes(
        placement,
        layout,
        list_copied_parameters(shape, candidate, trained_names),
        range(node_size),
        node_size if has_other_nodes else 1,
    )
    is_cpu = cluster.accelerator.kind == "cpu"
    memory_rate = get_host_memory_rate(cluster.profile)
    copy_seconds = (
        2.0 * own / memory_rate if is_cpu else own / get_transfer_rate("host", cluster.profile)
    )
    if has_other_nodes and cluster.inter is not None:
        send_seconds = sent / cluster.inter.bytes_per_second
    else:
        send_seconds = _LOCAL_PASSES * sent / memory_rate
    return PeerCopyCost(own, sent, node_bytes, copy_seconds, send_seconds, has_other_nodes)
