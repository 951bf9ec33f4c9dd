"""Fitted efficiencies: precedence of sections, and plausible values for every accelerator."""

from __future__ import annotations

import pytest

from shardwright.hardware import find_accelerator, list_accelerators
from shardwright.planner import Efficiency
from shardwright.planner.published.frameworks import FRAMEWORK_DEFAULTS
from shardwright.planner.rates.calibration import ALL_FRAMEWORKS, EfficiencyTable, load_efficiencies

H100 = find_accelerator("H100")


def test_the_more_specific_entry_has_precedence() -> None:
    efficiencies = EfficiencyTable(
        {
            "accelerators": {
                "Hopper": {"matmul_share": 0.7, "m_half": 100.0},
                "H100-80GB-SXM": {"m_half": 200.0},
            },
            "frameworks": {
                "aleph": {"matmul_share": 0.6, "host_seconds": 1e-3, "memory_share": 0.5},
                "aleph on gpu": {"host_seconds": 2e-3, "memory_share": 0.6},
                "aleph on cpu": {"host_seconds": 3e-3},
            },
            "features": {"torch": {"bytes_share": 3.0, "memory_share": 0.7}},
        }
    )
    assert efficiencies.get_efficiency(H100, "aleph").memory_share == 0.6
    assert efficiencies.get_efficiency(find_accelerator("cpu"), "aleph").host_seconds == 3e-3
    plain = efficiencies.get_efficiency(H100)
    assert (plain.matmul_share, plain.m_half, plain.bytes_share) == (0.7, 200.0, 1.0)
    with_entries = efficiencies.get_efficiency(H100, "aleph", ["torch"])
    assert (with_entries.matmul_share, with_entries.m_half, with_entries.bytes_share) == (
        0.6,
        200.0,
        3.0,
    )
    assert (with_entries.host_seconds, with_entries.memory_share) == (2e-3, 0.7)
    assert efficiencies.get_efficiency(find_accelerator("A100")) == Efficiency(), (
        "unfitted values are the default"
    )


def test_unfitted_accelerators_use_the_rates_that_their_vendor_measured() -> None:
    unfitted = EfficiencyTable({}).get_efficiency(find_accelerator("MI300X"))
    assert unfitted.matmul_share == pytest.approx(708 / 1307.4)
    assert unfitted.attention_forward_share < Efficiency().attention_forward_share
    of_kind = {"matmul_share": 0.75, "attention_forward_share": 0.6}
    shared = EfficiencyTable({"accelerators": {"gpu": of_kind}})
    scaled = shared.get_efficiency(find_accelerator("MI300X"))
    assert scaled.matmul_share == pytest.approx(708 / 1307.4), "what all GPUs reach, it does not"
    assert scaled.attention_forward_share == pytest.approx(0.6 * 708 / 1307.4 / 0.75)
    assert shared.get_efficiency(H100).matmul_share == 0.75
    fitted = EfficiencyTable({"accelerators": {"CDNA 3": {"matmul_share": 0.5}}})
    assert fitted.get_efficiency(find_accelerator("MI300X")).matmul_share == 0.5


def test_our_engine_runs_flash_attention_2_on_ampere() -> None:
    ours = load_efficiencies().get_efficiency(find_accelerator("A100"))
    fitted = load_efficiencies().get_efficiency(find_accelerator("A100"), "llm-foundry")
    assert (ours.attention_forward_share, ours.attention_backward_share) == (0.73, 0.63)
    assert fitted.attention_forward_share < 0.5, "FlashAttention of 2022"


def test_frameworks_share_values_of_their_implementation_below_those_of_the_device() -> None:
    efficiencies = EfficiencyTable(
        {
            "frameworks": {
                ALL_FRAMEWORKS: {"data_overlap": 0.5, "bytes_share": 2.0},
                "FSDP2": {"data_overlap": 0.8},
            },
            "accelerators": {"cpu": {"data_overlap": 0.0}},
        }
    )
    assert efficiencies.get_efficiency(H100, "torchtitan") == efficiencies.get_efficiency(H100), (
        "shardwright uses FSDP2 too"
    )
    assert (
        efficiencies.get_efficiency(H100).data_overlap,
        efficiencies.get_efficiency(H100).bytes_share,
    ) == (0.8, 2.0)
    assert efficiencies.get_efficiency(H100, "aleph").data_overlap == 0.5
    assert efficiencies.get_efficiency(find_accelerator("EPYC-9654")).data_overlap == 0.0
    own_entry = ("frameworks", "torchtitan")
    assert (
        efficiencies.get_efficiency(H100, "torchtitan", before_entry=own_entry).data_overlap == 0.8
    )


def test_replacing_one_value_keeps_the_others() -> None:
    before = EfficiencyTable({"frameworks": {"aleph": {"matmul_share": 0.6}}})
    after = before.replace_value("frameworks", "aleph", "m_half", 1.0)
    assert after.get_efficiency(H100, "aleph").matmul_share == 0.6
    assert after.get_efficiency(H100, "aleph").m_half == 1.0
    assert before.get_efficiency(H100, "aleph").m_half == Efficiency().m_half
    with pytest.raises(AssertionError):
        before.replace_value("frameworks", "aleph", "luck", 1.0)


@pytest.mark.parametrize("name", list_accelerators())
def test_the_packaged_values_are_plausible(name: str) -> None:
    for framework in ("shardwright", *FRAMEWORK_DEFAULTS):
        efficiency = load_efficiencies().get_efficiency(find_accelerator(name), framework)
        for share in (
            "matmul_share",
            "attention_forward_share",
            "memory_share",
            "intra_share",
            "inter_share",
        ):
            assert 0 < getattr(efficiency, share) <= 1, share
        assert 0 <= efficiency.data_overlap <= 1
        if framework == "shardwright":
            assert (efficiency.data_overlap == 0) == efficiency.runs_on_host, (
                "on a CPU, the host and the device cannot overlap"
            )
        assert all(0 < share <= 1 for share in efficiency.matmul_share_by_precision.values())
        assert 0 < efficiency.host_seconds < 1e-3
        assert 0 <= efficiency.straggler_share < 0.5
