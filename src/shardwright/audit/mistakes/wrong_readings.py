"""Wrong readings of the recorded rows and pairs, and the mistakes that they stand for."""

from __future__ import annotations

from dataclasses import replace

from shardwright.audit.batch_reading import BatchReading
from shardwright.audit.evidence import Evidence


def list_readings(evidence: Evidence) -> list[BatchReading]:
    """List wrong readings of the rows that can differ from the right one here."""
    right = evidence.reading
    batches = [batch for batches in evidence.data for batch in batches]
    listed = [replace(right, label_offset=right.label_offset + 1)]
    if right.label_offset:
        listed.append(replace(right, label_offset=0))
    listed.append(replace(right, supervises_prompt=True))
    if any(batch.has_padding for batch in batches):
        listed.append(replace(right, supervises_padding=True))
    if any(batch.document_ids is not None for batch in batches):
        listed += [
            replace(right, crosses_documents=True),
            replace(right, separates_documents=False),
            replace(right, resets_positions=False),
            replace(right, separates_documents=False, resets_positions=False),
            replace(right, separates_documents=False, crosses_documents=True),
            replace(right, resets_positions=False, crosses_documents=True),
            replace(
                right, separates_documents=False, resets_positions=False, crosses_documents=True
            ),
        ]
    if any(rank.values["dropout"] for rank in evidence.record.ranks):
        listed.append(replace(right, replays_dropout=True))
    if evidence.model.routers:
        listed.append(replace(right, detaches_routers=True))
    if evidence.model.preference is not None:
        listed += [
            replace(right, swaps_pairs=True),
            replace(right, averages_log_probs=True),
            replace(right, omits_reference=True),
            replace(right, is_own_reference=True),
        ]
    return listed


def list_reading_mistakes(evidence: Evidence, reading: BatchReading) -> tuple[str, ...]:
    """Name the mistakes by which a reading differs from the right one."""
    right = evidence.reading
    names = []
    if reading.label_offset > right.label_offset:
        names.append("labels_shifted_twice")
    if reading.label_offset < right.label_offset:
        names.append("labels_not_shifted")
    for field, mistake in (
        ("separates_documents", "documents_attend"),
        ("resets_positions", "positions_not_reset"),
        ("crosses_documents", "targets_cross_documents"),
        ("supervises_prompt", "prompt_supervised"),
        ("supervises_padding", "padding_supervised"),
        ("replays_dropout", "dropout_on"),
        ("detaches_routers", "router_detached"),
        ("swaps_pairs", "pairs_swapped"),
        ("averages_log_probs", "log_probs_averaged"),
        ("omits_reference", "reference_omitted"),
        ("is_own_reference", "own_reference"),
    ):
        if getattr(reading, field) != getattr(right, field):
            names.append(mistake)
    return tuple(names)
