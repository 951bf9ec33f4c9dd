"""Smoothing of curves, and downsampling that keeps every peak."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


def smooth_values(values: FloatArray, half_width: int) -> FloatArray:
    """Compute the centred mean over 2 x half_width + 1 values, without lag.

    At the start, where curves are steep, the window shrinks symmetrically; at the end, where
    they are flat, only its later half shrinks, so that the last values are still means of many.
    Means leave out values that are not finite; an empty mean is NaN.
    """
    count = len(values)
    if count == 0 or half_width < 1:
        return values.astype(np.float64)
    finite = np.isfinite(values)
    sums = np.concatenate(([0.0], np.cumsum(np.where(finite, values, 0.0))))
    counts = np.concatenate(([0], np.cumsum(finite)))
    index = np.arange(count)
    before = np.minimum(half_width, index)
    after = np.minimum(half_width, count - 1 - index)
    after = np.minimum(after, before)
    low = index - before
    high = index + after + 1
    num_values = counts[high] - counts[low]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(num_values > 0, (sums[high] - sums[low]) / num_values, np.nan)


def thin_points(x: FloatArray, y: FloatArray, num_buckets: int) -> tuple[FloatArray, FloatArray]:
    """Keep the first, lowest, highest and last point per bucket, so that peaks remain.

    `x` is ascending. Points whose y is not finite are removed first.
    """
    finite = np.isfinite(y)
    x = x[finite]
    y = y[finite]
    if len(x) <= 4 * num_buckets:
        return x, y
    edges = np.linspace(x[0], x[-1], num_buckets + 1)
    bounds = np.unique(np.concatenate((np.searchsorted(x, edges[:-1], side="left"), [len(x)])))
    indices: list[int] = []
    for low, high in pairwise(bounds.tolist()):
        part = y[low:high]
        indices += sorted({low, low + int(part.argmin()), low + int(part.argmax()), high - 1})
    selected = np.asarray(indices)
    return x[selected], y[selected]


def compute_bin_means(
    x: FloatArray, y: FloatArray, num_buckets: int
) -> tuple[FloatArray, FloatArray]:
    """Compute mean x and y of consecutive groups of equal size; keeps sums of areas exact."""
    if len(x) <= num_buckets:
        return x, y
    starts = np.linspace(0, len(x), num_buckets + 1).astype(int)[:-1]
    counts = np.diff(np.append(starts, len(x)))
    return np.add.reduceat(x, starts) / counts, np.add.reduceat(y, starts) / counts
