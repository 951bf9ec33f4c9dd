"""Report page of runs: self-contained, with the numbers of the runs."""

from __future__ import annotations

import dataclasses
import html
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from shardwright.report.charts import build_charts
from shardwright.report.event_timeline import draw_timeline, list_process_spans
from shardwright.report.page_shell import render_facts
from shardwright.report.recorded_run import load_run, load_runs, summarise_run
from shardwright.report.terminal_summary import describe_run
from tests.unit.report.pages import PageParser, render
from tests.unit.report.samples import (
    falling,
    make_memory_event,
    make_noisy_loss,
    make_step,
    write_events,
    write_run,
)
from tests.unit.telemetry.samples import make_pipeline_event, make_ranks_event, make_start_event


def find_section(page: str, key: str) -> str:
    """Return the HTML of the section with this id."""
    match = re.search(rf'id="{key}">(.*?)</section>', page, flags=re.DOTALL)
    assert match is not None
    return match[1]


def read_loss_data(page: str) -> Any:
    """Read the hover data of the loss chart."""
    match = re.search(r'id="loss-data">(.*?)</script>', page)
    assert match is not None
    return json.loads(match[1])


def test_the_page_is_self_contained(eventful: Path) -> None:
    page = render(eventful)
    parser = PageParser()
    parser.feed(page)
    assert parser.open == []
    assert len(parser.ids) == len(set(parser.ids))
    assert parser.links == ["data:,"]
    assert "url(" not in re.sub(r"url\(#[\w-]+\)", "", page)
    assert "@import" not in page
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")


def test_the_page_has_every_chart_and_its_table(eventful: Path) -> None:
    page = render(eventful)
    sections = dict(
        re.findall(
            r'<section class="card[^"]*" id="([\w-]+)">(.*?)</section>', page, flags=re.DOTALL
        )
    )
    curves = [
        "loss",
        "gradient-norm",
        "learning-rate",
        "throughput",
        "mfu",
        "memory",
        "waits-0",
        "time-0",
    ]
    panels = ["ranks-0", "memory-parts-0", "goodput-0", "pipeline-0-ran", "pipeline-0-ideal"]
    assert list(sections) == curves + panels
    for key in panels:
        assert sections[key].count("<svg") == 3
        assert sections[key].count("<tr>") > 2
        assert "<rect" in sections[key]
    for key in curves:
        section = sections[key]
        assert section.count("<svg") == (3 if key == "loss" else 2)
        assert "no data" not in section
        assert len(re.findall(r"<tr>", section)) > 20, key
        match = re.search(r'type="application/json"[^>]*>(.*?)</script>', section)
        assert match is not None
        hover = json.loads(match[1])
        assert all(len(series["x"]) == len(series["y"]) > 5 for series in hover["series"])
    for words in (
        "running",
        "resumes",
        "skipped steps",
        "stops, failures",
        "minutes since the first start",
    ):
        assert words in page
    for words in (
        "resumed at step 200",
        "1 step was skipped",
        "killed by &lt;signal&gt; 9",
        "dp_shard=2,zero_stage=3",
    ):
        assert words in page


def test_ranks_are_compared_and_the_slow_one_is_marked(eventful: Path, tmp_path: Path) -> None:
    text = html.unescape(render(eventful))
    assert "Rank 0 is more than 10% slower than the median rank in own work" in text
    assert "slow: 1.14 x" in text
    assert "<td>0 (slow)</td><td>450.000</td><td>400.000</td><td>1.14</td><td>50.000</td>" in text
    many = [make_ranks_event(i, own_seconds=(0.4,) * 40 + (0.6,)) for i in range(1, 6)]
    page = render(
        write_events(tmp_path / "many", [make_start_event(world_size=41), *many, make_step(6, 2.0)])
    )
    section = find_section(page, "ranks-0")
    assert "slow: 1.50 x" in section
    assert section.count("<tr>") == 1 + 41  # the table has all ranks


def test_the_pipeline_is_drawn_as_executed_and_as_scheduled(eventful: Path) -> None:
    text = html.unescape(render(eventful))
    # Forwards take 0.1 s, backwards 0.2 s on rank 0 and 0.25 s on rank 1. The schedule predicts a
    # step of 1 s; the measured step takes 1.1 s.
    assert (
        "Step 3, 1F1B: 2 ranks, 2 stages, 2 micro-batches. Ranks computed 59.1% of the time" in text
    )
    assert "Step time: 91% of the measured" in text
    assert "<title>1B0: 0.2 to 0.45</title>" in text


def test_the_timeline_begins_with_the_process_not_with_its_first_event(tmp_path: Path) -> None:
    """A run of four seconds with two of set-up had a bar of two seconds."""
    run = load_run(
        write_events(tmp_path / "run", [make_start_event(), *(make_step(i, 2.0) for i in (1, 2))])
    )
    assert list_process_spans(run) == [(1.7e9 + 60, 1.7e9 + 61.5)]
    assert "1.5 s of a process" in draw_timeline(run, 720)


def test_a_pipeline_with_unknown_actions_is_omitted(tmp_path: Path) -> None:
    event = dataclasses.replace(make_pipeline_event(1), actions=(("0F0", "nonsense"),) * 2)
    page = render(write_events(tmp_path / "run", [make_start_event(), make_step(1, 2.0), event]))
    assert 'id="pipeline' not in page


def test_memory_by_part_is_shown_with_the_prediction(eventful: Path, tmp_path: Path) -> None:
    run = shutil.copytree(eventful, tmp_path / "run")
    prediction = {
        "memory_bytes": {"weights": 2**20, "driver": 2**19, "total": 2**21, "capacity": 2**30},
        "tokens_per_second": 256.0,
    }
    (run / "prediction.json").write_text(json.dumps(prediction))
    page = render(run)
    section = find_section(page, "memory-parts-0")
    assert "<td>weights</td><td>1.00 MiB</td><td>1.00 MiB</td>" in section
    assert "<td>the rest of the peak</td><td></td><td>3.00 MiB</td>" in section
    assert "<td>all</td><td>1.50 MiB</td><td>9.00 MiB</td>" in section
    for key in ("throughput", "mfu"):
        section = find_section(page, key)
        assert ">predicted</text>" in section
    (run / "prediction.json").write_text("{half")
    assert "No prediction" in render(run)


def test_experts_and_samples_are_shown(tmp_path: Path) -> None:
    tokens = ((10, 30, 20, 20), (0, 0, 80, 0))
    run = write_events(
        tmp_path / "run",
        [
            make_start_event(),
            *(make_step(i, 2.0, expert_tokens=tokens, expert_load=4.0) for i in (1, 2)),
        ],
    )
    (run / "samples").mkdir()
    (run / "samples" / "step-2.txt").write_text("<b>once</b> upon")
    page = render(run)
    assert (
        "expert 2 of sparse layer 1 with 4.00 x. Orange is above the even share, blue below. "
        "3 experts received none." in page
    )
    assert "<title>layer 1, expert 2: 4.00 x</title>" in page
    assert "<td>step-2</td><td>&lt;b&gt;once&lt;/b&gt; upon</td>" in page
    assert 'id="expert-load"' in page


def test_rounding_of_8_bit_operands_is_shown_by_kind_of_layer(tmp_path: Path) -> None:
    rounding = {
        "fp8_flushed": {"attention": 0.25, "mlp": 0.5},
        "fp8_saturated": {"attention": 0, "mlp": 17},
        "fp8_nonfinite": {"attention": 3, "mlp": 0},
    }
    run = write_events(
        tmp_path / "run", [make_start_event(), *(make_step(i, 2.0, **rounding) for i in (1, 2))]
    )
    page = render(run)
    for kind in ("attention", "mlp"):
        assert f"Quantised operands rounded to zero: {kind}" in page
        assert f'id="fp8-saturated-{kind}"' in page
    assert "experts" not in page
    charts = {chart.key: chart for chart in build_charts(load_runs([run]))}
    values = {key: chart.series[0].y[-1] for key, chart in charts.items() if key.startswith("fp8")}
    assert charts["fp8-flushed-mlp"].frame.y_label == "% of elements"
    assert values == {
        "fp8-flushed-attention": 25.0,
        "fp8-flushed-mlp": 50.0,
        "fp8-saturated-attention": 0.0,
        "fp8-saturated-mlp": 17.0,
        "fp8-nonfinite-attention": 3.0,
        "fp8-nonfinite-mlp": 0.0,
    }
    assert "uantised operands" not in render(write_run(tmp_path / "wide", 3))


def test_rare_rounding_to_zero_is_counted_per_million(tmp_path: Path) -> None:
    steps = [make_step(i, 2.0, fp8_flushed={"attention": 6e-6}) for i in (1, 2)]
    run = write_events(tmp_path / "run", [make_start_event(), *steps])
    chart = next(c for c in build_charts(load_runs([run])) if c.key == "fp8-flushed-attention")
    assert chart.frame.y_label == "elements per million"
    assert chart.series[0].y.tolist() == pytest.approx([6.0, 6.0])
    assert "<td>2</td><td>6</td>" in find_section(render(run), chart.key)


def test_values_of_some_steps_are_averaged_over_those_that_have_them(tmp_path: Path) -> None:
    shares = {i: {"mlp": 0.01 if i % 4 else 0.04} for i in range(2, 61, 2)}
    steps = [make_step(i, 2.0, fp8_flushed=shares.get(i)) for i in range(1, 61)]
    run = write_events(tmp_path / "run", [make_start_event(), *steps])
    chart = next(c for c in build_charts(load_runs([run])) if c.key == "fp8-flushed-mlp")
    assert chart.note == "Bold: mean over 3 recorded steps; faint: every recorded step."
    raw, line = chart.series
    assert raw.x.tolist() == line.x.tolist() == list(range(2, 61, 2))
    assert raw.y[:3].tolist() == pytest.approx([1.0, 4.0, 1.0])
    assert line.y[1:3].tolist() == pytest.approx([2.0, 3.0])


@pytest.mark.parametrize(("count", "ticks"), [(0, ["0", "1"]), (3, ["0", "1", "2", "3"])])
def test_saturated_elements_have_whole_ticks(tmp_path: Path, count: int, ticks: list[str]) -> None:
    steps = [make_step(i, 2.0, fp8_saturated={"mlp": count}) for i in (1, 2)]
    run = write_events(tmp_path / "run", [make_start_event(), *steps])
    picture = find_section(render(run), "fp8-saturated-mlp").split("</svg>")[0]
    assert re.findall(r'text-anchor="end">([\d.]+)</text>', picture) == ticks


def test_offloaded_states_are_shown_beside_the_memory_of_the_device(tmp_path: Path) -> None:
    transfers = {
        "offload_read_bytes": 3 * 10**9,
        "offload_written_bytes": 10**9,
        "parameter_read_bytes": 10**9,
        "parameter_waiting_seconds": 0.5,
    }
    run = write_events(
        tmp_path / "run",
        [
            make_start_event(),
            *(make_step(i, 2.0, offload_waiting_seconds=0.25, **transfers) for i in (1, 2)),
            dataclasses.replace(make_memory_event(2), offloaded_bytes=(2**30, 2**31)),
        ],
    )
    (run / "prediction.json").write_text(
        json.dumps({"memory_bytes": {"weights": 2**30, "offloaded": 2**40, "total": 2**30}})
    )
    page = render(run)
    assert "2.00 GiB of optimizer states are offloaded, in addition to these bytes." in page
    assert "TiB" not in page
    for name in ("offload", "parameter"):
        assert f'id="{name}-bytes"' in page
        assert f'id="{name}-waiting"' in page
    assert 'id="activation-bytes"' not in page
    assert 'id="offload-bytes"' not in render(write_run(tmp_path / "resident", 3))


@pytest.mark.parametrize(
    ("read_bytes", "seconds", "labels", "values"),
    [
        (3_000_000, 9e-6, ("MB", "ms"), (4.0, 0.009)),
        (5_000, 0.9, ("kB", "ms"), (5.5, 900.0)),
        (3 * 10**9, 2.5, ("GB", "s"), (3.001, 2.5)),
    ],
)
def test_units_of_transfers_and_waits_depend_on_their_sizes(
    tmp_path: Path,
    read_bytes: int,
    seconds: float,
    labels: tuple[str, str],
    values: tuple[float, float],
) -> None:
    written_bytes = 10**6 if read_bytes > 10**6 else 500
    step = make_step(
        1, 2.0, offload_read_bytes=read_bytes, offload_written_bytes=written_bytes,
        offload_waiting_seconds=seconds,
    )  # fmt: skip
    run = write_events(tmp_path / "run", [make_start_event(), step])
    charts = {chart.key: chart for chart in build_charts(load_runs([run]))}
    for key, label, value in zip(("bytes", "waiting"), labels, values, strict=True):
        chart = charts[f"offload-{key}"]
        assert chart.frame.y_label == f"{label} per step on rank 0"
        assert chart.series[0].y.tolist() == pytest.approx([value])


def test_temperature_and_throttled_clocks_are_shown(tmp_path: Path) -> None:
    hot = [
        make_ranks_event(
            i, temperature_celsius=(60.0, 60.0 + i), throttled=("", "heat" if i > 3 else "")
        )
        for i in range(1, 6)
    ]
    page = render(write_events(tmp_path / "run", [make_start_event(), make_step(1, 2.0), *hot]))
    assert "Clocks were throttled at 2 of the recorded steps." in page
    assert "rank 1: heat" in page


def test_text_of_a_run_is_not_executed_as_script(eventful: Path) -> None:
    page = render(eventful)
    assert '<script>alert("x")' not in page
    assert page.count("<script>") == 1


def test_the_name_of_a_run_is_not_executed_as_script(tmp_path: Path) -> None:
    names = ("</script><script>alert(1)</script>", "<img src=x onerror=alert(2)>")
    steps = [make_step(i, falling(i)) for i in range(1, 9)]
    paths = [
        write_events(
            tmp_path / str(i), [make_start_event(name=name, layout=name, host=name), *steps]
        )
        for i, name in enumerate(names)
    ]
    for selection in (paths, paths[:1], paths[1:]):
        page = render(*selection)
        PageParser().feed(page)
        assert "alert(1)</script>" not in page
        assert "<img" not in page


def test_the_hover_values_equal_those_of_the_run(tmp_path: Path) -> None:
    page = render(write_run(tmp_path / "run", 10, validation=falling, every=5))
    data = read_loss_data(page)
    training, validation = data["series"]
    assert training["x"] == list(range(1, 11))
    assert training["y"] == pytest.approx([falling(i) for i in range(1, 11)], rel=1e-5)
    assert (validation["x"], validation["name"]) == ([5, 10], "validation")


def test_several_runs_are_overlaid_with_their_names(tmp_path: Path) -> None:
    page = render(
        write_run(tmp_path / "small", 50),
        write_run(tmp_path / "large", 80, make_noisy_loss(0.01, 1)),
    )
    parser = PageParser()
    parser.feed(page)
    assert len(parser.ids) == len(set(parser.ids))
    assert "<h1>2 runs</h1>" in page
    data = read_loss_data(page)
    assert [(s["name"], s["x"][-1]) for s in data["series"]] == [("small", 50), ("large", 80)]


def test_runs_of_equal_name_get_distinct_names(tmp_path: Path) -> None:
    paths = []
    for parent in ("one", "two"):
        paths.append(write_run(tmp_path / parent / "same", 5))
    assert len({run.name for run in load_runs(paths)}) == 2


def test_runs_with_different_batches_share_an_axis_of_tokens(tmp_path: Path) -> None:
    small = write_run(tmp_path / "small", 20)
    steps = [make_step(i, falling(i), tokens=128) for i in range(1, 21)]
    large = write_events(
        tmp_path / "large", [make_start_event(name="large", global_batch_tokens=128), *steps]
    )
    page = render(small, large)
    data = read_loss_data(page)
    assert data["x"] == "tokens seen"
    assert f"<td>{64 * 2:,}</td><td>{falling(2):.4g}</td><td></td><td>{falling(1):.4g}</td>" in page
    assert [s["x"][-1] for s in data["series"]] == [20 * 64, 20 * 128]


SETTINGS = {
    "precision": {"kind": "fp8", "fp8": {"recipe": "mxfp8"}, "master_weights": "fp32"},
    "optimizer": {"name": "muon"},
    "offload": {"optimizer": "host", "parameters": "none", "activations": "disk"},
}
OFFLOADED = "optimizer states in host memory, saved tensors on disk"


def test_precision_optimizer_and_offloading_are_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 5, recipe=SETTINGS)
    page = render(run)
    head = page[: page.index('class="charts"')]
    assert f"fp8 mxfp8 · muon · {OFFLOADED} · 2 ranks" in head
    for name, text in (("precision", "fp8 mxfp8"), ("optimizer", "muon"), ("offload", OFFLOADED)):
        assert f"<dt>{name}</dt><dd>{text}</dd>" in page
    other = write_run(
        tmp_path / "other", 5,
        recipe={
            "precision": {"kind": "bf16", "master_weights": "bf16"},
            "optimizer": {"name": "adamw"},
            "offload": dict.fromkeys(("optimizer", "parameters", "activations"), "none"),
        },
    )  # fmt: skip
    both = render(run, other)
    assert f'<td class="text wrap">fp8 mxfp8, muon, {OFFLOADED}</td>' in both
    assert '<td class="text wrap">bf16, master weights in bf16, adamw</td>' in both
    assert "<dt>offload</dt><dd>none</dd>" in both


def test_the_terminal_summary_names_the_settings(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "run", 5, recipe=SETTINGS))
    lines = describe_run(run, summarise_run(run))
    assert lines[2:5] == [
        "  precision       fp8 mxfp8",
        "  optimizer       muon",
        f"  offload         {OFFLOADED}",
    ]
    assert not any("adapters" in line for line in lines)  # older runs do not record them
    for section, text in (
        ({"kind": "dora", "rank": 4, "quantize": None}, "dora of rank 4"),
        ({"kind": None, "rank": None, "quantize": "nf4"}, "lora of rank 16, base in nf4"),
        ({"kind": None, "rank": None, "path": "folder"}, "from folder"),
        (None, "none"),
    ):
        recipe = SETTINGS | {"adapters": section}
        adapted = load_run(write_run(tmp_path / text, 5, recipe=recipe))
        assert f"  adapters        {text}" in describe_run(adapted, summarise_run(adapted))
    old = load_run(write_run(tmp_path / "old", 5))
    text = "\n".join(describe_run(old, summarise_run(old)))
    assert "precision" not in text
    assert "<dt>precision</dt><dd>not recorded</dd>" in render(tmp_path / "old")


def test_long_facts_of_the_terminal_summary_continue_in_a_second_line(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "run", 5))
    summary = summarise_run(run) | {"precision": " ".join(["word"] * 30)}
    lines = describe_run(run, summary)
    assert lines[2] == "  precision       " + " ".join(["word"] * 16)
    assert lines[3] == " " * 18 + " ".join(["word"] * 14)
    assert max(map(len, lines)) <= 100


def test_ten_numbers_of_the_head_are_two_rows_of_five() -> None:
    for num_facts, num_columns in ((3, 3), (9, 9), (10, 5), (11, 6)):
        head = render_facts([(f"name {index}", "1") for index in range(num_facts)])
        assert f'style="--columns:{num_columns}"' in head
