"""HTML page of an audit: diagnosis, worst parameters, heat map of layers by kind."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from html import escape

from shardwright.audit.check import AuditReport, ParameterResult
from shardwright.audit.mistakes.hypotheses import MistakeDiagnosis
from shardwright.report.page_shell import PICTURE_SIZES, Panel, Table, render_panel_page

NUM_WORST = 20
_ROW_PIXELS = 20
_CHARACTER_PIXELS = 7.4
"""Length of a character of a column's name, which is slanted."""
_SLANTS = ((24, 35), (0, 70))
"""Smallest width of a column, and the angle of its name in degrees."""
_LABEL_PIXELS = 74
_CELL_PIXELS = 56


def render_audit(report: AuditReport) -> str:
    """Render the page of a report."""
    num_wrong = sum(not result.passed for result in report.parameters)
    facts = [
        ("gradients that differ", f"{num_wrong} of {len(report.parameters)}"),
        ("relative difference", f"{report.residual:.1e}"),
        ("loss in one process", f"{report.expected_loss:.5g}"),
        (report.term_unit, f"{report.num_terms:,}"),
        ("ranks", str(report.num_ranks)),
        ("micro-batches", str(report.num_micro_batches)),
    ]
    lead = (
        f"Step {report.step} of {report.folder}, recomputed in one process in {report.dtype}; "
        f"objective {report.objective}."
    )
    title = "Audit: equal to one process" if report.passed else "Audit: differs from one process"
    panels = [
        _build_diagnosis_panel(report),
        _build_heat_panel(report.parameters),
        _build_parameter_panel(report),
        _build_findings_panel(report),
    ]
    return render_panel_page(title, lead, panels, facts=facts)


def _build_diagnosis_panel(report: AuditReport) -> Panel:
    if report.passed:
        text = "Gradients and all other comparisons equal those of one process, up to rounding."
        return Panel("diagnosis", "No mistake found", text, is_wide=True)
    if not report.diagnoses:
        text = "None of the known mistakes reproduces this difference."
        return Panel("diagnosis", "Diagnosis", text, is_wide=True)
    rows = tuple(row for diagnosis in report.diagnoses for row in _list_rows(diagnosis))
    table = Table(
        ("mistake", "where", "residual without it", "with it", "fix", "seen in (GitHub)"),
        rows,
        is_text=True,
    )
    note = "A mistake is named if the gradients computed with it equal the recorded ones."
    return Panel("diagnosis", "Diagnosis", note, {}, table, is_wide=True, is_table_open=True)


def _list_rows(diagnosis: MistakeDiagnosis) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for mistake in diagnosis.mistakes:
        rows.append(
            (
                mistake.title,
                diagnosis.subject or "all parameters",
                *(
                    f"{residual:.1e}".replace("-", "\u2011")  # a hyphen where no line breaks
                    for residual in (diagnosis.residual_before, diagnosis.residual_after)
                ),
                f"{mistake.remedy}. {diagnosis.note}".strip(),
                "\n".join(_shorten_link(link) for link in mistake.links),
            )
        )
    return rows


def _shorten_link(link: str) -> str:
    """Return `owner/repository #number` for an issue, `commit hash` for a commit."""
    path = link.removeprefix("https://github.com/")
    path = path.replace("/issues/", " #").replace("/commit/", " commit ")
    return path.replace("/", "/\u200b")  # a line may break after the owner, not inside a name


def _build_parameter_panel(report: AuditReport) -> Panel:
    rows = tuple(
        (
            result.name,
            "pass" if result.passed else "fail",
            f"{result.error:.2e}",
            f"{result.allowed:.0e}",
            f"{result.recorded_norm:.4g}",
            f"{result.expected_norm:.4g}",
        )
        for result in report.worst_parameters[:NUM_WORST]
    )
    columns = ("parameter", "", "relative error", "rounding", "recorded norm", "expected norm")
    note = f"The {len(rows)} worst of {len(report.parameters)} gradients."
    table = Table(columns, rows, is_text=True)
    return Panel("worst", "Worst parameters", note, {}, table, is_wide=True, is_table_open=True)


def _build_findings_panel(report: AuditReport) -> Panel:
    rows = [
        (
            finding.quantity,
            "pass" if finding.passed else "fail",
            finding.subject,
            f"{finding.error:.1e}",
            f"{finding.allowed:.0e}",
        )
        for finding in report.findings
    ]
    rows += [
        (reason.partition(":")[0], "", f"not checked:{reason.partition(':')[2]}", "", "")
        for reason in report.unchecked
    ]
    table = Table(("comparison", "", "where", "error", "allowed"), tuple(rows), is_text=True)
    return Panel("step", "The rest of the step", "", {}, table, is_wide=True, is_table_open=True)


def split_layer(name: str) -> tuple[str, str]:
    """Split a parameter's name into its layer and its kind within the layer.

    >>> split_layer("model.layers.3.mlp.up_proj.weight")
    ('3', 'mlp.up_proj')
    >>> split_layer("model.layers.3.mlp.experts.17.up_proj.weight")
    ('3', 'mlp.experts.up_proj')
    >>> split_layer("lm_head.weight")
    ('', 'lm_head')
    """
    match = re.search(r"\.(?:layers|h|blocks|block)\.(\d+)\.(.+)$", f".{name}")
    layer, rest = (match[1], match[2]) if match else ("", name.removeprefix("model."))
    return layer, re.sub(r"experts\.\d+\.", "experts.", rest).removesuffix(".weight")


def _build_heat_panel(results: Sequence[ParameterResult]) -> Panel:
    cells: dict[tuple[str, str], ParameterResult] = {}
    for result in sorted(results, key=lambda result: result.severity):
        cells[split_layer(result.name)] = result  # of many experts the worst
    cells = {split_layer(result.name): cells[split_layer(result.name)] for result in results}
    layers = sorted({layer for layer, _ in cells}, key=lambda text: int(text or -1))
    kinds = list(dict.fromkeys(kind for layer, kind in cells if layer)) + list(
        dict.fromkeys(kind for layer, kind in cells if not layer)
    )
    note = (
        "Error of each gradient divided by what rounding explains, on a logarithmic scale: pale "
        "is equal, full colour is 10,000 times rounding or more. Rows are layers; parameters "
        "outside layers are in the first row; of a layer's experts the worst is shown."
    )
    pictures = {
        name: _draw_heat_map(cells, layers, kinds, width)
        for name, (width, _) in PICTURE_SIZES.items()
    }
    return Panel("map", "Error by layer and kind", note, pictures, is_wide=True)


def _draw_heat_map(
    cells: dict[tuple[str, str], ParameterResult],
    layers: Sequence[str],
    kinds: Sequence[str],
    width: int,
) -> str:
    cell = min(_CELL_PIXELS, (width - _LABEL_PIXELS - 90) / max(1, len(kinds)))
    slant = next(angle for smallest, angle in _SLANTS if cell >= smallest)
    length = _CHARACTER_PIXELS * max((len(kind) for kind in kinds), default=0)
    header = 14 + length * math.sin(math.radians(slant))
    out = []
    for column, kind in enumerate(kinds):
        x = _LABEL_PIXELS + (column + 0.5) * cell
        out.append(
            f'<text transform="translate({x:.1f} {header - 6:.1f}) rotate(-{slant})">'
            f"{escape(kind)}</text>"
        )
    for row, layer in enumerate(layers):
        y = header + row * _ROW_PIXELS
        label = f"layer {layer}" if layer else "outside"
        out.append(f'<text x="0" y="{y + 14:.1f}">{label}</text>')
        for column, kind in enumerate(kinds):
            result = cells.get((layer, kind))
            if result is None:
                continue
            x = _LABEL_PIXELS + column * cell
            title = f"{result.name}: {result.error:.2e}, rounding explains {result.allowed:.0e}"
            out.append(
                f'<rect style="fill:var(--c4);fill-opacity:{_compute_opacity(result):.2f};'
                f'stroke:var(--quiet);stroke-width:.5" x="{x:.1f}" y="{y:.1f}" '
                f'width="{cell - 2:.1f}" height="{_ROW_PIXELS - 2}">'
                f"<title>{escape(title)}</title></rect>"
            )
    height = header + len(layers) * _ROW_PIXELS + 4
    return (
        f'<svg class="plot" viewBox="0 0 {width} {height:.0f}" role="img" '
        f'aria-label="Error of gradients by layer and kind">{"".join(out)}</svg>'
    )


def _compute_opacity(result: ParameterResult) -> float:
    """Return 0 for an error that rounding explains, 1 for 10,000 times that."""
    if result.passed:
        return 0.0
    if not math.isfinite(result.severity):
        return 1.0
    return min(1.0, 0.2 + 0.2 * math.log10(max(1.0, result.severity)))
