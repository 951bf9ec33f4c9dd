"""Seconds of a layer's matrix products on one rank for one micro-batch."""

from __future__ import annotations

from typing import NamedTuple

from shardwright.planner.candidate import Candidate
from shardwright.planner.model_costs import LayerKind, Matmul, ModelFacts
from shardwright.planner.rates.device_rates import DeviceRates
from shardwright.planner.time.memory_traffic import (
    compute_local_sides,
    count_matmul_calls,
    list_matmuls,
)


class MatmulSeconds(NamedTuple):
    """Seconds of a layer's matrix products; those of its experts are also counted apart."""

    forward: float = 0.0
    input_gradients: float = 0.0
    weight_gradients: float = 0.0
    experts_forward: float = 0.0
    experts_backward: float = 0.0


def get_layer_matmul_seconds(
    facts: ModelFacts, kind: LayerKind, candidate: Candidate, rates: DeviceRates
) -> MatmulSeconds:
    """Return the cached seconds of a layer's matrix products, which recomputation and the methods
    of tp and cp do not change."""
    key = (
        facts,
        kind.slot,
        candidate.micro_batch_tokens,
        candidate.layout.tp,
        candidate.layout.ep,
        candidate.expert_load,
        candidate.num_expert_parts,
        candidate.scaled_shares,
        candidate.engine,
        candidate.adapter is None,
    )
    seconds = rates.layer_cache.get(key)
    if seconds is None:
        seconds = rates.layer_cache[key] = _time_matmuls(facts, kind, candidate, rates)
    assert isinstance(seconds, MatmulSeconds)
    return seconds


def _time_matmuls(
    facts: ModelFacts, kind: LayerKind, candidate: Candidate, rates: DeviceRates
) -> MatmulSeconds:
    forward = inputs = weights = experts_forward = experts_backward = 0.0
    for product, rows in list_matmuls(facts, kind, candidate):
        product_forward, input_gradient, weight_gradient = time_matmul_passes(
            product, rows, candidate, rates
        )
        if not product.is_trained:
            weight_gradient = 0.0
        num_calls = count_matmul_calls(facts, kind, product, candidate)
        if product in kind.expert_matmuls:
            num_calls /= rates.efficiency.expert_share
            experts_forward += num_calls * product_forward
            experts_backward += num_calls * (input_gradient + weight_gradient)
        forward += num_calls * product_forward
        inputs += num_calls * input_gradient
        weights += num_calls * weight_gradient
    if candidate.adapter is not None:
        weights = 0.0  # frozen matrices take no gradient
    return MatmulSeconds(forward, inputs, weights, experts_forward, experts_backward)


def time_matmul_passes(
    matmul: Matmul, rows: float, candidate: Candidate, rates: DeviceRates
) -> tuple[float, float, float]:
    """Return seconds of the matmul, of its input's gradient, and of its weight's gradient."""
    num_out, num_in = compute_local_sides(matmul, candidate)
    # Most frameworks pad the vocabulary, whatever size a table states.
    share = 1.0 if matmul.sharding == "vocabulary" else rates.compute_tile_share(num_in, num_out)
    shares = candidate.scaled_shares if rates.is_low_precision else None
    low_share = 0.0 if matmul.role in ("head", "router") else 1.0
    low_weight_share = low_share
    if shares is not None:
        low_share = shares.get_share(matmul.role)
        low_weight_share = shares.get_weight_gradient_share(matmul.role)

    def time_product(m: float, n: float, k: float, low_precision_share: float) -> float:
        seconds = 0.0
        if low_precision_share > 0:
            seconds += low_precision_share * rates.time_matmul(m, n, k)
        if low_precision_share < 1:
            wide = rates.time_matmul(m, n, k, is_high_precision=True)
            seconds += (1 - low_precision_share) * wide
        return seconds / share

    return (
        time_product(rows, num_out, num_in, low_share),
        time_product(rows, num_in, num_out, low_share),
        time_product(num_out, num_in, rows, low_weight_share),
    )
