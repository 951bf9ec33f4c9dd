"""Sinks display every kind of event, and a failing sink does not stop a run."""

from __future__ import annotations

import io
import math
import re
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwright.errors import InputError
from shardwright.telemetry.event_log import (
    MEASUREMENT_TYPES,
    EvaluationEvent,
    Event,
    EventWriter,
    FailureEvent,
    ReshardEvent,
    RestartEvent,
    ResumeEvent,
    RunFinishedEvent,
    StepEvent,
    WarningEvent,
    read_events,
)
from shardwright.telemetry.event_logger import EventLogger, open_event_logger
from shardwright.telemetry.exporters import (
    MLflow,
    TensorBoard,
    WeightsAndBiases,
    extract_scalars,
    open_exporter,
)
from shardwright.telemetry.meter import RunProgress
from shardwright.telemetry.sinks import LogFile, PlainLines, RankErrorLines, describe_event
from shardwright.telemetry.terminal import Terminal
from tests.unit.telemetry.samples import make_start_event, make_step_event
from tests.unit.telemetry.test_event_log import ONE_OF_EACH


class TerminalStream(io.StringIO):
    """Stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("event", ONE_OF_EACH, ids=lambda event: event.kind)
def test_every_kind_except_measurements_has_one_plain_line(event: Event) -> None:
    if isinstance(event, MEASUREMENT_TYPES):
        for stream in (io.StringIO(), TerminalStream()):
            sink = Terminal(stream) if stream.isatty() else PlainLines(stream)
            sink.on_event(event)
            sink.close()
            assert stream.getvalue() == ""
        return
    line = describe_event(event)
    assert line
    assert "\n" not in line
    assert "None" not in line


def test_plain_lines_show_every_nth_step_and_the_last() -> None:
    stream = io.StringIO()
    sink = PlainLines(stream, every_steps=4)
    for event in (
        make_start_event(total_steps=10),
        *(make_step_event(i) for i in range(1, 11)),
        WarningEvent(message="look"),
    ):
        sink.on_event(event)
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines if line.startswith("step")] == [
        "4/10",
        "8/10",
        "10/10",
    ]
    assert "64 tokens/s" not in stream.getvalue()
    assert "128 tokens/s" in lines[1]
    assert lines[-1] == "warning: look"


def test_the_log_file_is_appended_to(tmp_path: Path) -> None:
    for step in (1, 2):
        log = LogFile(tmp_path / "log.txt")
        log.on_event(make_step_event(step))
        log.close()
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert len(lines) == 2
    assert lines[1].split("  ")[1].startswith("step 2")


def test_other_ranks_print_warnings_and_failures_with_their_rank() -> None:
    stream = io.StringIO()
    sink = RankErrorLines(3, stream)
    for event in ONE_OF_EACH:
        sink.on_event(event)
    assert stream.getvalue().splitlines() == [
        "[rank 3] warning: slow — disk",
        "[rank 3] failed: died",
    ]


def test_an_error_of_all_ranks_is_printed_by_the_command_alone(tmp_path: Path) -> None:
    """Each rank's sink printed it too: three times on two ranks."""
    shared = FailureEvent(rank=0, step=4, message="SaveFailed: rank 0: No space left on device")
    own = FailureEvent(rank=0, step=4, message="RuntimeError: Connection closed by peer")
    streams = [io.StringIO(), TerminalStream(), io.StringIO()]
    sinks = [PlainLines(streams[0]), Terminal(streams[1], width=100), RankErrorLines(1, streams[2])]
    log = LogFile(tmp_path / "log.txt")
    for sink in (*sinks, log):
        sink.on_event(shared)
        sink.on_event(own)
        sink.close()
    for stream in streams:
        assert "No space left" not in stream.getvalue()
        assert "Connection closed by peer" in stream.getvalue()
    assert "No space left" in (tmp_path / "log.txt").read_text()


class BrokenSink:
    """Sink that raises from its second event on, and when closed."""

    def __init__(self) -> None:
        self.num_events = 0

    def on_event(self, event: Event) -> None:
        self.num_events += 1
        if self.num_events > 1:
            raise OSError("the service is gone")

    def close(self) -> None:
        raise OSError("still gone")


def test_a_sink_that_raises_is_disabled_with_one_warning(tmp_path: Path) -> None:
    broken = BrokenSink()
    stream = io.StringIO()
    event_logger = EventLogger(EventWriter(tmp_path), [broken, PlainLines(stream)])
    for step in range(1, 5):
        event_logger.log_event(make_step_event(step))
    event_logger.close()
    assert broken.num_events == 2
    log = read_events(tmp_path)
    assert [e.step for e in log.filter_by_type(StepEvent)] == [1, 2, 3, 4]
    assert [e.message for e in log.filter_by_type(WarningEvent)] == [
        "BrokenSink is off for the rest of the run: OSError: the service is gone"
    ]
    assert stream.getvalue().count("BrokenSink is off") == 1


def test_events_are_written_even_if_all_sinks_fail(tmp_path: Path) -> None:
    event_logger = EventLogger(EventWriter(tmp_path), [BrokenSink(), BrokenSink()])
    for step in range(1, 4):
        event_logger.log_event(make_step_event(step))
    event_logger.close()
    assert len(read_events(tmp_path).filter_by_type(StepEvent)) == 3


def test_only_rank_0_writes_the_run_folder(tmp_path: Path) -> None:
    stream = io.StringIO()
    with open_event_logger(tmp_path / "run", rank=1, stream=stream) as event_logger:
        event_logger.log_event(make_step_event(1))
        event_logger.log("failed", message="no memory\nat all", rank=1)
    assert not (tmp_path / "run").exists()
    assert stream.getvalue() == "[rank 1] failed: no memory\n[rank 1] failed: at all\n"


def test_an_unknown_exporter_releases_the_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"allowed: tensorboard, wandb, mlflow"):
        open_event_logger(tmp_path, exporters=["tensorbored"], stream=io.StringIO())
    open_event_logger(tmp_path, stream=io.StringIO()).close()  # the lock is released


def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match=r"pip install 'shardwright\[wandb\]'"):
        open_exporter("wandb", tmp_path)
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    with pytest.raises(InputError, match=r"pip install 'shardwright\[tensorboard\]'"):
        open_exporter("tensorboard", tmp_path)


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_the_bar_fits_its_terminal(width: int) -> None:
    stream = TerminalStream()
    terminal = Terminal(stream, width=width)
    for event in (
        make_start_event(total_steps=10, name="x"),
        *(make_step_event(i, mfu=0.4) for i in range(1, 11)),
    ):
        terminal.on_event(event)
    terminal.close()
    final = stream.getvalue().split("\r")[-1].split("\n")[0]
    plain = "".join(
        part.partition("m")[2] if index else part for index, part in enumerate(final.split("\x1b["))
    )
    assert len(plain.rstrip()) <= width
    assert "10/10" in plain
    assert "loss 2.5" in plain
    assert ("MFU" in plain) == (width >= 80)


def test_the_remaining_time_is_shown_last_and_removed_at_the_end() -> None:
    stream = TerminalStream()
    terminal = Terminal(stream, width=100)
    terminal.on_event(make_start_event(total_steps=3))
    for step, last in ((1, "200 B"), (2, "left"), (3, "200 B")):
        stream.truncate(0)
        stream.seek(0)
        terminal.on_event(make_step_event(step))
        terminal._draw(should_force=True)
        assert re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).rstrip().endswith(last)
    terminal.close()


def test_the_bar_accepts_a_loss_that_is_not_finite() -> None:
    terminal = Terminal(TerminalStream(), width=80)
    terminal.on_event(make_start_event())
    terminal.on_event(make_step_event(1, loss=math.nan, gradient_norm=math.inf))
    terminal.close()
    terminal.close()


def test_the_final_line_is_below_the_bar() -> None:
    stream = TerminalStream()
    terminal = Terminal(stream, width=100)
    for event in (
        make_start_event(),
        make_step_event(10),
        RunFinishedEvent(step=10, status="completed", total_seconds=5.0, total_tokens=640),
    ):
        terminal.on_event(event)
    terminal.close()
    assert stream.getvalue().rindex("completed after") > stream.getvalue().rindex("10/10")


def test_progress_of_a_resumed_run_starts_at_its_step() -> None:
    progress = RunProgress()
    for event in (make_start_event(total_steps=100), ResumeEvent(step=60, path="a")):
        progress.on_event(event)
    assert progress.step == 60


def read_tensorboard(folder: Path) -> list[Any]:
    from tensorboard.compat.proto.event_pb2 import Event as Record

    records = []
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        offset = 0
        while offset < len(content):
            (length,) = struct.unpack_from("<Q", content, offset)
            records.append(Record.FromString(content[offset + 12 : offset + 12 + length]))
            offset += 12 + length + 4
    return records


def test_tensorboard_receives_scalars_and_the_purge(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    sink = TensorBoard(tmp_path)
    for event in ONE_OF_EACH:
        sink.on_event(event)
    sink.close()
    records = read_tensorboard(tmp_path / "tensorboard")
    values = {
        value.tag: (record.step, value.simple_value)
        for record in records
        for value in record.summary.value
    }
    assert values["train/loss"] == (1, 2.5)
    assert values["validation/loss"] == (1, 2.0)
    assert values["memory_bytes/rank_1"] == (1, 200.0)
    assert [r.step for r in records if r.HasField("session_log")] == [2]


def test_weights_and_biases_receives_a_resumable_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: dict[str, Any] = {"log": [], "metrics": []}
    run = SimpleNamespace(
        log=calls["log"].append,
        define_metric=lambda *args, **options: calls["metrics"].append((args, options)),
        finish=lambda exit_code: calls.update(exit_code=exit_code),
        summary={},
    )
    monkeypatch.setitem(
        sys.modules,
        "wandb",
        SimpleNamespace(init=lambda **options: calls.update(init=options) or run),
    )
    ids = []
    for _ in range(2):
        sink = WeightsAndBiases(tmp_path)
        for event in ONE_OF_EACH:
            sink.on_event(event)
        sink.close()
        ids.append(calls["init"]["id"])
    assert ids[0] == ids[1]
    assert calls["init"]["resume"] == "allow"
    (tmp_path / "wandb-run-id").unlink()  # another run at the same path, or on another machine
    WeightsAndBiases(tmp_path).on_event(make_start_event())
    assert calls["init"]["id"] != ids[0]
    assert calls["log"][0]["step"] == 1
    assert calls["log"][0]["train/loss"] == 2.5
    assert calls["exit_code"] == 0
    assert run.summary["final_loss"] == 2.0


def test_mlflow_receives_a_resumable_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: dict[str, list[Any]] = {
        "created": [],
        "batches": [],
        "updated": [],
        "ended": [],
        "uris": [],
        "places": [],
    }

    class Client:
        def __init__(self, tracking_uri: str) -> None:
            calls["uris"].append(tracking_uri)

        def get_experiment_by_name(self, name: str) -> None:
            return None

        def create_experiment(self, name: str, artifact_location: str | None) -> str:
            calls["places"].append(artifact_location)
            return f"id of {name}"

        def create_run(self, experiment_id: str, run_name: str) -> SimpleNamespace:
            calls["created"].append((experiment_id, run_name))
            return SimpleNamespace(info=SimpleNamespace(run_id="abc"))

        def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
            calls["batches"].append((run_id, list(metrics), list(params)))

        def log_dict(self, run_id: str, content: dict[str, Any], name: str) -> None:
            assert content["recipe"] == {"seed": 0}

        def update_run(self, run_id: str, status: str) -> None:
            calls["updated"].append((run_id, status))

        def set_terminated(self, run_id: str, status: str) -> None:
            calls["ended"].append((run_id, status))

    tuples = SimpleNamespace(Metric=lambda *values: values, Param=lambda *values: values)
    monkeypatch.setitem(
        sys.modules, "mlflow", SimpleNamespace(MlflowClient=Client, entities=tuples)
    )
    monkeypatch.setitem(sys.modules, "mlflow.entities", tuples)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for _ in range(2):
        sink = MLflow(tmp_path)
        for event in ONE_OF_EACH:
            sink.on_event(event)
        sink.close()
    assert calls["uris"] == [f"sqlite:///{tmp_path / 'mlflow.db'}"] * 2
    assert calls["places"] == [(tmp_path / "mlflow-files").as_uri()], "not the working directory"
    assert calls["created"] == [("id of shardwright", "tiny")]
    assert calls["updated"] == [("abc", "RUNNING")]
    assert calls["ended"] == [("abc", "KILLED")] * 2
    metrics = {metric[0]: metric for _, batch, _ in calls["batches"] for metric in batch}
    assert metrics["train/loss"][1:] == (2.5, 0, 1)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://server")
    (tmp_path / "mlflow-run-id").unlink()
    MLflow(tmp_path).on_event(make_start_event())
    assert (calls["uris"][-1], calls["places"][-1]) == ("http://server", None)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(InputError, match=r"pip install 'shardwright\[mlflow\]'"):
        open_exporter("mlflow", tmp_path)


def test_absent_values_are_not_exported() -> None:
    assert "speed/mfu" not in extract_scalars(make_step_event(1))
    assert extract_scalars(WarningEvent(message="x")) == {}


def test_rewards_take_the_place_of_a_perplexity() -> None:
    rewards: dict[str, Any] = {"reward_margin": 0.25, "reward_accuracy": 0.75}
    rewards |= {"reward_chosen": 0.5, "reward_rejected": 0.25}
    step = make_step_event(1, **rewards)
    evaluation = EvaluationEvent(step=1, loss=0.5, perplexity=1.6, tokens=9, seconds=1.0, **rewards)
    for event in (step, evaluation):
        assert "reward margin 0.25  accuracy 75%" in describe_event(event)
    assert "perplexity" not in describe_event(evaluation)
    assert extract_scalars(evaluation) == {
        "validation/loss": 0.5, **{f"validation/{key}": value for key, value in rewards.items()}
    }  # fmt: skip
    assert extract_scalars(step)["train/reward_accuracy"] == 0.75


def test_no_sink_imports_torch() -> None:
    code = (
        "import sys, shardwright.telemetry.event_logger as s\n"
        "from shardwright.telemetry.exporters import open_exporter\n"
        "import tempfile, pathlib\n"
        "open_exporter('tensorboard', pathlib.Path(tempfile.mkdtemp())).close()\n"
        "assert 'torch' not in sys.modules"
    )
    pytest.importorskip("tensorboard")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_event_logger_returns_the_written_event(tmp_path: Path) -> None:
    with EventLogger(None, []) as event_logger:
        event = event_logger.log("warning", message="m")
    assert isinstance(event, WarningEvent)


def test_a_restart_names_the_processes_that_stay() -> None:
    restart = RestartEvent(number=2, max_restarts=3, world_size=4, reason="rank 1 was killed")
    text = "restart 2 of at most 3, 4 ranks: rank 1 was killed"
    assert describe_event(restart) == text
    warm = replace(restart, is_warm=True, surviving_ranks=(0, 2))
    assert describe_event(warm) == f"{text}. Processes that stay: ranks 0, 2"
    stuck = ". Processes that were stuck and are replaced: rank 3"
    partly = replace(warm, stuck_ranks=(3,))
    assert describe_event(partly) == f"{text}{stuck}. Processes that stay: ranks 0, 2"
    cold = replace(restart, is_warm=True, stuck_ranks=(3,))
    assert describe_event(cold) == f"{text}{stuck}. No process stays (cold restart)"


def test_a_layout_change_names_both_layouts_and_the_numbers_of_ranks() -> None:
    event = ReshardEvent(
        step=1200,
        from_layout="dp_shard=3,zero_stage=3",
        to_layout="dp_shard=2,zero_stage=3",
        world_size=2,
        former_world_size=3,
        source="memory",
        seconds=0.25,
    )
    assert describe_event(event) == (
        "resharded at step 1,200 from 3 ranks to 2: dp_shard=3,zero_stage=3 to "
        "dp_shard=2,zero_stage=3, from memory in 250 ms"
    )
    resumed = replace(event, former_world_size=None, source="checkpoint", seconds=None)
    assert describe_event(resumed) == (
        "resharded at step 1,200 for 2 ranks: dp_shard=3,zero_stage=3 to "
        "dp_shard=2,zero_stage=3, from checkpoint"
    )


def test_texts_of_others_cannot_control_the_terminal() -> None:
    """A checkpoint's layout and a warning's text may come from another program."""
    line = describe_event(WarningEvent(message="\x1b[2J of\ttwo\nlines\x07"))
    assert line == "warning: ␛[2J of\ttwo\nlines␇"
