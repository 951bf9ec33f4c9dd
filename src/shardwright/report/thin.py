"""Many points made few without losing what the eye looks for: smoothing, and thinning that keeps every peak."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def smooth(values: Floats, half_width: int) -> Floats:
    """Centred mean over 2 x half_width + 1 values, without lag.

    At the start, where curves are steep, the window shrinks so that it stays centred; at the end, where they are flat, it only
    loses its later half, so that the last values, which people read, are still means of many. Values that are not finite are
    left out of every mean; a mean of nothing is NaN.
    """
    count = len(values)
    if count == 0 or half_width < 1:
        return values.astype(np.float64)
    finite = np.isfinite(values)
    sums = np.concatenate(([0.0], np.cumsum(np.where(finite, values, 0.0))))
    counts = np.concatenate(([0], np.cumsum(finite)))
    index = np.arange(count)
    before, after = np.minimum(half_width, index), np.minimum(half_width, count - 1 - index)
    after = np.minimum(after, before)
    low, high = index - before, index + after + 1
    taken = counts[high] - counts[low]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(taken > 0, (sums[high] - sums[low]) / taken, np.nan)


def thin(x: Floats, y: Floats, buckets: int) -> tuple[Floats, Floats]:
    """At most 4 points per bucket: its first, lowest, highest and last, in order. Peaks stay, whatever the bucket's size.

    `x` rises. Points whose y is not finite go first.
    """
    finite = np.isfinite(y)
    x, y = x[finite], y[finite]
    if len(x) <= 4 * buckets:
        return x, y
    edges = np.linspace(x[0], x[-1], buckets + 1)
    bounds = np.unique(np.concatenate((np.searchsorted(x, edges[:-1], side="left"), [len(x)])))
    kept: list[int] = []
    for low, high in pairwise(bounds.tolist()):
        part = y[low:high]
        kept += sorted({low, low + int(part.argmin()), low + int(part.argmax()), high - 1})
    chosen = np.asarray(kept)
    return x[chosen], y[chosen]


def bin_means(x: Floats, y: Floats, buckets: int) -> tuple[Floats, Floats]:
    """Mean x and mean y of consecutive groups of equal count: for stacked areas, whose sum must stay a sum."""
    if len(x) <= buckets:
        return x, y
    starts = np.linspace(0, len(x), buckets + 1).astype(int)[:-1]
    counts = np.diff(np.append(starts, len(x)))
    return np.add.reduceat(x, starts) / counts, np.add.reduceat(y, starts) / counts
