"""Search and verification of checkpoints by several ranks: each file is hashed by one of them.

Every rank returns the same result or raises the same error.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardwright.checkpoint.integrity import (
    ObjectCache,
    assign_files,
    find_file_faults,
    find_folder_faults,
    list_candidates,
)
from shardwright.checkpoint.local_tensors import (
    ParameterShard,
    describe_local_tensor,
    find_non_finite,
)
from shardwright.checkpoint.manifest import Manifest, parse_manifest, read_manifest_text
from shardwright.checkpoint.rank_group import RankGroup
from shardwright.checkpoint.storage_path import StoragePath
from shardwright.errors import CheckpointError, ShardwrightError


def list_candidates_on_all_ranks(
    ranks: RankGroup, root: StoragePath
) -> tuple[list[str], list[list[str]]]:
    """Return the names to try, and names that were lost with the reason.

    Raises:
        CheckpointError: an object store did not answer the first rank.
    """
    result: dict[str, Any] = {"names": [], "lost": [], "unread": None}
    if ranks.is_first:
        try:
            paths, refused = list_candidates(root)
            result["names"] = [path.name for path in paths]
            result["lost"] = [[lost.path.name, lost.reason] for lost in refused]
        except OSError as error:
            if isinstance(root, Path):
                raise
            result["unread"] = str(error)
    result = ranks.broadcast_first(result)
    _require_answers(root, [result["unread"]])
    return result["names"], result["lost"]


def verify_on_all_ranks(
    ranks: RankGroup, path: StoragePath, cache: ObjectCache | None = None
) -> tuple[Manifest | None, list[str]]:
    """Return the manifest, which the first rank reads, and the faults that any rank found.

    Args:
        cache: Receives the bytes of the objects that this rank hashes.

    Raises:
        CheckpointError: an object store did not answer, so nothing is known of the checkpoint.
    """
    result: dict[str, Any] = {"text": "", "faults": [], "unread": None}
    if ranks.is_first:
        try:
            result["text"] = read_manifest_text(path).decode("utf-8", errors="strict")
            manifest = parse_manifest(result["text"].encode(), path)
            result["faults"] = find_folder_faults(path, manifest)
        except ShardwrightError as error:
            result["faults"] = [getattr(error, "problem", str(error))]
        except (OSError, UnicodeDecodeError) as error:
            if isinstance(error, OSError) and not isinstance(path, Path):
                result["unread"] = str(error)
            else:
                result["faults"] = [str(error)]
    result = ranks.broadcast_first(result)
    _require_answers(path, [result["unread"]])
    if result["faults"]:
        return None, result["faults"]
    manifest = parse_manifest(result["text"].encode(), path)
    report: dict[str, Any] = {"faults": [], "unread": None}
    try:
        report["faults"] = find_file_faults(
            path, manifest, assign_files(manifest, ranks.rank, ranks.world_size), cache=cache
        )
    except OSError as error:  # only of a store: see `convert_read_errors`
        report["unread"] = str(error)
    reports = ranks.all_gather(report)
    _require_answers(path, [report["unread"] for report in reports])
    return manifest, sorted({fault for report in reports for fault in report["faults"]})


def _require_answers(path: StoragePath, failures: list[str | None]) -> None:
    """Raise the same error on every rank if a store did not answer one.

    Not a fault of the checkpoint: an older one must not be used in its place.
    """
    listed = [f"rank {rank}: {text}" for rank, text in enumerate(failures) if text is not None]
    if listed:
        raise CheckpointError(
            f"cannot be read: {'; '.join(listed)}",
            field=str(path),
            remedy="It may be intact: try again when the store answers",
        )


def is_any_rank_non_finite(
    group: dist.ProcessGroup | None, tensors: Mapping[str, ParameterShard]
) -> bool:
    """Return True if a tensor contains NaN or infinity on any rank, or cannot be read.

    Collective over `group`; the same on all ranks.
    """
    try:
        names = find_non_finite(
            {name: describe_local_tensor(name, part) for name, part in tensors.items()}
        )
    except (OSError, ShardwrightError) as error:  # the save reports it
        names = [str(error)]
    return any(RankGroup(group).all_gather(bool(names)))
