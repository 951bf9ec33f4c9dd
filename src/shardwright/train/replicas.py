"""Whether ranks that should hold the same weights do: a bit that flipped in one of them is found and named."""

from __future__ import annotations

from collections import Counter

import torch

from shardwright.checkpoint.exchange import Ranks
from shardwright.parallel.model import ParallelModel, local_part
from shardwright.parallel.reduce import narrow


def differing_replicas(model: ParallelModel) -> str | None:
    """What differs between ranks that hold the same part of a parameter, in words; None where all agree. Every rank calls this.

    Compared is an XOR over the bits of each part (`torch.hash_tensor`): any one value that differs is found. Parts that one rank
    alone holds, as ZeRO and tensor parallelism leave them, have nobody to be compared with.
    Copies are equal to the bit after every step, since each adds the same sums to the same weights.
    """
    places, hashes = [], []
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local = local_part(parameter.detach())
            for box in model.held(name):
                part = narrow(local, box.local)
                if part.numel():
                    places.append(f"{name} {[list(bounds) for bounds in box.whole]}")
                    hashes.append(torch.hash_tensor(part).view(torch.int64))
    mine = dict(zip(places, torch.stack(hashes).tolist() if hashes else [], strict=True))
    told: dict[str, dict[int, int]] = {}
    for rank, parts in enumerate(Ranks().gather(mine)):
        for place, value in parts.items():
            told.setdefault(place, {})[rank] = value
    wrong = {place: values for place, values in told.items() if len(set(values.values())) > 1}
    if not wrong:
        return None
    place, values = next(iter(wrong.items()))
    share = f"{len(wrong)} of {len(told)} parts of the weights"
    return f"{share} differ between ranks that should hold them alike: {place}, {_odd(values)}"


def _odd(values: dict[int, int]) -> str:
    """Whose value is not the others', where most agree."""
    (common, count), *others = Counter(values.values()).most_common()
    if others and others[0][1] == count:
        return f"ranks {', '.join(map(str, values))} disagree, and no majority says which is right"
    return f"on rank {', '.join(str(rank) for rank, value in values.items() if value != common)}"
