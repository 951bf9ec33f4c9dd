"""Summary of a profiled step: busy and idle time of the device by phase, its largest gaps with the
host's work in them, and kernels by kind.

Reads the Chrome trace of one rank, as torch.profiler writes it. Imports no torch.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RANGE_PREFIX = "shardwright: "
"""Prefix of the names of the ranges of a step, which are phases, or `PASSES`."""
PASSES = "forward and backward"
PHASES = ("forward", "backward", "reduction", "gradient norm", "update", "other")
KINDS = (
    *("products", "attention", "quantisation", "generated", "communication", "copies"),
    *("gradient norm", "update", "rest"),
)
"""Kinds of kernels. `generated` are the compiler's fused kernels (norms, gates, rotations); kernels
of the norm and the update are counted by phase, whatever they are."""
HOST_BOUND_SECONDS = 5e-6
"""A kernel that starts sooner after its launch has returned did not wait for the device."""
_BACKWARD = "autograd::engine::evaluate_function"
_DEVICE = {"kernel": "", "gpu_memcpy": "copies", "gpu_memset": "copies"}
_HOST_COPIES = ("HtoD", "DtoH")
"""Directions in the names of copies to or from the host."""
_TRANSFERS = "transfers"
"""Kind of these copies. They need no processor of the device, so they are no kernels."""
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_HOST = ("cpu_op", "user_annotation", *_LAUNCHES)
_QUANTISATION = ("amax", "scaled_mm", "clamp", "quant")
"""Operators in the names of generated kernels that search maxima or write codes."""
_ATTENTION = ("flash", "fmha", "attention", "sdpa")
_PRODUCTS = ("gemm", "nvjet", "cutlass", "xmma", "::mm", "::addmm", "::bmm", "grouped_mm")
_COPIES = ("::copy_", "memcpy", "memset")
_NUM_GAPS = 6
_NUM_HOST_PARTS = 3


@dataclass(frozen=True)
class PhaseTime:
    """Device time of the kernels that a phase launched."""

    name: str
    busy_seconds: float
    """Time with at least one of its kernels."""
    idle_seconds: float
    """Time without any kernel that ended with one of this phase."""
    num_kernels: int
    num_host_bound: int
    """Kernels, without copies, that started less than `HOST_BOUND_SECONDS` after their launch."""


@dataclass(frozen=True)
class KindTime:
    """Kernels of a kind."""

    name: str
    calls: int
    seconds: float
    """Sum of their times; kernels of several streams may overlap."""
    num_bytes: float | None
    """Bytes that they read and write, where the trace or the caller knows them."""


@dataclass(frozen=True)
class Gap:
    """Time without a kernel on the device, perhaps with transfers."""

    seconds: float
    phase: str
    """Phase of the kernel that ends it."""
    host: str
    """Work of the host until it launched that kernel, with milliseconds."""


@dataclass(frozen=True)
class TraceSummary:
    """Summary of the time from the first kernel of a trace to the end of the last one."""

    has_device: bool
    """False for a trace of a CPU: operators that are no wrappers of others stand for kernels."""
    seconds: float
    busy_seconds: float
    phases: tuple[PhaseTime, ...]
    kinds: tuple[KindTime, ...]
    """Kinds, the longest time first."""
    gaps: tuple[Gap, ...]
    """The largest ones, in descending order."""

    @property
    def host_bound_share(self) -> float:
        """Share of the kernels that waited for the host, not for the device."""
        bound = sum(phase.num_host_bound for phase in self.phases)
        return bound / max(1, sum(phase.num_kernels for phase in self.phases))


@dataclass(frozen=True)
class _Span:
    start: float
    end: float
    name: str


@dataclass(frozen=True)
class _Kernel:
    start: float
    end: float
    kind: str
    phase: str
    num_bytes: float | None
    launch: _Span | None
    thread: Any


def classify_kernel(name: str) -> str:
    """Return the kind of a kernel, or of an operator on a CPU, by its name.

    A generated kernel that quantises may contain the operations before it: norms, gates, rotations.

    >>> classify_kernel("sm90_xmma_gemm_bf16bf16_bf16f32"), classify_kernel("triton_red_fused_amax")
    ('products', 'quantisation')
    """
    lowered = name.lower()
    if lowered.startswith("triton"):
        is_quantising = any(part in lowered for part in _QUANTISATION)
        return "quantisation" if is_quantising else "generated"
    for kind, parts in (
        ("communication", ("nccl", "c10d::")),
        ("attention", _ATTENTION),
        ("products", _PRODUCTS),
        ("copies", _COPIES),
    ):
        if any(part in lowered for part in parts):
            return kind
    return "rest"


def summarise_trace(
    events: Iterable[Mapping[str, Any]], kind_bytes: Mapping[str, float] | None = None
) -> TraceSummary:
    """Summarise the events of one rank's Chrome trace (`traceEvents`).

    Args:
        kind_bytes: bytes that the kernels of a kind read and write, where the caller knows them.

    Raises:
        ValueError: the trace has neither kernels nor operators.
    """
    spans = [event for event in events if event.get("ph") == "X" and "cat" in event]
    threads = _collect_threads(spans)
    work = sorted(_list_kernels(spans, threads), key=lambda kernel: kernel.start)
    if not work:
        raise ValueError("the trace has neither kernels of a device nor operators")
    kernels = [kernel for kernel in work if kernel.kind != _TRANSFERS] or work
    gaps = [
        (end, following)
        for end, following in _find_gaps(kernels)
        if following.start > end  # not only rounded
    ]
    idle: dict[str, float] = defaultdict(float)
    for end, following in gaps:
        idle[following.phase] += following.start - end
    last_end = max(kernel.end for kernel in kernels)
    seconds = (last_end - kernels[0].start) / 1e6
    largest = sorted(gaps, key=lambda gap: gap[0] - gap[1].start)[:_NUM_GAPS]
    return TraceSummary(
        has_device=any(event["cat"] in _DEVICE for event in spans),
        seconds=seconds,
        busy_seconds=seconds - sum(idle.values()) / 1e6,
        phases=_sum_phases(kernels, idle),
        kinds=_sum_kinds(work, kind_bytes or {}),
        gaps=tuple(
            Gap(
                (following.start - end) / 1e6,
                following.phase,
                _describe_host(end, following, threads.get(following.thread, [])),
            )
            for end, following in largest
        ),
    )


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Read the events of a Chrome trace, compressed if its name ends in `.gz`.

    Raises:
        OSError, ValueError, KeyError: it cannot be read.
    """
    content = path.read_bytes()
    document = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    events: list[dict[str, Any]] = document["traceEvents"]
    return events


def render_summary(summary: TraceSummary) -> str:
    """Return the summary as text of fewer than 40 lines."""
    work = "kernel" if summary.has_device else "operator"
    lines = [
        describe_summary(summary),
        "",
        f"{'phase':16}{'busy ms':>9}{'idle ms':>9}{work + 's':>10}{'host-bound':>12}",
    ]
    lines += [
        f"{phase.name:16}{phase.busy_seconds * 1e3:9.2f}{phase.idle_seconds * 1e3:9.2f}"
        f"{phase.num_kernels:10,}{phase.num_host_bound:12,}"
        for phase in summary.phases
    ]
    lines += ["", f"{work + 's':16}{'calls':>9}{'ms':>9}{'TB/s':>10}"]
    for kind in summary.kinds:
        rate = "" if kind.num_bytes is None else f"{kind.num_bytes / kind.seconds / 1e12:.2f}"
        lines.append(f"{kind.name:16}{kind.calls:9,}{kind.seconds * 1e3:9.2f}{rate:>10}")
    lines += ["", f"{'gap before':16}{'ms':>9}  the host, in ms"]
    lines += [f"{gap.phase:16}{gap.seconds * 1e3:9.3f}  {gap.host}" for gap in summary.gaps]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def describe_summary(summary: TraceSummary) -> str:
    """Describe the summary in one line."""
    largest = ", ".join(f"{kind.name} {kind.seconds * 1e3:.1f} ms" for kind in summary.kinds[:3])
    idle = 1.0 - summary.busy_seconds / summary.seconds if summary.seconds else 0.0
    bound = f"; {summary.host_bound_share:.0%} of the kernels waited for the host"
    return (
        f"{summary.seconds * 1e3:.1f} ms, {idle:.1%} of it without "
        f"{'a kernel' if summary.has_device else 'an operator'}; {largest}"
        f"{bound if summary.has_device else ''}"
    )


def _collect_threads(spans: Iterable[Mapping[str, Any]]) -> dict[Any, list[_Span]]:
    """Return the host's events by thread, each list in the order of start, outer ones first."""
    threads: dict[Any, list[_Span]] = defaultdict(list)
    for event in spans:
        if event["cat"] in _HOST:
            start = event["ts"]
            threads[event["tid"]].append(_Span(start, start + event["dur"], event["name"]))
    for own in threads.values():
        own.sort(key=lambda span: (span.start, -span.end))
    return threads


def _list_kernels(
    spans: Sequence[Mapping[str, Any]], threads: Mapping[Any, Sequence[_Span]]
) -> Iterable[_Kernel]:
    """Yield the work of the device with the phase in which it was launched."""
    find_phase = _PhaseFinder(threads)
    launches = {
        event["args"]["correlation"]: (
            _Span(event["ts"], event["ts"] + event["dur"], event["name"]),
            event["tid"],
        )
        for event in spans
        if event["cat"] in _LAUNCHES and "correlation" in event.get("args", {})
    }
    work = [event for event in spans if event["cat"] in _DEVICE]
    for event in work:
        arguments = event.get("args", {})
        launch, thread = launches.get(arguments.get("correlation"), (None, None))
        start = event["ts"]
        phase = find_phase(start if launch is None else launch.start, thread)
        kind = _DEVICE[event["cat"]] or classify_kernel(event["name"])
        if kind == "copies" and any(way in event["name"] for way in _HOST_COPIES):
            kind = _TRANSFERS
        is_moved = kind in ("copies", _TRANSFERS, "communication")
        if not is_moved and phase in ("gradient norm", "update"):
            kind = phase
        num_bytes = arguments.get("bytes")
        yield _Kernel(start, start + event["dur"], kind, phase, num_bytes, launch, thread)
    for thread, own in () if work else threads.items():
        for span in _list_operators(own):
            phase = find_phase(span.start, thread)
            kind = phase if phase in ("gradient norm", "update") else classify_kernel(span.name)
            yield _Kernel(span.start, span.end, kind, phase, None, None, thread)


def _list_operators(spans: Sequence[_Span]) -> Iterable[_Span]:
    """Yield the outermost operators that spend at least half of their time in no other one.

    The others are wrappers. Ranges are no operators.
    """
    operators = [span for span in spans if not _is_range(span)]
    inner = [0.0] * len(operators)
    parents: list[int] = []
    for place, span in enumerate(operators):
        while parents and operators[parents[-1]].end <= span.start:
            parents.pop()
        if parents:
            inner[parents[-1]] += span.end - span.start
        parents.append(place)
    end = float("-inf")
    for span, inner_time in zip(operators, inner, strict=True):
        if span.start >= end and inner_time <= (span.end - span.start) / 2:
            end = span.end
            yield span


class _PhaseFinder:
    """Finds the phase in which a thread launches something.

    Backward passes of autograd have marks of their own, on each of its threads. Every other phase
    is a range of the main thread, and other threads work for the range that is open then.
    """

    def __init__(self, threads: Mapping[Any, Sequence[_Span]]) -> None:
        self._ranges = sorted(
            (span for own in threads.values() for span in own if _is_range(span)),
            key=lambda span: span.start,
        )
        self._starts = [span.start for span in self._ranges]
        self._backward = {
            thread: _keep_outermost(span for span in own if span.name.startswith(_BACKWARD))
            for thread, own in threads.items()
        }
        self._backward_starts = {
            thread: [span.start for span in own] for thread, own in self._backward.items()
        }

    def __call__(self, time: float, thread: Any) -> str:
        place = bisect_right(self._backward_starts.get(thread, []), time) - 1
        if place >= 0 and time < self._backward[thread][place].end:
            return "backward"
        place = bisect_right(self._starts, time) - 1
        if place < 0 or time >= self._ranges[place].end:
            return "other"
        name = self._ranges[place].name.removeprefix(RANGE_PREFIX)
        return "forward" if name == PASSES else name


def _is_range(span: _Span) -> bool:
    return span.name.startswith(RANGE_PREFIX)


def _keep_outermost(spans: Iterable[_Span]) -> list[_Span]:
    outermost: list[_Span] = []
    for span in spans:
        if not outermost or span.start >= outermost[-1].end:
            outermost.append(span)
    return outermost


def _find_gaps(kernels: Sequence[_Kernel]) -> Iterable[tuple[float, _Kernel]]:
    """Yield the end of the kernels before a gap, and the kernel that ends it."""
    end = kernels[0].end
    for kernel in kernels[1:]:
        if kernel.start > end:
            yield end, kernel
        end = max(end, kernel.end)


def _sum_phases(kernels: Sequence[_Kernel], idle: Mapping[str, float]) -> tuple[PhaseTime, ...]:
    by_phase: dict[str, list[_Kernel]] = defaultdict(list)
    for kernel in kernels:
        by_phase[kernel.phase].append(kernel)
    found = []
    for name in sorted(by_phase, key=PHASES.index):
        own = by_phase[name]
        gaps = sum(kernel.start - end for end, kernel in _find_gaps(own))
        span = max(kernel.end for kernel in own) - own[0].start
        bound = sum(
            kernel.launch is not None
            and kernel.kind != "copies"  # their launches may return when they have ended
            and kernel.start - kernel.launch.end < 1e6 * HOST_BOUND_SECONDS
            for kernel in own
        )
        found.append(
            PhaseTime(name, (span - gaps) / 1e6, idle.get(name, 0.0) / 1e6, len(own), bound)
        )
    return tuple(found)


def _sum_kinds(kernels: Sequence[_Kernel], kind_bytes: Mapping[str, float]) -> tuple[KindTime, ...]:
    by_kind: dict[str, list[_Kernel]] = defaultdict(list)
    for kernel in kernels:
        by_kind[kernel.kind].append(kernel)
    found = []
    for name, own in by_kind.items():
        counted = [kernel.num_bytes for kernel in own if kernel.num_bytes is not None]
        num_bytes = kind_bytes.get(name, sum(counted) if len(counted) == len(own) else None)
        seconds = sum(kernel.end - kernel.start for kernel in own) / 1e6
        found.append(KindTime(name, len(own), seconds, num_bytes if seconds else None))
    return tuple(sorted(found, key=lambda kind: -kind.seconds))


def _describe_host(end: float, following: _Kernel, spans: Sequence[_Span]) -> str:
    """Describe what the thread that launched a kernel did from the start of a gap to the launch."""
    launch = following.launch
    if launch is not None and launch.end <= end:
        return f"had launched it {(end - launch.end) / 1e3:.2f} before: it waits for another stream"
    until = following.start if launch is None else min(following.start, launch.end)
    # A parent's own time is its time less that of the events in it.
    own: dict[str, float] = defaultdict(float, {"no operator": until - end})
    open_spans: list[_Span] = []
    for span in spans:
        if span.start >= until:
            break
        if _is_range(span):
            continue
        overlap = min(span.end, until) - max(span.start, end)
        while open_spans and open_spans[-1].end <= span.start:
            open_spans.pop()
        if overlap > 0:
            own[_shorten(span.name)] += overlap
            own[_shorten(open_spans[-1].name) if open_spans else "no operator"] -= overlap
        open_spans.append(span)
    largest = sorted(own.items(), key=lambda item: -item[1])[:_NUM_HOST_PARTS]
    parts = [f"{name[:48]} {time / 1e3:.2f}" for name, time in largest if time >= 1.0]
    return ", ".join(parts) or "launched it at once"


def _shorten(name: str) -> str:
    """Name a backward pass of autograd as the operator in it, which has the same name."""
    return name.removeprefix(f"{_BACKWARD}: ")
