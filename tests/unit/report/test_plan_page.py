"""Pages of `plan`, `schedule` and `doctor`: self-contained, with the output of the verbs."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

from shardwright.cli.main import run
from shardwright.doctor.finding import Finding
from shardwright.errors import ExitCode
from shardwright.report.diagnosis_page import render_diagnosis
from tests.unit.report.pages import PageParser

RECIPES = Path(__file__).parents[3] / "recipes"


def check_page(page: str) -> None:
    parser = PageParser()
    parser.feed(page)
    assert parser.open == []
    assert len(parser.ids) == len(set(parser.ids))
    assert parser.links == ["data:,"]
    assert "no data" not in page


def test_a_plan_is_written_as_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.html"
    arguments = [
        "plan",
        str(RECIPES / "llama3-8b.yaml"),
        "--cluster",
        "8xH100-80GB",
        "--gpus",
        "8,16",
        "--top",
        "3",
        "--html",
        str(out),
    ]
    assert run(arguments) == ExitCode.DONE
    page = html.unescape(out.read_text())
    check_page(out.read_text())
    assert re.findall(r'<section class="card[^"]*" id="([\w-]+)"', page) == [
        "layouts",
        "memory",
        "time",
        "growth",
        "rejected",
    ]
    printed = capsys.readouterr().out
    assert "DDP" in page
    assert "DDP" in printed
    for picture in (
        "Layouts by throughput",
        "Memory by part",
        "Time by part",
        "Throughput by number of devices",
    ):
        assert f'aria-label="{picture}"' in page


@pytest.mark.parametrize("num_listed", ["1", "5"])
def test_the_page_of_a_plan_draws_and_explains_the_chosen_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], num_listed: str
) -> None:
    out = tmp_path / "plan.html"
    recipe = str(RECIPES / "llama3-8b.yaml")
    options = ["--cluster", "8xH100-80GB", "--top", num_listed, "--html", str(out)]
    assert run(["plan", recipe, *options]) == ExitCode.DONE
    printed = re.search(r"^chosen: (.*?): (the .*?)( \(~\))?$", capsys.readouterr().out, re.M)
    assert printed is not None, "the fastest layout is tight, so another one is chosen"
    layout = printed[1]
    reason = printed[2]
    page = html.unescape(out.read_text())
    assert f"<p>Chosen: {layout}, {reason}.</p>" in page
    for key in ("layouts", "memory", "time"):
        section = re.search(rf'id="{key}">(.*?)</section>', page, flags=re.DOTALL)
        assert section is not None
        assert section[1].count(f"<td>{layout}</td>") == 1


def test_a_schedule_is_written_as_a_page(tmp_path: Path) -> None:
    out = tmp_path / "schedule.html"
    assert (
        run(["schedule", "zbv", "--stages", "4", "--micro-batches", "8", "--html", str(out)])
        == ExitCode.DONE
    )
    page = out.read_text()
    check_page(page)
    assert page.count("<title>0F0: 0 to") == 3  # drawn at every width
    assert "without deadlock" in page


def test_a_page_that_cannot_be_written_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "schedule",
        "1f1b",
        "--stages",
        "2",
        "--micro-batches",
        "4",
        "--html",
        str(tmp_path / "no" / "x.html"),
    ]
    assert run(arguments) == ExitCode.WRONG_INPUT
    assert "--html: the page cannot be written" in capsys.readouterr().err


def test_an_examination_is_rendered_as_a_page() -> None:
    bus = {"4096": 1e8, "1048576": 3e9}
    numbers = {
        "axis": "dp_shard = all",
        "kind": "all_reduce",
        "num_ranks": 2,
        "bus_bytes_per_second": bus,
        "link": "nvlink4",
    }
    findings = [
        Finding("host", "cores", "pass", "2 cores for 2 ranks"),
        Finding(
            "rates",
            "products, bf16",
            "pass",
            "1 TFLOP/s",
            numbers={"flops_per_second": {0: 1e12, 1: 0.9e12}},
        ),
        Finding(
            "collectives",
            "all_reduce over dp_shard = all",
            "fail",
            "3 <GB/s>",
            "Look",
            numbers | {"peak_bytes_per_second": 3e10},
        ),
        Finding("links", "slow link 0 -> 1", "warn", "1 GB/s", "Look at it"),
    ]
    page = render_diagnosis("Doctor", "2 ranks", findings)
    check_page(page)
    assert re.findall(r'<section class="card[^"]*" id="([\w-]+)"', page) == [
        "to-do",
        "section-host",
        "section-rates",
        "traffic-3",
        "section-links",
    ]
    to_do = page[page.index('id="to-do"') : page.index('id="section-host"')]
    assert to_do.index('<td class="fail">fail</td>') < to_do.index('<td class="warn">warn</td>')
    assert "3 &lt;GB/s&gt;" in to_do
    assert page.count("<title>bf16, rank 1 pass: 900 GFLOP/s</title>") == 3  # drawn at every width
    assert page.count(">10%</text>") == 3  # of the link
    assert '<th scope="col">4.00 KiB</th>' in page
    assert "All checks pass" in render_diagnosis("Doctor", "one", findings[:1])
