"""Measured profiles: round trip through a file, refused fields, interpolated rates."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwright.errors import InputError
from shardwright.hardware import (
    AttentionRate,
    CollectiveRate,
    ElementwiseRate,
    MatmulRate,
    MeasuredProfile,
    ScaledProductRate,
    TierRates,
    load_profile,
    parse_cluster,
    save_profile,
)
from shardwright.hardware.measured_profile import read_profile

PROFILE = MeasuredProfile(
    accelerator="NVIDIA H200",
    catalog_name="H200-141GB-SXM",
    measured_at="2026-11-21T00:00:00Z",
    memory_bytes=150_000_000_000,
    memory_bytes_per_second=4.3e12,
    matmuls=(
        MatmulRate("bf16", 1024, 1024, 1024, 3e14),
        MatmulRate("bf16", 8192, 8192, 8192, 7.9e14),
    ),
    collectives=(
        CollectiveRate("all_reduce", 8, 8, 1_000, 2e-5),
        CollectiveRate("all_reduce", 8, 8, 1_001_000, 1.2e-4),
        CollectiveRate("send", 2, 1, 1_000, 1e-2, 1e-3),
        CollectiveRate("send", 2, 1, 900_000, 1e-2, 1e-3),
        CollectiveRate("send", 2, 1, 1_000_000, 2e-2, 3e-3),
        CollectiveRate("all_gather", 2, 2, 1_000, 1e-4, 1e-4, 3e-4),
        CollectiveRate("all_gather", 2, 2, 3_000, 1e-4, 1e-4, 5e-4),
    ),
    software={"torch": "2.13"},
    attention=(
        AttentionRate("bf16", 512, 128, 2e14, 1e14),
        AttentionRate("bf16", 8192, 128, 6e14, 5e14),
        AttentionRate("bf16", 2048, 64, 3e14, 2e14),
    ),
    elementwise=(
        ElementwiseRate("bf16", 1024, 512, 2e12, 1e12),
        ElementwiseRate("bf16", 8192, 4096, 3e12, 2e12),
    ),
    handoff_seconds=0.0,
    tiers=TierRates(host_link_bytes_per_second=5e10, disk_read_bytes_per_second=3e9),
    scaled_products=(ScaledProductRate("rowwise", 8192, 1.6), ScaledProductRate("mxfp8", 8192, 2)),
)


def test_a_profile_without_rates_of_scaled_products_opens() -> None:
    content = json.loads(json.dumps(PROFILE.as_dict()))
    del content["scaled_products"]
    old = read_profile(content)
    assert old == replace(PROFILE, scaled_products=())
    assert old.find_scaled_product_ratio("rowwise") is None
    assert PROFILE.find_scaled_product_ratio("mxfp8") == 2
    content["scaled_products"] = [{"recipe": "rowwise", "side": 8192, "times_bf16": 0}]
    with pytest.raises(InputError, match=r"profile\.scaled_products\.times_bf16"):
        read_profile(content)


def test_a_profile_survives_a_round_trip_through_a_file(tmp_path: Path) -> None:
    save_profile(PROFILE, tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == PROFILE


def test_matmul_rates_are_the_nearest_and_collective_times_are_interpolated() -> None:
    assert PROFILE.find_matmul_flops_per_second("bf16", 900, 1200, 1024) == 3e14
    assert PROFILE.find_matmul_flops_per_second("bf16", 16384, 4096, 8192) == 7.9e14
    assert PROFILE.find_matmul_flops_per_second("fp8", 8192, 8192, 8192) is None
    assert PROFILE.find_collective_seconds("all_reduce", 8, 8, 10) == 2e-5
    assert PROFILE.find_collective_seconds("all_reduce", 8, 8, 501_000) == pytest.approx(7e-5)
    assert PROFILE.find_collective_seconds("all_reduce", 8, 8, 2_001_000) == pytest.approx(2.2e-4)
    assert PROFILE.find_collective_seconds("all_reduce", 16, 8, 1_000) is None
    # The rate of large messages is that between sizes of which one is at least twice the other.
    assert PROFILE.find_collective_seconds("send", 2, 1, 2_000_000) == pytest.approx(3e-2, rel=1e-2)


def test_processor_seconds_of_collectives_are_interpolated_where_they_were_measured() -> None:
    assert PROFILE.find_processor_seconds("send", 2, 1, 950_000) == pytest.approx(2e-3)
    assert PROFILE.find_processor_seconds("all_reduce", 8, 8, 1_000) is None


def test_collectives_between_computations_are_interpolated_where_they_were_measured() -> None:
    assert PROFILE.find_step_seconds("all_gather", 2, 2, 2_000) == pytest.approx(4e-4)
    assert PROFILE.find_step_seconds("send", 2, 1, 1_000) is None


def test_elementwise_rates_are_those_of_the_nearest_size() -> None:
    assert PROFILE.find_elementwise_bytes_per_second("bf16", 512, 1024, is_backward=False) == 2e12
    assert PROFILE.find_elementwise_bytes_per_second("bf16", 8192, 2048, is_backward=True) == 2e12
    assert PROFILE.find_elementwise_bytes_per_second("fp32", 512, 1024, is_backward=False) is None


def test_attention_rates_use_the_nearest_width_and_interpolate_row_lengths() -> None:
    def find_rate(
        row_tokens: float, head_dim: int, *, backward: bool = False, precision: str = "bf16"
    ) -> float | None:
        return PROFILE.find_attention_flops_per_second(
            precision, row_tokens, head_dim, is_backward=backward
        )

    assert find_rate(512, 128) == 2e14
    assert find_rate(2048, 128) == pytest.approx(
        4e14
    )  # halfway from 512 to 8192 on a logarithmic scale
    assert find_rate(2048, 128, backward=True) == pytest.approx(3e14)
    assert (find_rate(16, 128), find_rate(10**6, 128)) == (2e14, 6e14)
    assert find_rate(8192, 80) == 3e14
    assert find_rate(512, 128, precision="fp32") is None


def test_a_profile_without_attention_rates_loads(tmp_path: Path) -> None:
    document = PROFILE.as_dict()
    del document["attention"]
    (tmp_path / "before.json").write_text(json.dumps(document))
    assert load_profile(tmp_path / "before.json").attention == ()


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    assert CollectiveRate("all_reduce", 4, 4, 1_000_000, 1.0).bus_bytes_per_second == 1_500_000
    assert CollectiveRate("all_gather", 4, 4, 1_000_000, 1.0).bus_bytes_per_second == 750_000


def test_rates_of_cpus_are_refused_for_gpus_and_the_reverse() -> None:
    on_cpu = replace(PROFILE, accelerator="x86_64", catalog_name="EPYC-9654")
    assert parse_cluster("2xCPU", profile=on_cpu).profile == on_cpu
    with pytest.raises(InputError, match=r"profile: .*rates of x86_64; allowed: rates of H100-"):
        parse_cluster("8xH100-80GB", profile=on_cpu)
    with pytest.raises(InputError, match="device of another kind"):
        parse_cluster("2xCPU", profile=PROFILE)
    unknown = replace(PROFILE, catalog_name=None)
    assert parse_cluster("2xCPU", profile=unknown).profile == unknown


def test_the_cluster_uses_measured_memory() -> None:
    cluster = parse_cluster("8xH200", profile=PROFILE)
    assert cluster.accelerator.memory_bytes == PROFILE.memory_bytes
    assert cluster.accelerator.memory_bytes_per_second == 4.3e12
    assert cluster.profile is PROFILE


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"schema_version": 2}, "profile.schema_version"),
        ({"memory_bytes": -1}, "profile.memory_bytes"),
        ({"memory_bytes_per_second": None}, "profile.memory_bytes_per_second"),
        ({"accelerator": ""}, "profile.accelerator"),
        ({"matmuls": {}}, "profile.matmuls"),
        ({"tiers": []}, "profile.tiers"),
        (
            {"tiers": {"disk_read_bytes_per_second": 0}},
            "profile.tiers.disk_read_bytes_per_second",
        ),
        (
            {"matmuls": [{"precision": "bf16", "m": 1, "n": 1, "k": True, "flops_per_second": 1}]},
            "profile.matmuls.k",
        ),
        ({"collectives": [{"kind": "gossip"}]}, "profile.collectives.kind"),
    ],
)
def test_an_invalid_profile_is_refused_by_field(
    tmp_path: Path, change: dict[str, Any], field: str
) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(PROFILE.as_dict() | change))
    with pytest.raises(InputError) as raised:
        load_profile(path)
    assert raised.value.field == field


def test_missing_files_and_invalid_json_are_wrong_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        load_profile(tmp_path / "none.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(InputError, match="not JSON"):
        load_profile(tmp_path / "broken.json")
