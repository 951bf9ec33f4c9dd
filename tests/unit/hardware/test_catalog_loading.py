"""The catalogue: alternative names, plausible numbers, parsed clusters."""

from __future__ import annotations

import pytest

from shardwright.errors import InputError
from shardwright.hardware import (
    Cluster,
    find_accelerator,
    find_link,
    find_node,
    list_accelerators,
    list_links,
    parse_cluster,
)
from shardwright.units import GIB_BYTES


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("H100-80GB-SXM", "H100-80GB-SXM"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB-SXM"),
        ("H100-96GB-SXM-HBM2e-500W", "H100-96GB-SXM-HBM2e"),
        ("A100-SXM (DGX-A100, 2020)", "A100-80GB-SXM"),
        ("B200 (power limited)", "B200-180GB-SXM"),
        ("V100-SXM (DGX-2)", "V100-32GB-SXM"),
        ("GeForce RTX 4090", "RTX4090-24GB"),
        ("AMD Instinct MI300X", "MI300X-192GB"),
        ("MI250X GCD", "MI250X-GCD-64GB"),
        ("GH200 120GB", "GH200-96GB"),
        # Names without an entry: family, memory and form factor are parsed separately.
        ("A10 (24GB)", "A10-24GB"),
        ("A100 80G", "A100-80GB-SXM"),
        ("A100 40GB PCIe", "A100-40GB-PCIe"),
        ("DGX A100 (40GB)", "A100-40GB-SXM"),
        ("H100 SXM5 80 GB HBM3", "H100-80GB-SXM"),
        ("H100s", "H100-80GB-SXM"),
        ("Tesla V100-PCIE-16GB", "V100-16GB-PCIe"),
        ("Intel Gaudi 3 (128 GB)", "Gaudi3-128GB"),
        ("L40S 48GB", "L40S-48GB"),
        ("L40 48GB", "L40-48GB"),
    ],
)
def test_names_of_data_sheets_drivers_and_published_tables_are_known(alias: str, name: str) -> None:
    assert find_accelerator(alias).name == name


@pytest.mark.parametrize("name", list_accelerators())
def test_every_entry_is_complete_and_has_sources(name: str) -> None:
    node = find_node(name)
    device = node.accelerator
    numbers = {
        "memory_bytes",
        "memory_bytes_per_second",
        "power_watts",
        *device.peak_flops_per_second,
    }
    numbers |= {f"sustained {precision}" for precision in device.sustained_flops_per_second}
    assert set(device.sources) == numbers
    assert all(
        any(year in text for year in map(str, range(2015, 2027)))
        for text in device.sources.values()
    ), "every source has a date"
    assert 14 * GIB_BYTES < device.memory_bytes < 400 * GIB_BYTES
    assert 2e11 < device.memory_bytes_per_second < 1e13
    peaks = device.peak_flops_per_second
    if device.kind == "gpu" and device.vendor != "Intel":
        assert peaks["fp16"] >= 1.9 * peaks["fp32"]
        assert peaks.get("fp8", 2 * peaks["fp16"]) == pytest.approx(2 * peaks["fp16"], rel=0.02), (
            "dense, not sparse"
        )
    assert all(
        0.4 * peaks[precision] < sustained < peaks[precision]
        for precision, sustained in device.sustained_flops_per_second.items()
    )
    assert node.intra.bytes_per_second > node.inter.bytes_per_second


def test_every_entry_is_found_by_its_name_and_by_its_parts() -> None:
    for name in list_accelerators():
        assert find_accelerator(name).name == name
        assert find_accelerator(f"NVIDIA {name.replace('-', ' ')} GPU").name == name, (
            "the same entry, parsed by its parts"
        )


def test_a_links_rate_is_one_direction_of_one_accelerator() -> None:
    assert find_link("nvlink4", 8).bytes_per_second == 450e9
    assert find_link("ib400", 8).bytes_per_second == 50e9
    assert find_link("eth100", 8).bytes_per_second == pytest.approx(100e9 / 8 / 8)
    assert (
        find_link("8xib200", 8).bytes_per_second == find_link("ib200", 8).bytes_per_second == 25e9
    )
    assert find_link("4xopa100", 8).bytes_per_second == 6.25e9
    assert all(find_link(name, 8).sources for name in list_links())


def test_a_cluster_is_parsed_from_its_name() -> None:
    cluster = parse_cluster("8xH100-80GB", num_nodes=4, link="ib400")
    assert (cluster.num_gpus, cluster.domain_size, cluster.name) == (
        32,
        8,
        "4 x 8xH100-80GB-SXM over ib400",
    )
    assert cluster.get_link(8, 1).kind == "nvlink"
    assert cluster.get_link(9, 1).kind == "infiniband"
    assert cluster.get_link(2, 8).kind == "infiniband"
    assert cluster.get_link(4, 2).kind == "nvlink"


def test_a_rack_is_one_domain() -> None:
    cluster = parse_cluster("4xGB200", num_nodes=32)
    assert cluster.domain_size == 72
    assert cluster.get_link(64, 1).kind == "nvlink"
    assert cluster.get_link(128, 1).kind == "infiniband"


def test_two_nodes_need_a_link_and_one_does_not() -> None:
    node = find_node("H100")
    assert Cluster(node.accelerator, 8, 1, node.intra).inter is None
    with pytest.raises(InputError, match="no link connects the nodes"):
        Cluster(node.accelerator, 8, 2, node.intra)


@pytest.mark.parametrize("name", ["H1000", "8xH10-80GB", "A100-20GB", "H100-64GB", "warp drive"])
def test_unknown_accelerators_are_refused_with_the_nearest(name: str) -> None:
    with pytest.raises(InputError, match="not in the catalogue") as raised:
        parse_cluster(name)
    assert raised.value.exit_code == 2
    assert "SXM" in str(raised.value.allowed)
    assert "CPU for the cores of this machine" in str(raised.value.remedy)


def test_unknown_links_and_zero_accelerators_are_refused() -> None:
    with pytest.raises(InputError, match=r"closest: .*ib400"):
        find_link("ib4000", 8)
    with pytest.raises(InputError, match="at least 1"):
        parse_cluster("0xH100")


@pytest.mark.parametrize(
    ("digits", "got"),
    [
        ("262145", "262145 GPUs"),
        ("123456789", "123456789 GPUs"),
        ("12345678901234", "12345678901234;"),
        ("9" * 5000, r"999999999\.\.\. \(5,000 digits\)"),
    ],
)
def test_clusters_with_too_many_devices_are_refused(digits: str, got: str) -> None:
    with pytest.raises(InputError, match=rf"^cluster: .*got {got}.*at most 262,144"):
        parse_cluster(f"{digits}xH100-80GB")
    if len(digits) > 9:
        with pytest.raises(InputError, match=rf"^link: .*got {got}.*at most 262,144"):
            find_link(f"{digits}xib400", 8)


def test_leading_zeros_of_a_number_do_not_count() -> None:
    assert parse_cluster("0000000000008xH100-80GB") == parse_cluster("8xH100-80GB")
