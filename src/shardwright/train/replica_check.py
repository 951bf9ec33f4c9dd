"""Check that replicated weights are identical on all ranks, to find flipped bits."""

from __future__ import annotations

from collections import Counter

import torch

from shardwright.checkpoint.rank_group import RankGroup
from shardwright.parallel.gradient_reduction import narrow_to_box
from shardwright.parallel.parallel_model import ParallelModel, get_local_tensor


def find_differing_replicas(model: ParallelModel) -> str | None:
    """Describe how ranks differ that hold the same part of a parameter; None if all agree.

    Collective. Compares an XOR over the bits of each part (`torch.hash_tensor`), which finds
    any single differing value. Replicas are identical to the bit, because each adds the same
    sums to the same weights. Parts on one rank only (ZeRO, tensor parallelism) have no replica.
    """
    places = []
    hashes = []
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local = get_local_tensor(parameter.detach())
            for box in model.local_boxes(name):
                part = narrow_to_box(local, box.local_bounds)
                if part.numel():
                    places.append(f"{name} {[list(bounds) for bounds in box.global_bounds]}")
                    hashes.append(torch.hash_tensor(part).view(torch.int64))
    local_hashes = dict(zip(places, torch.stack(hashes).tolist() if hashes else [], strict=True))
    hashes_by_place: dict[str, dict[int, int]] = {}
    for rank, parts in enumerate(RankGroup().all_gather(local_hashes)):
        for place, value in parts.items():
            hashes_by_place.setdefault(place, {})[rank] = value
    wrong = {
        place: values for place, values in hashes_by_place.items() if len(set(values.values())) > 1
    }
    if not wrong:
        return None
    place, values = next(iter(wrong.items()))
    share = f"{len(wrong)} of {len(hashes_by_place)} parts of the weights"
    return f"{share} differ between ranks that should have identical copies: {place}, {_describe_outlier(values)}"


def _describe_outlier(values: dict[int, int]) -> str:
    """Name the ranks that differ from the majority, if there is one."""
    (common, count), *others = Counter(values.values()).most_common()
    if others and others[0][1] == count:
        return f"ranks {', '.join(map(str, values))} disagree, without a majority"
    return f"on rank {', '.join(str(rank) for rank, value in values.items() if value != common)}"
