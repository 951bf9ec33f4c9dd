"""Rates of a device: matmuls by shape, memory traffic, attention."""

from __future__ import annotations

from shardwright.config.low_precision import LowPrecisionRecipe
from shardwright.hardware import Cluster
from shardwright.planner.low_precision import find_measured_ratio
from shardwright.planner.rates.efficiency import Efficiency

PEAK_PRECISIONS = {"fp8": "fp8", "nvfp4": "fp4"}
"""Precisions of the peaks that quantised products reach, by kind of precision."""


class DeviceRates:
    """Rates of a device in a candidate's precision: matmuls by shape, memory, attention. Caches
    matmul times."""

    def __init__(
        self,
        cluster: Cluster,
        efficiency: Efficiency,
        precision: str,
        recipe: LowPrecisionRecipe | None = None,
    ) -> None:
        """`recipe`: recipe of quantised products, whose rate a profile may have."""
        accelerator = cluster.accelerator
        self.cluster = cluster
        self.efficiency = efficiency
        self.precision = PEAK_PRECISIONS.get(precision, precision)
        self.peak_flops_per_second = accelerator.get_peak_flops_per_second(self.precision)
        self.attention_precision = "bf16" if precision in PEAK_PRECISIONS else self.precision
        self.attention_peak_flops_per_second = accelerator.get_peak_flops_per_second(
            self.attention_precision
        )
        share = efficiency.matmul_share_by_precision.get(precision, efficiency.matmul_share)
        self.matmul_flops_per_second = self.peak_flops_per_second * share
        self.bytes_per_second = accelerator.memory_bytes_per_second * efficiency.memory_share
        self.update_bytes_per_second = (
            accelerator.memory_bytes_per_second * efficiency.optimizer_share
        )
        if cluster.profile is not None:
            # A measured copy rate needs no efficiency factor.
            self.bytes_per_second = cluster.profile.memory_bytes_per_second
            self.update_bytes_per_second = cluster.profile.memory_bytes_per_second
        self.operand_bytes = {"fp8": 1, "fp4": 1, "fp32": 4, "fp64": 8}.get(self.precision, 2)
        self.is_low_precision = precision in PEAK_PRECISIONS
        """True if blocks multiply in fewer bits than the head and everything else, which stay
        in bf16."""
        self._high_precision = (
            DeviceRates(cluster, efficiency, "bf16") if self.is_low_precision else self
        )
        self._ratio = find_measured_ratio(cluster, recipe) if self.is_low_precision else None
        """Measured rate of products as a multiple of that of bf16."""
        self._matmul_cache: dict[tuple[float, float, float], float] = {}
        self._tile_shares: dict[tuple[float, ...], float] = {}
        self.layer_cache: dict[tuple[object, ...], object] = {}
        """Cache of `planner.time.layer_matmuls`."""

    def time_matmul(
        self, m: float, n: float, k: float, *, is_high_precision: bool = False
    ) -> float:
        """Return seconds of [m, k] x [k, n]. `is_high_precision` uses bf16 where blocks multiply in
        fewer bits."""
        if is_high_precision and self.is_low_precision:
            return self._high_precision.time_matmul(m, n, k)
        key = (m, n, k)
        seconds = self._matmul_cache.get(key)
        if seconds is None:
            seconds = self._matmul_cache[key] = self._time_matmul(m, n, k)
        return seconds

    def _time_matmul(self, m: float, n: float, k: float) -> float:
        if m <= 0 or n <= 0 or k <= 0:
            return 0.0
        rate = self._compute_matmul_rate(m, n, k)
        memory_seconds = self.operand_bytes * (m * k + k * n + m * n) / self.bytes_per_second
        return max(2.0 * m * n * k / rate, memory_seconds, self.efficiency.kernel_seconds)

    def _compute_matmul_rate(self, m: float, n: float, k: float) -> float:
        """Return FLOP/s: a measured multiple of bf16, a measured rate, or the fitted one."""
        if self._ratio is not None:
            return self._ratio * self._high_precision._compute_matmul_rate(m, n, k)
        efficiency = self.efficiency
        rate = None
        if self.cluster.profile is not None:
            rate = self.cluster.profile.find_matmul_flops_per_second(
                self.precision, max(1, round(m)), max(1, round(n)), max(1, round(k))
            )
        if rate is None:
            rate = (
                self.matmul_flops_per_second
                * m
                / (m + efficiency.m_half)
                * n
                / (n + efficiency.n_half)
                * k
                / (k + efficiency.k_half)
            )
        return rate

    def compute_tile_share(self, *widths: float) -> float:
        """Return the share of the matmul rate at these matrix widths, by how well they fill
        tiles. 1 with a measured profile."""
        share = self._tile_shares.get(widths)
        if share is None:
            share = self._tile_shares[widths] = self._compute_tile_share(widths)
        return share

    def _compute_tile_share(self, widths: tuple[float, ...]) -> float:
        if self.cluster.profile is not None:
            return 1.0
        if any(width % 8 for width in widths):
            return self.efficiency.odd_share
        if any(width % 16 for width in widths):
            return self.efficiency.half_aligned_share
        return self.efficiency.uneven_share if any(width % 64 for width in widths) else 1.0

    def time_copy(self, num_bytes: float) -> float:
        """Return seconds to read and write `num_bytes` in total."""
        return num_bytes / self.bytes_per_second

    def time_elementwise(
        self, num_bytes: float, tokens: float, width: int, *, is_backward: bool
    ) -> float:
        """Return seconds of elementwise operations that read and write `num_bytes`, on tensors
        of `tokens` x `width`.

        Without a measurement the rate is that of a copy.
        """
        profile = self.cluster.profile
        rate = None
        if profile is not None:
            rate = profile.find_elementwise_bytes_per_second(
                self.attention_precision, max(1, round(tokens)), width, is_backward=is_backward
            )
        return num_bytes / (self.bytes_per_second if rate is None else rate)

    def time_attention(
        self, flops: float, row_tokens: float, head_dim: int, *, is_backward: bool
    ) -> float:
        """Return seconds of the fused attention kernel for `flops`."""
        efficiency = self.efficiency
        rate = None
        if self.cluster.profile is not None:
            rate = self.cluster.profile.find_attention_flops_per_second(
                self.attention_precision, row_tokens, head_dim, is_backward=is_backward
            )
        if rate is None:
            share = (
                efficiency.attention_backward_share
                if is_backward
                else efficiency.attention_forward_share
            )
            rate = (
                self.attention_peak_flops_per_second
                * share
                * row_tokens
                / (row_tokens + efficiency.attention_half_tokens)
            )
        return max(flops / rate, efficiency.kernel_seconds)
