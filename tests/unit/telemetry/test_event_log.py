"""Event file: round trip, loss of at most the last line in a crash, one curve after a resume."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwright.errors import InputError, RunFailed
from shardwright.telemetry.event_log import (
    EVENTS_FILE_NAME,
    CheckpointEvent,
    EvaluationEvent,
    Event,
    EventWriter,
    FailureEvent,
    MemoryEvent,
    PreemptionEvent,
    ProfileEvent,
    ReshardEvent,
    RestartEvent,
    ResumeEvent,
    RollbackEvent,
    RunFinishedEvent,
    SkippedStepEvent,
    StepEvent,
    WarningEvent,
    make_event,
    read_events,
    select_surviving,
    select_surviving_steps,
)
from shardwright.telemetry.event_types import EVENT_TYPES
from tests.unit.telemetry.samples import (
    make_pipeline_event,
    make_ranks_event,
    make_start_event,
    make_step_event,
)

ONE_OF_EACH: tuple[Event, ...] = (
    make_start_event(flops_per_token=6000.0, matmul_flops_per_second=1e12),
    make_step_event(
        1,
        data_seconds=0.1,
        forward_seconds=0.1,
        backward_seconds=0.2,
        reduction_seconds=0.05,
        optimizer_seconds=0.05,
        mfu=0.4,
    ),
    make_ranks_event(
        1,
        temperature_celsius=(61.0, 64.0),
        throttled=("", "power"),
        reserved_bytes=(5, 6),
        device_bytes=(7, 8),
    ),
    MemoryEvent(
        step=2,
        weights_bytes=(1, 2),
        gradients_bytes=(1, 2),
        optimizer_bytes=(3, 4),
        peak_bytes=(9, 9),
    ),
    make_pipeline_event(3),
    ProfileEvent(step=3, path="profile/step-00000003.json.gz", ranks=2, clock_error_seconds=1e-5),
    EvaluationEvent(step=1, loss=2.0, perplexity=math.exp(2.0), tokens=100, seconds=1.5, best=True),
    CheckpointEvent(step=1, path="checkpoints/1", size_bytes=10, seconds=0.1),
    RestartEvent(
        number=1,
        max_restarts=3,
        world_size=4,
        reason="rank 1 was killed",
        is_warm=True,
        surviving_ranks=(0, 2),
        stuck_ranks=(3,),
        seconds_since_loss=0.5,
    ),
    ResumeEvent(step=1, path="checkpoints/1"),
    ReshardEvent(
        step=1,
        from_layout="dp_replicate=3,zero_stage=0",
        to_layout="pp=2,zero_stage=0",
        world_size=2,
        former_world_size=3,
        source="memory",
        seconds=0.5,
    ),
    RollbackEvent(
        step=100,
        reason="a spike",
        from_step=120,
        path="step-00000100",
        first_sample=400,
        num_samples=80,
    ),
    SkippedStepEvent(step=2, reason="gradient norm is nan", in_a_row=1, loss_scale=32768.0),
    WarningEvent(message="slow — disk", rank=1),
    PreemptionEvent(step=2, reason="SIGINT"),
    RunFinishedEvent(
        step=2, status="preempted", total_seconds=3.0, total_tokens=128, final_loss=2.0
    ),
    FailureEvent(message="died", rank=1),
)


def test_every_kind_is_read_as_written(tmp_path: Path) -> None:
    assert {event.kind for event in ONE_OF_EACH} == set(EVENT_TYPES)
    with EventWriter(tmp_path) as writer:
        written = tuple(writer.append(event) for event in ONE_OF_EACH)
    log = read_events(tmp_path)
    assert log.problems == ()
    for before, after in zip(written, log, strict=True):
        assert type(before) is type(after)
        for name, value in vars(before).items():
            if name not in ("time", "elapsed_seconds"):
                assert getattr(after, name) == value, name
        assert after.time == pytest.approx(before.time, abs=1e-3)
    elapsed = [event.elapsed_seconds for event in log]
    assert elapsed == sorted(elapsed)


def test_every_line_is_strict_json_with_the_envelope(tmp_path: Path) -> None:
    with EventWriter(tmp_path) as writer:
        writer.append(make_step_event(1, loss=math.nan, gradient_norm=math.inf))
        writer.write("warning", message="x")

    def fail_on_constant(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    for line in (tmp_path / EVENTS_FILE_NAME).read_text().splitlines():
        record = json.loads(line, parse_constant=fail_on_constant)
        assert {"schema_version", "kind", "time", "elapsed_seconds", "step"} <= set(record)
    (step, _) = read_events(tmp_path)
    assert isinstance(step, StepEvent)
    assert math.isnan(step.loss)
    assert step.gradient_norm == math.inf


def test_a_line_is_readable_while_the_writer_is_open(tmp_path: Path) -> None:
    with EventWriter(tmp_path) as writer:
        writer.append(make_step_event(1))
        assert len(read_events(tmp_path)) == 1


def test_a_torn_tail_is_skipped_and_repaired_on_reopen(tmp_path: Path) -> None:
    with EventWriter(tmp_path) as writer:
        writer.append(make_step_event(1))
        writer.append(make_step_event(2))
    path = tmp_path / EVENTS_FILE_NAME
    path.write_bytes(path.read_bytes()[:-30])
    log = read_events(tmp_path)
    assert [e.step for e in log] == [1]
    assert log.has_torn_tail
    assert log.broken_lines == ()
    with EventWriter(tmp_path) as writer:
        writer.append(make_step_event(2))
    repaired = read_events(tmp_path)
    assert repaired.problems == ()
    assert [e.kind for e in repaired] == ["step", "warning", "step"]


def test_a_last_line_without_newline_is_preserved(tmp_path: Path) -> None:
    with EventWriter(tmp_path) as writer:
        writer.append(make_step_event(1))
    path = tmp_path / EVENTS_FILE_NAME
    path.write_bytes(path.read_bytes()[:-1])
    with EventWriter(tmp_path) as writer:
        writer.append(make_step_event(2))
    assert [e.step for e in read_events(tmp_path)] == [1, 2]


def test_a_torn_tail_longer_than_one_read_is_repaired(tmp_path: Path) -> None:
    with EventWriter(tmp_path) as writer:
        writer.append(make_step_event(1))
    with (tmp_path / EVENTS_FILE_NAME).open("ab") as file:
        file.write(b"\0" * 200_000)
    with EventWriter(tmp_path):
        pass
    assert [e.kind for e in read_events(tmp_path)] == ["step", "warning"]


def test_unreadable_lines_are_counted_with_their_number(tmp_path: Path) -> None:
    with EventWriter(tmp_path) as writer:
        writer.append(make_step_event(1))
    with (tmp_path / EVENTS_FILE_NAME).open("a") as file:
        file.write(
            'not json\n{"schema_version": 1, "kind": "step", "step": 2}\n'
            '{"schema_version": 1, "kind": "later"}\n[1]\n'
        )
    log = read_events(tmp_path)
    assert log.broken_lines == (2, 3, 5)
    assert log.unknown_kinds == (("later", 1),)
    assert len(log.problems) == 2


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    (tmp_path / EVENTS_FILE_NAME).write_text('{"schema_version": 99, "kind": "step"}\n')
    with pytest.raises(InputError, match="newer shardwright"):
        read_events(tmp_path)


def test_unknown_fields_of_a_known_kind_are_ignored(tmp_path: Path) -> None:
    (tmp_path / EVENTS_FILE_NAME).write_text(
        '{"schema_version": 1, "kind": "warning", "message": "m", "colour": "red"}\n'
    )
    assert read_events(tmp_path).filter_by_type(WarningEvent)[0].message == "m"


def test_a_folder_without_events_is_an_error_with_the_file_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=EVENTS_FILE_NAME):
        read_events(tmp_path)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("stepp", {}, "Did you mean `step`"),
        ("warning", {"message": "m", "colour": 1}, "no such field"),
        ("warning", {}, "message: a `warning` event needs this field"),
    ],
)
def test_an_event_that_does_not_fit_its_kind_is_refused(
    kind: str, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        make_event(kind, **values)


def test_two_writers_do_not_share_a_run(tmp_path: Path) -> None:
    code = (
        f"from shardwright.telemetry.event_log import EventWriter; EventWriter({str(tmp_path)!r})"
    )
    with EventWriter(tmp_path):
        other = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
        assert other.returncode != 0
        assert "another process is writing this run" in other.stderr
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_full_disk_is_a_clear_error_and_leaves_complete_lines(tmp_path: Path) -> None:
    code = f"""
import resource, signal
from shardwright.telemetry.event_log import EventWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
writer = EventWriter({str(tmp_path)!r})
for _ in range(100):
    writer.write("warning", message="m" * 100)
"""
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert "RunFailed: cannot write" in process.stderr
    log = read_events(tmp_path)
    assert len(log) > 1
    assert log.problems == ()


def test_a_folder_that_cannot_be_created_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFailed, match="cannot open"):
        EventWriter(tmp_path / "file" / "run")


def list_losses(events: list[Event]) -> list[tuple[int | None, float]]:
    return [(e.step, e.loss) for e in select_surviving_steps(events)]


def test_a_resume_withdraws_later_steps() -> None:
    evaluation = {"perplexity": 1.0, "tokens": 1, "seconds": 1.0}
    events = [
        make_start_event(),
        *(make_step_event(i, loss=float(i)) for i in (1, 2)),
        CheckpointEvent(step=2, path="a", size_bytes=1, seconds=1.0),
        EvaluationEvent(step=2, loss=2.0, **evaluation),
        *(make_step_event(i, loss=float(i)) for i in (3, 4, 5)),
        EvaluationEvent(step=4, loss=4.0, **evaluation),
        FailureEvent(step=5, message="x"),
        make_start_event(),
        ResumeEvent(step=2, path="a"),
        make_step_event(3, loss=33.0),
    ]
    assert list_losses(events) == [(1, 1.0), (2, 2.0), (3, 33.0)]
    surviving = select_surviving(events)
    assert [e.loss for e in surviving if isinstance(e, EvaluationEvent)] == [2.0]
    assert [e.kind for e in surviving].count("run_started") == 2
    assert any(isinstance(e, FailureEvent) for e in surviving)


def test_a_start_without_resume_is_a_new_training() -> None:
    first = [make_start_event(), *(make_step_event(i, loss=1.0) for i in (1, 2, 3))]
    assert list_losses([*first, make_start_event(), make_step_event(1, loss=9.0)]) == [(1, 9.0)]


def test_a_start_without_a_step_withdraws_nothing() -> None:
    first = [make_start_event(), *(make_step_event(i, loss=1.0) for i in (1, 2, 3))]
    assert len(list_losses([*first, make_start_event(), FailureEvent(message="no memory")])) == 3


def test_a_second_resume_from_an_earlier_step_overrides_the_first() -> None:
    events: list[Event] = [make_start_event(), *(make_step_event(i, loss=1.0) for i in range(1, 9))]
    events += [
        make_start_event(),
        ResumeEvent(step=6, path="b"),
        *(make_step_event(i, loss=2.0) for i in (7, 8)),
    ]
    events += [
        make_start_event(),
        ResumeEvent(step=2, path="a"),
        *(make_step_event(i, loss=3.0) for i in (3, 4)),
    ]
    assert list_losses(events) == [(1, 1.0), (2, 1.0), (3, 3.0), (4, 3.0)]


def test_a_skipped_step_and_its_step_event_survive_in_either_order() -> None:
    skip = SkippedStepEvent(step=2, reason="nan")
    step = make_step_event(2)
    for pair in ([skip, step], [step, skip]):
        assert (
            len(
                select_surviving(
                    [make_start_event(), make_step_event(1), *pair, make_step_event(3)]
                )
            )
            == 5
        )
