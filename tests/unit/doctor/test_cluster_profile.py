"""A calibration measures every rate that the planner looks up, and its rates change predictions."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.config.layout import ClusterSection
from shardwright.config.recipe import Recipe
from shardwright.config.recipe_loading import validate_recipe
from shardwright.doctor.diagnosis import Diagnosis
from shardwright.doctor.examination import ExaminationRequest
from shardwright.doctor.finding import Finding
from shardwright.doctor.rates import planner_lookups
from shardwright.doctor.rates.cluster_profile import build_profile, build_request
from shardwright.doctor.rates.device_rates import AttentionWorkload, time_attention
from shardwright.doctor.rates.elementwise import time_elementwise
from shardwright.doctor.rates.scaled_rates import ScaledRate
from shardwright.errors import InputError
from shardwright.hardware import (
    AttentionRate,
    CollectiveRate,
    ElementwiseRate,
    MatmulRate,
    MeasuredProfile,
    ScaledProductRate,
    load_profile,
    save_profile,
)
from shardwright.hardware.catalog_loading import find_accelerator
from shardwright.layout import Layout
from shardwright.planner.auto_layout import build_cluster
from shardwright.planner.candidate import Candidate
from shardwright.planner.prediction import Prediction
from shardwright.planner.predictor import predict
from shardwright.planner.problem import build_recipe_candidate, build_template, read_planning_shape
from shardwright.planner.rates.calibration import load_efficiencies

LAYOUT = Layout(dp_shard=2, zero_stage=3)


@pytest.fixture
def recipe() -> Recipe:
    return validate_recipe(
        {
            "model": {
                "config": {
                    "model_type": "llama",
                    "hidden_size": 192,
                    "intermediate_size": 512,
                    "num_hidden_layers": 4,
                    "num_attention_heads": 6,
                    "num_key_value_heads": 3,
                    "vocab_size": 2048,
                    "max_position_embeddings": 512,
                }
            },
            "data": {"sources": "corpus.txt"},
            "training": {
                "sequence_length": 256,
                "micro_batch_size": 4,
                "max_steps": 10,
                "learning_rate": 1e-3,
            },
            "precision": "bf16",
            "layout": {"zero_stage": 3},
        }
    )


def make_diagnosis(
    request: ExaminationRequest,
    flops_per_second: float,
    bytes_per_second: float,
    attention_flops_per_second: float | None = None,
    handoff_seconds: float = 0.0,
) -> Diagnosis:
    """Return an examination of two ranks, one of them a fifth slower; links transfer 1 GB/s after
    50 us.

    Args:
        attention_flops_per_second: rate of attention, if not that of products.
        handoff_seconds: cost of each synchronisation of the ranks between two computations.
    """
    products = [
        asdict(MatmulRate(*shape, flops_per_second * share)) | {"rank": rank}
        for shape in request.matmuls
        for rank, share in ((0, 1.0), (1, 0.8))
    ]
    attention = [
        asdict(
            AttentionRate(
                rows.precision, rows.row_tokens, rows.head_dim, share * rate, share * rate
            )
        )
        | {"rank": rank}
        for rate in [attention_flops_per_second or flops_per_second]
        for rows in request.attention
        for rank, share in ((0, 1.0), (1, 0.8))
    ]
    copies = [
        {"kind": "memory", "num_bytes": 2**26, "bytes_per_second": bytes_per_second, "rank": rank}
        for rank in (0, 1)
    ]
    collectives = [
        asdict(CollectiveRate(kind, size, size, num_bytes, 50e-6 + num_bytes / 1e9))
        | {"axis": "dp_shard", "ranks": [0, 1]}
        for kind, size, num_bytes in request.messages
    ]
    elementwise = [
        asdict(ElementwiseRate(*tensor, share * bytes_per_second, share * bytes_per_second / 2))
        | {"rank": rank}
        for tensor in request.elementwise
        for rank, share in ((0, 1.0), (1, 0.8))
    ]
    rates = {
        "products": products,
        "attention": attention,
        "copies": copies,
        "collectives": collectives,
    }
    rates |= {
        "elementwise": elementwise,
        "handoffs": [{"rank": rank, "seconds": handoff_seconds} for rank in (0, 1)],
    }
    return Diagnosis((), 2, str(request.layout), "cpu", "x86_64", 2**34, rates)


def predict_for_cpus(recipe: Recipe, profile: Path | None) -> Prediction:
    """Predict the recipe for two CPUs as `train` and `plan` do."""
    cluster = build_cluster(
        ClusterSection(node="2xEPYC-9654", profile=None if profile is None else str(profile)), 2
    )
    candidate = build_recipe_candidate(recipe, build_template(recipe), 2)
    assert isinstance(candidate, Candidate)
    return predict(
        read_planning_shape(recipe),
        candidate,
        cluster,
        load_efficiencies().get_efficiency(cluster.accelerator),
    )


def test_a_profile_has_the_ratio_of_each_recipe_that_was_measured(recipe: Recipe) -> None:
    request = build_request(recipe, LAYOUT, device="cpu", should_calibrate=True)
    diagnosis = make_diagnosis(request, 1e11, 1e10)
    measured = [
        asdict(ScaledRate("rowwise", 512, 1e11, kernel_flops_per_second=rate, obstacle=None))
        for rate in (1.5e11, 1.7e11)
    ]
    diagnosis.rates["scaled_products"] = [
        *measured,
        asdict(ScaledRate("blockwise", 512, 1e11, obstacle="no kernel")),
    ]
    profile = build_profile(diagnosis, request)
    assert profile.scaled_products == (ScaledProductRate("rowwise", 512, 1.6),)


@pytest.mark.parametrize("kind", ["fp8", "nvfp4"])
def test_a_recipe_with_quantised_products_has_lookups_in_bf16(
    kind: str, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rates of quantised products are multiples of those of bf16, of the same shapes."""
    monkeypatch.setattr(planner_lookups, "find_catalog_name", lambda *_: "B200-180GB-SXM")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "")

    def list_products(precision: Any) -> set[Any]:
        changed = validate_recipe(recipe.model_dump(mode="json") | {"precision": precision})
        return set(planner_lookups.list_recipe_lookups(changed, LAYOUT, "cuda").matmuls)

    section = {"kind": kind, kind: {"experimental": True} if kind == "nvfp4" else {}}
    assert list_products(section) == list_products("bf16")
    monkeypatch.undo()
    with pytest.raises(InputError, match="no hardware support for"):
        planner_lookups.list_recipe_lookups(
            validate_recipe(recipe.model_dump(mode="json") | {"precision": section}),
            LAYOUT,
            "cpu",
        )


def test_every_rate_that_the_planner_looks_up_is_measured(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    request = build_request(recipe, LAYOUT, device="cpu", should_calibrate=True)
    save_profile(
        build_profile(make_diagnosis(request, 1e11, 1e10), request), tmp_path / "here.json"
    )
    missed: list[Any] = []
    find_matmul = MeasuredProfile.find_matmul_flops_per_second

    def record_matmul(
        self: MeasuredProfile, precision: str, m: int, n: int, k: int
    ) -> float | None:
        if not any(
            (rate.precision, rate.m, rate.n, rate.k) == (precision, m, n, k)
            for rate in self.matmuls
        ):
            missed.append((precision, m, n, k))
        return find_matmul(self, precision, m, n, k)

    find_attention = MeasuredProfile.find_attention_flops_per_second

    def record_attention(
        self: MeasuredProfile,
        precision: str,
        row_tokens: float,
        head_dim: int,
        *,
        is_backward: bool,
    ) -> float | None:
        if not any(
            (rate.precision, rate.row_tokens, rate.head_dim) == (precision, row_tokens, head_dim)
            for rate in self.attention
        ):
            missed.append((precision, row_tokens, head_dim))
        return find_attention(self, precision, row_tokens, head_dim, is_backward=is_backward)

    find_elementwise = MeasuredProfile.find_elementwise_bytes_per_second

    def record_elementwise(
        self: MeasuredProfile, precision: str, tokens: int, width: int, *, is_backward: bool
    ) -> float | None:
        if not any(
            (rate.precision, rate.tokens, rate.width) == (precision, tokens, width)
            for rate in self.elementwise
        ):
            missed.append((precision, tokens, width))
        return find_elementwise(self, precision, tokens, width, is_backward=is_backward)

    monkeypatch.setattr(MeasuredProfile, "find_elementwise_bytes_per_second", record_elementwise)
    monkeypatch.setattr(MeasuredProfile, "find_matmul_flops_per_second", record_matmul)
    monkeypatch.setattr(MeasuredProfile, "find_attention_flops_per_second", record_attention)
    predict_for_cpus(recipe, tmp_path / "here.json")
    assert missed == []
    assert {rows.row_tokens for rows in request.attention} == {128, 256, 512, 2048}
    assert {kind for kind, _, _ in request.messages} == {"all_gather", "reduce_scatter"}


def test_predictions_follow_measured_rates(recipe: Recipe, tmp_path: Path) -> None:
    request = build_request(recipe, LAYOUT, device="cpu", should_calibrate=True)
    times = {}
    for name, flops, bytes_per_second in (("slow", 1e10, 1e9), ("fast", 1e11, 1e10)):
        profile = build_profile(make_diagnosis(request, flops, bytes_per_second), request)
        save_profile(profile, tmp_path / f"{name}.json")
        assert load_profile(tmp_path / f"{name}.json") == profile
        # The median of the two ranks.
        assert profile.matmuls[0].flops_per_second == pytest.approx(0.9 * flops)
        assert profile.catalog_name == "EPYC-9654"
        times[name] = predict_for_cpus(recipe, tmp_path / f"{name}.json").time
    assert times["slow"].compute == pytest.approx(10 * times["fast"].compute, rel=0.05)
    assert times["slow"].optimizer == pytest.approx(10 * times["fast"].optimizer, rel=0.01)
    # The 96 cores of the data sheet are faster than either.
    assert predict_for_cpus(recipe, None).time.step < times["fast"].step


def test_predictions_follow_measured_attention(recipe: Recipe, tmp_path: Path) -> None:
    request = build_request(recipe, LAYOUT, device="cpu", should_calibrate=True)
    seconds = []
    for name, attention_flops_per_second in (("slow", 1e8), ("fast", 1e10)):
        save_profile(
            build_profile(make_diagnosis(request, 1e11, 1e10, attention_flops_per_second), request),
            tmp_path / f"{name}.json",
        )
        seconds.append(predict_for_cpus(recipe, tmp_path / f"{name}.json").time.compute)
    # 4 rows of 256, 4 layers, 6 heads of 32: forward and 2.5 times that backward, at nine tenths of
    # the given rate.
    flops = 3.5 * 4 * 2 * (2 * 6 * 32) * (4 * 256) * (257 / 2)
    assert seconds[0] - seconds[1] == pytest.approx(
        flops / (0.9 * 1e8) - flops / (0.9 * 1e10), rel=1e-6
    )


def test_the_profile_counts_the_cores_of_the_smallest_host(recipe: Recipe, tmp_path: Path) -> None:
    request = build_request(recipe, LAYOUT, device="cpu", should_calibrate=True)
    diagnosis = make_diagnosis(request, 1e11, 1e10)
    assert build_profile(diagnosis, request).num_cores is None
    findings = tuple(
        Finding("host", f"cores @ {name}", "pass", "", numbers={"cores": cores})
        for name, cores in (("one", 8.0), ("two", 1.5))
    )
    profile = build_profile(replace(diagnosis, findings=findings), request)
    save_profile(profile, tmp_path / "here.json")
    assert load_profile(tmp_path / "here.json").num_cores == 1.5


def test_predictions_follow_measured_elementwise_operations(recipe: Recipe, tmp_path: Path) -> None:
    request = build_request(recipe, LAYOUT, device="cpu", should_calibrate=True)
    profile = build_profile(make_diagnosis(request, 1e11, 1e10), request)
    assert [(rate.precision, rate.tokens, rate.width) for rate in profile.elementwise] == [
        ("bf16", 1024, 192)
    ]
    seconds = []
    for share in (1.0, 0.01):
        (rate,) = profile.elementwise
        slow = replace(
            rate,
            forward_bytes_per_second=share * rate.forward_bytes_per_second,
            backward_bytes_per_second=share * rate.backward_bytes_per_second,
        )
        save_profile(replace(profile, elementwise=(slow,)), tmp_path / "here.json")
        seconds.append(predict_for_cpus(recipe, tmp_path / "here.json").time.compute)
    # 4 layers of two norms, two sums, rotations and a gate on 1024 tokens; a hundredth of the rate
    # adds 99 times the time.
    width = 1024 * 192
    heads = 1024 * (192 + 96)
    inner = 1024 * 512
    forward = 2 * (10 * width + 3 * heads + 5 * inner)
    backward = 2 * (12 * width + 3 * heads + 11 * inner)
    share = load_efficiencies().get_efficiency(find_accelerator("CPU")).bytes_share
    all_layers_seconds = 4 * share * (forward / (0.9 * 1e10) + backward / (0.9 * 5e9))
    assert seconds[1] - seconds[0] == pytest.approx(99 * all_layers_seconds, rel=1e-6)


def test_every_collective_of_a_step_pays_for_its_synchronisation(
    recipe: Recipe, tmp_path: Path
) -> None:
    request = build_request(recipe, LAYOUT, device="cpu", should_calibrate=True)
    seconds = []
    for handoff in (0.0, 0.002):
        save_profile(
            build_profile(make_diagnosis(request, 1e11, 1e10, handoff_seconds=handoff), request),
            tmp_path / "here.json",
        )
        seconds.append(predict_for_cpus(recipe, tmp_path / "here.json").time.data)
    # Four layers are gathered in both passes and reduced in one; embedding and head are gathered
    # once. The engine's own work around each of them takes a share of the synchronisation.
    share = load_efficiencies().get_efficiency(find_accelerator("CPU")).handoff_share
    each = 0.002 * (1 + share)
    assert seconds[1] - seconds[0] == pytest.approx(each * (3 * 4 + 2), rel=0.15)


def test_elementwise_rates_use_the_counted_bytes() -> None:
    rate = time_elementwise("bf16", 64, 32, torch.device("cpu"), seconds=0.002)
    assert (rate.precision, rate.tokens, rate.width) == ("bf16", 64, 32)
    assert min(rate.forward_bytes_per_second, rate.backward_bytes_per_second) > 0


def test_attention_rates_use_the_counted_flops() -> None:
    rows = AttentionWorkload(
        "fp32", num_rows=2, row_tokens=8, num_heads=4, num_kv_heads=2, head_dim=16
    )
    assert rows.flops == 2 * (2 * 4 * 16) * (2 * 8) * 4.5
    rate = time_attention(rows, torch.device("cpu"), seconds=0.001)
    assert rate is not None
    assert (rate.precision, rate.row_tokens, rate.head_dim) == ("fp32", 8, 16)
    assert min(rate.forward_flops_per_second, rate.backward_flops_per_second) > 0


def test_without_a_recipe_common_shapes_are_measured() -> None:
    request = build_request(None, LAYOUT, device="cpu", should_calibrate=True)
    assert {shape[0] for shape in request.matmuls} == {"fp32", "bf16"}
    assert len(request.matmuls) > 40
    assert len(request.attention) == 3
    assert build_request(None, LAYOUT, device="cpu").matmuls == ()
    assert build_request(None, LAYOUT, device="cpu").attention == ()


def test_long_products_are_measured_with_fewer_rows(recipe: Recipe) -> None:
    long = recipe.model_copy(
        update={"training": recipe.training.model_copy(update={"micro_batch_size": 4096})}
    )
    request = build_request(long, LAYOUT, device="cpu", should_calibrate=True)
    assert max(2.0 * m * n * k for _, m, n, k in request.matmuls) <= 1e11
    assert max(rows.flops for rows in request.attention) <= 1e11
    assert max(num_bytes for _, _, num_bytes in request.messages) <= 64 * 2**20


def test_an_incomplete_examination_gives_no_profile() -> None:
    request = build_request(None, LAYOUT, device="cpu", should_calibrate=True)
    incomplete = replace(
        make_diagnosis(request, 1e11, 1e10), rates={"products": [], "copies": [], "collectives": []}
    )
    with pytest.raises(InputError, match="stopped early"):
        build_profile(incomplete, request)
