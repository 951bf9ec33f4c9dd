"""Page of `make gpu`: what each switch gives, all steps, then numbers, speed, memory, kernels."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.gpu_figures import STEP_HEADER, describe_host_waits, format_step
from benchmarks.gpu_low_precision_page import (
    divide_bf16,
    join_low_precision,
    render_low_precision,
)
from benchmarks.gpu_switches import render_switches
from benchmarks.table import escape_cell, render_conditions, render_gpu, render_text_table

PREFACE = """\
Made by `make gpu`. Every step is a process with its own time limit; a step that failed has its
reason in the table of steps. Nothing is left out: steps that have not run are named. Seconds after
a plus sign are those of processes that compiled a step's kernels before, several at once."""
NUMBERS = """\
A decoder of three blocks with random weights, forward and backward, against float64 on the CPU. The
error is the norm of the difference over the norm of the exact values; the limits are 1e-4 in fp32
and 5e-2 in bf16."""

ATTENTION = """\
Forward and backward passes of four layers, {num_tokens:,} tokens in one row, with the kernels that
`model.attention: auto` takes (on) and without them (off). The distance is that of all gradients, on
from off, over their norm. Operators names the kernels that the profiler saw, host waits are those
of a pass."""

FUNCTIONS = """\
Updates and dequantisation of {num_elements:,} elements with `model.compile_functions` on and off,
in turn. The ratio is the median of neighbouring times (on / off), with its quartiles. Bits: whether
all results and states are equal bit by bit after the same number of calls, or how far apart they
are. AdamW and 8-bit AdamW clip gradients and cast the new weights to bf16, too; off, AdamW does so
in passes of their own. The loss is not compiled: off are chunks of 1,024 tokens, whose products are
rounded before they are summed; on is one chunk, as `model.loss_chunk_tokens: auto` takes where
memory is free.
The tile of a row that ranks share is on the kernel that plain attention takes (cuDNN on Hopper),
off flash attention. Weights cast once per step (`precision.working_weights`) are those of forward
and backward passes of four micro-batches; off casts them at every use. Norms, gate, rotation and
residual sum are those of `model.fused_pointwise: compiled` and `none`, forward and backward. The
loss by Liger's kernel (`model.loss_kernel: liger`, where it is installed) is next to one chunk."""

OFFLOAD = """\
Steps with states in host memory or on disk, each variant in a process of its own, on the same
weights and tokens. Transfers: the longer one of the bytes to and from the device, at the rates of
pinned copies measured in the same process; those of a disk are not measured. Ratio: the step over
the longer one of the resident step and the transfers; 1 hides the shorter one. Times resident: the
step over the resident one. Waiting: seconds in which the last step waited for transfers. Adapters
are compared with the resident step of adapters."""

_WRONG_FORM = (AttributeError, IndexError, KeyError, TypeError, ValueError)
"""Errors of reading a result that lacks something."""


def render_page(content: dict[str, Any]) -> str:
    """Return the page of all steps."""
    steps = content["steps"]
    counts = {
        status: sum(step["status"] == status for step in steps)
        for status in ("passed", "failed", "timed out", "interrupted", "no time left", "not run")
    }
    verdict = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    device = _find_result(steps, "device")
    name = "one GPU" if device is None else f"one {device.get('name')}"
    sections = [f"# On {name}", PREFACE]
    if (switches := render_switches(steps)) is not None:
        sections.append(switches)
    sections += ["## Steps", f"**{verdict}.**", _render_steps(steps)]
    profiles = [step for step in steps if step["name"].startswith("profile")]
    sections += [
        *_render_safely(_render_device, device),
        *_render_safely(_render_numbers, _find_result(steps, "numbers")),
        *_render_safely(_render_attention, _find_result(steps, "attention")),
        *_render_safely(_render_functions, _find_result(steps, "functions")),
        *_render_safely(render_low_precision, join_low_precision(steps)),
        *_render_safely(_render_speed, _collect_cases(steps)),
        *(
            section
            for step in steps
            if step["name"].startswith("offload")
            for section in _render_safely(_render_offload, step if "result" in step else None)
        ),
        *(
            section
            for step in profiles
            for section in _render_safely(_render_profile, step if "result" in step else None)
        ),
        *(
            section
            for step in steps
            if step["name"].startswith("step cost")
            for section in _render_safely(_render_step_cost, step if "result" in step else None)
        ),
    ]
    names: dict[str, list[str]] = {}
    for step in steps:
        if "conditions" in step:
            text = render_conditions({"conditions": step["conditions"], "skipped": {}})
            names.setdefault(text, []).append(step["name"])
    for text, own in names.items():
        heading = "## Conditions" + (f" of {', '.join(own)}" if len(names) > 1 else "")
        sections.append(text.replace("## Conditions", heading, 1))
    return "\n\n".join(sections) + "\n"


def count_tests(junit: str) -> tuple[int, int, int, list[str]]:
    """Return the numbers of passed, failed and skipped tests, and the failed ones with reasons."""
    passed = skipped = 0
    failed: list[str] = []
    for case in ElementTree.fromstring(junit).iter("testcase"):
        problems = [each for each in case if each.tag in ("failure", "error")]
        if problems:
            reason = (problems[0].get("message") or "").splitlines()
            failed.append(f"{case.get('name')}: {reason[0] if reason else ''}")
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return passed, len(failed), skipped, failed


def list_measurements(junit: str) -> list[str]:
    """List the values that tests have measured."""
    properties = ElementTree.fromstring(junit).iter("property")
    return [f"{each.get('name')} {each.get('value')}" for each in properties]


def _render_safely(
    render: Callable[[dict[str, Any]], str], result: dict[str, Any] | None
) -> list[str]:
    """Render a section; a result of another form must not take the page from the others."""
    if result is None:
        return []
    try:
        return [render(result)]
    except _WRONG_FORM as error:
        return [f"A result has another form ({type(error).__name__}: {error})."]


def _render_speed(speed: dict[str, Any]) -> str:
    _, preface, *tables = render_gpu(speed)
    lowered = [table.replace("## ", "### ", 1) for table in tables]
    return "\n\n".join(["## Speed and memory", preface, *lowered])


def _render_step_cost(step: dict[str, Any]) -> str:
    """Render the rates of the training loop with each of its switches off."""
    lines = [
        f"## {step['name'][0].upper()}{step['name'][1:]}",
        "The whole training loop on random text, with one change in each row; seconds per step. "
        "With rows of many lengths, tokens/s and MFU count padding up to the whole length.",
    ]
    header = ("variant", "difference", "compiled", "seconds", *STEP_HEADER)
    rows = [
        (
            row["name"],
            row["difference"],
            "yes" if row["compiled"] else "no",
            f"{row['step_seconds']:.4f}",
            *format_step(row),
        )
        if "step_seconds" in row
        else (row["name"], escape_cell(row["failure"]), *("",) * (len(header) - 2))
        for row in step["result"]["variants"]
    ]
    lines.append(render_text_table(header, rows))
    return "\n\n".join(lines)


def _find_result(steps: Iterable[dict[str, Any]], name: str) -> dict[str, Any] | None:
    return next((step.get("result") for step in steps if step["name"] == name), None)


def _collect_cases(steps: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """Join the results of the speed steps, in the form that `benchmarks.gpu` writes."""
    results = [
        step["result"]
        for step in steps
        if step["name"].startswith("speed") and "cases" in step.get("result", {})
    ]
    if not results:
        return None
    return results[0] | {
        "cases": [case for result in results for case in result["cases"]],
        "skipped": {
            name: why for result in results for name, why in result.get("skipped", {}).items()
        },
    }


def _render_steps(steps: Iterable[dict[str, Any]]) -> str:
    rows = []
    for step in steps:
        seconds = f"{step['seconds']:.0f}" if "seconds" in step else ""
        seconds += f" + {step['warm_seconds']:.0f}" if "warm_seconds" in step else ""
        try:
            summary = _summarise(step)
        except (*_WRONG_FORM, ElementTree.ParseError) as error:
            summary = f"its result has another form ({type(error).__name__}: {error})"
        rows.append(
            (str(step["part"]), step["name"], step["status"], seconds, escape_cell(summary))
        )
    return render_text_table(("part", "step", "result", "s", "summary"), rows)


def _summarise(step: dict[str, Any]) -> str:
    """Return what a person needs of a step in one cell."""
    result = step.get("result", {})
    text = ""
    if "junit" in result:
        passed, num_failed, skipped, failed = count_tests(result["junit"])
        counts = f"{passed} passed, {num_failed} failed, {skipped} skipped"
        return "; ".join([counts, *failed[:5], *list_measurements(result["junit"])])
    if "cases" in result:
        text = "; ".join(
            f"{name} {row['tokens_per_second']:,.0f} tokens/s"
            if "tokens_per_second" in row
            else f"{name} {row['failed']}"
            for case in result["cases"]
            for name, row in case["contenders"].items()
        ) or "; ".join(f"{name}: {why}" for name, why in result["skipped"].items())
    elif "precisions" in result:
        text = "; ".join(
            f"{name}: worst gradient {each['worst_gradient_error']:.1e} off"
            for name, each in result["precisions"].items()
        )
    elif "attention" in result:
        text = "; ".join(
            f"{name} {row['off']['seconds'] / row['on']['seconds']:.2f}x as fast"
            for name, row in result["attention"].items()
            if "seconds" in row["off"] and "seconds" in row["on"]
        )
    elif "low_precision" in result:
        ratios = {name: divide_bf16(result["steps"], name, "seconds") for name in result["steps"]}
        text = "; ".join(
            f"{name} {ratio}x as fast as bf16"
            for name, ratio in ratios.items()
            if ratio and not name.startswith("bf16")
        )
    elif "offload" in result:
        text = "; ".join(
            f"{row['name']} {row['ratio']:.2f} of the longer one"
            for row in result["offload"]
            if "ratio" in row
        )
    elif "idle_share" in result:
        text = f"{result['step_seconds']:.3g} s a step, {result['idle_share']:.0%} without a kernel"
    elif "product_error" in result:
        text = f"{result['name']}, torch {result['torch']}, CUDA {result['cuda'] or 'none'}"
    return "; ".join(filter(None, [text, step.get("message", "")]))


def _render_device(device: dict[str, Any]) -> str:
    lines = [
        f"{device['name']}, torch {device['torch']}, CUDA {device['cuda'] or 'none'}",
        *(
            f"{rate / 1e12:,.3g} TFLOP/s in the best square {name} product"
            for name, rate in device["matmul_flops_per_second"].items()
        ),
        f"{device['copy_bytes_per_second'] / 1e12:.3g} TB/s in large copies",
    ]
    if "memory_bytes" in device:
        lines.append(
            f"{device['memory_bytes'] / 2**30:.0f} GiB, capability {device['capability']}, "
            f"{device['num_devices']} device(s), NCCL {device['nccl']}, cuDNN {device['cudnn']}"
        )
    return "## Device\n\n" + "\n".join(f"- {line}" for line in lines)


def _render_numbers(numbers: dict[str, Any]) -> str:
    header = ("precision", "logits", "loss", "worst gradient", "error", "within the limit")
    rows = [
        (
            name,
            f"{each['logits_error']:.1e}",
            f"{each['loss_error']:.1e}",
            f"`{each['worst_gradient']}`",
            f"{each['worst_gradient_error']:.1e}",
            "yes" if each["is_within_limit"] else "**no**",
        )
        for name, each in numbers["precisions"].items()
    ]
    kernels = [
        (name, ", ".join(f"`{key}`" for key in each["attention"]), f"`{kernel['name'][:80]}`")
        for name, each in numbers["precisions"].items()
        for kernel in each["kernels"][:1]
    ]
    chosen = render_text_table(
        ("precision", "attention operators", "kernel with the most time"), kernels
    )
    return f"## Numbers\n\n{NUMBERS}\n\n{render_text_table(header, rows)}\n\n## Kernels\n\n{chosen}"


def _render_attention(result: dict[str, Any]) -> str:
    rows = [
        (
            name,
            side,
            f"{each['seconds'] * 1e3:.1f}" if "seconds" in each else each["failed"],
            f"{each['peak_bytes'] / 2**30:.2f}" if each.get("peak_bytes") else "",
            f"{row['distance']:.1e}" if side == "on" and "distance" in row else "",
            ", ".join(each.get("attention_kernels", ())),
            describe_host_waits(each) if "host_waits" in each else "",
            escape_cell("; ".join(each.get("kernels", ()))),
        )
        for name, row in result["attention"].items()
        for side, each in ((side, row[side]) for side in ("off", "on"))
    ]
    header = ("case", "kernels", "ms", "peak GiB", "distance", "operators", "host waits", "log")
    return f"## Attention\n\n{ATTENTION.format(**result)}\n\n{render_text_table(header, rows)}"


def _render_functions(result: dict[str, Any]) -> str:
    rows = []
    for name, row in result["functions"].items():
        low, median, high = row["ratio_quartiles"]
        peaks = [row["temporary_bytes"].get(side) for side in ("off", "on")]
        rows.append(
            (
                name,
                f"{row['off_seconds'] * 1e3:.2f}",
                f"{row['on_seconds'] * 1e3:.2f}",
                f"{median:.2f} ({low:.2f} to {high:.2f})",
                " / ".join("" if peak is None else f"{peak / 2**20:.0f}" for peak in peaks),
                "equal" if row["has_equal_bits"] else f"differ by {row['distance']:.1e}",
                escape_cell("; ".join(row["log"])),
            )
        )
    header = ("function", "off ms", "on ms", "ratio", "temporary MiB off / on", "bits", "log")
    return f"## Functions\n\n{FUNCTIONS.format(**result)}\n\n{render_text_table(header, rows)}"


def _render_offload(step: dict[str, Any]) -> str:
    """Render the steps with offloaded states."""
    times = ("seconds", "transfers", "ratio", "times resident", "waiting")
    header = ("states", *times, "equal losses", *STEP_HEADER)
    rows = [
        (
            row["name"],
            f"{row['step_seconds']:.4f}",
            f"{row['transfer_seconds']:.4f}" if "transfer_seconds" in row else "",
            f"{row['ratio']:.2f}" if "ratio" in row else "",
            f"{row['times_resident']:.2f}" if "times_resident" in row else "",
            f"{row['waiting_seconds']:.4f}" if "waiting_seconds" in row else "",
            ("yes" if row["has_equal_losses"] else "no") if "has_equal_losses" in row else "",
            *format_step(row),
        )
        if "step_seconds" in row
        else (row["name"], escape_cell(row["failure"]), *("",) * (len(header) - 2))
        for row in step["result"]["offload"]
    ]
    return "\n\n".join(
        [f"## {step['name'].capitalize()}", OFFLOAD, render_text_table(header, rows)]
    )


def _render_profile(step: dict[str, Any]) -> str:
    """Render phases, kernels by kind, gaps, and the kernels with the most time."""
    result = step["result"]
    rows = [
        (
            f"`{escape_cell(kernel['name'][:90])}`",
            str(kernel["calls"]),
            f"{kernel['seconds'] * 1e3:.2f}",
            f"{kernel['seconds'] / result['step_seconds']:.1%}",
        )
        for kernel in result["kernels"][:8]
    ]
    table = render_text_table(("kernel", "calls", "ms", "share of the step"), rows)
    summary = (
        f"One optimizer step takes {result['step_seconds']:.3g} s without the profiler. The "
        "summary is of the step after it, from its first kernel to its last."
    )
    text = f"```text\n{result['summary']['text']}```"
    return f"## {step['name'].capitalize()}\n\n{summary}\n\n{text}\n\n{table}"
