"""The report page: whole by itself, true to its numbers, small, and alive in a browser (where there is one)."""

from __future__ import annotations

import dataclasses
import functools
import html
import http.server
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from shardwright.errors import InputError
from shardwright.report.page import render_page
from shardwright.report.runs import load_runs, summarise
from shardwright.telemetry.events import FILE_NAME, Evaluation, Warned
from tests.unit.report.samples import falling, noisy, one_step, write_eventful_run, write_events, write_run
from tests.unit.telemetry.samples import pipeline_event, ranks_event, start_event

VOID = {"meta", "link"}


class Balanced(HTMLParser):
    """Fails on tags that do not match; keeps ids and what could be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "srcset", "action", "xlink:href"):
                self.links.append(value or "")

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def eventful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_eventful_run(tmp_path_factory.mktemp("runs") / "eventful")


def render(*paths: Path) -> str:
    return render_page(load_runs(paths))


def test_the_page_is_whole_by_itself(eventful: Path) -> None:
    page = render(eventful)
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    assert len(parser.ids) == len(set(parser.ids))
    assert parser.links == ["data:,"]
    assert "url(" not in re.sub(r"url\(#[\w-]+\)", "", page)
    assert "@import" not in page
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")


def test_every_chart_and_its_table_are_there(eventful: Path) -> None:
    page = render(eventful)
    sections = dict(re.findall(r'<section class="card[^"]*" id="([\w-]+)">(.*?)</section>', page, flags=re.DOTALL))
    curves = ["loss", "gradient-norm", "learning-rate", "throughput", "mfu", "memory", "waits-0", "time-0"]
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
        hover = json.loads(re.search(r'type="application/json"[^>]*>(.*?)</script>', section)[1])  # type: ignore[index]
        assert all(len(series["x"]) == len(series["y"]) > 5 for series in hover["series"])
    for words in ("running", "resumes", "skipped steps", "stops, failures", "minutes since the first start"):
        assert words in page
    for words in ("resumed at step 200", "1 step was skipped", "killed by &lt;signal&gt; 9", "dp_shard=2,zero_stage=3"):
        assert words in page


def test_ranks_are_held_against_each_other_and_the_slow_one_is_marked(eventful: Path, tmp_path: Path) -> None:
    text = html.unescape(render(eventful))
    assert "Rank 0 is more than 10% slower than the median rank by itself" in text
    assert "slow: 1.14 x" in text
    assert "<td>0 (slow)</td><td>450.000</td><td>400.000</td><td>1.14</td><td>50.000</td>" in text
    many = [ranks_event(i, own_seconds=(0.4,) * 40 + (0.6,)) for i in range(1, 6)]
    page = render(write_events(tmp_path / "many", [start_event(world_size=41), *many, one_step(6, 2.0)]))
    section = re.search(r'id="ranks-0">(.*?)</section>', page, flags=re.DOTALL)[1]  # type: ignore[index]
    assert "slow: 1.50 x" in section
    assert section.count("<tr>") == 1 + 41  # the table has them all


def test_the_pipeline_is_drawn_as_it_ran_and_as_its_schedule_has_it(eventful: Path) -> None:
    text = html.unescape(render(eventful))
    # Forwards take 0.1 s, rank 0's backwards 0.2 s, rank 1's 0.25 s: by the schedule the step takes 1 s; it took 1.1 s.
    assert "Step 3, 1F1B: 2 ranks, 2 stages, 2 micro-batches. Ranks computed 59.1% of it" in text
    assert "takes 91% of the time" in text
    assert "<title>1B0: 0.2 to 0.45</title>" in text


def test_a_pipeline_that_somebody_has_changed_is_left_out(tmp_path: Path) -> None:
    event = dataclasses.replace(pipeline_event(1), actions=(("0F0", "nonsense"),) * 2)
    page = render(write_events(tmp_path / "run", [start_event(), one_step(1, 2.0), event]))
    assert 'id="pipeline' not in page


def test_memory_by_part_stands_beside_the_prediction(eventful: Path, tmp_path: Path) -> None:
    run = shutil.copytree(eventful, tmp_path / "run")
    told = {"memory_bytes": {"weights": 2**20, "driver": 2**19, "total": 2**21, "capacity": 2**30}, "tokens_per_second": 256.0}
    (run / "prediction.json").write_text(json.dumps(told))
    page = render(run)
    section = re.search(r'id="memory-parts-0">(.*?)</section>', page, flags=re.DOTALL)[1]  # type: ignore[index]
    assert "<td>weights</td><td>1.00 MiB</td><td>1.00 MiB</td>" in section
    assert "<td>the rest of the peak</td><td></td><td>3.00 MiB</td>" in section
    assert "<td>all</td><td>1.50 MiB</td><td>9.00 MiB</td>" in section
    for key in ("throughput", "mfu"):
        section = re.search(rf'id="{key}">(.*?)</section>', page, flags=re.DOTALL)[1]  # type: ignore[index]
        assert ">predicted</text>" in section
    (run / "prediction.json").write_text("{half")
    assert "Nothing was predicted" in render(run)


def test_experts_and_samples_are_shown(tmp_path: Path) -> None:
    tokens = ((10, 30, 20, 20), (0, 0, 80, 0))
    run = write_events(
        tmp_path / "run", [start_event(), *(one_step(i, 2.0, expert_tokens=tokens, expert_load=4.0) for i in (1, 2))]
    )
    (run / "samples").mkdir()
    (run / "samples" / "step-2.txt").write_text("<b>once</b> upon")
    page = render(run)
    assert "expert 2 of sparse layer 1 with 4.00 x. 3 experts got none." in page
    assert "<title>layer 1, expert 2: 4.00 x</title>" in page
    assert "<td>step-2</td><td>&lt;b&gt;once&lt;/b&gt; upon</td>" in page
    assert 'id="expert-load"' in page


def test_temperature_and_held_down_clocks(tmp_path: Path) -> None:
    hot = [ranks_event(i, temperature_celsius=(60.0, 60.0 + i), throttled=("", "heat" if i > 3 else "")) for i in range(1, 6)]
    page = render(write_events(tmp_path / "run", [start_event(), one_step(1, 2.0), *hot]))
    assert "Clocks were held down at 2 of the steps that tell." in page
    assert "rank 1: heat" in page


def test_what_a_run_says_cannot_become_script(eventful: Path) -> None:
    page = render(eventful)
    assert '<script>alert("x")' not in page
    assert page.count("<script>") == 1


def test_what_a_run_is_called_cannot_become_script(tmp_path: Path) -> None:
    names = ("</script><script>alert(1)</script>", "<img src=x onerror=alert(2)>")
    steps = [one_step(i, falling(i)) for i in range(1, 9)]
    paths = [
        write_events(tmp_path / str(i), [start_event(name=name, layout=name, host=name), *steps]) for i, name in enumerate(names)
    ]
    for chosen in (paths, paths[:1], paths[1:]):
        page = render(*chosen)
        Balanced().feed(page)
        assert "alert(1)</script>" not in page
        assert "<img" not in page


def test_the_hover_numbers_are_the_runs_numbers(tmp_path: Path) -> None:
    page = render(write_run(tmp_path / "run", 10, validation=falling, every=5))
    data = json.loads(re.search(r'id="loss-data">(.*?)</script>', page)[1])  # type: ignore[index]
    training, validation = data["series"]
    assert training["x"] == list(range(1, 11))
    assert training["y"] == pytest.approx([falling(i) for i in range(1, 11)], rel=1e-5)
    assert (validation["x"], validation["name"]) == ([5, 10], "validation")


def test_several_runs_are_overlaid_under_their_names(tmp_path: Path) -> None:
    page = render(write_run(tmp_path / "small", 50), write_run(tmp_path / "large", 80, noisy(0.01, 1)))
    parser = Balanced()
    parser.feed(page)
    assert len(parser.ids) == len(set(parser.ids))
    assert "<h1>2 runs</h1>" in page
    data = json.loads(re.search(r'id="loss-data">(.*?)</script>', page)[1])  # type: ignore[index]
    assert [(s["name"], s["x"][-1]) for s in data["series"]] == [("small", 50), ("large", 80)]


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    paths = []
    for parent in ("one", "two"):
        paths.append(write_run(tmp_path / parent / "same", 5))
    assert len({run.name for run in load_runs(paths)}) == 2


def test_runs_with_other_batches_share_an_axis_of_tokens(tmp_path: Path) -> None:
    small = write_run(tmp_path / "small", 20)
    steps = [one_step(i, falling(i), tokens=128) for i in range(1, 21)]
    large = write_events(tmp_path / "large", [start_event(name="large", global_batch_tokens=128), *steps])
    page = render(small, large)
    data = json.loads(re.search(r'id="loss-data">(.*?)</script>', page)[1])  # type: ignore[index]
    assert data["x"] == "tokens seen"
    assert f"<td>{64 * 2:,}</td><td>{falling(2):.4g}</td><td></td><td>{falling(1):.4g}</td>" in page
    assert [s["x"][-1] for s in data["series"]] == [20 * 64, 20 * 128]


@pytest.mark.parametrize(
    "events",
    [
        [start_event()],
        [one_step(1, 2.0)],
        [start_event(), one_step(1, float("nan"))],
        [start_event(), Evaluation(step=0, loss=3.0, perplexity=20.0, tokens=5, seconds=1.0)],
        [Warned(message="alone")],
        [start_event(), one_step(1, 2.0, memory_bytes=(), mfu=None), one_step(2, 2.0, memory_bytes=(1,))],
        [start_event(world_size=64), *(one_step(i, 2.0, memory_bytes=tuple(range(1, 65))) for i in range(1, 30))],
    ],
    ids=["start only", "step only", "nan only", "evaluation only", "warning only", "ragged", "many ranks"],
)
def test_odd_runs_still_make_a_page(tmp_path: Path, events: list[object]) -> None:
    page = render(write_events(tmp_path / "odd", events))  # type: ignore[arg-type]
    Balanced().feed(page)
    json.dumps(summarise(load_runs([tmp_path / "odd"])[0]), allow_nan=False)


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 5)
    with (run / FILE_NAME).open("a") as file:
        file.write("garbage\n{half a li")
    page = html.unescape(render(run))
    assert "1 lines of" in page
    assert "the last line has no end" in page


def test_what_a_newer_version_wrote_is_shown_as_far_as_it_is_understood(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 5)
    newer = (run / FILE_NAME).read_text().replace('"schema_version": 1', '"schema_version": 7')
    (run / FILE_NAME).write_text(newer + '{"schema_version": 7, "kind": "unheard_of"}\n')
    page = html.unescape(render(run))
    assert "a newer shardwright's (schema 7, this one knows 1)" in page
    assert "1 events of unknown kind `unheard_of`" in page
    assert 'id="loss"' in page


@pytest.mark.parametrize("content", [None, "", "garbage\n", "{half a li"], ids=["no file", "empty", "garbage", "torn"])
def test_a_folder_without_events_makes_a_page_with_a_note(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / FILE_NAME).write_text(content)
    page = render(tmp_path)
    Balanced().feed(page)
    assert "there are no events to show yet" in page or "holds no event that can be read yet" in page
    json.dumps(summarise(load_runs([tmp_path])[0]), allow_nan=False)
    assert render(tmp_path, write_run(tmp_path / "whole", 3))  # beside one that has some


def test_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no events to read"):
        load_runs([tmp_path / "mistyped"])


def test_the_summary_holds_the_numbers(eventful: Path) -> None:
    summary = summarise(load_runs([eventful])[0])
    assert summary["status"] == "completed"
    assert (summary["steps"], summary["total_steps"]) == (300, 300)
    assert (summary["resumes"], summary["skipped_steps"], summary["withdrawn_steps"]) == (1, 1, 20)
    assert summary["best_validation_step"] == 300
    assert summary["best_validation_loss"] == pytest.approx(falling(300) * 1.05)
    assert summary["training_loss"] == pytest.approx(falling(300), rel=0.05)
    assert summary["peak_memory_bytes"] == [2**30 + 6, 2**29]
    assert summary["part_seconds"]["backward"] == 0.25
    assert summary["failures"] == [{"rank": 1, "message": "killed by <signal> 9"}]
    assert 0 < summary["useful_share"] <= 1


@pytest.fixture(scope="module")
def long_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("runs") / "long"
    return render(write_run(folder, 100_000, noisy(0.02, 3), validation=falling, every=2000))


@pytest.mark.long
def test_a_hundred_thousand_steps_make_a_small_page(long_page: str) -> None:
    assert len(long_page) < 600_000


def test_pages_do_not_grow_with_the_steps(tmp_path: Path) -> None:
    short, longer = (len(render(write_run(tmp_path / str(steps), steps, noisy(0.02, 3)))) for steps in (3000, 6000))
    assert longer < 1.1 * short


PROBE = """
<script>
addEventListener("load", () => setTimeout(() => {
  const found = { seconds: performance.now() / 1000, shown: [], readers: [] };
  for (const figure of document.querySelectorAll(".figure")) {
    const svgs = [...figure.querySelectorAll("svg")].filter((svg) => svg.getBoundingClientRect().width > 0);
    const drawn = svgs.length ? [...svgs[0].querySelectorAll("path.line, path.area, rect")] : [];
    const boxes = drawn.map((shape) => shape.getBBox());
    const spread = Math.max(...boxes.map((box) => box.x + box.width)) - Math.min(...boxes.map((box) => box.x));
    found.shown.push([svgs.length, boxes.length ? spread / svgs[0].viewBox.baseVal.width : 0]);
    if (!figure.dataset.chart || !svgs.length) continue;
    const box = svgs[0].getBoundingClientRect();
    svgs[0].dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + box.width / 2, clientY: box.top + 50 }));
    found.readers.push(figure.querySelector(".reader").hidden ? "" : figure.querySelector(".reader").textContent);
  }
  found.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  document.title = JSON.stringify(found);
}, 0));
</script>
"""


@pytest.fixture(scope="module")
def browser() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome", "chrome"):
        found = shutil.which(name)
        if found:
            return found
    pytest.skip("no Chromium on this machine: the page was not opened in a browser")


class Server:
    """Serves one page and keeps what else was asked for."""

    def __init__(self, page: str) -> None:
        self.asked: list[str] = []
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.asked.append(self.path)
                self.send_response(200 if self.path == "/page" else 404)
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.end_headers()
                if self.path == "/page":
                    self.wfile.write(page.encode())

            def log_message(self, *_: object) -> None:
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=functools.partial(self.http.serve_forever, poll_interval=0.05))
        self.thread.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.http.server_address[1]}/page"

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@pytest.fixture
def serve() -> Iterator[list[Server]]:
    servers: list[Server] = []
    yield servers
    for server in servers:
        server.close()


def open_in(
    browser: str, page: str, servers: list[Server], profile: Path, width: int
) -> tuple[dict[str, object], list[str], list[str]]:
    """What the probe found, what the console said, and what was fetched."""
    servers.append(Server(page.replace("</body>", PROBE + "</body>")))
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={profile}",
        "--disable-background-networking", "--disable-component-update", "--enable-logging=stderr",
        f"--window-size={width},900", "--virtual-time-budget=3000", "--dump-dom", servers[-1].address,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    title = re.search(r"<title>(\{.*?\})</title>", done.stdout)
    assert title, done.stderr[-2000:]
    return json.loads(html.unescape(title[1])), console, servers[-1].asked


@pytest.mark.parametrize("width", [1280, 700])
def test_the_page_lives_in_a_browser(browser: str, eventful: Path, serve: list[Server], tmp_path: Path, width: int) -> None:
    found, console, asked = open_in(browser, render(eventful), serve, tmp_path, width)
    assert console == []
    assert asked == ["/page"]
    shown = found["shown"]
    assert isinstance(shown, list)
    assert len(shown) == 14
    assert all(count == 1 and share > 0.3 for count, share in shown), shown  # one picture per chart, and its curve has width
    readers = found["readers"]
    assert isinstance(readers, list)
    assert all(re.search(r"step \d+.*\d", reader) for reader in readers)
    assert found["overflow"] == 0


@pytest.mark.long
def test_a_hundred_thousand_steps_open_in_two_seconds(browser: str, long_page: str, serve: list[Server], tmp_path: Path) -> None:
    found, console, _ = open_in(browser, long_page, serve, tmp_path, 1280)
    assert console == []
    assert isinstance(found["seconds"], float)
    assert found["seconds"] < 2
