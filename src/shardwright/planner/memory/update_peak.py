"""Memory of a rank in the update of its parameters."""

from __future__ import annotations

from shardwright.planner.candidate import Candidate
from shardwright.planner.memory.moved_weights import compute_updated_bytes
from shardwright.planner.memory.parameter_memory import PersistentMemory
from shardwright.planner.prediction import MemoryParts


def compute_update_peak(candidate: Candidate, persistent: PersistentMemory) -> MemoryParts:
    """Return memory in the update, in which no activations exist."""
    weight_bytes, gradient_bytes = compute_updated_bytes(candidate, persistent.moved)
    return MemoryParts(
        weights=persistent.weights,
        optimizer=persistent.optimizer,
        gradients=persistent.updated_gradients + gradient_bytes,
        workspaces=_compute_update_temporaries(candidate, persistent),
        gathered=weight_bytes,
    )


def _compute_update_temporaries(candidate: Candidate, persistent: PersistentMemory) -> float:
    trained = persistent.trained_parameters
    if candidate.offload != "none":
        return 0.0
    return candidate.engine.compute_update_temporary_bytes(
        candidate.optimizer, trained.sharded if candidate.layout.zero_stage else trained.local
    )
