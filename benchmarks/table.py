"""Write the tables of the benchmarks' JSON as Markdown: `python -m benchmarks.table RESULT.json
docs/benchmarks/RESULT.md`.

Only the notes are written by hand: RESULT.notes.md next to the page is copied in below the numbers
and explains them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.contenders import TITLES
from benchmarks.gpu_figures import describe_host_waits, format_gib, name_attention_kernels

CPU_GOALS = {"torch-loop": 1.0, "torch-loop-own-decoder": 1.0, "deepspeed": 1.1, "trainer": 1.15}
"""Goal for shardwright's tokens per second over the contender's, at no more memory."""
OURS = "shardwright"

CPU_PREFACE = """\
Made by `make bench` (`python -m benchmarks.cpu`, then `python -m benchmarks.table`). Within a
comparison all contenders start from the same weights, read the same tokens and run the same AdamW
with the same gradient clipping. All are alive at once and timed in turn, so a slow minute affects
all of them. *Speed* and *memory* are shardwright over the contender: above 1 is faster, below 1 is
smaller. Memory is the largest resident high-water mark of a rank while it trains (with imports),
measured in the same way for all. Goals: speed at least 1.00 against the hand-written loops, 1.10
against DeepSpeed, 1.15 against Trainer; memory at most 1.00."""
CPU_PREDICTIONS = """\
Predictions of our runs from rates measured on the same two ranks right before each comparison. The
error of the step is measured over predicted tokens/s, less one. Bytes of tensors are those of the
profiler's allocator events in a separate step."""
GPU_PREDICTIONS = """\
Predictions of shardwright's runs from the catalogue and the fitted efficiencies. The error of the
step is measured over predicted tokens/s, less one."""
GPU_PREFACE = """\
Made by `make gpu` (`python -m benchmarks.gpu`, then `python -m benchmarks.table`). Random weights,
synthetic tokens, {precision} compute with fp32 master weights and moments, fused AdamW, gradients
clipped to 1; an option names another optimizer. torchtune has no mixed precision: its weights,
gradients and moments are {precision} too, so that it moves and keeps fewer bytes. LoRA has
adapters of all projections, and the base is frozen. Where an option names the layers, the model has
as many as the planner says fit. Experts get the tokens that their random router chooses. Contenders
of a case run in turn, each visit in a new process. MFU is model FLOPs (causal attention, no
recomputation, no gradient of a frozen matrix) over the best square matrix product measured right
before the case. Attention names the kernels of the operators that one more step ran, as the
profiler saw them: cuDNN, flash, varlen, efficient, flex or math; (log) marks earlier results, which
have what the contender says instead. Graph breaks are the places where torch.compile stopped
tracing. Host waits are those of a step for the device, counted in steps after the timed ones."""


GPU_RATIOS = """\
Families with windows, soft caps, sinks and experts, each next to Llama 3 8B of the same length. The
goal for Gemma 2 and gpt-oss is a ratio of at least 0.85."""


def main() -> None:
    """Write the page of one result file."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.table", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("result", type=Path, help="JSON of benchmarks.cpu or benchmarks.gpu")
    parser.add_argument(
        "page",
        type=Path,
        help="Markdown file to write; PAGE.notes.md next to it is copied in if it exists",
    )
    arguments = parser.parse_args()
    write_page(json.loads(arguments.result.read_text()), arguments.page)


def write_page(result: dict[str, Any], page: Path) -> None:
    """Write a result as Markdown, with the notes next to the page."""
    notes = page.with_suffix(".notes.md")
    page.write_text(render(result, notes.read_text() if notes.is_file() else ""))


def render(result: dict[str, Any], notes: str = "") -> str:
    """Return one result as Markdown."""
    sections = render_cpu(result) if "comparisons" in result else render_gpu(result)
    if notes:
        sections.append(notes.strip())
    sections.append(render_conditions(result))
    return "\n\n".join(sections) + "\n"


def render_cpu(result: dict[str, Any]) -> list[str]:
    """Render two CPU ranks: one table per comparison, then the missed goals."""
    sections = ["# Two ranks on two CPU cores", CPU_PREFACE]
    missed: list[str] = []
    for comparison in result["comparisons"]:
        sections.append(_render_comparison(comparison, missed))
    predicted = [
        (c["name"], c["contenders"][OURS])
        for c in result["comparisons"]
        if "predicted" in c["contenders"].get(OURS, {})
    ]
    if predicted:
        sections.append(
            f"## Predicted and measured\n\n{CPU_PREDICTIONS}\n\n{_render_predictions(predicted)}"
        )
    if missed:
        sections.append("## Where it falls short\n\n" + "\n".join(f"- {line}" for line in missed))
    elif any(OURS in c["contenders"] and len(c["contenders"]) > 1 for c in result["comparisons"]):
        sections.append("Every goal is met.")
    return sections


def _render_comparison(comparison: dict[str, Any], missed: list[str]) -> str:
    title = f"zero_stage {comparison['zero_stage']}, {comparison['precision']}" + (
        ", compiled blocks" if comparison["compile"] else ""
    )
    ours = comparison["contenders"].get(OURS)
    rows = []
    for name, row in comparison["contenders"].items():
        speed = memory = goal = ""
        if ours is not None and name != OURS:
            speed_ratio = ours["tokens_per_second"] / row["tokens_per_second"]
            memory_ratio = ours["peak_memory_bytes"] / row["peak_memory_bytes"]
            speed = f"{speed_ratio:.2f}"
            memory = f"{memory_ratio:.2f}"
            goal = f"{CPU_GOALS[name]:.2f}"
            missed += _list_missed_goals(title, name, speed_ratio, memory_ratio)
        losses = f"{row['first_loss']:.4f}, {row['last_loss']:.4f}"
        rows.append(
            (
                TITLES[name],
                _format_rate(row),
                speed,
                goal,
                f"{row['peak_memory_bytes'] / 2**20:,.0f}",
                memory,
                losses,
            )
        )
    header = (
        "contender",
        "tokens/s, median (range)",
        "speed",
        "goal",
        "MiB a rank",
        "memory",
        "first, last loss",
    )
    return f"## {title}\n\n{render_table(header, rows)}"


def _list_missed_goals(title: str, name: str, speed_ratio: float, memory_ratio: float) -> list[str]:
    """List goals that are missed by more than the two printed digits."""
    lines = []
    goal = CPU_GOALS[name]
    against = f"{title}, against {TITLES[name]}"
    if round(speed_ratio, 2) < goal:
        lines.append(
            f"{against}: speed {speed_ratio:.2f}, goal {goal:.2f} "
            f"({1 - speed_ratio / goal:.0%} short)"
        )
    if round(memory_ratio, 2) > 1.0:
        lines.append(
            f"{against}: memory {memory_ratio:.2f}, goal 1.00 ({memory_ratio - 1:.0%} over)"
        )
    return lines


def render_gpu(result: dict[str, Any]) -> list[str]:
    """Render one GPU: one table per model shape."""
    device = result["device"]
    precision = result["precision"]
    matmul = device["matmul_flops_per_second"] / 1e12
    copy = device["copy_bytes_per_second"] / 1e12
    ceilings = (
        f"The device reached a median of {matmul:,.3g} TFLOP/s in {precision} products and "
        f"{copy:.2f} TB/s in large copies."
    )
    sections = [
        f"# Fine-tuning on one {device['name']}",
        f"{GPU_PREFACE.format(precision=precision)} {ceilings}",
    ]
    for shape in dict.fromkeys(case["shape"] for case in result["cases"]):
        rows = []
        for case in (case for case in result["cases"] if case["shape"] == shape):
            batch = f"{case['micro_batch_size']} x {case['sequence_length']:,}"
            options = ", ".join(case["options"]) or "plain"
            for name, row in case["contenders"].items():
                rows.append((batch, options, TITLES[name], *_format_gpu_figures(row)))
        header = (
            "batch",
            "options",
            "contender",
            "tokens/s",
            "MFU",
            "allocated GiB",
            "reserved GiB",
            "attention",
            "graph breaks",
            "host waits",
            "first, last loss",
        )
        sections.append(f"## {shape}\n\n{render_table(header, rows)}")
    rows = [(case["name"], case["contenders"].get(OURS, {})) for case in result["cases"]]
    if predicted := [(name, row) for name, row in rows if row.get("predicted")]:
        sections.append(
            f"## Predicted and measured\n\n{GPU_PREDICTIONS}\n\n{_render_predictions(predicted)}"
        )
    if ratios := _list_utilisation_ratios(dict(rows), result["cases"]):
        header = ("run", "MFU", "compared with", "its MFU", "ratio")
        sections.append(
            f"## MFU of other families\n\n{GPU_RATIOS}\n\n{render_table(header, ratios)}"
        )
    if result["skipped"]:
        sections.append(
            "## Skipped\n\n"
            + "\n".join(f"- {name}: {reason}" for name, reason in result["skipped"].items())
        )
    return sections


def _list_utilisation_ratios(
    rows: dict[str, dict[str, Any]], cases: list[dict[str, Any]]
) -> list[tuple[str, ...]]:
    """Compare the MFU of our rows with that of the case that each is measured by."""
    ratios = []
    for case in cases:
        name = case["name"]
        other = case["compared_with"]
        mfu = rows[name].get("mfu")
        reference = rows.get(other, {}).get("mfu")
        if mfu is not None and reference is not None:
            ratios.append((name, f"{mfu:.1%}", other, f"{reference:.1%}", f"{mfu / reference:.2f}"))
    return ratios


def _render_predictions(rows: list[tuple[str, dict[str, Any]]]) -> str:
    """Compare our rows with their predictions: memory of tensors and, if an allocator reserves it,
    reserved memory.
    """
    reserves = any(row.get("peak_reserved_bytes") for _, row in rows)
    lines = []
    for name, row in rows:
        predicted_figures = row["predicted"]
        speed = row["tokens_per_second"]
        line = [
            name,
            f"{speed:,.0f}",
            f"{predicted_figures['tokens_per_second']:,.0f}",
            f"{speed / predicted_figures['tokens_per_second'] - 1:+.0%}",
        ]
        for measured, predicted in (
            ("peak_allocated_bytes", "memory_bytes"),
            ("peak_reserved_bytes", "reserved_bytes"),
        ):
            if measured == "peak_allocated_bytes" or reserves:
                line += _format_memory(row.get(measured), predicted_figures[predicted])
        lines.append(tuple(line))
    header = (
        "run",
        "tokens/s",
        "predicted",
        "error of the step",
        "MiB of tensors",
        "predicted",
        "error",
    )
    return render_table(
        (*header, "MiB reserved", "predicted", "error") if reserves else header, lines
    )


def _format_memory(measured: float | None, predicted: float) -> list[str]:
    if not measured:
        return ["", f"{predicted / 2**20:,.0f}", ""]
    return [
        f"{measured / 2**20:,.0f}",
        f"{predicted / 2**20:,.0f}",
        f"{predicted / measured - 1:+.1%}",
    ]


def _format_gpu_figures(row: dict[str, Any]) -> tuple[str, ...]:
    if "failed" in row:
        return (row["failed"], "", "", "", "", "", "", "")
    gib = [format_gib(row[f"peak_{kind}_bytes"]) for kind in ("allocated", "reserved")]
    return (
        _format_rate(row),
        f"{row['mfu']:.1%}",
        *gib,
        name_attention_kernels(row),
        str(row["graph_breaks"]),
        describe_host_waits(row),
        f"{row['first_loss']:.3f}, {row['last_loss']:.3f}",
    )


def _format_rate(row: dict[str, Any]) -> str:
    median, lowest, highest = (
        row[key]
        for key in ("tokens_per_second", "tokens_per_second_lowest", "tokens_per_second_highest")
    )
    return f"{median:,.0f}" + (f" ({lowest:,.0f} to {highest:,.0f})" if lowest < highest else "")


def render_conditions(result: dict[str, Any]) -> str:
    """Render machine, software, date and repetitions."""
    conditions = result["conditions"]
    packages = ", ".join(f"{name} {version}" for name, version in conditions["packages"].items())
    memory = f"{conditions['memory_bytes'] / 2**30:.0f} GiB"
    lines = [
        f"{conditions['processor']}, {conditions['cores']} cores, {memory}, {conditions['system']}",
        f"Python {conditions['python']}, {packages}; "
        f"shardwright {conditions['shardwright']} at {conditions['commit']}",
        f"measured {conditions['date']}",
    ]
    if result.get("comparisons"):
        first = result["comparisons"][0]
        lines += [
            f"Llama of {result['num_parameters'] / 1e6:.1f}M parameters, "
            f"{first['sequence_length']} tokens, "
            f"micro batch {first['micro_batch_size']} on each of {first['world_size']} ranks, "
            "one thread a rank",
            f"{first['warmup_steps']} warm-up steps, then {first['rounds']} rounds of "
            f"{first['steps_per_round']} steps; the slower rank's time counts",
        ]
    lines += [
        f"skipped {name}: {reason}"
        for name, reason in result["skipped"].items()
        if "comparisons" in result
    ]
    return "## Conditions\n\n" + "\n".join(f"- {line}" for line in lines)


def render_table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Render a Markdown table whose columns but the first have numbers, aligned to the right."""
    return _render_rows(header, ("---", *("---:" for _ in header[1:])), *rows)


def render_text_table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Render a Markdown table whose columns are aligned to the left."""
    return _render_rows(header, tuple("---" for _ in header), *rows)


def _render_rows(*rows: tuple[str, ...]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def escape_cell(text: str) -> str:
    """Return text that a cell of a Markdown table can contain, at most 700 characters."""
    return text.replace("|", "\\|").replace("\n", " ")[:700]


if __name__ == "__main__":
    main()
