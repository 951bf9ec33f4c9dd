"""Summary of a trace of a CUDA device, whose events are written by hand; times are microseconds."""

from __future__ import annotations

from typing import Any

import pytest

from shardwright.telemetry.trace_summary import (
    RANGE_PREFIX,
    classify_kernel,
    describe_summary,
    render_summary,
    summarise_trace,
)

MAIN = 1
AUTOGRAD = 2


def span(category: str, name: str, tid: int, start: float, end: float, **args: Any) -> Any:
    times = {"ts": start, "dur": end - start}
    return {"ph": "X", "cat": category, "name": name, "tid": tid, "args": args} | times


def mark(name: str, start: float, end: float) -> Any:
    return span("user_annotation", RANGE_PREFIX + name, MAIN, start, end)


def launch(correlation: int, tid: int, start: float, end: float, name: str = "launch") -> Any:
    return span("cuda_runtime", name, tid, start, end, correlation=correlation)


def kernel(name: str, correlation: int, start: float, end: float, stream: int = 7) -> Any:
    return span("kernel", name, stream, start, end, correlation=correlation)


FUNCTION = "autograd::engine::evaluate_function: MmBackward0"
EVENTS = [
    {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
    span("Trace", "PyTorch Profiler (0)", 0, 0, 2000),
    # The main thread waits in the range of the passes while autograd's thread launches.
    mark("forward and backward", 0, 1000),
    launch(1, MAIN, 100, 105),
    kernel("triton_poi_fused_add_norm", 1, 108, 300),
    launch(2, MAIN, 110, 115),
    kernel("nvjet_tst_128x256", 2, 300, 500),
    span("cpu_op", FUNCTION, AUTOGRAD, 490, 900),
    span("cpu_op", "MmBackward0", AUTOGRAD, 510, 890),
    span("cpu_op", "aten::mm", AUTOGRAD, 550, 566),
    launch(3, AUTOGRAD, 560, 565),
    kernel("sm90_xmma_gemm", 3, 570, 700),
    launch(4, AUTOGRAD, 565, 566),
    kernel("cudnn_flash_bprop", 4, 700, 1010),
    mark("gradient norm", 1000, 1200),
    launch(5, MAIN, 1005, 1008),
    kernel("reduce_kernel", 5, 1010, 1100),
    span("cuda_runtime", "cudaMemcpyAsync", MAIN, 1010, 1200, correlation=6),
    span("gpu_memcpy", "Memcpy DtoH", 7, 1100, 1250, correlation=6, bytes=8),
    mark("update", 1200, 1300),
    launch(7, MAIN, 1250, 1254, "cuLaunchKernel"),
    kernel("triton_poi_fused_clamp", 7, 1258, 1400),
    launch(8, MAIN, 1260, 1264),
    kernel("triton_poi_fused_1", 8, 1300, 1390, stream=8),
    launch(9, MAIN, 1264, 1268),
    kernel("triton_poi_fused_2", 9, 1420, 1430, stream=8),
]


def test_busy_and_idle_time_by_phase() -> None:
    summary = summarise_trace(EVENTS)
    assert summary.has_device
    assert summary.seconds == pytest.approx(1322e-6)
    assert summary.busy_seconds == pytest.approx((1322 - 70 - 158 - 20) * 1e-6)
    by_name = {phase.name: phase for phase in summary.phases}
    assert list(by_name) == ["forward", "backward", "gradient norm", "update"]
    busy = {name: phase.busy_seconds * 1e6 for name, phase in by_name.items()}
    expected = {"forward": 392, "backward": 440, "gradient norm": 90, "update": 152}
    assert busy == pytest.approx(expected)  # overlapping kernels count once, transfers do not
    idle = {name: phase.idle_seconds * 1e6 for name, phase in by_name.items()}
    assert idle == pytest.approx({"forward": 0, "backward": 70, "gradient norm": 0, "update": 178})
    bound = {name: phase.num_host_bound for name, phase in by_name.items()}
    assert bound == {"forward": 1, "backward": 0, "gradient norm": 1, "update": 1}
    assert summary.host_bound_share == pytest.approx(3 / 8)


def test_kernels_by_kind() -> None:
    summary = summarise_trace(EVENTS, {"update": 242e6})
    kinds = {kind.name: (kind.calls, kind.seconds * 1e6) for kind in summary.kinds}
    expected = {
        "products": (2, 330),
        "attention": (1, 310),
        "update": (3, 242),
        "generated": (1, 192),
        "transfers": (1, 150),
        "gradient norm": (1, 90),
    }
    assert list(kinds) == list(expected)
    for name, (calls, seconds) in expected.items():
        assert kinds[name] == (calls, pytest.approx(seconds)), name
    num_bytes = {kind.name: kind.num_bytes for kind in summary.kinds}
    assert (num_bytes["transfers"], num_bytes["update"], num_bytes["products"]) == (8, 242e6, None)
    text = render_summary(summary)
    assert len(text.splitlines()) < 40
    assert text.splitlines()[0] == describe_summary(summary)
    (update,) = (line for line in text.splitlines() if line.startswith("update") and "1.00" in line)
    assert update.split() == ["update", "3", "0.24", "1.00"]


def test_gaps_name_the_work_of_the_launching_thread() -> None:
    gaps = summarise_trace(EVENTS).gaps
    assert [(gap.phase, round(gap.seconds * 1e6)) for gap in gaps] == [
        ("update", 158),
        ("backward", 70),
        ("update", 20),
    ]
    # cudaMemcpyAsync returned at 1200, and Python launched at 1250.
    assert gaps[0].host == "cudaMemcpyAsync 0.10, no operator 0.05, cuLaunchKernel 0.00"
    assert gaps[1].host == "MmBackward0 0.05, aten::mm 0.01, launch 0.01"
    assert gaps[2].host == "had launched it 0.13 before: it waits for another stream"


def test_a_trace_of_a_cpu_counts_operators_without_their_wrappers() -> None:
    events = [
        mark("forward and backward", 0, 100),
        span("cpu_op", "aten::linear", MAIN, 10, 60),
        span("cpu_op", "aten::addmm", MAIN, 20, 60),
        span("cpu_op", "aten::resolve_conj", MAIN, 30, 31),
        span("cpu_op", FUNCTION, MAIN, 70, 100),
        span("cpu_op", "aten::mm", MAIN, 76, 95),
    ]
    summary = summarise_trace(events)
    assert not summary.has_device
    assert [(phase.name, phase.num_kernels) for phase in summary.phases] == [
        ("forward", 1),
        ("backward", 1),
    ]
    (kind,) = summary.kinds
    assert (kind.name, kind.calls, kind.seconds) == ("products", 2, pytest.approx(59e-6))
    assert summary.gaps[0].host == "no operator 0.01, MmBackward0 0.01"
    with pytest.raises(ValueError, match="neither kernels of a device nor operators"):
        summarise_trace(events[:1])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32", "communication"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop>", "products"),
        ("fmha_cutlassF_bf16_aligned_64x64", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90", "attention"),
        ("triton_red_fused_abs_amax_clamp_div", "quantisation"),
        ("triton_poi_fused_mul_silu", "generated"),
        ("void at::native::vectorized_elementwise_kernel<4>", "rest"),
    ],
)
def test_kinds_of_kernels_by_name(name: str, kind: str) -> None:
    assert classify_kernel(name) == kind
