"""`make gpu` without a GPU: its parts, failing and slow steps, and a Python that has only torch."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from benchmarks import gpu_arguments, gpu_packages, gpu_parts, gpu_results
from benchmarks.gpu_figures import StepFigures
from benchmarks.gpu_kernels import summarise_kernels
from benchmarks.gpu_page import count_tests, list_measurements
from benchmarks.gpu_steps import Step
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[3]


def parse(*arguments: str) -> argparse.Namespace:
    return gpu_parts.parse_arguments(["--device", "cpu", *arguments])


def make_step(name: str, code: str, *, part: int = 1, limit: float = 60.0) -> Step:
    return Step(name, part, limit, (sys.executable, "-c", code, "{out}"), "result.json")


def run_steps(out: Path, steps: list[Step], *, seconds: float = 100.0) -> dict[str, dict[str, Any]]:
    arguments = parse("--out", str(out))
    until = time.monotonic() + seconds
    for step in steps:
        gpu_parts.run_step(step, arguments, dict(os.environ), until)
        gpu_results.write_results(out, steps)
    content = json.loads((out / "gpu.json").read_text())
    return {step["name"]: step for step in content["steps"]}


WRITE = "import pathlib, sys; pathlib.Path(sys.argv[1], 'result.json').write_text({text!r})"


def test_a_failing_or_slow_step_leaves_the_others(tmp_path: Path) -> None:
    started = tmp_path / "started"
    start_child = (
        "import pathlib, subprocess, time; child = subprocess.Popen(['sleep', '600']); "
        f"pathlib.Path('{started}').write_text(str(child.pid)); time.sleep(600)"
    )
    steps = [
        make_step("first", WRITE.format(text='{"product_error": 0, "name": "x"}')),
        make_step(
            "raises",
            f"print('a line of {gpu_parts.ROOT}/x.py'); raise ValueError('broken on purpose')",
        ),
        make_step("slow", start_child, limit=2.0),
        make_step("damaged", WRITE.format(text="{")),
        make_step("not there", "", part=2),
        make_step("last", "print('fine')"),
    ]
    steps[4] = Step("not there", 2, 9.0, ("/no/such/program",), "result.json")
    results = run_steps(tmp_path, steps)
    assert {name: step["status"] for name, step in results.items()} == {
        "first": "passed",
        "raises": "failed",
        "slow": "timed out",
        "damaged": "passed",
        "not there": "failed",
        "last": "passed",
    }
    assert results["first"]["result"]["name"] == "x"
    assert "ValueError: broken on purpose" in results["raises"]["message"]
    assert "a line of x.py" in results["raises"]["message"]
    assert "is damaged" in results["damaged"]["message"]
    page = (tmp_path / "gpu.md").read_text()
    assert "**3 passed, 2 failed, 1 timed out.**" in page
    assert "its result has another form (KeyError: 'torch')" in page
    assert "broken on purpose" in page
    child = int(started.read_text())
    is_running = psutil.pid_exists(child) and psutil.Process(child).status() != "zombie"
    assert not is_running, "a process of a step that was ended still runs"


def test_publishing_adds_to_earlier_results(tmp_path: Path) -> None:
    steps = [make_step(name, WRITE.format(text=f'{{"{name}": 1}}')) for name in ("one", "two")]
    run_steps(tmp_path / "earlier", steps)
    run_steps(tmp_path / "later", steps[:1])
    published = json.loads((tmp_path / "earlier" / "gpu.json").read_text())
    published["steps"][0]["result"] = {"one": "old"}
    gpu_results.restore_results(published, tmp_path / "later", steps)
    gpu_results.write_results(tmp_path / "later", steps)
    results = json.loads((tmp_path / "later" / "gpu.json").read_text())["steps"]
    assert [step["result"] for step in results] == [{"one": 1}, {"two": 1}]
    assert [step["status"] for step in results] == ["passed", "passed"]


def test_publishing_a_selection_keeps_published_steps_that_did_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [make_step(name, WRITE.format(text=f'{{"{name}": 1}}')) for name in ("one", "two")]
    run_steps(tmp_path / "earlier", steps)
    published = tmp_path / "docs/benchmarks/gpu.json"
    published.parent.mkdir(parents=True)
    shutil.copyfile(tmp_path / "earlier/gpu.json", published)
    out = tmp_path / "later"
    run_steps(out, steps[:1])
    run_steps(out, steps[1:], seconds=0.0)
    monkeypatch.setattr(gpu_results, "ROOT", tmp_path)
    outcomes = gpu_results.read_last_outcomes(out, steps)
    assert outcomes["two"]["status"] == "passed"
    monkeypatch.setattr(
        gpu_parts, "list_steps", lambda arguments: steps[:1] if arguments.goals else steps
    )
    assert gpu_parts.main(["--publish", "--goals", "--out", str(out)]) == 0
    results = json.loads(published.read_text())["steps"]
    assert [step["result"] for step in results] == [{"one": 1}, {"two": 1}]


def test_parts_run_to_their_end_after_a_failing_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [make_step("broken", "1/0"), make_step("next", ""), make_step("last", "", part=2)]
    monkeypatch.setattr(gpu_parts, "list_steps", lambda _arguments: steps)
    monkeypatch.setattr(gpu_parts, "build_environment", lambda _arguments: dict(os.environ))
    assert gpu_parts.main(["--device", "cpu", "--out", str(tmp_path)]) == 1
    content = json.loads((tmp_path / "gpu.json").read_text())
    assert [step["status"] for step in content["steps"]] == ["failed", "passed", "passed"]
    assert "ZeroDivisionError" in (tmp_path / "gpu.md").read_text()


def test_a_part_ends_in_time_and_an_interrupted_one_leaves_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [make_step("one", ""), make_step("two", ""), make_step("three", "")]
    results = run_steps(tmp_path / "late", steps, seconds=0.0)
    assert {step["status"] for step in results.values()} == {"no time left"}
    assert "make gpu PART=1/12 ARGS=--missing" in results["one"]["message"]

    out = tmp_path / "interrupted"
    run = gpu_parts._run_process

    def interrupt(command: Sequence[str], folder: Path, *arguments: Any) -> tuple[str, str]:
        if folder.name.endswith("two"):
            raise KeyboardInterrupt
        return run(command, folder, *arguments)

    monkeypatch.setattr(gpu_parts, "_run_process", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_steps(out, steps)
    statuses = [step["status"] for step in json.loads((out / "gpu.json").read_text())["steps"]]
    assert statuses == ["passed", "not run", "not run"]
    assert gpu_results.has_passed(out, steps[0])
    assert not gpu_results.has_passed(out, steps[1])


def test_a_terminated_call_ends_its_step(tmp_path: Path) -> None:
    code = (
        "import signal, sys; from pathlib import Path; from benchmarks import gpu_parts\n"
        "signal.signal(signal.SIGTERM, gpu_parts.end_with_steps)\n"
        "step = 'import os, time; print(os.getpid(), flush=True); time.sleep(60)'\n"
        "gpu_parts._run_process([sys.executable, '-c', step], Path(sys.argv[1]), {}, 60.0)"
    )
    log = tmp_path / "log.txt"
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) as call:
        while not log.is_file() or not log.read_text().endswith("\n"):
            assert call.poll() is None
            time.sleep(0.02)
        call.terminate()
        assert call.wait(30) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text()), 0)


def test_parts_are_below_nine_minutes_and_the_most_informative_come_first() -> None:
    steps = gpu_parts.list_steps(gpu_parts.parse_arguments([]))
    assert gpu_arguments.PART_SECONDS < 9 * 60 - 10
    assert [step.part for step in steps] == sorted(step.part for step in steps)
    assert {step.part for step in steps} == set(range(1, gpu_arguments.NUM_PARTS + 1))
    for name in ("README.md", "Makefile"):
        assert set(re.findall(r"PART=\d+/(\d+)", (ROOT / name).read_text())) == {
            str(gpu_arguments.NUM_PARTS)
        }
    names = [step.name for step in steps]
    assert names[:4] == ["device", "smoke", "numbers", "tests of numbers"]
    assert names[4:6] == ["attention", "functions"]
    assert names[8:11] == [
        "speed llama-3.2-1b-4096",
        "speed llama-3.2-1b-4096-compile",
        "profile llama-3.2-1b-4096",
    ]
    for part in range(1, gpu_arguments.NUM_PARTS + 1):
        chosen = [step for step in steps if step.part == part]
        expected_seconds = sum(step.estimated_seconds for step in chosen)
        # Shapes of one part, all of whose steps are alike, may leave one step to a second call.
        slack = max(step.estimated_seconds for step in chosen) if part in (5, 6) else 0.0
        assert expected_seconds - slack <= gpu_arguments.PART_SECONDS, part
    assert names[-1].startswith("offload more ")
    tested = {word for step in steps for word in step.command if word.startswith("tests/gpu/")}
    assert tested == {f"tests/gpu/{path.name}" for path in (ROOT / "tests/gpu").glob("test_*.py")}
    folders = [gpu_results.get_folder(Path(), step) for step in steps]
    assert len(set(folders)) == len(folders)
    one = gpu_parts.list_steps(gpu_parts.parse_arguments(["--step", "speed *-4096"]))
    assert len(one) == 3


@pytest.mark.parametrize("part", ["0/12", "13/12", "3/5", "x"])
def test_parts_that_do_not_exist_are_refused(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_parts.parse_arguments(["--part", part])
    assert "is not a part; write 1/12 and so on" in capsys.readouterr().err


def test_failed_tests_are_named_with_their_reason() -> None:
    junit = """<testsuites><testsuite><testcase name="a"><properties>
    <property name="chunked" value="1.5 ms"/></properties></testcase><testcase name="b"><failure
    message="assert 1 == 2&#10;more"/></testcase><testcase name="c"><skipped/></testcase>
    </testsuite></testsuites>"""
    assert count_tests(junit) == (1, 1, 1, ["b: assert 1 == 2"])
    assert list_measurements(junit) == ["chunked 1.5 ms"]


def test_kernels_are_the_events_of_the_device_without_annotations() -> None:
    def make_event(name: str, kind: str, *, is_annotation: bool = False) -> SimpleNamespace:
        return SimpleNamespace(
            key=name,
            count=2,
            self_device_time_total=3e6,
            self_cpu_time_total=5e6,
            device_type=f"DeviceType.{kind}",
            is_user_annotation=is_annotation,
        )

    events = [
        make_event("aten::mm", "CPU"),
        make_event("gemm", "CUDA"),
        make_event("Optimizer.step", "CUDA", is_annotation=True),
    ]
    recorded = SimpleNamespace(key_averages=lambda: events)
    assert summarise_kernels(recorded, torch.device("cuda")) == [
        {"name": "gemm", "calls": 2, "seconds": 3.0}
    ]
    assert [row["seconds"] for row in summarise_kernels(recorded, torch.device("cpu"))] == [5.0] * 2


def write_wheel(folder: Path, name: str, files: dict[str, str]) -> None:
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / name, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)


def test_wheels_are_unpacked_and_those_of_another_python_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheels = tmp_path / "wheels"
    folder = tmp_path / "packages"
    assert gpu_packages.main(["unpack", str(wheels), str(folder)]) == 1
    assert "has no wheels; make them with `make gpu-wheels`" in capsys.readouterr().err
    write_wheel(wheels, "one-1-py3-none-any.whl", {"one/__init__.py": "value = 1"})
    write_wheel(wheels, "two-1-py3-none-any.whl", {"two-1.data/platlib/two.py": "value = 2"})
    folder.mkdir()
    (folder / "left_from_before.py").touch()
    assert gpu_packages.main(["unpack", str(wheels), str(folder)]) == 0
    code = "import one, two; print(one.value + two.value)"
    environment = os.environ | {"PYTHONPATH": str(folder)}
    printed = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert printed.stdout == b"3\n"
    assert not (folder / "left_from_before.py").exists()
    write_wheel(wheels, "three-1-cp27-cp27m-manylinux1_x86_64.whl", {"three.py": ""})
    arguments = parse("--wheels", str(wheels), "--out", str(tmp_path / "out"))
    message = gpu_parts.build_environment(arguments)
    assert isinstance(message, str)
    assert "three-1-cp27-cp27m-manylinux1_x86_64.whl" in message
    assert f"make gpu-wheels GPU_PYTHON={sys.version.split()[0]}" in message


def collect_requirements(names: Iterable[str]) -> set[str]:
    """Return the installed distributions that these need, with them, by normalised name."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # another system's, such as nvidia-*
        found.add(name)
        for text in requirements:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return found


def link_distributions(folder: Path, names: Iterable[str]) -> None:
    folder.mkdir()
    for name in names:
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] != ".."}:
            target = folder / top
            if top != "__pycache__" and not target.exists():
                target.symlink_to(Path(str(distribution.locate_file(top))).resolve())


def test_the_wheels_are_all_that_our_packages_need_beside_torch() -> None:
    """pyarrow is imported where a file needs it; transformers' requirements come with it."""
    ours = {"pydantic", "pyyaml", "numpy", "safetensors", "psutil", "rich", "tokenizers"}
    ours |= {"transformers", "accelerate", "pytest", "pytest-timeout", "hypothesis", "typer"}
    with_torch = collect_requirements(["torch"])
    missing = collect_requirements(ours) - set(gpu_packages.PACKAGES) - with_torch
    assert not missing
    assert "pyarrow" not in gpu_packages.PACKAGES


def test_wheels_above_the_limit_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gpu_packages.MAX_BYTES == 64 * 1024**2
    monkeypatch.setattr(gpu_packages, "MAX_BYTES", 10)

    def download(command: list[str], **_options: Any) -> None:
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir()
        (folder / "a-1-py3-none-any.whl").write_bytes(b"0" * 11)

    monkeypatch.setattr(subprocess, "run", download)
    with pytest.raises(ValueError, match="the wheels have 11 bytes, more than 10"):
        gpu_packages.download_wheels(tmp_path / "wheels", "3.12")


@pytest.mark.timeout(900)
def test_a_python_with_only_torch_runs_a_step_of_every_kind(tmp_path: Path) -> None:
    """A virtual environment without pip: torch in its packages, ours where wheels are unpacked."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True
    )
    link_distributions(tmp_path / "torch", collect_requirements(["torch"]))
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "torch.pth").write_text(f"{tmp_path / 'torch'}\n")
    with_torch = collect_requirements(["torch"])
    link_distributions(tmp_path / "packages", set(gpu_packages.PACKAGES) - with_torch)
    python = tmp_path / "venv/bin/python"
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
    } | {"OMP_NUM_THREADS": "1", "OUT": str(tmp_path / "out")}
    has_ours = subprocess.run([python, "-c", "import pydantic"], env=environment)
    assert has_ours.returncode != 0
    chosen = (
        "device",
        "numbers",
        "tests of numbers",
        "speed tiny-64",
        "profile tiny-64",
        "step cost tiny*",
    )
    steps = " ".join(f"--step '{name}'" for name in (*chosen, "offload tiny*"))
    completed = subprocess.run(
        [
            *("make", "gpu", f"PYTHON={python}"),
            f"ARGS=--device cpu --quick --tests norm_and_clip --wheels {tmp_path / 'none'} {steps}",
        ],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(tmp_path / "packages")},
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    content = json.loads((tmp_path / "out/gpu.json").read_text())
    results = {step["name"]: step.get("result", {}) for step in content["steps"]}
    assert {step["status"] for step in content["steps"]} == {"passed"}
    assert results["device"]["product_error"] < 1e-5
    precisions = results["numbers"]["precisions"]
    assert precisions["fp32"]["worst_gradient_error"] < 1e-5
    assert 1e-4 < precisions["bf16"]["worst_gradient_error"] < 5e-2
    assert count_tests(results["tests of numbers"]["junit"])[:2] == (1, 0)
    (case,) = results["speed tiny-64"]["cases"]
    assert case["contenders"]["shardwright"]["tokens_per_second"] > 0
    assert case["contenders"]["shardwright"]["attention"] == ["sdpa (causal order)"]
    assert results["profile tiny-64"]["kernels"][0]["seconds"] > 0
    phases = [phase["name"] for phase in results["profile tiny-64"]["summary"]["phases"]]
    assert phases[:5] == ["forward", "backward", "reduction", "gradient norm", "update"]
    (variant,) = results["step cost tiny-64"]["variants"]
    resident, offloaded = results["offload tiny-64"]["offload"]
    for row in (case["contenders"]["shardwright"], variant, resident, offloaded):
        assert StepFigures.__annotations__.keys() <= row.keys()
        assert row["tokens_per_second"] > 0
        assert row["predicted"]["memory_bytes"] > 0
        assert row["attention_kernels"] == ["flash"]
    assert offloaded["losses"] == resident["losses"]
    assert offloaded["read_bytes"] > 0
    page = (tmp_path / "out/gpu.md").read_text()
    headings = (
        "## Offload",
        "## Numbers",
        "## Speed and memory",
        "## Profile tiny-64",
        "## Step cost tiny-64",
        "gap before",
    )
    for expected in ("**7 passed.**", *headings):
        assert expected in page


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_all_parts_run_to_their_end(tmp_path: Path) -> None:
    completed = subprocess.run(
        [
            *("make", "gpu", f"PYTHON={sys.executable}"),
            f"ARGS=--device cpu --budget 3000 --wheels {tmp_path / 'none'}",
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "OUT": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    content = json.loads((tmp_path / "gpu.json").read_text())
    assert {step["status"] for step in content["steps"]} == {"passed"}
    steps = gpu_parts.list_steps(gpu_parts.parse_arguments(["--device", "cpu"]))
    assert len(steps) > 10
    assert [step["name"] for step in content["steps"]] == [step.name for step in steps]
