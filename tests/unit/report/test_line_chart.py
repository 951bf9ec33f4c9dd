"""Charts: coordinates match the values at any size, and downsampling preserves peaks."""

from __future__ import annotations

import itertools
import math
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.report.axis_scale import AxisScale, find_ticks, format_ticks, pad_range
from shardwright.report.downsampling import compute_bin_means, smooth_values, thin_points
from shardwright.report.line_chart import ChartFrame, Series, draw_curves


def parse_path(d: str) -> list[tuple[float, float]]:
    """Parse a path of one M and relative moves into absolute points."""
    head, _, tail = d.removeprefix("M").rstrip("Z").partition("l")
    x, y = (float(v) for v in head.split(","))
    points = [(x, y)]
    for move in tail.split():
        dx, dy = (float(v) for v in move.split(","))
        x, y = x + dx, y + dy
        points.append((x, y))
    return points


def read_geometry(svg: str) -> list[float]:
    """Read the data range of x and the edges of the plot: low, high, left, right, top, bottom."""
    geometry = re.search(r'data-x="([^"]+)"', svg)
    assert geometry is not None
    return [float(v) for v in geometry[1].split()]


def list_paths(svg: str, style: str) -> list[list[tuple[float, float]]]:
    return [
        parse_path(d)
        for d in re.findall(rf'class="{style} [^"]*"(?: style="[^"]*")? d="([^"]+)"', svg)
    ]


def test_the_points_of_a_curve_match_its_values() -> None:
    x = np.array([0.0, 50.0, 100.0])
    y = np.array([0.0, 10.0, 5.0])
    svg = draw_curves([Series("a", x, y)], ChartFrame(width=500, height=300, y_range=(0.0, 10.0)))
    low, high, left, right, top, bottom = read_geometry(svg)
    assert (low, high) == (0.0, 100.0)
    (points,) = list_paths(svg, "line")
    assert points == pytest.approx(
        np.array([(left, bottom), ((left + right) / 2, top), (right, (top + bottom) / 2)]), abs=0.11
    )


def test_areas_stack_to_their_sum() -> None:
    x = np.array([0.0, 1.0, 2.0])
    parts = [
        Series(name, x, np.full(3, value), index, "area")
        for index, (name, value) in enumerate((("a", 1.0), ("b", 3.0)))
    ]
    svg = draw_curves(parts, ChartFrame(width=400, height=250, y_range=(0.0, 4.0)))
    *_, top, bottom = read_geometry(svg)
    lower, upper = list_paths(svg, "area")
    quarter = bottom - (bottom - top) / 4
    assert {round(y) for _, y in lower} == {round(bottom), round(quarter)}
    assert {round(y) for _, y in upper} == {round(quarter), round(top)}


@pytest.mark.parametrize("standalone", [True, False])
@pytest.mark.parametrize("labels", ["direct", "legend"])
def test_the_svg_is_well_formed_and_escapes_names(labels: str, standalone: bool) -> None:
    x = np.arange(5.0)
    series = [
        Series('<b> & "c"', x, x, i, style)
        for i, style in enumerate(("line", "faint", "dashed", "dots"))
    ]  # type: ignore[arg-type]
    frame = ChartFrame(
        labels=labels,  # type: ignore[arg-type]
        y_label="a < b",
        rules=((2.0, "<r>"),),
        marks=((1.0, "&m"),),
    )
    root = ElementTree.fromstring(draw_curves(series, frame, title="<t>", is_standalone=standalone))
    text = " ".join(root.itertext())
    assert '<b> & "c"' in text
    assert "a < b" in text
    assert ("<t>" in text) == standalone
    assert root.get("viewBox", "").split()[2:] == ["720", "320"]


@pytest.mark.parametrize("steps", [(10.0, 14.0, 90.0), (40.0, 60.0, 62.0), (1.0, 2.0, 3.0, 4.0)])
def test_labels_of_near_marks_do_not_overlap(steps: tuple[float, ...]) -> None:
    """Two resumes within a few steps were one unreadable label on a narrow page."""
    x = np.array([0.0, 100.0])
    frame = ChartFrame(width=350, marks=tuple((step, "resumed") for step in steps))
    root = ElementTree.fromstring(draw_curves([Series("a", x, x)], frame))
    boxes = []
    for text in root.iter("text"):
        if text.text == "resumed":
            left = float(text.get("x", "")) - (50.0 if text.get("text-anchor") == "end" else 0.0)
            boxes.append((left, float(text.get("y", ""))))
    assert len(boxes) == len(steps)
    for (left, y), (other, other_y) in itertools.combinations(boxes, 2):
        assert abs(left - other) >= 50.0 or abs(y - other_y) >= 12.0


@pytest.mark.parametrize(
    "y",
    [
        [],
        [math.nan, math.nan],
        [3.0],
        [1.0, 1.0],
        [0.0, 0.0],
        [math.inf, 1.0, -math.inf],
        [1e-30, 1e30],
    ],
)
@pytest.mark.parametrize("log", [True, False])
def test_unusual_data_are_drawn_without_error(y: list[float], log: bool) -> None:
    svg = draw_curves(
        [Series("a", np.arange(float(len(y))), np.array(y))], ChartFrame(is_y_log=log)
    )
    ElementTree.fromstring(svg)
    assert "nan" not in svg.lower().replace("no data", "")
    assert ("no data" in svg) == (not any(map(math.isfinite, y)))


def test_the_only_step_of_a_run_is_visible() -> None:
    one = np.array([1.0])
    svg = draw_curves([Series("a", one, one), Series("b", one, one, 1, "area")], ChartFrame())
    assert svg.count("<circle") == 1
    (bar,) = list_paths(svg, "area")
    assert len({x for x, _ in bar}) == 2
    assert re.findall(r'text-anchor="middle">([^<]*)', svg) == ["1"]


def test_labels_do_not_overlap() -> None:
    x = np.arange(3.0)
    svg = draw_curves([Series(f"run {i}", x, x + 1e-6 * i, i) for i in range(6)], ChartFrame())
    ys = sorted(float(y) for y in re.findall(r'<text class="f\d" x="[^"]+" y="([^"]+)"', svg))
    assert len(ys) == 6
    assert min(np.diff(ys)) >= 14.9


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.integers(2, 9))
def test_ticks_are_few_increasing_and_in_range(low: float, width: float, count: int) -> None:
    ticks = find_ticks(low, low + width, count)
    assert len(ticks) <= 2 * count + 2
    assert all(a < b for a, b in itertools.pairwise(ticks))
    slack = 1e-6 * width + 1e-12 * abs(low)
    assert all(low - slack <= tick <= low + width + slack for tick in ticks)


@given(st.integers(0, 10**6), st.integers(1, 10**6), st.integers(2, 9))
def test_ticks_of_steps_are_integers(low: int, width: int, count: int) -> None:
    ticks = find_ticks(low, low + width, count, is_whole=True)
    assert ticks
    assert all(tick == round(tick) for tick in ticks)


@given(st.floats(-12, 8), st.floats(0.5, 12))
def test_log_ticks_are_few_and_in_range(exponent: float, decades: float) -> None:
    low = 10**exponent
    high = 10 ** (exponent + decades)
    ticks = find_ticks(low, high, 5, is_log=True)
    assert 1 <= len(ticks) <= 11
    assert all(low * 0.999 <= tick <= high * 1.001 for tick in ticks)


def test_tick_labels_are_distinct() -> None:
    for low, high in (
        (0, 1),
        (0, 900),
        (0, 9999),
        (0, 123456),
        (1e-5, 9e-5),
        (0, 1e-3),
        (2.31, 2.34),
        (-3, 3),
        (0, 3e9),
    ):
        labels = format_ticks(find_ticks(low, high, 5))
        assert len(set(labels)) == len(labels) >= 3, (low, high, labels)


def test_scales_are_linear_or_logarithmic() -> None:
    assert AxisScale(0, 10, 100, 200)(5) == 150
    assert AxisScale(1, 100, 0, 2, is_log=True)(10) == pytest.approx(1)
    assert pad_range(1, 100, is_log=True)[0] < 1
    low, high = pad_range(1e9, 1e9 + 1e-6)
    assert high - low > 1e6


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400), st.integers(1, 30))
def test_downsampling_preserves_ends_and_extremes(values: list[float], buckets: int) -> None:
    x = np.arange(float(len(values)))
    y = np.array(values)
    tx, ty = thin_points(x, y, buckets)
    assert len(tx) <= max(4 * buckets, 1)
    assert (ty.min(), ty.max()) == (y.min(), y.max())
    assert (tx[0], tx[-1]) == (x[0], x[-1])
    assert (np.diff(tx) > 0).all()
    assert all(y[int(a)] == b for a, b in zip(tx, ty, strict=True))


def test_downsampling_preserves_a_single_spike() -> None:
    y = np.ones(100_000)
    y[54_321] = 9.0
    tx, ty = thin_points(np.arange(100_000.0), y, 200)
    assert len(tx) <= 800
    assert tx[ty.argmax()] == 54_321


def test_smoothing_is_centred_and_ignores_nan() -> None:
    line = np.arange(50.0)
    assert smooth_values(line, 5)[:45] == pytest.approx(line[:45])  # no lag, even at the start
    assert smooth_values(line, 5)[-1] == pytest.approx(np.mean(line[-6:]))
    line[20] = math.nan
    assert np.isfinite(smooth_values(line, 5)).all()
    assert math.isnan(smooth_values(np.array([math.nan]), 3)[0])


def test_bins_preserve_the_mean() -> None:
    x = np.arange(1000.0)
    y = np.random.default_rng(0).random(1000)
    bx, by = compute_bin_means(x, y, 100)
    assert len(bx) == 100
    assert by.mean() == pytest.approx(y.mean())


def test_many_names_do_not_reduce_the_height_of_curves() -> None:
    """On narrow screens long names take a row each above the curves, and the picture grows."""
    x = np.arange(5.0)

    def measure_curve_height(count: int) -> float:
        series = [
            Series(f"a run with a name that fills its row, number {n}", x, x, n)
            for n in range(count)
        ]
        svg = draw_curves(series, ChartFrame(width=350, height=250, labels="legend"))
        *_, top, bottom = read_geometry(svg)
        return bottom - top

    assert measure_curve_height(12) == measure_curve_height(2) > 120
