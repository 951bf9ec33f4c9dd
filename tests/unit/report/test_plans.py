"""Pages of `plan` and `schedule`: whole by themselves, with what the verbs say."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

from shardwright.cli.main import run
from shardwright.errors import ExitCode
from tests.unit.report.test_page import Balanced

RECIPES = Path(__file__).parents[3] / "recipes"


def check_whole(page: str) -> None:
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    assert len(parser.ids) == len(set(parser.ids))
    assert parser.links == ["data:,"]
    assert "no data" not in page


def test_a_plan_as_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.html"
    words = [
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
    assert run(words) == ExitCode.DONE
    page = html.unescape(out.read_text())
    check_whole(out.read_text())
    assert re.findall(r'<section class="card[^"]*" id="([\w-]+)"', page) == ["layouts", "memory", "time", "growth", "rejected"]
    printed = capsys.readouterr().out
    assert "DDP" in page
    assert "DDP" in printed
    for picture in ("Layouts by throughput", "Memory by part", "Time by part", "Throughput by number of devices"):
        assert f'aria-label="{picture}"' in page


def test_a_schedule_as_a_page(tmp_path: Path) -> None:
    out = tmp_path / "schedule.html"
    assert run(["schedule", "zbv", "--stages", "4", "--micro-batches", "8", "--html", str(out)]) == ExitCode.DONE
    page = out.read_text()
    check_whole(page)
    assert page.count("<title>0F0: 0 to") == 3  # drawn at every width
    assert "free of deadlock" in page


def test_a_page_that_cannot_be_written_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["schedule", "1f1b", "--stages", "2", "--micro-batches", "4", "--html", str(tmp_path / "no" / "x.html")]
    assert run(words) == ExitCode.WRONG_INPUT
    assert "--html: the page cannot be written" in capsys.readouterr().err
