"""Rates measured on one machine, which override the catalogue; written by `doctor --calibrate`.

The module imports no torch. The file is one JSON object:

    schema_version   1
    accelerator      device name in its driver; `catalog_name`: its entry in the catalogue
    measured_at      ISO 8601 date and time; `software`: versions that affect the rates
    memory_bytes     memory that the driver offers to a process
    memory_bytes_per_second   bytes read plus written per second by a large copy on the device
    matmuls          [{precision, m, n, k, flops_per_second}]    products [m, k] x [k, n]
    collectives      [{kind, num_ranks, ranks_per_node, message_bytes, seconds,
                     processor_seconds, step_seconds}]    the last two are null on a GPU; optional
    attention        [{precision, row_tokens, head_dim, forward_flops_per_second,
                     backward_flops_per_second}]    fused kernel over causal rows; optional
    scaled_products  [{recipe, side, times_bf16}]    kernels of 8-bit and 4-bit products; optional
    elementwise      [{precision, tokens, width, forward_bytes_per_second,
                     backward_bytes_per_second}]    operations between products; optional
    tiers            {host_link_bytes_per_second, host_memory_bytes_per_second,
                     disk_read_bytes_per_second, disk_write_bytes_per_second,
                     disk_both_bytes_per_second}    rates of one rank with all ranks of its node at
                     work, for offloading; each is null if it was not measured; optional
    num_cores        cores that the ranks of a host may use; null if unknown; optional
    handoff_seconds  extra time of a collective between two computations, compared with
                     back-to-back collectives; optional

`message_bytes` is the size of the whole result of an all_gather, of the whole input of a
reduce_scatter, of the tensor of an all_reduce or broadcast, of one rank's input of an
all_to_all, and of the message of a send.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

from shardwright.errors import InputError
from shardwright.files import read_text
from shardwright.hardware.collective_rate import (
    CollectiveKind,
    CollectiveRate,
    interpolate_seconds,
)

PROFILE_SCHEMA_VERSION = 1


@dataclass(frozen=True)
class MatmulRate:
    """FLOP/s achieved by products `[m, k] x [k, n]` in one precision."""

    precision: str
    m: int
    n: int
    k: int
    flops_per_second: float


@dataclass(frozen=True)
class AttentionRate:
    """FLOP/s achieved by fused causal attention over rows of `row_tokens`.

    Counted as in the planner: forward, 2 (width of queries + width of values) per token and
    visible key, with (row_tokens + 1) / 2 visible keys per token on average; backward, 2.5
    times as many (FlashAttention-2, section 4.1).
    """

    precision: str
    row_tokens: int
    head_dim: int
    forward_flops_per_second: float
    backward_flops_per_second: float


@dataclass(frozen=True)
class ElementwiseRate:
    """Bytes/s of a residual sum, a norm and a gate on `[tokens, width]`, reads plus writes.

    A CPU computes 16-bit operations in fp32, so their time depends on elements rather than
    bytes; a fixed fraction of the copy rate would not describe it.
    """

    precision: str
    tokens: int
    width: int
    forward_bytes_per_second: float
    backward_bytes_per_second: float


@dataclass(frozen=True)
class ScaledProductRate:
    """Rate of the kernel that multiplies a recipe's quantised operands, of `side` rows and
    columns, as a multiple of the rate of the same product in bf16."""

    recipe: str
    side: int
    times_bf16: float


Rate = TypeVar(
    "Rate", MatmulRate, CollectiveRate, AttentionRate, ElementwiseRate, ScaledProductRate
)


@dataclass(frozen=True)
class TierRates:
    """Bytes/s of one rank to slower memory, while all ranks of its node do the same; None where
    nothing was measured."""

    host_link_bytes_per_second: float | None = None
    """Between device and pinned host memory, the slower direction."""
    host_memory_bytes_per_second: float | None = None
    """Bytes read plus written by the CPU in host memory."""
    disk_read_bytes_per_second: float | None = None
    """Rate of direct I/O in the folder of scratch files."""
    disk_write_bytes_per_second: float | None = None
    disk_both_bytes_per_second: float | None = None
    """Rate of each direction while both are busy."""


def compute_attention_flops(num_tokens: int, row_tokens: int, widths: int) -> float:
    """Return the FLOPs of a forward pass over causal rows.

    `widths` is the width of queries plus that of values, over all heads.

    >>> compute_attention_flops(num_tokens=8, row_tokens=4, widths=2)
    80.0
    """
    return 2.0 * widths * num_tokens * (row_tokens + 1) / 2


@dataclass(frozen=True)
class MeasuredProfile:
    """Rates achieved by one machine.

    The `*_per_second` and `*_read_seconds` methods return None if nothing relevant was measured;
    callers then use the catalogue.
    """

    accelerator: str
    catalog_name: str | None
    measured_at: str
    memory_bytes: int
    memory_bytes_per_second: float
    matmuls: tuple[MatmulRate, ...] = ()
    collectives: tuple[CollectiveRate, ...] = ()
    software: Mapping[str, str] | None = None
    attention: tuple[AttentionRate, ...] = ()
    elementwise: tuple[ElementwiseRate, ...] = ()
    handoff_seconds: float | None = None
    """Extra time of each collective after a computation: the wait for the last rank, and the
    wake-up of threads."""
    tiers: TierRates = TierRates()
    """Rates of host memory and disk, for offloading."""
    num_cores: float | None = None
    """Cores that the ranks of a host may use, on the host with the fewest."""
    scaled_products: tuple[ScaledProductRate, ...] = ()

    def find_matmul_flops_per_second(self, precision: str, m: int, n: int, k: int) -> float | None:
        """Return FLOP/s of the measured product with the closest shape.

        The distance is the sum of the differences of log m, log n and log k.
        """
        known = [rate for rate in self.matmuls if rate.precision == precision]
        if not known:
            return None
        return min(
            known, key=lambda rate: _compute_log_distance((rate.m, rate.n, rate.k), (m, n, k))
        ).flops_per_second

    def find_scaled_product_ratio(self, recipe: str) -> float | None:
        """Return the rate of a recipe's products as a multiple of that of bf16."""
        ratios = (rate.times_bf16 for rate in self.scaled_products if rate.recipe == recipe)
        return next(ratios, None)

    def find_collective_seconds(
        self, kind: CollectiveKind, num_ranks: int, ranks_per_node: int, message_bytes: float
    ) -> float | None:
        """Return seconds of a collective, interpolated between measured sizes of its kind and
        group.

        Below the smallest size the time is constant (latency); above the largest each byte takes
        as long as in the largest messages.
        """
        return self._interpolate("seconds", (kind, num_ranks, ranks_per_node), message_bytes)

    def find_processor_seconds(
        self, kind: CollectiveKind, num_ranks: int, ranks_per_node: int, message_bytes: float
    ) -> float | None:
        """Return the interpolated processor seconds of a collective on a CPU."""
        key = (kind, num_ranks, ranks_per_node)
        return self._interpolate("processor_seconds", key, message_bytes)

    def find_step_seconds(
        self, kind: CollectiveKind, num_ranks: int, ranks_per_node: int, message_bytes: float
    ) -> float | None:
        """Return the interpolated seconds of a collective between two computations."""
        return self._interpolate("step_seconds", (kind, num_ranks, ranks_per_node), message_bytes)

    def _interpolate(
        self, field: str, key: tuple[CollectiveKind, int, int], message_bytes: float
    ) -> float | None:
        """Interpolate a field of the collectives of one kind and group that have it."""
        points = [
            (rate.message_bytes, getattr(rate, field))
            for rate in self.collectives
            if (rate.kind, rate.num_ranks, rate.ranks_per_node) == key
        ]
        return interpolate_seconds(
            [(size, seconds) for size, seconds in points if seconds is not None], message_bytes
        )

    def find_attention_flops_per_second(
        self, precision: str, row_tokens: float, head_dim: int, *, is_backward: bool
    ) -> float | None:
        """Return FLOP/s of fused attention, interpolated over the log of the row length.

        Uses the measured head width that is closest; outside the measured lengths the rate is
        constant.
        """
        known = [rate for rate in self.attention if rate.precision == precision]
        if not known:
            return None
        width = min(
            (rate.head_dim for rate in known), key=lambda width: abs(math.log(width / head_dim))
        )
        points = sorted(
            (
                rate.row_tokens,
                rate.backward_flops_per_second if is_backward else rate.forward_flops_per_second,
            )
            for rate in known
            if rate.head_dim == width
        )
        for (short, slow), (long, fast) in pairwise(points):
            if short < row_tokens <= long:
                return slow + math.log(row_tokens / short) / math.log(long / short) * (fast - slow)
        return points[0][1] if row_tokens <= points[0][0] else points[-1][1]

    def find_elementwise_bytes_per_second(
        self, precision: str, tokens: int, width: int, *, is_backward: bool
    ) -> float | None:
        """Return bytes/s of the measured tensors with the closest size."""
        known = [rate for rate in self.elementwise if rate.precision == precision]
        if not known:
            return None
        nearest = min(
            known, key=lambda rate: abs(math.log(rate.tokens * rate.width / (tokens * width)))
        )
        return (
            nearest.backward_bytes_per_second if is_backward else nearest.forward_bytes_per_second
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the content of the file as plain values."""
        return {"schema_version": PROFILE_SCHEMA_VERSION} | asdict(self)


def _compute_log_distance(first: tuple[int, int, int], second: tuple[int, int, int]) -> float:
    return sum(abs(math.log(a / b)) for a, b in zip(first, second, strict=True))


def load_profile(path: str | Path) -> MeasuredProfile:
    """Read a measured profile.

    Raises:
        InputError: no such file, not JSON, an unknown schema version, or a missing or invalid
            field, by name.
    """
    path = Path(path)
    try:
        content = json.loads(read_text(path))
    except OSError as error:
        raise InputError(
            f"the measured profile cannot be read: {error.strerror}",
            field="profile",
            got=path,
            remedy="Write one with `shardwright doctor --calibrate`",
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"the measured profile is not JSON: {error}", field="profile", got=path
        ) from error
    return read_profile(content)


def read_profile(content: Any) -> MeasuredProfile:
    """Parse a profile from the JSON of its file, or from JSON that contains it.

    Raises:
        InputError: an unknown schema version, or a missing or invalid field, by name.
    """
    if not isinstance(content, dict) or content.get("schema_version") != PROFILE_SCHEMA_VERSION:
        got = content.get("schema_version") if isinstance(content, dict) else type(content).__name__
        raise InputError(
            "unknown schema version of a measured profile",
            field="profile.schema_version",
            got=got,
            allowed=str(PROFILE_SCHEMA_VERSION),
            remedy="Create a new one with `shardwright doctor --calibrate`",
        )
    software = content.get("software")
    return MeasuredProfile(
        accelerator=_read_text(content, "accelerator"),
        catalog_name=content.get("catalog_name"),
        measured_at=_read_text(content, "measured_at"),
        memory_bytes=int(_read_positive(content, "memory_bytes")),
        memory_bytes_per_second=_read_positive(content, "memory_bytes_per_second"),
        matmuls=_read_rates(content, "matmuls", MatmulRate),
        collectives=_read_rates(content, "collectives", CollectiveRate),
        software=dict(software) if isinstance(software, dict) else None,
        attention=_read_rates(content, "attention", AttentionRate),
        elementwise=_read_rates(content, "elementwise", ElementwiseRate),
        handoff_seconds=_read_seconds(content, "handoff_seconds"),
        tiers=_read_tiers(content),
        num_cores=None
        if content.get("num_cores") is None
        else _read_positive(content, "num_cores"),
        scaled_products=_read_rates(content, "scaled_products", ScaledProductRate),
    )


def save_profile(profile: MeasuredProfile, path: str | Path) -> None:
    """Write the file that `load_profile` reads."""
    Path(path).write_text(json.dumps(profile.as_dict(), indent=1) + "\n", encoding="utf-8")


def _read_rates(content: dict[str, Any], name: str, rate: type[Rate]) -> tuple[Rate, ...]:
    """Read a list of rates; the type of a field decides how its value is checked."""
    entries = content.get(name, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise InputError(
            "expected a list of mappings", field=f"profile.{name}", got=type(entries).__name__
        )
    return tuple(
        rate(
            **{
                field.name: _VALUE_READERS[cast(str, field.type)](entry, field.name, name)
                for field in fields(rate)
            }
        )
        for entry in entries
    )


def _read_tiers(content: dict[str, Any]) -> TierRates:
    entry = content.get("tiers", {})
    if not isinstance(entry, dict):
        raise InputError("expected a mapping", field="profile.tiers", got=type(entry).__name__)
    return TierRates(
        **{
            rate.name: _read_positive(entry, rate.name, "tiers")
            for rate in fields(TierRates)
            if entry.get(rate.name) is not None
        }
    )


def _read_seconds(content: dict[str, Any], name: str, section: str = "") -> float | None:
    """Return None if nothing was measured; 0 is a measurement."""
    value = content.get(name)
    return value if value in (None, 0, 0.0) else _read_positive(content, name, section)


def _read_text(content: dict[str, Any], name: str, section: str = "") -> str:
    value = content.get(name)
    if not isinstance(value, str) or not value:
        raise InputError(
            "expected non-empty text", field=_build_field_name(name, section), got=repr(value)
        )
    return value


def _read_positive(content: dict[str, Any], name: str, section: str = "") -> float:
    value = content.get(name)
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or value <= 0
    ):
        raise InputError(
            "expected a positive number", field=_build_field_name(name, section), got=repr(value)
        )
    return float(value)


def _read_kind(content: dict[str, Any], name: str, section: str) -> str:
    kind = content.get(name)
    if kind not in get_args(CollectiveKind):
        raise InputError(
            "unknown collective",
            field=_build_field_name(name, section),
            got=kind,
            allowed=", ".join(get_args(CollectiveKind)),
        )
    return cast(str, kind)


_VALUE_READERS: dict[str, Callable[[dict[str, Any], str, str], Any]] = {
    "str": _read_text,
    "int": lambda content, name, section: int(_read_positive(content, name, section)),
    "float": _read_positive,
    "float | None": _read_seconds,
    "CollectiveKind": _read_kind,
}
"""Readers of a rate's values by the type of its field."""


def _build_field_name(name: str, section: str) -> str:
    return f"profile.{section}.{name}" if section else f"profile.{name}"
