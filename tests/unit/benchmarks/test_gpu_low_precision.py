"""The comparison of 8-bit and 4-bit recipes with bf16, rehearsed on a CPU, and its page."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks import gpu_low_precision
from benchmarks.gpu_low_precision_page import render_low_precision
from benchmarks.gpu_page import render_page
from benchmarks.gpu_quantised_steps import sum_by_kind

RECIPES = ("tensorwise", "mxfp8", "nvfp4")


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    target = tmp_path_factory.mktemp("low-precision") / "result.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_low_precision, "RECIPE_NAMES", RECIPES)
        patch.setattr(sys, "argv", ["gpu_low_precision", "cpu", "tiny", str(target)])
        gpu_low_precision.main()
    content: dict[str, Any] = json.loads(target.read_text())
    return content


def test_everything_is_compared(result: dict[str, Any]) -> None:
    assert tuple(result["kernels"]) == RECIPES
    assert "compute_expert_output" in result["kernels"]["mxfp8"]
    assert "compute_expert_output" not in result["kernels"]["tensorwise"]
    assert all(
        row["distance"] <= gpu_low_precision.LIMIT and row["seconds"] > 0
        for products in result["kernels"].values()
        for row in products.values()
    )
    assert list(result["steps"]) == ["bf16", *RECIPES]
    for step in result["steps"].values():
        assert step["kernel_seconds"]["products"] > 0
        assert sum(step["kernel_seconds"].values()) >= sum(k["seconds"] for k in step["kernels"])
    assert list(result["curves"]) == ["bf16, seed 0", "bf16, seed 1", *RECIPES]
    curves = result["curves"]
    plain = curves["bf16, seed 0"]["losses"]
    assert plain[0] != curves["bf16, seed 1"]["losses"][0]
    for recipe in RECIPES:
        assert curves[recipe]["losses"] != plain
        assert curves[recipe]["losses"] == pytest.approx(plain, rel=0.01)
        assert (curves[recipe]["saturated"], curves[recipe]["nonfinite"]) == (0, 0)
        assert curves[recipe]["num_counted"] > 0


def test_kernels_are_summed_by_kind() -> None:
    kinds = {
        "nvjet_qqtst_128x256_128x6_2x1_v_bz_coopA_TNT": "products",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "products",
        "void cutlass::device_kernel<at::cuda::detail::f8f8bf16_rowwise>": "products",
        "void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel": "attention",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma": "attention",
        "triton_red_fused_abs_add_amax_mean_mul_pow_rsqrt_view_0": "quantisation",
        "triton_poi_fused__scaled_mm_v2_clone_permute_7": "quantisation",
        "triton_poi_fused_add_div_exp_mul_neg_sigmoid_3": "rest",
        "Memcpy DtoD (Device -> Device)": "rest",
    }
    for name, kind in kinds.items():
        seconds = sum_by_kind([{"name": name, "seconds": 2.0}, {"name": name, "seconds": 1.0}])
        assert {key: value for key, value in seconds.items() if value} == {kind: 3.0}, name


def test_a_kernel_that_differs_fails_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"distance": 0.1, "seconds": 1.0, "bf16_seconds": 1.0}
    monkeypatch.setattr(gpu_low_precision, "RECIPE_NAMES", ("rowwise",))
    monkeypatch.setattr(gpu_low_precision, "compare_kernels", lambda *_: {"compute_output": row})
    for name in ("time_steps", "train_curve"):
        monkeypatch.setattr(gpu_low_precision, name, lambda *_: {})
    monkeypatch.setattr(sys, "argv", ["", "cpu", "tiny", str(tmp_path / "result.json")])
    with pytest.raises(SystemExit, match=r"rowwise compute_output: 1\.0e-01"):
        gpu_low_precision.main()


def test_the_page_names_missing_and_failed_recipes(result: dict[str, Any]) -> None:
    steps = dict(result["steps"]) | {"mxfp8": {"failed": "RuntimeError: a|b"}}
    changed = result | {"obstacles": {"blockwise": "no kernel on this GPU"}, "steps": steps}
    page = render_low_precision(changed)
    assert "- blockwise: no kernel on this GPU" in page
    assert "RuntimeError: a\\|b" in page
    assert "| bf16, seed 1 |" in page
    assert "| passes | products | quantisation | attention | rest |" in page
    whole = render_page(
        {"steps": [{"name": "low precision", "part": 7, "status": "passed", "result": changed}]}
    )
    assert "## 8-bit and 4-bit products" in whole
    assert "tensorwise" in whole
    assert "has another form" not in whole
