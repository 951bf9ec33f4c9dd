"""Benchmarks: all contenders read the same tokens; missed goals are reported."""

from __future__ import annotations

import argparse
import importlib
import io
import json
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from math import exp
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from benchmarks import cpu, fit_cpu, gpu, gpu_fit, launch, table
from benchmarks.case import LLAMA_29M, Case, make_tokens, select_batch, shift_labels
from benchmarks.conditions import format_rows
from benchmarks.contenders import CONTENDERS, TITLES
from benchmarks.contenders.with_shardwright import _PaceSink, _TimerFailed, build_recipe
from benchmarks.gpu_figures import name_attention_kernels
from benchmarks.gpu_fit import fit_case, is_fitting
from benchmarks.gpu_turns import Rounds, Visits
from benchmarks.host_waits import HostWaitCounter
from benchmarks.layout_cases import ENTRIES
from benchmarks.layout_page import render_page
from benchmarks.pace import Pace, count_graph_breaks, read_peak_rss_bytes
from benchmarks.predicted import (
    build_candidate,
    build_cpu_cluster,
    find_catalogue_cluster,
    read_shape,
)
from benchmarks.shapes import SHAPES, TINY

from shardwright.architecture import read_config
from shardwright.data.sample_order import SampleOrder
from shardwright.hardware import ElementwiseRate, MeasuredProfile
from shardwright.hardware.catalog_loading import find_accelerator
from shardwright.placement.compilation import CompileChoice
from shardwright.planner.problem import build_template
from shardwright.planner.rates.calibration import load_efficiencies
from shardwright.telemetry.event_log import StepEvent

ROOT = Path(__file__).resolve().parents[3]


def make_case(**fields: Any) -> Case:
    defaults: dict[str, Any] = {
        "contender": "shardwright",
        "zero_stage": 0,
        "precision": "fp32",
        "weights_dir": "weights",
    }
    return Case(**(defaults | fields))


def test_a_case_survives_a_json_round_trip() -> None:
    case = make_case(compile=True, micro_batch_size=3)
    assert Case.from_json(case.to_json()) == case


def test_ranks_read_their_slices_of_the_global_batch_in_order() -> None:
    case = make_case(micro_batch_size=2)
    tokens = torch.arange(10)[:, None]
    read = [
        select_batch(tokens, case, step, rank).flatten().tolist()
        for step in range(3)
        for rank in range(2)
    ]
    assert read == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [0, 1]]


def test_shardwright_reads_the_same_tokens_as_the_others() -> None:
    from benchmarks.contenders.with_shardwright import SEED, SyntheticDataset

    dataset = SyntheticDataset(64, 8)
    tokens = make_tokens(64, 8)
    order = SampleOrder(SEED, len(dataset))
    for position in (0, 1, 7, len(dataset) + 3):
        sample = dataset.get_sample(order.get_index(position), order.get_epoch(position))
        expected_T = tokens[position % len(dataset)]
        assert torch.equal(torch.from_numpy(sample.input_ids), expected_T)
        assert torch.equal(torch.from_numpy(sample.labels), shift_labels(expected_T[None])[0])


def test_the_recipe_has_the_settings_of_the_case() -> None:
    from benchmarks.contenders.with_shardwright import build_recipe

    recipe = build_recipe(make_case(zero_stage=3, precision="bf16"))
    assert (recipe.layout.zero_stage, recipe.precision.kind, recipe.training.micro_batch_size) == (
        3,
        "bf16",
        4,
    )


@pytest.mark.parametrize(("compiles_blocks", "kind"), [(False, "compiled"), (True, "none")])
def test_functions_of_the_benchmark_are_compiled_as_in_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiles_blocks: bool, kind: str
) -> None:
    from benchmarks.contenders import with_shardwright

    (tmp_path / "config.json").write_text(json.dumps(TINY["tiny"].config))
    monkeypatch.setattr(
        with_shardwright,
        "choose_compilation",
        lambda _device: CompileChoice(True, "a test says so"),
    )
    case = make_case(weights_dir=str(tmp_path), compile=compiles_blocks, sequence_length=16)
    run = with_shardwright.build_validated_run(build_recipe(case), 1, torch.device("cuda"))
    assert run.plan.pointwise.kind == kind
    assert run.plan.has_fused_losses


def test_pace_counts_blocks_and_stops_on_command() -> None:
    replies = io.StringIO()
    pace = Pace(io.StringIO("2\n1\nstop\n"), replies, lambda: None, "cpu")
    torch._dynamo.reset()
    breaks = count_graph_breaks()
    assert pace.begin()
    torch.compile(lambda x: (torch._dynamo.graph_break(), x + 1)[1], backend="eager")(torch.ones(1))
    assert pace.step_done(1.0)
    assert pace.step_done(torch.tensor(2.0))
    assert not pace.step_done(3.0)
    ready, first, second = (json.loads(line) for line in replies.getvalue().splitlines())
    assert ready["ready"]
    assert first["losses"] == [1.0, 2.0]
    assert second["losses"] == [3.0]
    assert first["seconds"] > 0
    assert first["graph_breaks"] == breaks + 1
    assert 0 < first["peak_rss_bytes"] <= read_peak_rss_bytes() * 2


def test_a_rank_that_dies_is_reported_with_its_last_line(tmp_path: Path) -> None:
    case = make_case(contender="nobody", world_size=1)
    with (
        launch.Ranks(case, tmp_path, time_limit_seconds=250) as ranks,
        pytest.raises(launch.RanksFailed, match="KeyError: 'nobody'"),
    ):
        ranks.wait_ready()


def test_a_contender_with_another_first_loss_is_refused() -> None:
    rows = {
        name: {"warmup": [{"losses": [loss]}]}
        for name, loss in (("a", 9.0), ("b", 9.0), ("c", 9.1))
    }
    comparison = cpu.Comparison(0, "fp32", ("a", "b", "c"))
    with pytest.raises(launch.RanksFailed, match="first losses differ"):
        cpu.check_first_losses(comparison, rows)
    rows["c"]["warmup"] = [{"losses": [9.0]}]
    cpu.check_first_losses(comparison, rows)


def test_names_of_contenders_agree() -> None:
    assert CONTENDERS.keys() == TITLES.keys()
    named = {
        contender
        for comparison in (*cpu.DEFAULT, *cpu.ON_REQUEST)
        for contender in comparison.contenders
    }
    assert named | set(gpu.NEEDS) <= CONTENDERS.keys()
    assert named - {"shardwright"} == table.CPU_GOALS.keys()


def test_the_cpu_model_has_the_size_in_its_name() -> None:
    assert read_config(LLAMA_29M).num_parameters == pytest.approx(29.5e6, rel=0.01)


def make_cpu_result(speed: float, memory: float) -> dict[str, Any]:
    def row(tokens_per_second: float, peak_memory_bytes: float) -> dict[str, Any]:
        return {
            "tokens_per_second": tokens_per_second,
            "tokens_per_second_lowest": tokens_per_second - 1,
            "tokens_per_second_highest": tokens_per_second + 1,
            "peak_memory_bytes": peak_memory_bytes,
            "first_loss": 9.1,
            "last_loss": 7.2,
        }

    conditions = {
        "date": "2026-01-01",
        "processor": "some",
        "cores": 2,
        "memory_bytes": 2**34,
        "system": "Linux",
        "python": "3.11",
        "packages": {"torch": "2.13"},
        "shardwright": "0.1.0",
        "commit": None,
    }
    comparison = {
        "zero_stage": 3,
        "precision": "bf16",
        "compile": False,
        "world_size": 2,
        "sequence_length": 512,
        "micro_batch_size": 4,
        "rounds": 5,
        "steps_per_round": 2,
        "warmup_steps": 2,
        "contenders": {
            "shardwright": row(1000.0 * speed, 1e9 * memory),
            "deepspeed": row(1000.0, 1e9),
        },
    }
    return {
        "conditions": conditions,
        "num_parameters": 29_500_000,
        "skipped": {"trainer": "not here"},
        "comparisons": [comparison],
    }


def test_a_missed_goal_is_reported_with_its_size() -> None:
    page = table.render(make_cpu_result(speed=1.035, memory=1.2), notes="Because of the weather.")
    assert "speed 1.03, goal 1.10 (6% short)" in page
    assert "memory 1.20, goal 1.00 (20% over)" in page
    assert "Because of the weather." in page
    assert "skipped trainer: not here" in page


def test_met_goals_are_reported_as_met() -> None:
    page = table.render(make_cpu_result(speed=1.16, memory=0.9))
    assert "Every goal is met." in page
    assert "falls short" not in page


def test_gpu_cases_cover_every_shape_length_and_variant() -> None:
    completed = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--list"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    names = completed.stdout.split()
    assert len(names) == 3 * 2 * 4 + 15
    assert {
        "llama-3.2-1b-4096",
        "llama-3.2-3b-8192-compile",
        "llama-3-8b-12-layers-8192-compile-recompute",
        "qwen3-30b-a3b-lora-4096-compile",
    } <= set(names)


def fit(name: str, device: str) -> gpu.GpuCase:
    shape = SHAPES[name]
    case = gpu.GpuCase(name, shape, max(shape.micro_batch_sizes), "-compile")
    return fit_case(case, find_catalogue_cluster(device), "cuda", "bf16")


def test_cases_take_the_first_settings_that_fit_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"torchao"}
    monkeypatch.setattr(
        gpu_fit.importlib.util, "find_spec", lambda name: object() if name in installed else None
    )
    for name, shape in SHAPES.items():
        if shape.has_fitted_layers:
            small = fit(name, "H100")
            large = fit(name, "H200")
            assert small.num_layers < large.num_layers or (
                large.num_layers == shape.config["num_hidden_layers"]
            )
            more = replace(small, num_layers=small.num_layers + 2)
            cluster = find_catalogue_cluster("H100")
            assert is_fitting(small, cluster, "cuda", "bf16")
            assert not is_fitting(more, cluster, "cuda", "bf16")
    assert fit("llama-3-8b-lora", "H100").list_options()[1:] == ["LoRA of rank 16"]
    assert fit("llama-3-8b", "H200").list_options()[1:] == ["recompute"]
    assert fit("llama-3-8b", "H100-96GB").list_options()[1:] == ["recompute", "8-bit AdamW"]
    assert fit("llama-3-8b", "H100").list_options()[1:] == ["recompute", "moments in host memory"]
    installed.clear()
    assert "moments in host memory" in fit("llama-3-8b", "H100-96GB").list_options()
    with pytest.raises(gpu.CaseDoesNotFitError, match="8-bit AdamW: not installed: torchao"):
        fit("llama-3-8b", "L4")


def test_peers_are_compiled_with_the_settings_that_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[tuple[bool, list[str]]] = []

    def visit(case: gpu.GpuCase, names: list[str], _: argparse.Namespace, __: Rounds) -> Visits:
        compiled.append((case.settings.recompute, names))
        return Visits()

    monkeypatch.setattr(gpu, "visit", visit)
    monkeypatch.setattr(gpu, "name_missing", lambda _packages: "")
    arguments = argparse.Namespace(device="cpu", precision="fp32", out=tmp_path)
    case = gpu.GpuCase("tiny-lora", TINY["tiny-lora"], 64, "")
    assert gpu.compile_cases([case], ["torchtune"], {}, arguments)
    assert compiled == [(True, ["torchtune"])]


@pytest.mark.parametrize(
    "fields",
    [
        {"compile": True},
        {"recompute": "full", "has_offloaded_moments": True},
        {"has_bf16_weights": True, "optimizer": "adamw_8bit"},
        {"lora_rank": 16},
    ],
)
def test_a_case_is_predicted_with_the_settings_of_its_recipe(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    config = SHAPES["llama-3.2-1b"].config
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = {"precision": "bf16", "device": "cuda", "world_size": 1} | fields
    case = make_case(weights_dir=str(tmp_path), random_weights=True, **settings)
    candidate = build_candidate(case, read_shape(config, case.lora_rank))
    template = build_template(build_recipe(case))
    assert candidate == replace(
        template,
        micro_batch_size=case.micro_batch_size,
        recompute=case.recompute,
        has_fused_functions=not case.compile,  # the recipe's `auto` on this device
    )


def test_a_family_is_compared_with_llama_of_its_length() -> None:
    names = ("llama-3-8b-12-layers", "gemma-2-9b")
    conditions = make_cpu_result(speed=1.0, memory=1.0)["conditions"]
    rates = {f"tokens_per_second{suffix}": 1.0 for suffix in ("", "_lowest", "_highest")}
    row = rates | {
        "peak_allocated_bytes": None,
        "peak_reserved_bytes": None,
        "attention": ["flex (x)"],
        "graph_breaks": 0,
        "host_waits": 1.0,
        "first_loss": 9.0,
        "last_loss": 8.0,
    }
    cases = [
        gpu.GpuCase(name, SHAPES[name], length, "-compile").describe()
        | {"contenders": {"shardwright": row | {"mfu": length * share}}}
        for name, share in zip(names, (1e-4, 0.9e-4), strict=True)
        for length in (4096, 8192)
    ]
    device = {"name": "some", "matmul_flops_per_second": 1.0, "copy_bytes_per_second": 1.0}
    page = table.render(
        {"conditions": conditions, "precision": "bf16", "device": device, "skipped": {}}
        | {"cases": cases}
    )
    for length, own, other in ((4096, "36.9%", "41.0%"), (8192, "73.7%", "81.9%")):
        expected = f"| gemma-2-9b-{length}-compile | {own} | {names[0]}-{length}-compile | {other} "
        assert f"{expected}| 0.90 |" in page
    assert "| 2 x 4,096 | compile, 42 of 42 layers | shardwright | 1 |" in page


def test_attention_kernels_are_named_without_their_reasons() -> None:
    lines = ["flex (a window of 8 tokens; sinks / a soft cap); sdpa (causal order)", "sdpa (x)"]
    assert name_attention_kernels({"attention": lines}) == "flex (log), sdpa (log)"


def test_waits_of_the_host_are_counted_on_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def wait(text: str = "called a synchronizing CUDA operation (Triggered internally)") -> None:
        for _ in range(2):  # the same warning of the same line
            warnings.warn(text, UserWarning, stacklevel=1)

    counter = HostWaitCounter()
    wait()
    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    with pytest.warns(UserWarning, match="another"):
        wait("another warning")
    assert counter.end() == 5
    assert modes == ["warn", "default"]
    torch.cuda.synchronize()
    assert counter.end() == 5


def test_a_contender_is_skipped_with_the_name_of_its_missing_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        gpu.importlib.util, "find_spec", lambda name: None if name == "pydantic" else object()
    )
    contenders, skipped = gpu.find_contenders([])
    assert "shardwright" not in contenders
    assert skipped["shardwright"] == "not installed: pydantic"


def test_a_failing_case_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def measure(case: gpu.GpuCase, *_: Any) -> dict[str, Any]:
        if case.variant:
            raise RuntimeError("broken on purpose")
        return case.describe() | {"matmul_flops_per_second": 1.0, "contenders": {}}

    ceiling = {"name": "some", "matmul_flops_per_second": 1.0, "copy_bytes_per_second": 1.0}
    monkeypatch.setattr(gpu, "measure", measure)
    monkeypatch.setattr(gpu, "measure_ceiling", lambda device, precision, shapes: ceiling)
    cases = [
        gpu.GpuCase("tiny", TINY["tiny"], 64, variant) for variant in ("-compile", "", "-recompute")
    ]
    cases.append(gpu.GpuCase("tiny-lora", TINY["tiny-lora"], 64, ""))
    assert gpu.measure_cases(
        cases,
        [],
        {},
        argparse.Namespace(device="cpu", precision="fp32", shapes="tiny", out=tmp_path),
    )
    result = json.loads((tmp_path / "one-gpu.json").read_text())
    assert [case["name"] for case in result["cases"]] == ["tiny-64"]
    assert result["skipped"].keys() == {"tiny-64-compile", "tiny-64-recompute", "tiny-lora-64"}
    assert "the catalogue lacks this device" in result["skipped"]["tiny-lora-64"]
    assert "broken on purpose" in (tmp_path / "one-gpu.md").read_text()


def test_the_gpu_benchmark_starts_without_our_packages() -> None:
    """Without our requirements, the others are measured and ours is reported as skipped."""
    program = (
        "import sys\n"
        "for name in ('pydantic', 'yaml', 'rich', 'safetensors', 'psutil'):\n"
        "    sys.modules[name] = None\n"
        "sys.argv = ['gpu', '--list']\n"
        "from benchmarks import gpu\n"
        "raise SystemExit(gpu.main())\n"
    )
    completed = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert completed.returncode == 0, completed.stderr


def test_predictions_are_beside_measurements() -> None:
    result = make_cpu_result(speed=1.0, memory=1.0)
    guess = {"tokens_per_second": 800.0, "memory_bytes": 90 * 2**20, "reserved_bytes": 99 * 2**20}
    ours = result["comparisons"][0]["contenders"]["shardwright"]
    ours |= {"predicted": guess, "peak_allocated_bytes": 100 * 2**20}
    result["comparisons"][0]["name"] = "zero3-bf16"
    assert "| zero3-bf16 | 1,000 | 800 | +25% | 100 | 90 | -10.0% |" in table.render(result)
    ours["peak_reserved_bytes"] = 110 * 2**20
    assert (
        "| zero3-bf16 | 1,000 | 800 | +25% | 100 | 90 | -10.0% | 110 | 99 | -10.0% |"
        in table.render(result)
    )


def test_every_layouts_prediction_is_beside_its_measurement() -> None:
    def row(layout: str, seconds: float) -> dict[str, Any]:
        guess = {"step_seconds": 1.1 * seconds, "memory_bytes": 98 * 2**20}
        return {
            "work": "dense fp32", "layout": layout, "recompute": "none", "seconds": seconds,
            "parts": {"forward": 1.0},
            "memory_bytes": 100 * 2**20, "predicted": guess,
            "predicted_by_catalogue": {"step_seconds": 0.1},
        }  # fmt: skip

    conditions = make_cpu_result(1.0, 1.0)["conditions"] | {"rounds": 3, "load_average": [0.1, 0.2]}
    rows = [row("one process", 4.0), row("dp_shard=2,zero_stage=3", 2.0)]
    text = render_page(
        {
            "name": "layouts-two-ranks",
            "groups": {"dense fp32": {"conditions": conditions, "profile": None, "rows": rows}},
        },
        "Because of the weather.",
    )
    assert "| dense fp32 | dp_shard=2,zero_stage=3 | 2.00 | 2.00 | 1.00 | 1.00 |" in text
    assert "| dense fp32 | one process | 4.00 | 4.40 | +10% | 0.100 | 100 | 98 | -2.0% |" in text
    assert "2 rows: step time 10.0% off on average" in text
    assert "Because of the weather." in text


@pytest.mark.parametrize(
    ("name", "render"), [("layouts-predicted", render_page), ("cpu-shardwright", table.render)]
)
def test_a_published_page_is_that_of_its_measurements(
    name: str, render: Callable[[dict[str, Any], str], str]
) -> None:
    folder = ROOT / "docs" / "benchmarks"
    text = (folder / f"{name}.json").read_text()
    result = json.loads(text)
    notes = (folder / f"{name}.notes.md").read_text()
    assert render(result, notes) == (folder / f"{name}.md").read_text()
    assert format_rows(result) + "\n" == text


def test_a_fit_finds_the_values_that_generated_the_rows() -> None:
    start = replace(
        load_efficiencies().get_efficiency(find_accelerator("CPU")),
        bytes_share=1.5,
        handoff_share=2.0,
    )
    truth = replace(start, bytes_share=4.5, handoff_share=4.0)
    elementwise = tuple(ElementwiseRate(kind, 512, 384, 1e10, 1e10) for kind in ("fp32", "bf16"))
    profile = MeasuredProfile(
        "some",
        "EPYC-9654",
        "2026-01-01",
        2**34,
        2e10,
        elementwise=elementwise,
        handoff_seconds=1e-3,
    )
    rows = []
    for entry in [entry for entry in ENTRIES if entry.model == "dense" and entry.layout.pp == 1][
        :4
    ]:
        row = fit_cpu.Row(
            entry.group,
            str(entry),
            entry.shape,
            entry.candidate,
            build_cpu_cluster(entry.layout.world_size, profile),
            1.0,
        )
        rows.append(replace(row, seconds=exp(row.error(truth))))
    assert max(abs(row.error(start)) for row in rows) > 0.2
    fitted = fit_cpu.fit(rows, start)
    assert max(abs(row.error(fitted)) for row in rows) < 0.08


def test_an_error_of_the_timer_ends_training() -> None:
    pace = mock.Mock(step_done=mock.Mock(side_effect=OSError("broken on purpose")))
    event = mock.Mock(spec=StepEvent, loss=1.0)
    with pytest.raises(_TimerFailed):
        _PaceSink(pace).on_event(event)
    # Event loggers turn a sink off after one, and the contender would train on.
    assert not issubclass(_TimerFailed, Exception)


def test_compiled_functions_describe_their_arguments() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_functions"]
    shown = subprocess.run([*command, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0
    assert "RESULT.json" in shown.stdout
    wrong = subprocess.run([*command, "cpu", "huge", "x"], cwd=ROOT, capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "invalid choice: 'huge'" in wrong.stderr


@pytest.mark.parametrize("name", ["ceiling", "gpu_attention", "gpu_device", "gpu_numbers"])
@pytest.mark.parametrize("words", [[], ["tpu", "bf16", "tiny", "result.json"]])
def test_measurements_of_a_device_name_their_arguments(
    name: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They ended with an IndexError, or with an error of torch."""
    monkeypatch.setattr(sys, "argv", [name, *words])
    with pytest.raises(SystemExit) as end:
        importlib.import_module(f"benchmarks.{name}").main()
    assert end.value.code == 2
    assert f"usage: python -m benchmarks.{name}" in capsys.readouterr().err
