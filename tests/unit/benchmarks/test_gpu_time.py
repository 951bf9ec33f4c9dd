"""`make gpu` in limited time: turns of contenders, order of steps, compilation before timing."""

from __future__ import annotations

import argparse
import copy
import json
import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from benchmarks import gpu_order, gpu_parts, gpu_results, gpu_steps, gpu_turns, gpu_warm
from benchmarks.case import Case
from benchmarks.gpu_steps import Step
from benchmarks.launch import RanksFailed

GIB = 2**30


class FakeRanks:
    """Ranks that write what they are asked to a log, on a device of 100 GiB."""

    log: ClassVar[list[str]] = []
    reserved_bytes: ClassVar[dict[str, int]] = {}
    used_bytes: ClassVar[int] = 0
    failures: ClassVar[dict[str, str]] = {}
    """Contender -> text of the error of its first steps."""

    def __init__(self, case: Case, *_: Any, **options: Any) -> None:
        assert options["waits_to_build"]
        self.name = case.contender
        self.own_bytes = 0

    def __enter__(self) -> FakeRanks:
        self.log.append(f"import {self.name}")
        return self

    def __exit__(self, *_: object) -> None:
        FakeRanks.used_bytes -= self.own_bytes
        self.log.append(f"end {self.name}")

    def build(self) -> None:
        self.own_bytes = self.reserved_bytes.get(self.name, 0)
        FakeRanks.used_bytes += self.own_bytes

    def wait_ready(self) -> list[dict[str, Any]]:
        return [{"details": {"import_seconds": 1.0, "build_seconds": 2.0}}]

    def run_block(self, steps: int, option: str = "") -> list[dict[str, Any]]:
        self.log.append(f"{self.name} {steps}{option and ' ' + option}")
        if self.name in self.failures:
            raise RanksFailed(self.failures[self.name])
        free_bytes = 100 * GIB - self.used_bytes
        memory = {"peak_reserved_bytes": self.own_bytes, "free_bytes": free_bytes}
        attention = {"attention_operators": ["aten::x"], "attention_kernels": [self.name]}
        return [{"seconds": 1.0, "losses": [2.0], "num_waits": 8} | memory | attention]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeRanks]:
    monkeypatch.setattr(gpu_turns, "Ranks", FakeRanks)
    for name, value in (("log", []), ("reserved_bytes", {}), ("used_bytes", 0), ("failures", {})):
        monkeypatch.setattr(FakeRanks, name, value)
    return FakeRanks


def visit(*names: str) -> gpu_turns.Visits:
    cases = {name: Case(name, 0, "fp32", "", 1) for name in names}
    return gpu_turns.visit_in_turn(cases, Path(), gpu_turns.Rounds(2, 3, 5), 60.0)


def test_contenders_that_fit_together_take_turns_in_one_process_each(fake: type[FakeRanks]) -> None:
    fake.reserved_bytes = {"a": 40 * GIB, "b": 50 * GIB}
    visits = visit("a", "b")
    warm = ["import a", "import b", "a 3", "b 3"]
    counted = [[f"{name} 5", f"{name} 4 waits", f"{name} 1 attention"] for name in "ab"]
    turns = ["a 5", "b 5", *counted[0], *counted[1]]
    assert fake.log == [*warm, *turns, *fake.log[-2:]]
    assert sorted(fake.log[-2:]) == ["end a", "end b"]
    assert visits.are_alive_together
    for replies in visits.replies.values():
        assert [reply["host_waits"] for reply in replies] == [None, 2.0]
        assert replies[0]["losses"] == [2.0, 2.0]
    assert visits.replies["b"][-1]["attention_kernels"] == ["b"]
    for replies in visits.replies.values():
        assert replies[0]["start_seconds"] == {"import": 1.0, "build": 2.0}


def test_contenders_that_do_not_fit_together_alternate(fake: type[FakeRanks]) -> None:
    fake.reserved_bytes = {"a": 60 * GIB, "b": 30 * GIB}
    visits = visit("a", "b")
    timed = [line for line in fake.log if line.endswith(" 5") or line.startswith("end")]
    assert timed == ["a 5", "end a", "b 5", "end b"] * 2
    assert not visits.are_alive_together
    assert fake.used_bytes == 0


def test_failures_leave_the_others(fake: type[FakeRanks]) -> None:
    fake.failures = {"a": "trace\nValueError: broken", "b": "torch.OutOfMemoryError: x"}
    visits = visit("a", "b", "c")
    # The first failure of `b` may come from the memory of others; alone, it is its own.
    assert visits.failures == {"a": "failed: ValueError: broken", "b": "out of memory"}
    assert len(visits.replies["c"]) == 2
    fake.log.clear()
    del fake.failures["a"]
    assert visit("a", "b").failures == {"b": "out of memory"}
    assert fake.log.count("b 3") == 2


def make_step(name: str, seconds: float, **fields: Any) -> Step:
    code = "import pathlib, sys; pathlib.Path(sys.argv[1], 'result.json').write_text('{}')"
    command = (sys.executable, "-c", code, "{out}")
    return Step(name, 1, 60.0, command, "result.json", seconds, code=(), **fields)


def run(
    monkeypatch: pytest.MonkeyPatch,
    out: Path,
    steps: list[Step],
    *options: str,
    code: int = 0,
    delay: float = 0.0,
) -> dict[str, dict[str, Any]]:
    environment = dict(os.environ) | {"TORCHINDUCTOR_CACHE_DIR": str(out / "cache")}

    def build_environment(_arguments: argparse.Namespace) -> dict[str, str]:
        time.sleep(delay)
        return environment

    monkeypatch.setattr(gpu_parts, "list_steps", lambda _arguments: steps)
    monkeypatch.setattr(gpu_parts, "build_environment", build_environment)
    monkeypatch.setattr(gpu_results, "ROOT", out)  # nothing is published there
    assert gpu_parts.main(["--device", "cpu", "--out", str(out), *options]) == code
    content = json.loads((out / "gpu.json").read_text())
    return {step["name"]: step for step in content["steps"]}


def test_steps_without_a_current_result_come_first_and_those_that_do_not_fit_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = make_step("old", 5)
    long = make_step("long", 500)
    new = make_step("new", 5)
    run(monkeypatch, tmp_path, [old], "--seconds", "60")
    capsys.readouterr()
    results = run(monkeypatch, tmp_path, [old, long, new], "--seconds", "60")
    lines = [line.split("  ")[1] for line in capsys.readouterr().out.splitlines()[1:4]]
    assert [line.split(":")[0] for line in lines] == ["long", "new", "old"]
    assert [results[name]["status"] for name in ("old", "long", "new")] == [
        "passed",
        "no time left",
        "passed",
    ]
    assert "about 500 s needed, " in results["long"]["message"]
    # An earlier result stays if there is no time for another.
    results = run(monkeypatch, tmp_path, [replace(old, code=("x",)), new], "--seconds", "0.01")
    assert [results[name]["status"] for name in ("old", "new")] == ["passed", "passed"]


def test_an_ended_call_or_a_long_step_leaves_results_and_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step reads its own outcome, as the page of a call that was ended during it would."""
    code = (
        "import pathlib, sys, time; folder = pathlib.Path(sys.argv[1])\n"
        "(folder / 'result.json').write_text((folder / 'outcome.json').read_text())\n"
        "time.sleep(60)"
    )
    long = replace(make_step("long", 0.1), command=(sys.executable, "-c", code, "{out}"))
    monkeypatch.setattr(gpu_parts, "_LONGEST_MORE_SECONDS", 1.8)
    results = run(monkeypatch, tmp_path, [long, make_step("next", 1)], "--seconds", "60", code=1)
    assert results["long"]["status"] == "timed out"
    assert 2.0 <= results["long"]["seconds"] < 50.0
    assert results["next"]["status"] == "passed"
    during = results["long"]["result"]
    assert during["status"] == "interrupted"
    (tmp_path / "steps/1-long/outcome.json").write_text(json.dumps(during))
    gpu_results.write_results(tmp_path, [long])
    page = (tmp_path / "gpu.md").read_text()
    assert "**1 interrupted.**" in page
    # Time before the first step counts: imports, unpacked wheels.
    untils: list[float] = []
    monkeypatch.setattr(gpu_parts, "run_in_time", lambda *each: bool(untils.append(each[-1])))
    start_seconds = time.monotonic()
    run(monkeypatch, tmp_path, [long], "--seconds", "60", delay=1.0)
    assert start_seconds + 60 <= untils[0] < start_seconds + 60.9


def test_results_of_other_code_are_not_current(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_order, "ROOT", tmp_path)
    (tmp_path / "timed").mkdir()
    (tmp_path / "timed/a.py").write_text("1")
    step = replace(make_step("one", 50), code=("timed",))
    options = gpu_order.list_options(step.command)
    code = gpu_order.hash_code(step)
    passed = {"status": "passed", "seconds": 7.0, "code": code, "options": options}
    outcomes: dict[str, dict[str, Any]] = {"one": passed}
    assert gpu_order.has_current_result(step, outcomes)
    assert gpu_order.estimate_seconds(step, outcomes) == 7.0
    other = make_step("other", 20)
    assert gpu_order.order_by_information([step, other], outcomes) == [other, step]
    assert gpu_order.select_fitting([step, other], outcomes, 26.0) == [step]
    (tmp_path / "timed/a.py").write_text("2")
    assert not gpu_order.has_current_result(step, outcomes)
    assert gpu_order.order_by_information([step, other], outcomes) == [step, other]
    outcomes["one"] |= {"status": "timed out", "seconds": 90.0}
    assert gpu_order.estimate_seconds(step, outcomes) == 90.0
    assert gpu_order.estimate_seconds(step, {}) == 50.0


def test_a_whole_step_answers_for_the_shortened_one_but_not_the_reverse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make_step("one", 50)
    command = (*whole.command, "--shortened")
    shortened = replace(whole, command=command, whole_command=whole.command)
    earlier, later, out = (tmp_path / name for name in ("earlier", "later", "out"))
    run(monkeypatch, earlier, [whole])
    published = json.loads((earlier / "gpu.json").read_text())
    published["steps"][0]["result"] = {"contenders": 3}
    for folder in (earlier, later):
        results = run(monkeypatch, folder, [shortened])
        assert results["one"]["options"][-1] == ("{out}" if folder == earlier else "--shortened")
    for step, folder, is_current in (
        *((whole, earlier, True), (shortened, earlier, True)),
        *((whole, later, False), (shortened, later, True)),
    ):
        outcomes = gpu_results.read_last_outcomes(folder, [step])
        assert gpu_order.has_current_result(step, outcomes) == is_current
        assert gpu_results.has_passed(folder, step) == is_current
    assert gpu_order.has_current_result(shortened, results)
    assert not gpu_order.has_current_result(whole, results)
    estimate = gpu_order.estimate_seconds
    assert estimate(whole, {"one": {"options": [], "status": "passed", "seconds": 7.0}}) == 50.0
    # A published result is replaced by a shortened one unless it is of the same code.
    for code, expected in ((published["steps"][0]["code"], {"contenders": 3}), ("other", {})):
        content = copy.deepcopy(published)
        content["steps"][0]["code"] = code
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(later, out)
        gpu_results.restore_results(content, out, [whole])
        gpu_results.write_results(out, [whole])
        assert json.loads((out / "gpu.json").read_text())["steps"][0]["result"] == expected
    gpu_results.restore_results(
        json.loads((later / "gpu.json").read_text()), tmp_path / "x", [whole]
    )
    assert not gpu_results.has_passed(tmp_path / "x", whole)


def test_kernels_are_compiled_several_at_a_time_while_tests_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each process waits for the files of all: it ends if they run at once."""
    code = (
        "import pathlib, sys, time; folder = pathlib.Path(sys.argv[2])\n"
        "(folder / sys.argv[3]).touch()\n"
        "while len(list(folder.glob('*.best_config'))) < 3: time.sleep(0.01)\n"
        "pathlib.Path(sys.argv[1], 'result.json').write_text('{}')"
    )
    cache = tmp_path / "cache"
    cache.mkdir()

    def wait_for_all(name: str) -> tuple[str, ...]:
        return (sys.executable, "-c", code, "{out}", str(cache), f"{name}.best_config")

    shared = wait_for_all("shared")
    tested = replace(make_step("tested", 1, is_timed=False), command=wait_for_all("tested"))
    steps = [
        make_step("one", 1, compile_commands=(shared, wait_for_all("one"))),
        make_step("two", 1, compile_commands=(shared, ("/no/such/program",))),
        tested,
    ]
    results = run(monkeypatch, tmp_path, steps, "--seconds", "100", "--processes", "4")
    assert [step["status"] for step in results.values()] == ["passed"] * 3
    assert results["one"]["warm_seconds"] > 0
    printed = capsys.readouterr().out
    assert "compiling for two: failed" in printed
    assert "compiled 2 of 3 cases, 4 at a time, in " in printed
    assert "; 3 tile sizes discarded" in printed
    assert not list(cache.iterdir())
    assert (tmp_path / "gpu.md").read_text().count(" + ") >= 2


def test_as_many_processes_compile_as_cores_and_memory_allow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(16)))
    assert gpu_warm.choose_num_processes(None) == 5
    assert gpu_warm.choose_num_processes(141 * 10**9) == 5
    assert gpu_warm.choose_num_processes(80 * 10**9) == 2
    assert gpu_warm.choose_num_processes(16 * 10**9) == 1


@pytest.mark.parametrize("shapes", ["real", "tiny"])
def test_goals_are_steps_against_torchtune(shapes: str) -> None:
    def list_goals(*options: str) -> list[Step]:
        arguments: argparse.Namespace = gpu_parts.parse_arguments(["--shapes", shapes, *options])
        return gpu_steps.list_steps(arguments)

    goals = list_goals("--goals")
    assert [step.name for step in goals] == list(gpu_steps.GOALS[shapes])
    by_name = {step.name: step for step in list_goals()}
    assert len(by_name) > len(goals)
    profile = next(step for step in goals if step.name.startswith("profile "))
    (timed,) = (step for step in goals if step.name == f"speed {profile.name[8:]}")
    assert timed.command[-4:] == ("--contender", "shardwright", "--contender", "torchtune")
    assert len(timed.compile_commands) == 2 < len(by_name[timed.name].compile_commands)
    # The profile's kernels are those of the timed step, and are compiled once.
    assert profile.compile_commands == timed.compile_commands[:1]
    # Steps with 8-bit products are those that are compiled ahead.
    (quantised,) = (step for step in goals if step.name == "low precision all layers")
    recipes = [command[-1] for command in quantised.compile_commands]
    assert recipes == list(quantised.command[quantised.command.index("--only") + 1 :: 2])
    if shapes == "real":
        assert sum(step.estimated_seconds for step in goals) < 560 + 240
