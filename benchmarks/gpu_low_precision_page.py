"""Tables of 8-bit and 4-bit products on the page of `make gpu`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.gpu_figures import STEP_HEADER, format_step
from benchmarks.table import escape_cell, render_text_table

LOW_PRECISION = """\
Distance: norm of the difference between a kernel's result and its emulation on the same device,
over the norm of the latter; at most {limit:g}. Steps are those of {num_layers} layer(s) of {shape}
with the optimizer, or of all with 8-bit AdamW; passes are without the optimizer. MFU is over the
rate of bf16 products. Steps with LoRA have a frozen base, whose products are quantised. Curves are
of a small model on the text of Python's standard library, in 8 and 4 bits from the weights of the
first seed. Final loss is the mean of the last 20 steps, in which elements are counted."""

FAST_ACCUMULATION = """\
Fast accumulation leaves partial sums in the tensor cores, in about 14 bits; its distance is at most
{fast_limit:g}."""

UPDATE = "norm and update, ms / its kernels"
KERNELS_BY_KIND = """\
Milliseconds of kernels in a forward and backward pass, profiled after the timed steps. Generated
kernels that search maxima or write codes count as quantisation, with the norms, gates and rotations
that the compiler merges into them."""


def join_low_precision(steps: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """Join the results of the comparison of recipes and of the steps of all layers."""
    results = [
        step["result"]
        for step in steps
        if step["name"].startswith("low precision") and "low_precision" in step.get("result", {})
    ]
    if not results:
        return None
    sections = ("obstacles", "kernels", "steps", "curves")
    joined = {
        section: {name: row for result in results for name, row in result[section].items()}
        for section in sections
    }
    return results[0] | joined


def render_low_precision(result: dict[str, Any]) -> str:
    """Render kernels, steps and curves of the recipes, and the reasons of missing ones."""
    conditions = result["low_precision"]
    missing = [f"- {recipe}: {why}" for recipe, why in result["obstacles"].items()] + [
        f"- {name}: {row['failed']}"
        for section in ("kernels", "curves")
        for name, row in result[section].items()
        if "failed" in row
    ]
    return "\n\n".join(
        [
            "## 8-bit and 4-bit products",
            LOW_PRECISION.format(**conditions),
            *([FAST_ACCUMULATION.format(**conditions)] if "fast_limit" in conditions else []),
            _render_kernels(result["kernels"]),
            *_render_steps(result["steps"]),
            _render_curves(result["curves"]),
            *(["\n".join(missing)] if missing else []),
        ]
    )


def divide_bf16(steps: dict[str, Any], name: str, key: str) -> str:
    """Return the seconds of bf16's step of the same kind over those of a step."""
    kind = name.partition(", ")[2]
    base = steps.get(f"bf16, {kind}" if kind else "bf16", {})
    return f"{base[key] / steps[name][key]:.2f}" if key in base and key in steps[name] else ""


def choose_places(num_steps: int) -> list[int]:
    """Choose at most five steps, evenly spaced, the first and the last among them."""
    return sorted({round(part * (num_steps - 1) / 4) for part in range(5)})


def _render_kernels(kernels: dict[str, Any]) -> str:
    rows = [
        (
            recipe,
            product.removeprefix("compute_").replace("_", " "),
            f"{row['distance']:.1e}",
            f"{row['seconds'] * 1e3:.3f}",
            f"{row['bf16_seconds'] / row['seconds']:.2f}",
        )
        for recipe, products in kernels.items()
        if "failed" not in products
        for product, row in products.items()
    ]
    return render_text_table(("recipe", "product", "distance", "ms", "times bf16"), rows)


def _render_steps(steps: dict[str, Any]) -> list[str]:
    """Render times of the steps, and those of their kernels where they were profiled."""
    header = ("step", "ms", "times bf16", "passes, times bf16", UPDATE, *STEP_HEADER)
    timed = [
        (
            name,
            f"{row['seconds'] * 1e3:.1f}",
            divide_bf16(steps, name, "seconds"),
            divide_bf16(steps, name, "pass_seconds"),
            " / ".join(
                f"{row[key] * 1e3:.1f}"
                for key in ("update_seconds", "update_kernel_seconds")
                if key in row
            ),
            *format_step(row),
        )
        if "seconds" in row
        else (name, escape_cell(row["failed"]), *("",) * (len(header) - 2))
        for name, row in steps.items()
    ]
    kinds = [
        (name, *(f"{seconds * 1e3:.1f}" for seconds in row["kernel_seconds"].values()))
        for name, row in steps.items()
        if "kernel_seconds" in row
    ]
    if not kinds:
        return [render_text_table(header, timed)]
    kind_header = ("passes", "products", "quantisation", "attention", "rest")
    return [
        render_text_table(header, timed),
        KERNELS_BY_KIND,
        render_text_table(kind_header, kinds),
    ]


def _render_curves(curves: dict[str, Any]) -> str:
    trained = {name: row for name, row in curves.items() if "losses" in row}
    rows = [
        (
            name,
            *(f"{row['losses'][place]:.3f}" for place in choose_places(len(row["losses"]))),
            f"{row['final_loss']:.4f}",
            f"{row['saturated']:,}" if "saturated" in row else "",
            f"{row['flushed_share']:.1e}" if "flushed_share" in row else "",
        )
        for name, row in trained.items()
    ]
    num_steps = max((len(row["losses"]) for row in trained.values()), default=1)
    places = [f"step {place + 1}" for place in choose_places(num_steps)]
    return render_text_table(("curve", *places, "final loss", "saturated", "flushed share"), rows)
