"""Results of a block's operations that recomputation keeps, and the choice for each layer."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from shardwright.units import format_bytes, format_items, format_seconds

ResultName = Literal[
    "gathered", "attention", "projections", "attention_out", "gate_up", "down", "experts"
]
"""Groups of a block's results: the inputs of both branches that sequence parallelism gathers; of
the attention kernel, or of its two products without one; of the products before attention; of the
product after it; of the products before the activation; of the one after it; and of all products of
routed experts. Products of adapters and of the router belong to none. Under tensor parallelism
`attention_out` and `down` are the results after their sum over ranks."""

RESULT_NAMES: tuple[ResultName, ...] = get_args(ResultName)

SavedResults = frozenset[ResultName]
"""Results that a layer keeps in addition to its input. All else is recomputed."""

LayerResults = SavedResults | None
"""`SavedResults`, or None for a layer that saves all tensors of its backward pass."""


@dataclass(frozen=True)
class RecomputeChoice:
    """Choice of `recompute: auto` or `budget_gib` for a plan, with predicted figures."""

    layers: tuple[LayerResults, ...]
    """Choice for each layer of the model."""
    setting: str
    """The recipe's setting, in words."""
    cluster: str
    """Devices whose rates determine the choice."""
    budget_bytes: float
    memory_bytes: float
    """Predicted peak on the device of the rank that needs the most."""
    layer_bytes: float
    """Predicted bytes that the layers of the rank with the most save per micro-batch, inputs
    included. Exact if all layers recompute."""
    recompute_seconds: float
    """Predicted seconds of recomputation per micro-batch, all layers."""

    def as_dict(self) -> dict[str, Any]:
        """Return the choice as JSON values for the run folder."""
        values = {"description": self.describe()} | asdict(self)
        values["layers"] = [
            None if results is None else sort_results(results) for results in self.layers
        ]
        return values

    def describe(self) -> str:
        """Describe the choice and its figures in one line."""
        return (
            f"{self.setting} for {self.cluster}: {self.describe_layers()}; "
            f"{format_bytes(self.layer_bytes)} of saved tensors per micro-batch, "
            f"{format_seconds(self.recompute_seconds)} of recomputation per micro-batch, "
            f"{format_bytes(self.memory_bytes)} of {format_bytes(self.budget_bytes)} per device "
            "(predicted)"
        )

    def count_layers(self) -> dict[LayerResults, int]:
        """Count the layers of each choice, in order of first occurrence."""
        counts: dict[LayerResults, int] = {}
        for layer in self.layers:
            counts[layer] = counts.get(layer, 0) + 1
        return counts

    def describe_layers(self) -> str:
        """Describe the results that the layers keep, in one line."""
        return "; ".join(
            f"{format_items(count, 'layer')}: {describe_results(results)}"
            for results, count in self.count_layers().items()
        )


def describe_results(results: LayerResults) -> str:
    """List the names of the results that a layer keeps.

    >>> describe_results(frozenset(["gate_up", "attention"]))
    'input, attention, gate_up'
    >>> describe_results(None)
    'all saved tensors'
    """
    return "all saved tensors" if results is None else ", ".join(["input", *sort_results(results)])


def sort_results(results: SavedResults) -> list[ResultName]:
    """Sort names in the order in which a block computes the results."""
    return [name for name in RESULT_NAMES if name in results]
